// The resident grid from C: a task that answers, and one that makes tasks, without a launch for each. On the CPU it needs a
// C++ compiler when it runs.

#include <forebay.h>
#include <stdio.h>
#include <string.h>

static const char *TASKS =
    "TASK_PER_THREAD(square) { *(u64 *)fb_result(c) = ((const u64 *)t->args)[0] * ((const u64 *)t->args)[0]; }\n"
    "// Two tasks of one less each, down to the leaves, which are counted in the result.\n"
    "TASK_PER_THREAD(tree) {\n"
    "  const u64 depth = ((const u64 *)t->args)[0];\n"
    "  if (depth == 0) { fb_add64((u64 *)fb_result(c), 1); return; }\n"
    "  const u64 child = depth - 1;\n"
    "  for (u32 i = 0; i < 2; i++)\n"
    "    if (!fb_spawn(c, FN_tree, 0, 1, &child, sizeof child)) fb_add64((u64 *)fb_result(c), 1ull << child);\n"
    "}\n";

#define CHECK(call)                                \
  do {                                             \
    if ((call) != FOREBAY_OK) {                    \
      fprintf(stderr, "%s\n", forebay_error());    \
      return strstr(forebay_error(), "compiler") ? 77 : 1; \
    }                                              \
  } while (0)

int main(int n, char **arguments) {
  forebay_grid *grid;
  CHECK(forebay_grid_new(TASKS, "square tree", n > 1 ? arguments[1] : NULL, 0, 0, &grid));
  const char *names[2] = {"square", "tree"};
  for (int i = 0; i < 2; i++) {
    uint64_t argument = 12, result[FOREBAY_RESULT / 8];
    forebay_grid_call call = {0};
    forebay_ticket *ticket;
    CHECK(forebay_grid_function(grid, names[i], &call.function));
    call.args = &argument;
    call.bytes = sizeof argument;
    CHECK(forebay_grid_submit(grid, &call, 1, &ticket));
    CHECK(forebay_grid_wait(grid, ticket, FOREBAY_FOREVER, result));
    forebay_ticket_free(ticket);
    printf("%s: %llu\n", names[i], (unsigned long long)result[0]);
  }
  // A thousand small trees at a time, whose leaves add up.
  static forebay_grid_call calls[1000];
  uint64_t depth = 3, result[FOREBAY_RESULT / 8];
  forebay_ticket *ticket;
  for (int i = 0; i < 1000; i++) {
    CHECK(forebay_grid_function(grid, "tree", &calls[i].function));
    calls[i].args = &depth;
    calls[i].bytes = sizeof depth;
  }
  CHECK(forebay_grid_submit_all(grid, calls, 1000, &ticket));
  CHECK(forebay_grid_wait(grid, ticket, FOREBAY_FOREVER, result));
  forebay_ticket_free(ticket);
  printf("a thousand trees: %llu\n", (unsigned long long)result[0]);
  CHECK(forebay_grid_drain(grid));
  forebay_grid_free(grid);
  return 0;
}
