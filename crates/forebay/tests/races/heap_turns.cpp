// Small programs on a heap of few pages, by turns. While they run, nobody is told that there is no room where there must be.
// Behind arena.cpp.

// What is known of the pages from outside: pieces that somebody has in each, and calls that may hold pages for a moment.
struct Known {
  std::vector<u32> pieces;
  struct Call {
    u64 pages;
    // Pages that have been nobody's since it began, a bit for each; and the most that others may have held of them.
    u64 free, others;
    bool open;
  };
  std::vector<Call> calls;

  void look() {
    u64 free = 0, held = 0;
    for (u64 p = 0; p < pieces.size(); p++) free |= (u64)(pieces[p] == 0) << p;
    for (Call &c : calls) held += c.open ? c.pages : 0;
    for (Call &c : calls) if (c.open) {
      c.free &= free;
      if (held - c.pages > c.others) c.others = held - c.pages;
    }
  }
  void begin(u32 who, u64 n) { calls[who] = {n, ~0ull, 0, true}, look(); }
  void end(u32 who) { calls[who].open = false; }
  // Whether it may have met no page at all.
  bool none(u32 who) { return fb_ones((u32)calls[who].free) <= calls[who].others; }
};

static void by_turns(u32 seed) {
  srand(seed);
  const u32 pages = 1 + rand() % 2 * (rand() % 4), threads = 2 + rand() % 3, steps = 2 + rand() % 8, sizes = 1 + rand() % 3;
  Arena a(6000 + pages * 72000, 1 + rand() % 3, 1, seed);
  const u64 choices[] = {16, 1000, 6000, 20000, FB_LARGEST_SLOT, FB_PAGE, 2 * FB_PAGE};
  u64 of[3];
  for (u64 &bytes : of) bytes = choices[rand() % 7];
  Known known{std::vector<u32>(a.heap->pages), std::vector<Known::Call>(threads)};
  auto note = [&](const Piece &p, u32 by) {
    const u64 first = ((unsigned char *)p.at - a.heap->arena) >> FB_PAGE_SHIFT;
    for (u64 i = 0; i < (p.bytes + FB_PAGE - 1) / FB_PAGE; i++) known.pieces[first + i] += by;
  };
  std::vector<Piece> shelf;
  // Sometimes a page is full but for little, so that it is soon all free or all taken.
  if (rand() % 2)
    for (u32 i = rand() % 70; i > 0; i--)
      if (void *at = fb_malloc(a.heap, of[0])) {
        a.own(at, of[0], 1);
        shelf.push_back({at, of[0]});
        note(shelf.back(), 1);
      }
  Turns turns(seed);
  for (u32 t = 0; t < threads; t++) turns.add([&, t] {
    unsigned random = seed * 31 + t;
    auto take = [&] {
      const u64 bytes = of[rand_r(&random) % sizes], n = (bytes + FB_PAGE - 1) / FB_PAGE;
      known.begin(t, n);
      void *at = fb_malloc(a.heap, bytes);
      known.look();
      known.end(t);
      // A page is enough, wherever it is.
      CHECK(at || n > 1 || known.none(t));
      if (!at) return;
      a.own(at, bytes, 1);
      shelf.push_back({at, bytes});
      note(shelf.back(), 1);
      known.look();
    };
    auto give = [&](u64 k) {
      const Piece p = shelf[k];
      shelf[k] = shelf.back();
      shelf.pop_back();
      a.leave(p.at, p.bytes, 1);
      CHECK(fb_free(a.heap, p.at) == FB_FREED);
      note(p, -1u);
    };
    for (u32 i = 0; i < steps; i++) {
      const u32 what = rand_r(&random) % 4;
      if (what != 0 || shelf.empty()) take();
      // At once, or something.
      if (what < 2 && !shelf.empty()) give(what ? shelf.size() - 1 : rand_r(&random) % shelf.size());
    }
  });
  turns.run();
  a.settled();
  for (Piece &p : shelf) {
    a.leave(p.at, p.bytes, 1);
    CHECK(fb_free(a.heap, p.at) == FB_FREED);
  }
  a.whole();
}

// Pages come out of a set of three levels and go back: none is lost, none is there twice, and all are
// found again.
static void sets(u32 seed) {
  srand(seed);
  std::vector<u64> words(200);
  PageSets s = {};
  const u32 pages = 4097 + rand() % 100, threads = 2 + rand() % 3, each = 1 + rand() % 6;
  CHECK(fb_measure_set(pages, &s) < words.size() && s.levels == 3);
  s.words = words.data();
  // Few pages, of which some share words of one level or another.
  std::vector<u32> all, near = {0, 1, 64, 4095, 4096};
  for (u32 p : near) if (rand() % 2) all.push_back(p), fb_set_add(&s, 0, p);
  std::vector<u32> owner(pages);
  Turns turns(seed);
  for (u32 t = 0; t < threads; t++) turns.add([&, t] {
    unsigned random = seed * 31 + t;
    for (u32 i = 0; i < each; i++) {
      const u32 p = fb_set_take_any(&s, 0, rand_r(&random) % 3);
      if (p == FB_NO_PAGE) continue;
      CHECK(owner[p]++ == 0);
      fb_step();
      owner[p]--;
      fb_set_add(&s, 0, p);
    }
  });
  turns.run();
  for (u64 i = 0; i < all.size(); i++) CHECK(fb_set_take_any(&s, 0, 0) != FB_NO_PAGE);
  CHECK(fb_set_take_any(&s, 0, 0) == FB_NO_PAGE);
}

// Of two who free the same thing one is told.
static void twice(u32 seed) {
  srand(seed);
  Arena a(300000, 2, 1, seed);
  void *at = fb_malloc(a.heap, rand() % 2 ? 100 : 100000);
  u32 freed = 0;
  Turns turns(seed);
  for (u32 t = 0; t < 2; t++) turns.add([&] { freed += fb_free(a.heap, at) == FB_FREED; });
  turns.run();
  CHECK(freed == 1 && a.use().twice == 1);
  a.whole();
}

int main(int argc, char **argv) {
  (void)argc;
  const u32 first = (u32)atoi(argv[1]), n = (u32)atoi(argv[2]);
  for (u32 seed = first; seed < first + n; seed++) {
    by_turns(seed);
    sets(seed);
    if (seed % 16 == 0) twice(seed);
  }
  printf("%u seeds\n", n);
}
