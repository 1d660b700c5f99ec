// Runs the resident grid's own code with threads as blocks, small queues and random schedules, and looks whether anything
// is lost, done twice or torn. Appended to the grid's text; built with ThreadSanitizer where there is one.

#include <atomic>
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

static void once(u32 seed) {
  srand(seed);
  const u32 blocks = 1 + rand() % 5, ring = 1u << (1 + rand() % 3), size = 1u << (1 + rand() % 4);
  std::vector<Slot> slots[2] = {std::vector<Slot>(ring), std::vector<Slot>(ring)};
  std::vector<Root> roots(2 * ring);
  std::vector<Done> done(2 * ring);
  std::vector<Node> nodes(size);
  std::vector<Beat> beats(blocks);
  std::vector<Cell> cells[3] = {std::vector<Cell>(size), std::vector<Cell>(size), std::vector<Cell>(size)};
  Control control = {};
  Grid g = {};
  for (u32 i = 0; i < 2; i++) {
    g.rings[i].size = ring;
    g.rings[i].first_root = i * ring;
    g.rings[i].slots = slots[i].data();
    fill(g.queues[i], cells[i]);
  }
  fill(g.free_nodes, cells[2]);
  for (u32 i = 0; i < size; i++) {
    cells[2][i].task.first = i;
    cells[2][i].seq = i + 1;
  }
  g.free_nodes.count = g.free_nodes.tail = size;
  g.free_nodes.space = 0;
  g.blocks = blocks;
  g.grain = 1 + rand() % 50;
  g.nodes = nodes.data();
  g.roots = roots.data();
  g.done = done.data();
  g.beats = beats.data();
  g.control = &control;

  std::vector<std::thread> threads;
  for (u32 b = 0; b < blocks; b++) threads.emplace_back([&g, b] { fb_block(&g, b); });
  // A producer for each ring. What each task must count is known beforehand.
  const u32 tasks = 60;
  std::vector<u64> counts[2] = {std::vector<u64>(tasks), std::vector<u64>(tasks)};
  std::vector<std::thread> producers;
  for (u32 r = 0; r < 2; r++) producers.emplace_back([&, r] {
    unsigned random = seed * 2 + r;
    std::vector<u64> want(tasks);
    auto finished = [&](u32 ticket) {
      Done &d = done[r * ring + (ticket & (ring - 1))];
      while (fb_load_sys(&d.seq) != ticket + 1) fb_relax();
      CHECK(d.status == 0 || d.status == FB_FIRST_OWN);
      if (d.status == 0) CHECK(__atomic_load_n(&counts[r][ticket], __ATOMIC_RELAXED) == want[ticket]);
      if (d.status == 0) CHECK(*(u64 *)d.result == 0 || *(u64 *)d.result == 1);
    };
    for (u32 ticket = 0; ticket < tasks; ticket++) {
      if (ticket >= ring) finished(ticket - ring);
      Slot &s = slots[r][ticket & (ring - 1)];
      u64 args[4] = {0, (u64)&counts[r][ticket], (u64)&counts[r][ticket], 0};
      s.fuel = 0;
      s.first = 0;
      s.count = 1;
      switch (rand_r(&random) % 3) {
        case 0:
          s.function = FN_tree;
          args[0] = rand_r(&random) % 7;
          args[2] = (u64)&args_ignored;
          want[ticket] = 1ull << args[0];
          break;
        case 1:
          s.function = FN_diamond;
          args[0] = 1 + rand_r(&random) % 9;
          want[ticket] = args[0];
          break;
        default:
          s.function = FN_ones;
          s.count = rand_r(&random) % 400;
          want[ticket] = s.count;
      }
      memcpy(s.args, args, sizeof s.args);
      fb_store_sys(&s.seq, ticket + 1);
    }
    for (u32 ticket = tasks - (ring < tasks ? ring : tasks); ticket < tasks; ticket++) finished(ticket);
  });
  for (auto &p : producers) p.join();
  fb_store_sys(&control.stop, rand() % 2 ? FB_STOP_DRAIN : FB_STOP_NOW);
  for (auto &t : threads) t.join();
  // Everything is where it was.
  CHECK(g.idle == 0);
  for (u32 i = 0; i < 2; i++) CHECK(g.queues[i].count == 0 && g.queues[i].space == size);
  CHECK(g.free_nodes.count == size && g.free_nodes.space == 0);
  std::vector<bool> free(size);
  Task t;
  for (u32 i = 0; i < size; i++) {
    CHECK(fb_take(&g.free_nodes, &t, 1) == 1 && t.first < size && !free[t.first]);
    free[t.first] = true;
  }
  for (auto &r : roots) CHECK(r.remaining == 0);
}

int main(int argc, char **argv) {
  const u32 first = (u32)atoi(argv[1]), n = (u32)atoi(argv[2]);
  for (u32 seed = first; seed < first + n; seed++) once(seed);
  printf("%u seeds\n", n);
}
