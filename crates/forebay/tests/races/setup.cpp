// What the tests of the grid set up: its queues, and what is submitted. Appended to the grid's text.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define CHECK(what)                                                                 \
  do {                                                                              \
    if (!(what)) {                                                                  \
      fprintf(stderr, "seed %u: line %d: %s\n", seed, __LINE__, #what);             \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)

static void fill(Queue &q, std::vector<Cell> &cells) {
  memset((void *)&q, 0, sizeof q);
  for (u32 i = 0; i < cells.size(); i++) cells[i].seq = i;
  q.space = q.size = (u32)cells.size();
  q.cells = cells.data();
}

// The first `free` nodes are to be had.
static void fill_nodes(Queue &q, std::vector<Cell> &cells, u32 free) {
  fill(q, cells);
  for (u32 i = 0; i < free; i++) {
    cells[i].task.first = i;
    cells[i].seq = i + 1;
  }
  q.count = q.tail = free;
  q.space = q.size - free;
}

// As the host writes a slot: its sequence number last. Or, to one who looks at halves, each at once, in either order.
static void submit(Slot *to, const Slot &s, bool halves = false, bool last_first = false) {
  u64 words[8];
  memcpy(words, &s, sizeof words);
  for (u32 i = 0; i < 8; i++) {
    const u32 at = halves && last_first ? (i + 4) % 8 : i;
    if (halves && i == 4) FB_STEP();
    __atomic_store_n((u64 *)to + at, words[at], at < 7 ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);
  }
}
