// Runs the heap's own code with threads as processors and random schedules, and looks whether two ever have the same bytes,
// whether what is free can be had, and whether all of it comes back. Behind arena.cpp.

#ifdef FB_LANES
static thread_local Meetings own;
// A thread that is no lane of a warp.
static void alone() {
  meetings = &own;
  lane = 0;
  together = 1;
}

// Lanes of warps allocate and free, all of a warp or some of them together, the same sizes and others; some free what another
// lane had, or all of them the same thing.
static void warps(u32 seed) {
  srand(seed);
  alone();
  const u32 blocks = 1 + rand() % 2, sizes = 1 + rand() % 3;
  // So much that everybody always gets what it wants; or little.
  const bool roomy = rand() % 2;
  Arena a(roomy ? 4000000 : (1 + rand() % 8) * 70000 + 200000, 1 + rand() % 3, 1 + rand() % 3, seed);
  u64 of[3];
  for (u32 i = 0; i < 3; i++) of[i] = roomy || rand() % 4 ? 1 + rand() % 600 : 1 + rand() % FB_LARGEST_SLOT;
  std::vector<Meetings> all(blocks);
  std::vector<Meeting> turns(blocks * FB_LANES / FB_WARP);
  std::vector<std::thread> threads;
  for (u32 b = 0; b < blocks; b++) for (u32 l = 0; l < FB_LANES; l++) threads.emplace_back([&, b, l] {
    meetings = &all[b];
    lane = l;
    // What the lanes of a warp decide together, and what each does for itself.
    unsigned common = seed * 31 + b * FB_LANES + l / FB_WARP, random = common * 97 + l;
    const unsigned me = 1u << l % FB_WARP;
    struct Mine { void *at; u64 bytes; };
    std::vector<Mine> mine;
    for (u32 i = 0; i < 120; i++) {
      turns[(b * FB_LANES + l) / FB_WARP].meet(FB_WARP);
      const u32 what = rand_r(&common) % 8, present = 1 + rand_r(&common) % ((1u << FB_WARP) - 1);
      const u64 same = rand_r(&common) % 2 ? of[rand_r(&common) % sizes] : 0;
      together = present;
      if (what == 7) {
        // All of them free what the lowest has: one is told that it was there.
        if (!(present & me)) continue;
        const u32 first = fb_lowest(present);
        Mine m = {0, 0};
        if (l % FB_WARP == first && !mine.empty()) {
          m = mine.back();
          mine.pop_back();
          a.leave(m.at, m.bytes, 1);
        }
        void *at = (void *)fb_from(present, (u64)m.at, first);
        const u32 freed = at && fb_free(a.heap, at) == FB_FREED;
        const u32 total = fb_ones(fb_union(present, freed << l % FB_WARP));
        CHECK(total == (at ? 1 : 0));
      } else if (what < 4) {
        if (!(present & me)) continue;
        const u64 bytes = same ? same : of[rand_r(&random) % sizes];
        void *at = fb_malloc(a.heap, bytes);
        CHECK(at || !roomy);
        if (!at) continue;
        a.own(at, bytes, 1);
        mine.push_back({at, bytes});
      } else {
        // Who has nothing to free is not there.
        together = fb_union((1u << FB_WARP) - 1, present & me && !mine.empty() ? me : 0);
        if (!(together & me)) continue;
        Mine m = mine.back();
        mine.pop_back();
        a.leave(m.at, m.bytes, 1);
        CHECK(fb_free(a.heap, m.at) == FB_FREED);
      }
    }
    alone();
    for (Mine &m : mine) {
      a.leave(m.at, m.bytes, 1);
      CHECK(fb_free(a.heap, m.at) == FB_FREED);
    }
  });
  for (auto &t : threads) t.join();
  a.whole();
}
#endif

// Threads allocate, hand some of it to others, and free.
static void churn(u32 seed) {
  srand(seed);
  const u32 threads = 2 + rand() % 4, processors = 1 + rand() % 4, warps = 1 + rand() % 3;
  Arena a((1 + rand() % 40) * 70000 + 200000, processors, warps, seed);
  const u32 sizes = 1 + rand() % 4;
  const u32 large = rand() % 3 == 0;
  u64 of[4];
  for (u32 i = 0; i < 4; i++) of[i] = rand() % 3 ? 1 + rand() % 600 : 1 + rand() % FB_LARGEST_SLOT;
  std::vector<std::atomic<Piece *>> shelf(32);
  std::vector<std::thread> all;
  for (u32 t = 0; t < threads; t++) all.emplace_back([&, t] {
    unsigned random = seed * 31 + t;
    std::vector<Piece> mine;
    auto release = [&](Piece p, u32 owner) {
      a.leave(p.at, p.bytes, owner);
      CHECK(fb_free(a.heap, p.at) == FB_FREED);
    };
    for (u32 i = 0; i < 300; i++) {
      const u32 what = rand_r(&random) % 16;
      if (what < 7) {
        const u64 bytes = large && rand_r(&random) % 8 == 0 ? FB_LARGEST_SLOT + 1 + rand_r(&random) % 300000 : of[rand_r(&random) % sizes];
        void *at = fb_malloc(a.heap, bytes);
        if (!at) continue;
        CHECK(fb_usable(a.heap, at) >= bytes);
        a.own(at, bytes, 1);
        mine.push_back({at, bytes});
      } else if (what < 9) {
        // As a warp does it: many slots at once.
        const u64 bytes = of[rand_r(&random) % sizes];
        const u32 c = fb_class_of((u32)bytes);
        const u64 taken = fb_take_slots(a.heap, c, 1 + rand_r(&random) % 32);
        for (u32 b = 0; b < 32; b++) if (taken >> b & 1) {
          void *at = fb_slot(a.heap, (u32)(taken >> 32), c, b);
          a.own(at, bytes, 1);
          mine.push_back({at, bytes});
        }
      } else if (what < 13 && !mine.empty()) {
        const u32 k = rand_r(&random) % mine.size();
        release(mine[k], 1);
        mine[k] = mine.back();
        mine.pop_back();
      } else if (what < 15 && !mine.empty()) {
        Piece *old = shelf[rand_r(&random) % shelf.size()].exchange(new Piece(mine.back()));
        mine.pop_back();
        if (old) {
          release(*old, 1);
          delete old;
        }
      } else if (!mine.empty() && mine.back().bytes > 16) {
        CHECK(fb_free(a.heap, (char *)mine.back().at + 8) == FB_INTERIOR);
        CHECK(fb_free(a.heap, &random) == FB_FOREIGN);
      }
    }
    for (Piece &p : mine) release(p, 1);
  });
  for (auto &t : all) t.join();
  a.settled();
  for (auto &s : shelf) if (Piece *p = s.load()) {
    a.leave(p->at, p->bytes, 1);
    CHECK(fb_free(a.heap, p->at) == FB_FREED);
    delete p;
  }
  a.whole();
}

// Threads take all there is of one size: to the last slot, while pages of another size become free.
static void fill(u32 seed) {
  srand(seed);
  const u32 threads = 2 + rand() % 3, processors = 1 + rand() % 4;
  Arena a((1 + rand() % 6) * 70000 + 200000, processors, 1, seed);
  const u64 bytes = 200 + rand() % (rand() % 2 ? 20000 : 1000), other = 1 + rand() % 2000;
  std::vector<void *> before;
  for (void *at; (at = fb_malloc(a.heap, other));) before.push_back(at);
  CHECK(before.size() == a.heap->pages * fb_class_slots(fb_class_of((u32)other)));
  for (u64 i = before.size(); i-- > 1;) std::swap(before[i], before[rand() % (i + 1)]);
  std::vector<std::vector<void *>> got(threads);
  std::vector<std::thread> all;
  std::atomic<u32> freed{0};
  for (u32 t = 0; t < threads; t++) all.emplace_back([&, t] {
    for (u64 i = t; i < before.size(); i += threads) CHECK(fb_free(a.heap, before[i]) == FB_FREED);
    freed++;
    // What the last ones free must be found without their having to wait for each other.
    for (;;) {
      const bool last = freed.load() == threads;
      void *at = fb_malloc(a.heap, bytes);
      if (at) {
        a.own(at, bytes, 1);
        got[t].push_back(at);
      } else if (last) {
        break;
      }
    }
  });
  for (auto &t : all) t.join();
  a.settled();
  u64 n = 0;
  for (auto &g : got) n += g.size();
  const u64 slots = a.heap->pages * fb_class_slots(fb_class_of((u32)bytes));
  if (n != slots) fprintf(stderr, "%llu of %llu\n", n, slots);
  CHECK(n == slots);
  for (auto &g : got) for (void *at : g) {
    a.leave(at, bytes, 1);
    CHECK(fb_free(a.heap, at) == FB_FREED);
    CHECK(fb_free(a.heap, at) == FB_DOUBLE);
  }
  CHECK(a.use().twice == n && a.use().last_bad != 0);
  a.whole();
}

// Two threads free the same thing: one of them is told.
static void twice(u32 seed) {
  Arena a(600000, 2, 1, seed);
  for (u32 i = 0; i < 50; i++) {
    void *at = fb_malloc(a.heap, i % 2 ? 100 : 100000);
    std::atomic<u32> ok{0}, refused{0};
    auto free = [&] { (fb_free(a.heap, at) == FB_FREED ? ok : refused)++; };
    std::thread one(free), two(free);
    one.join();
    two.join();
    CHECK(ok == 1 && refused == 1);
  }
  a.whole();
}

// What a processor that does nothing more has left is for the others.
static void abandoned(u32 seed) {
  Arena a(400000 + seed % 3 * 70000, 8, 1, seed);
  void *first = 0;
  std::thread([&] { first = fb_malloc(a.heap, 1000); }).join();
  u64 n = 1;
  for (void *at; (at = fb_malloc(a.heap, 1000));) CHECK(++n && at != first);
  CHECK(n == a.heap->pages * fb_class_slots(fb_class_of(1000)));
}

// What is free is always found, though others try to make its page nobody's.
static void wanted(u32 seed) {
  Arena a(300000, 2, 1, seed);
  std::vector<void *> taken;
  for (void *at; (at = fb_malloc(a.heap, 512));) taken.push_back(at);
  // The first word of a page is free, and the page can never be retired.
  const u32 p = (u32)(((u64)taken[0] - (u64)a.heap->arena) >> FB_PAGE_SHIFT);
  for (void *at : taken)
    if ((u64)at - (u64)a.heap->arena - ((u64)p << FB_PAGE_SHIFT) < 32 * 512) CHECK(fb_free(a.heap, at) == FB_FREED);
  std::atomic<bool> end{false};
  std::thread other([&] {
    while (!end) {
      fb_set_add(&a.heap->sets, FB_SET_EMPTY, p);
      CHECK(fb_malloc(a.heap, FB_PAGE) == 0);
    }
  });
  for (u32 i = 0; i < 1000; i++) {
    void *at = fb_malloc(a.heap, 512);
    CHECK(at && fb_free(a.heap, at) == FB_FREED);
  }
  end = true;
  other.join();
}

// The only page changes its class again and again, while somebody who has freed in it has not counted that yet.
static void uncounted(u32 seed) {
  Arena a(75000, 2, 1, seed);
  CHECK(a.heap->pages == 1);
  for (u32 i = 0; i < 10; i++) {
    std::atomic<bool> end{false};
    std::thread other([&] {
      away = 20;
      while (!end)
        if (void *at = fb_malloc(a.heap, 1000)) CHECK(fb_free(a.heap, at) == FB_FREED);
    });
    std::vector<void *> got;
    while (got.empty())
      for (void *at; (at = fb_malloc(a.heap, 20000));) got.push_back(at);
    CHECK(fb_free(a.heap, got.back()) == FB_FREED);
    got.pop_back();
    end = true;
    other.join();
    a.settled();
    for (void *at : got) CHECK(fb_free(a.heap, at) == FB_FREED);
  }
  a.whole();
}

// Two want the only page for themselves and give up, because a third has slots of it now and then: when all have ended, it is
// known that nothing of it is taken.
static void given_up(u32 seed) {
  Arena a(75000, 3, 1, seed);
  CHECK(a.heap->pages == 1);
  // The last word of the smallest slots: all others are taken from it before it is looked at, and are given back after it.
  const u32 c = 0, last = FB_PAGE_WORDS - 1;
  for (u32 i = 0; i < 200; i++) {
    void *first = fb_malloc(a.heap, 16);
    const u32 got = fb_claim(a.heap, last, fb_peek64(fb_word(a.heap, last)), c, 32, 0);
    CHECK(first && got);
    CHECK(fb_free(a.heap, first) == FB_FREED);
    fb_set_add(&a.heap->sets, FB_SET_EMPTY, 0);
    std::atomic<u32> here{0};
    std::atomic<bool> given{false};
    std::vector<std::thread> all;
    for (u32 t = 0; t < 3; t++) all.emplace_back([&, t] {
      for (here++; here < 3;) sched_yield();
      if (t == 0) {
        for (u32 k = 0; k < i % 50; k++) fb_peek64(fb_word(a.heap, last));
        fb_give(a.heap, last, c, got);
        given = true;
      } else {
        for (bool end = false; !end;) {
          end = given;
          if (void *at = fb_malloc(a.heap, FB_PAGE)) CHECK(fb_free(a.heap, at) == FB_FREED);
        }
      }
    });
    for (auto &t : all) t.join();
    a.settled();
  }
  a.whole();
}

// Threads take pages out of a set and put them in again: none is lost.
static void sets(u32 seed) {
  std::vector<u64> words(200);
  PageSets s = {};
  const u64 pages = 4097 + seed % 2000;
  CHECK(fb_measure_set(pages, &s) < words.size() && s.levels == 3);
  s.words = words.data();
  const u32 threads = 3, each = 2;
  std::vector<std::thread> all;
  for (u32 t = 0; t < threads; t++) all.emplace_back([&, t] {
    unsigned random = seed * 31 + t;
    for (u32 i = 0; i < each; i++) fb_set_add(&s, 0, (u32)(pages - 1 - t * each - i));
    for (u32 i = 0; i < 200; i++) {
      const u32 p = fb_set_take_any(&s, 0, rand_r(&random));
      if (p != FB_NO_PAGE) fb_set_add(&s, 0, p);
    }
  });
  for (auto &t : all) t.join();
  for (u32 i = 0; i < threads * each; i++) CHECK(fb_set_take_any(&s, 0, 0) != FB_NO_PAGE);
  CHECK(fb_set_take_any(&s, 0, 0) == FB_NO_PAGE);
}

// Pages in sets that have three levels.
static void large(u32 seed) {
  srand(seed);
  // Only what describes the arena is ever written.
  std::vector<u64> words(1 << 20);
  PageSets s = {};
  const u64 pages = 70000 + rand() % 9000;
  CHECK(fb_measure_set(pages, &s) < words.size() && s.levels == 3);
  s.words = words.data();
  std::vector<bool> in(pages);
  u64 count = 0;
  for (u32 i = 0; i < 3000; i++) {
    const u32 p = (u32)(((u64)rand() << 16 ^ rand()) % pages);
    if (!in[p]) count++;
    in[p] = true;
    fb_set_add(&s, 0, p);
    if (rand() % 2) {
      const u32 q = fb_set_take_any(&s, 0, rand());
      CHECK(q < pages && in[q]);
      in[q] = false;
      count--;
    }
  }
  for (; count > 0; count--) {
    const u32 q = fb_set_take_any(&s, 0, rand());
    CHECK(q < pages && in[q]);
    in[q] = false;
  }
  CHECK(fb_set_take_any(&s, 0, 0) == FB_NO_PAGE);
}

static void bounds(u32 seed) {
  for (u32 bytes = 1; bytes <= FB_LARGEST_SLOT; bytes++) {
    const u32 c = fb_class_of(bytes);
    CHECK(c < FB_CLASSES && fb_class_bytes(c) >= bytes && (c == 0 || fb_class_bytes(c - 1) < bytes));
    CHECK(fb_class_bytes(c) % 16 == 0 && fb_class_words(c) <= FB_PAGE_WORDS);
    // No more than a quarter in vain, but for the smallest.
    CHECK(bytes <= 64 || fb_class_bytes(c) * 4 <= bytes * 5);
  }
  unsigned char little[1000];
  CHECK(!fb_heap_init(little, 0, 1, 1, 0, 1) && !fb_heap_init(little, sizeof little, 1, 1, 0, 1));
  CHECK(!fb_heap_init(little, ~0ull, 1, 1, 0, 1) && !fb_heap_init(little, 1 << 20, 0, 1, 0, 1));
  Arena a(400000, 1, 1, seed);
  CHECK(fb_malloc(a.heap, 0) == 0 && fb_free(a.heap, 0) == FB_FREED);
  CHECK(fb_malloc(a.heap, ~0ull) == 0 && fb_malloc(a.heap, 1ull << 40) == 0);
  void *big = fb_malloc(a.heap, 100000);
  CHECK(big && fb_free(a.heap, (char *)big + FB_PAGE) == FB_INTERIOR && fb_free(a.heap, (char *)big + 16) == FB_INTERIOR);
  CHECK(fb_free(a.heap, big) == FB_FREED && fb_free(a.heap, big) == FB_DOUBLE);
  a.whole();
}

int main(int argc, char **argv) {
  (void)argc;
  const u32 first = (u32)atoi(argv[1]), n = (u32)atoi(argv[2]);
#ifdef FB_LANES
  for (u32 seed = first; seed < first + n; seed++) warps(seed);
  return 0;
#endif
  bounds(first);
  for (u32 seed = first; seed < first + n; seed++) {
    churn(seed);
    fill(seed);
    large(seed);
    sets(seed);
    abandoned(seed);
    if (seed % 16 == 0) {
      twice(seed);
      wanted(seed);
      uncounted(seed);
      given_up(seed);
    }
  }
  printf("%u seeds\n", n);
}
