// The breadth-first search of `forebay bench resident` with threads for the lanes of a block: every vertex has its distance,
// whatever the graph. Behind the grid's text with the benchmark's tasks and setup.cpp; built with ThreadSanitizer where there is one.

#include <queue>

// A graph by rows: a chain, a star, or edges anywhere, some vertices out of reach.
struct Graph {
  std::vector<u32> offsets, edges;
  explicit Graph(u32 kind) {
    const u32 n = 1 + rand() % 120;
    std::vector<std::vector<u32>> rows(n);
    auto join = [&](u32 a, u32 b) {
      rows[a].push_back(b);
      rows[b].push_back(a);
    };
    for (u32 v = 1; v < n && kind == 0; v++) join(v - 1, v);
    for (u32 v = 1; v < n && kind == 1; v++) join(v % 5 == 4 ? 1 : 0, v);
    for (u32 i = n + rand() % (2 * n); i > 0 && kind > 1; i--) join(rand() % n, rand() % n);
    offsets.push_back(0);
    for (auto &row : rows) {
      edges.insert(edges.end(), row.begin(), row.end());
      offsets.push_back((u32)edges.size());
    }
    edges.push_back(0);
  }
  std::vector<u32> distances() const {
    std::vector<u32> found(offsets.size() - 1, FB_NONE);
    std::queue<u32> next;
    found[0] = 0;
    next.push(0);
    for (; !next.empty(); next.pop())
      for (u32 v = next.front(), e = offsets[v]; e < offsets[v + 1]; e++)
        if (found[edges[e]] == FB_NONE) {
          found[edges[e]] = found[v] + 1;
          next.push(edges[e]);
        }
    return found;
  }
};

struct Block {
  Shared shared;
  Meetings meetings;
  alignas(16) char shared_by_lanes[256];
};

static void once(u32 seed) {
  srand(seed);
  const Graph graph(seed % 6);
  const u32 n = (u32)graph.offsets.size() - 1, size = 1u << (1 + rand() % 4), blocks = 2 + rand() % 2;
  std::vector<u32> distances(n, FB_NONE), lists[2] = {std::vector<u32>(n), std::vector<u32>(n)};
  distances[0] = 0;
  Search search = {graph.offsets.data(), graph.edges.data(), distances.data(), {lists[0].data(), lists[1].data()}, {1, 0}};

  std::vector<Slot> slots[2] = {std::vector<Slot>(2), std::vector<Slot>(2)};
  std::vector<Root> roots(4);
  std::vector<Done> done(4);
  std::vector<Node> nodes(size);
  std::vector<Beat> beats(blocks);
  std::vector<Post> posts(FB_POSTS);
  std::vector<Cell> cells[3] = {std::vector<Cell>(size), std::vector<Cell>(size), std::vector<Cell>(size)};
  Control control = {};
  Grid g = {};
  State state = {};
  g.state = &state;
  for (u32 i = 0; i < 2; i++) {
    g.rings[i].size = 2;
    g.rings[i].slots = slots[i].data();
    fill(state.queues[i], cells[i]);
  }
  // Sometimes there is no node to be had, and the block does all of it.
  fill_nodes(state.free_nodes, cells[2], rand() % 4 == 0 ? 0 : size);
  g.blocks = blocks;
  g.grain = 1 + rand() % 3;
  g.nodes = nodes.data();
  g.roots = roots.data();
  g.done = done.data();
  g.beats = beats.data();
  g.posts = posts.data();
  g.control = &control;

  Slot s = {};
  const u64 args[2] = {(u64)&search, 0};
  s.function = FN_level | FB_SINGLE;
  s.count = 1;
  memcpy(s.args, args, sizeof args);
  s.root = fb_round(&g, 0, 0);
  s.seq = 1;
  std::vector<std::thread> threads;
  std::vector<Block> all(blocks);
  for (u32 b = 0; b < blocks; b++)
    for (u32 i = 0; i < FB_LANES; i++) threads.emplace_back([&, b, i] {
      meetings = &all[b].meetings;
      shared_by_lanes = all[b].shared_by_lanes;
      lane = i;
      // Some fall far behind the others of their block.
      if ((seed + b + i) % 4 == 0) away = 500;
      fb_stay(&g, b, &all[b].shared);
    });
  // All have nothing to do, so that those who get work share it.
  while (__atomic_load_n(&state.idle, __ATOMIC_RELAXED) < blocks) sched_yield();
  submit(&slots[0][0], s);
  for (u32 i = 0; i < 4; i++)
    while (fb_load_sys(&done[0].quads[i].seq) != 1) fb_relax();
  fb_store_sys(&control.stop, FB_STOP_NOW);
  for (auto &t : threads) t.join();
  CHECK(distances == graph.distances());
}

int main(int, char **argv) {
  const u32 first = (u32)atoi(argv[1]), n = (u32)atoi(argv[2]);
  for (u32 seed = first; seed < first + n; seed++) once(seed);
  printf("%u seeds\n", n);
}
