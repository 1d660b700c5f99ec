// Runs the resident grid's own code with threads as blocks, small queues and random schedules, and looks whether anything
// is lost, done twice or torn. Behind the grid's text and setup.cpp; built with ThreadSanitizer where there is one.

// What a block is: a thread, or one for each lane.
struct Block {
  Shared shared;
#ifdef FB_LANES
  Meetings meetings;
#endif
};

static void start(Crew &crew, Grid *g, u32 b, Block *block) {
#ifdef FB_LANES
  for (u32 i = 0; i < FB_LANES; i++) crew.add([=] {
    meetings = &block->meetings;
    lane = i;
    fb_stay(g, b, &block->shared);
  });
#else
  crew.add([=] { fb_stay(g, b, &block->shared); });
#endif
}

static void once(u32 seed) {
  srand(seed);
#ifdef FB_LANES
  const u32 most = 3, tasks = 30;
#elif defined(FB_PROCESSOR)
  // By turns few tasks are enough, and more of the orders that they can have are tried.
  const u32 most = 4, tasks = 1 + rand() % 14;
#else
  const u32 most = 5, tasks = 60;
#endif
  const u32 blocks = 1 + rand() % most, ring = 1u << (1 + rand() % 3), size = 1u << (1 + rand() % 4);
  std::vector<Slot> slots[2] = {std::vector<Slot>(ring), std::vector<Slot>(ring)};
  std::vector<Root> roots(2 * ring);
  std::vector<Done> done(2 * ring);
  std::vector<Node> nodes(size);
  std::vector<Beat> beats(blocks);
  std::vector<Post> posts(FB_POSTS);
  std::vector<Cell> cells[3] = {std::vector<Cell>(size), std::vector<Cell>(size), std::vector<Cell>(size)};
  Control control = {};
  Grid g = {};
  State state = {};
  g.state = &state;
  for (u32 i = 0; i < 2; i++) {
    g.rings[i].size = ring;
    g.rings[i].slots = slots[i].data();
    fill(state.queues[i], cells[i]);
  }
  fill_nodes(state.free_nodes, cells[2], size);
  g.blocks = blocks;
  const u32 permits = 1 + rand() % 2, aside = rand() % 6;
  g.limited = rand() % 2;
  state.permits = g.limited ? permits : 0;
  std::vector<Task> put_aside(blocks * aside);
  g.aside = put_aside.data();
  g.aside_size = aside;
  g.grain = 1 + rand() % 50;
#ifdef FB_PROCESSOR
  // By turns what is looked at together is of one time.
  g.halves = rand() % 2;
#endif
  g.nodes = nodes.data();
  g.roots = roots.data();
  g.done = done.data();
  g.beats = beats.data();
  g.posts = posts.data();
  g.control = &control;

  Crew crew(seed);
  std::vector<Block> all(blocks);
  for (u32 b = 0; b < blocks; b++) start(crew, &g, b, &all[b]);
  // With the end of the grid right behind what was submitted, which is done all the same.
  const bool drained = rand() % 2;
  // Sometimes all tasks are of one kind, and all have limits, or none, or some of them.
  const u32 focus = rand() % 10, limits = rand() % 3;
  // A producer for each ring. What each task must count is known beforehand.
  std::vector<u64> counts[2] = {std::vector<u64>(tasks), std::vector<u64>(tasks)};
  std::vector<u64> wants[2] = {counts[0], counts[1]};
  std::vector<bool> diamonds[2] = {std::vector<bool>(tasks), std::vector<bool>(tasks)};
  auto finished = [&](u32 r, u32 ticket) {
    Done &d = done[r * ring + (ticket & (ring - 1))];
    u32 words[12];
    for (u32 i = 0; i < 4; i++) {
      while (fb_load_sys(&d.quads[i].seq) != ticket + 1) fb_relax();
      memcpy(&words[3 * i], d.quads[i].words, 12);
    }
    // There may be no room for a diamond.
    const u32 status = words[10];
    CHECK(status == 0 || (status == FB_FIRST_OWN && diamonds[r][ticket]));
    if (status == 0) CHECK(__atomic_load_n(&counts[r][ticket], __ATOMIC_RELAXED) == wants[r][ticket]);
    if (status == 0) CHECK(words[0] == diamonds[r][ticket] && words[1] == 0);
  };
  const u32 last = tasks - (ring < tasks ? ring : tasks);
  u32 producers = 2;
  for (u32 r = 0; r < 2; r++) crew.add([&, r] {
    unsigned random = seed * 2 + r;
    std::vector<u64> &want = wants[r];
    for (u32 ticket = 0; ticket < tasks; ticket++) {
      if (ticket >= ring) finished(r, ticket - ring);
      Slot s = {};
      s.root = (r * ring + (ticket & (ring - 1))) | fb_round(&g, r, ticket);
      u64 args[4] = {0, (u64)&counts[r][ticket], (u64)&counts[r][ticket], 0};
      // Far more than it takes.
      s.fuel = limits == 0 || (limits == 1 && rand_r(&random) % 2) ? 0 : 1u << 20;
      s.first = 0;
      s.count = 1;
      const u32 kind = focus < 5 ? focus : rand_r(&random) % 5, trees[3] = {FN_tree, FN_tree_by_warp, FN_tree_by_thread};
      switch (kind) {
        case 0: case 1: case 2:
          s.function = trees[kind];
          args[0] = rand_r(&random) % 7;
          args[2] = (u64)&args_ignored;
          want[ticket] = 1ull << args[0];
          break;
        case 3:
          s.function = FN_diamond;
          diamonds[r][ticket] = true;
          args[0] = 1 + rand_r(&random) % 9;
          want[ticket] = args[0];
          break;
        default:
          s.function = FN_ones;
          s.count = rand_r(&random) % 400;
          want[ticket] = s.count;
      }
      memcpy(s.args, args, sizeof s.args);
      if (s.count == 1) s.function |= FB_SINGLE;
      s.seq = ticket + 1;
      submit(&slots[r][ticket & (ring - 1)], s, g.halves, rand_r(&random) % 2);
    }
    for (u32 ticket = last; ticket < tasks && !drained; ticket++) finished(r, ticket);
    if (fb_add(&producers, -1u) != 1) return;
    // Or when all wait, and may keep what others wait for.
    while (!drained && seed % 4 == 3 && fb_load(&state.idle) != blocks) fb_relax();
    fb_store_sys(&control.stop, drained || seed % 2 ? FB_STOP_DRAIN : FB_STOP_NOW);
  });
  crew.run();
  for (u32 r = 0; r < 2 && drained; r++)
    for (u32 ticket = last; ticket < tasks; ticket++) finished(r, ticket);
  // Everything is where it was.
  CHECK(state.idle == 0 && state.permits == (g.limited ? permits : 0));
  for (auto &b : all) CHECK(b.shared.own.count == 0 && b.shared.own.spilled == 0 && b.shared.own.held.left == 0);
  for (u32 i = 0; i < 2; i++) CHECK(state.queues[i].count == 0 && state.queues[i].space == size);
  CHECK(state.free_nodes.count == size && state.free_nodes.space == 0);
  std::vector<bool> free(size);
  Task t;
  for (u32 i = 0; i < size; i++) {
    CHECK(fb_take(&state.free_nodes, &t) && t.first < size && !free[t.first]);
    free[t.first] = true;
  }
  for (auto &r : roots) CHECK(r.remaining == 0);
  for (u32 i = 0; i < 2; i++) CHECK(state.heads[i].next == tasks && state.heads[i].keeper == 0);
}

// A range of any length is dealt out whole, to no more than there is room for.
static void deals(u32 seed) {
  State state = {};
  Grid g = {};
  Root root = {};
  Own own = {};
  Context c = {&g, 0, 0, 0, &own, 0, 0, 1, false};
  std::vector<Cell> cells(8);
  g.state = &state;
  g.roots = &root;
  g.grain = 1 + seed % 50;
  const u64 counts[] = {2, 3, 100, 12345, ~0ull - seed, ~0ull};
  for (u64 count : counts) {
    fill(state.queues[0], cells);
    state.idle = 1 + seed % 11;
    root.remaining = 0;
    Task t = {};
    t.function = FN_ones;
    t.count = count;
    Deal d;
    fb_deal(&c, &t, &d);
    CHECK(d.parts <= 8 && d.parts <= state.idle && root.remaining == d.parts && state.queues[0].space == 8 - d.parts);
    u64 next = t.count;
    for (u32 i = 0; i < d.parts; i++) {
      const u64 first = d.first + i * d.each, left = d.end - first;
      CHECK(first == next && left > 0);
      next += left < d.each ? left : d.each;
    }
    CHECK(next == count);
  }
}

int main(int argc, char **argv) {
  const u32 first = (u32)atoi(argv[1]), n = (u32)atoi(argv[2]);
  for (u32 seed = first; seed < first + n; seed++) {
    deals(seed);
    once(seed);
  }
  printf("%u seeds\n", n);
}
