// A loop without unrolling: a task whose output comes back as its input, as often as the program says. Its functions are as
// short as those of hello.c; new are an initializer (what comes in at first), a port that feeds the runtime (how often), and
// predicates (which blocks go round, and which leave).
//
//   gcc loop.c -I../../bindings/c/include -L../../target/release -lforebay_c -o loop && ./loop

#include <forebay.h>
#include <stdio.h>
#include <stdlib.h>

static void check(int status) {
  if (status == FOREBAY_OK) return;
  fprintf(stderr, "%s\n", forebay_error());
  exit(1);
}

static int twice(forebay_invocation *in, void *user) {
  void *y;
  size_t n;
  (void)user;
  if (forebay_invocation_output(in, "y", &y, &n)) return 1;
  *(uint64_t *)y *= 2;
  return 0;
}

static forebay_block *number(uint64_t v) {
  forebay_block *b;
  check(forebay_block_new("u64[1]", &v, sizeof v, &b));
  return b;
}

int main(void) {
  forebay_runtime *runtime;
  forebay_task *task;
  forebay_graph *graph;
  forebay_running *run;
  uint32_t first, times, result;

  check(forebay_task_new("twice", &task));
  check(forebay_task_port(task, "input", "x", "u64[1]"));
  check(forebay_task_port(task, "initializer", "x0", "x"));
  check(forebay_task_port(task, "in-place", "y", "x"));
  check(forebay_task_port(task, "iterations", "n", NULL));
  check(forebay_task_host(task, twice, NULL, NULL));

  check(forebay_graph_new("loop", &graph));
  check(forebay_graph_add(graph, task));
  check(forebay_graph_connect_when(graph, "twice.y", "twice.x", 1, "unless end-iteration"));
  check(forebay_graph_feed(graph, "twice.x0", 2, &first));
  check(forebay_graph_feed(graph, "twice.n", 2, &times));
  check(forebay_graph_drain_when(graph, "twice.y", 1, "only end-iteration", &result));

  check(forebay_runtime_new("cpu", NULL, &runtime));
  check(forebay_start(runtime, graph, &run));
  for (uint64_t n = 1; n <= 5; n++) {
    forebay_block *out;
    const void *data;
    size_t bytes;
    uint32_t signals;
    check(forebay_push(run, times, number(n), FOREBAY_FOREVER));
    check(forebay_push(run, first, number(3), FOREBAY_FOREVER));
    check(forebay_pull(run, result, FOREBAY_FOREVER, &out));
    check(forebay_block_signals(out, &signals));
    if (!(signals & FOREBAY_END_ITERATION)) return 1;
    check(forebay_block_data(out, &data, &bytes));
    printf("3 doubled %d times: %d\n", (int)n, (int)*(const uint64_t *)data);
    forebay_block_free(out);
  }
  forebay_running_free(run);
  forebay_runtime_free(runtime);
  return 0;
}
