// A heap on the device: any thread allocates and frees, from 1 byte to all of it. docs/heap.md has its rules.
//
// The arena is pages of 64 KiB. A page holds slots of one size, 32 to a word: the low half of the word has a bit for each
// free slot, the high half says whose page it is (class + 1), so that one atomic operation takes up to 32 slots and tells
// whether they are what was wanted. More than half a page is whole pages.
#pragma once

#define FB_PAGE 65536u
#define FB_PAGE_SHIFT 16
// Words have 32-bit numbers: 2 TiB.
#define FB_MAX_PAGES ((1u << 25) - 1)
// Words of a page, for its smallest slots.
#define FB_PAGE_WORDS 128u
// Sizes: 16, 32, 48, 64, then four for each doubling.
#define FB_CLASSES 40u
#define FB_LARGEST_SLOT 32768u

// Words that are looked at together: one takes as long as all of them. They lie in one page.
#define FB_SEEN 8u
#define FB_NO_WORD 0xFFFFFFFFu
// The rank of a lane that has its slot: far behind all others, whatever is taken from it.
#define FB_SERVED 0xFFFFFFFFu

// A page's kind: none of these is a class + 1.
#define FB_PAGE_FREE 0u
#define FB_PAGE_LARGE 254u
#define FB_PAGE_TAIL 255u

// What fb_free says, and what is counted in `bad`.
#define FB_FREED 0u
// Not from this heap.
#define FB_FOREIGN 1u
// Not the beginning of anything.
#define FB_INTERIOR 2u
// Freed before.
#define FB_DOUBLE 3u

// Sets of pages: one for each class, of pages that have room; then these.
#define FB_SET_POOL FB_CLASSES
#define FB_SET_EMPTY (FB_CLASSES + 1)
#define FB_SETS (FB_CLASSES + 2)

struct HeapPage {
  u32 kind;
  // Slots that are taken.
  u32 used;
  // Pages of a large piece.
  u32 pages;
  u32 unused;
};

struct alignas(128) Heap {
  unsigned char *arena;
  u64 pages;
  HeapPage *page;
  u64 *words;
  PageSets sets;
  // The word where a warp looks first, + 1, for each processor and class; and the page where it looks then, + 1.
  u32 *hints;
  u32 *homes;
  u32 processors;
  u32 warps;
  // Times that pages began to be moved between classes, or could not be seen for a while, and times that this ended.
  u32 moving;
  u32 moved;
  // Frees that were refused, by what was wrong with them; and the last such pointer.
  u64 bad[4];
  u64 last_bad;
};

FB_DEVICE u32 fb_class_of(u32 bytes) {
  if (bytes <= 64) return (bytes + 15) / 16 - 1;
  const u32 m = bytes - 1, e = fb_highest(m);
  return 4 + (e - 6) * 4 + ((m >> (e - 2)) & 3);
}

FB_DEVICE u32 fb_class_bytes(u32 c) {
  return c < 4 ? (c + 1) * 16 : (5 + (c & 3)) << (4 + c / 4 - 1);
}

// How many slots of class c lie in the first `bytes` of a page: a slot is 1 to 8 times a power of two, and these are divided
// by with a number of 15 bits, exactly up to 4096.
FB_DEVICE u32 fb_slots_in(u32 c, u32 bytes) {
  const u64 by[2] = {32769 | 16385 << 16 | 10923ull << 32 | 8193ull << 48, 6554 | 5462 << 16 | 4682ull << 32 | 4097ull << 48};
  const u32 units = bytes >> (c < 4 ? 4 : 3 + c / 4);
  return units * (u32)((c < 4 ? by[0] : by[1]) >> 16 * (c & 3) & 0xFFFF) >> 15;
}

FB_DEVICE u32 fb_class_slots(u32 c) { return fb_slots_in(c, FB_PAGE); }

FB_DEVICE u32 fb_class_words(u32 c) { return (fb_class_slots(c) + 31) / 32; }

// A word of a page whose slots are all free.
FB_DEVICE u64 fb_word_full(u32 c, u32 word) {
  const u32 left = fb_class_slots(c) - word * 32;
  return (u64)(c + 1) << 32 | (left >= 32 ? 0xFFFFFFFFu : (1u << left) - 1);
}

// The lowest `n` bits of `free` from bit `turn` on, all around.
FB_DEVICE u32 fb_choose(u32 free, u32 n, u32 turn) {
  if (fb_ones(free) <= n) return free;
  const u32 r = turn & 31;
  u32 rest = r ? free >> r | free << (32 - r) : free, chosen = 0;
  for (; n > 0; n--) {
    chosen |= rest & (0u - rest);
    rest &= rest - 1;
  }
  return r ? chosen << r | chosen >> (32 - r) : chosen;
}

FB_DEVICE u64 *fb_word(Heap *h, u32 word) { return &fb_kept(&h->words)[word]; }

FB_DEVICE HeapPage *fb_page(Heap *h, u32 p) { return &fb_kept(&h->page)[p]; }

// A page that was full has room now, or nothing in it is taken any more.
FB_DEVICE void fb_tell_room(Heap *h, u32 c, u32 p, bool had_none, bool empty) {
  if (had_none) fb_set_add(&h->sets, c, p);
  // It is there already when nobody has looked for one since it was last empty. (Whoever takes it out of the set after
  // this look sees that its slots are free.)
  if (empty && !fb_set_has(&h->sets, FB_SET_EMPTY, p)) fb_set_add(&h->sets, FB_SET_EMPTY, p);
}

// Slots of a word are free again. The word as it was.
FB_DEVICE u64 fb_give(Heap *h, u32 word, u32 c, u32 bits) {
  const u32 p = word / FB_PAGE_WORDS;
  const u64 old = fb_release64(fb_word(h, word), bits);
  const u32 fresh = bits & ~(u32)old;
  if (fresh == 0) return old;
  if ((u32)(old >> 32) != c + 1) {
    // Not a live slot: the page is no longer what it was when this was allocated. As if it had not happened.
    fb_and64(fb_word(h, word), ~(u64)fresh);
    return old | bits;
  }
  const u32 n = fb_ones(fresh), before = fb_count(&fb_page(h, p)->used, 0u - n), slots = fb_class_slots(c);
  const bool had_none = before >= slots && before - n < slots;
  if (had_none || before == n) fb_tell_room(h, c, p, had_none, before == n);
  return old;
}

// Takes up to `want` slots of a word, if it is of class c as it was just seen.
FB_DEVICE u32 fb_claim(Heap *h, u32 word, u64 seen, u32 c, u32 want, u32 turn) {
  if ((u32)(seen >> 32) != c + 1 || (u32)seen == 0) return 0;
  const u32 mask = fb_choose((u32)seen, want, turn);
  const u64 old = fb_strike64(fb_word(h, word), ~(u64)mask);
  const u32 got = (u32)old & mask;
  if (got == 0) return 0;
  fb_bump(&fb_page(h, word / FB_PAGE_WORDS)->used, fb_ones(got));
  const u32 now = (u32)(old >> 32);
  if (now == c + 1) return got;
  // The page became another class's between both looks: what was taken is that one's.
  fb_give(h, word, now - 1, got);
  return 0;
}

// Slots that were taken: their word, and bits of it. 0 is none.
FB_DEVICE u64 fb_taken(u32 word, u32 bits) { return bits ? (u64)word << 32 | bits : 0; }

// Takes up to `want` slots from one of the FB_SEEN words from `base` on, rather from number `from` of them or one behind it.
FB_DEVICE u64 fb_claim_near(Heap *h, u32 base, u32 from, u32 c, u32 want, u32 turn) {
  u64 *words = fb_word(h, base), seen[FB_SEEN], word = 0;
  // All are on their way before one is looked at. (None is chosen by its number: then all would go to memory first.)
  for (u32 j = 0; j < FB_SEEN; j++) seen[j] = fb_peek64(words + j);
  u32 k = FB_SEEN, some = 0;
  for (u32 j = FB_SEEN; j-- > 0;) {
    const bool is = (u32)seen[j] != 0, better = is && (j >= from || k == FB_SEEN || k < from);
    some |= is << j;
    word = better ? seen[j] : word;
    k = better ? j : k;
  }
  while (some) {
    const u32 got = fb_claim(h, base + k, word, c, want, turn);
    if (got) return fb_taken(base + k, got);
    // Somebody was quicker.
    some &= ~(1u << k);
    if (some == 0) return 0;
    const u32 later = some >> from << from;
    k = fb_lowest(later ? later : some);
    word = fb_peek64(words + k);
  }
  return 0;
}

// Takes up to `want` slots from anywhere in a page, from the word `from` or near it on.
FB_DEVICE u64 fb_claim_in(Heap *h, u32 p, u32 c, u32 want, u32 from, u32 turn) {
  const u32 groups = (fb_class_words(c) + FB_SEEN - 1) / FB_SEEN, first = from % FB_PAGE_WORDS / FB_SEEN;
  // A full page is left at once.
  const u32 used = fb_peek(&fb_page(h, p)->used);
  for (u32 i = 0; i < groups; i++) {
    // Words behind the last one of the class have no slots.
    const u64 got = fb_claim_near(h, p * FB_PAGE_WORDS + (first + i) % groups * FB_SEEN, from % FB_SEEN, c, want, turn);
    if (got || used >= fb_class_slots(c)) return got;
  }
  return 0;
}

// A page in a class's set turned out to have nothing: it stays if slots are still being counted, and goes if it is full or
// another's.
FB_DEVICE void fb_tidy(Heap *h, u32 c, u32 p) {
  const u32 slots = fb_class_slots(c);
  const HeapPage *page = fb_page(h, p);
  if (fb_peek(&page->used) < slots && fb_peek(&page->kind) == c + 1) return;
  if (!fb_set_take(&h->sets, c, p)) return;
  // Whoever frees a slot from now on says so; who did meanwhile may have said so before it was taken out.
  if (fb_load(&page->used) < slots && fb_load(&page->kind) == c + 1) fb_set_add(&h->sets, c, p);
}

// Whether nothing of a page of class c is taken, or being moved.
FB_DEVICE bool fb_unused(Heap *h, u32 p, u32 c) {
  if (fb_load(&fb_page(h, p)->used) != 0 || fb_load(&fb_page(h, p)->kind) != c + 1) return false;
  for (u32 i = 0; i < fb_class_words(c); i++)
    if (fb_peek64(fb_word(h, p * FB_PAGE_WORDS + i)) != fb_word_full(c, i)) return false;
  return true;
}

// Makes a page that its class has no use for nobody's. The caller has taken it from the set of empty pages.
FB_DEVICE bool fb_retire(Heap *h, u32 p) {
  const u32 kind = fb_load(&fb_page(h, p)->kind);
  if (kind == FB_PAGE_FREE || kind > FB_CLASSES) return false;
  const u32 c = kind - 1, n = fb_class_words(c);
  u64 *words = fb_word(h, p * FB_PAGE_WORDS);
  u32 taken = 0;
  fb_fence_all();
  while (taken < n && fb_try64(&words[taken], fb_word_full(c, taken), 0) == fb_word_full(c, taken)) taken++;
  // All of it is free, and whoever has freed has counted it, by what is this class's.
  if (taken == n && fb_load(&fb_page(h, p)->used) == 0) {
    fb_set_take(&h->sets, c, p);
    fb_store(&fb_page(h, p)->kind, FB_PAGE_FREE);
    return true;
  }
  if (taken == 0) return false;
  // Somebody has a slot, or is about to say that all is free. Who did so meanwhile may have been heard by another, who did not
  // get the first word: so whoever gives words back says it again.
  while (taken-- > 0) fb_or64(&words[taken], fb_word_full(c, taken));
  fb_fence_all();
  if (fb_unused(h, p, c)) fb_set_add(&h->sets, FB_SET_EMPTY, p);
  return false;
}

// A page for class c, all of it free and in its set; FB_NO_PAGE when there is none.
FB_DEVICE u32 fb_new_page(Heap *h, u32 c, u32 turn) {
  // Who finds nothing hides nothing: it must not make others look again.
  if (!fb_set_any(&h->sets, FB_SET_POOL) && !fb_set_any(&h->sets, FB_SET_EMPTY)) return FB_NO_PAGE;
  fb_add(&h->moving, 1);
  u32 p = fb_set_take_any(&h->sets, FB_SET_POOL, turn);
  while (p == FB_NO_PAGE) {
    // Each look takes a page from the set that some free put there: what it costs has been paid for.
    const u32 empty = fb_set_take_any(&h->sets, FB_SET_EMPTY, turn);
    if (empty == FB_NO_PAGE) break;
    if (fb_retire(h, empty)) p = empty;
  }
  if (p != FB_NO_PAGE) {
    // First whose it is, then what it has: whoever has a slot may free it at once.
    fb_mark(&fb_page(h, p)->kind, c + 1);
    fb_fence();
    for (u32 i = 0; i < fb_class_words(c); i++) fb_mark64(fb_word(h, p * FB_PAGE_WORDS + i), fb_word_full(c, i));
    fb_set_add(&h->sets, c, p);
  }
  fb_add(&h->moved, 1);
  return p;
}

// Takes up to `want` slots of class c from wherever there are any: from the page where the warp was last, behind the word
// that it has used up; from the next ones in the set, all around; from a new one.
FB_DEVICE u64 fb_search(Heap *h, u32 c, u32 want, u32 turn, u32 home, u32 last) {
  const u32 from = home && last / FB_PAGE_WORDS == home - 1 ? last + 1 : turn;
  u64 got = home ? fb_claim_in(h, home - 1, c, want, from, turn) : 0;
  u32 p = home;
  for (bool around = home == 0; got == 0;) {
    p = fb_set_next(&h->sets, c, p);
    if (p == FB_NO_PAGE || (around && home && p >= home)) {
      if (around) break;
      around = true;
      p = 0;
      continue;
    }
    got = fb_claim_in(h, p, c, want, turn, turn);
    if (got == 0) fb_tidy(h, c, p++);
  }
  while (got == 0) {
    p = fb_new_page(h, c, turn);
    if (p == FB_NO_PAGE) return 0;
    got = fb_claim_in(h, p, c, want, turn, turn);
  }
  return got;
}

// Where a warp looks first for slots of class c, among hints and homes.
FB_DEVICE u32 fb_place(Heap *h, u32 c) {
  const u32 n = fb_kept(&h->processors), warps = fb_kept(&h->warps), processor = fb_processor(), warp = fb_warp();
  return ((processor < n ? processor : processor % n) * FB_CLASSES + c) * warps + (warp < warps ? warp : warp % warps);
}

FB_DEVICE u32 fb_turn(void) { return fb_processor() * 7 + fb_warp(); }

FB_DEVICE u64 fb_take_elsewhere(Heap *h, u32 c, u32 want, u32 last) {
  const u32 place = fb_place(h, c), turn = fb_turn();
  u32 *home = &fb_kept(&h->homes)[place];
  u64 got = 0;
  u32 ended, begun;
  do {
    ended = fb_load(&h->moved);
    got = fb_search(h, c, want, turn, fb_peek(home), last);
    begun = fb_load(&h->moving);
    // What somebody moves cannot be seen for a moment: then what was not found may be there.
  } while (got == 0 && begun != ended);
  if (got == 0) return 0;
  const u32 word = (u32)(got >> 32);
  fb_mark(&fb_kept(&h->hints)[place], word + 1);
  fb_mark(home, word / FB_PAGE_WORDS + 1);
  return got;
}

// Takes up to `want` slots (1 to 32) of class c; 0 when there are none.
FB_DEVICE u64 fb_take_slots(Heap *h, u32 c, u32 want) {
  u32 *hint = &fb_kept(&h->hints)[fb_place(h, c)];
  const u32 last = fb_peek(hint) - 1, turn = fb_turn();
  if (last == FB_NO_WORD) return fb_take_elsewhere(h, c, want, last);
  const u64 seen = fb_peek64(fb_word(h, last));
  u64 got = fb_taken(last, fb_claim(h, last, seen, c, want, turn));
  if (got == 0) got = fb_claim_near(h, last / FB_SEEN * FB_SEEN, last % FB_SEEN, c, want, turn);
  if (got == 0) return fb_take_elsewhere(h, c, want, last);
  const u32 word = (u32)(got >> 32);
  // Where this one is used up, the next one is looked at.
  if (word != last) fb_mark(hint, word + 1);
  else if ((u32)got == (u32)seen && (last + 1) % FB_PAGE_WORDS != 0) fb_mark(hint, last + 2);
  return got;
}

FB_DEVICE void *fb_slot(Heap *h, u32 word, u32 c, u32 bit) {
  const u64 slot = word % FB_PAGE_WORDS * 32 + bit;
  return fb_kept(&h->arena) + ((u64)(word / FB_PAGE_WORDS) << FB_PAGE_SHIFT) + slot * fb_class_bytes(c);
}

// Takes pages [first, first + n) from the pool, all of them or none.
FB_DEVICE bool fb_take_range(Heap *h, u64 first, u64 n) {
  bool all = true;
  // What goes back cannot be seen until then.
  fb_add(&h->moving, 1);
  for (u64 i = first; i < first + n && all;) {
    const u64 end = first + n < (i / 64 + 1) * 64 ? first + n : (i / 64 + 1) * 64;
    const u64 count = end - i, mask = (count == 64 ? ~0ull : (1ull << count) - 1) << (i & 63);
    const u64 got = fb_set_take_mask(&h->sets, FB_SET_POOL, (u32)(i / 64), mask);
    if (got != mask) {
      if (got) fb_set_add_mask(&h->sets, FB_SET_POOL, (u32)(i / 64), got);
      for (u64 j = first; j < i; j++) fb_set_add(&h->sets, FB_SET_POOL, (u32)j);
      all = false;
    }
    i = end;
  }
  fb_add(&h->moved, 1);
  return all;
}

// The beginning of `n` free pages in a row, taken; FB_NO_PAGE when there are none. From the end on, away from small pieces.
// Adds to `moves` how often it took some.
FB_DEVICE u32 fb_take_pages(Heap *h, u64 n, u32 *moves) {
  u64 run = 0;
  for (u64 word = (h->pages + 63) / 64; word-- > 0;) {
    if (h->sets.levels > 1 && (word & 63) == 63 && fb_load64(fb_set_word(&h->sets, FB_SET_POOL, 1, (u32)(word / 64))) == 0) {
      // 4096 pages that are all taken.
      run = 0;
      word &= ~63ull;
      continue;
    }
    const u64 v = fb_load64(fb_set_word(&h->sets, FB_SET_POOL, 0, (u32)word));
    if (v == 0) run = 0;
    else for (u32 bit = 64; bit-- > 0;) {
      run = v >> bit & 1 ? run + 1 : 0;
      if (run < n) continue;
      *moves += 1;
      if (fb_take_range(h, word * 64 + bit, n)) return (u32)(word * 64 + bit);
      run = 0;
    }
  }
  return FB_NO_PAGE;
}

// As fb_take_pages, also from pages that classes have no use for, which may fill the gap. Adds to `moves` if it moved any.
FB_DEVICE u32 fb_gather_pages(Heap *h, u64 n, u32 *moves) {
  const u32 p = fb_take_pages(h, n, moves);
  if (p != FB_NO_PAGE || !fb_set_any(&h->sets, FB_SET_EMPTY)) return p;
  bool any = false;
  fb_add(&h->moving, 1);
  for (u32 e; (e = fb_set_take_any(&h->sets, FB_SET_EMPTY, 0)) != FB_NO_PAGE;)
    if (fb_retire(h, e)) {
      fb_set_add(&h->sets, FB_SET_POOL, e);
      any = true;
    }
  fb_add(&h->moved, 1);
  *moves += 1;
  return any ? fb_take_pages(h, n, moves) : FB_NO_PAGE;
}

FB_DEVICE void *fb_malloc_large(Heap *h, u64 bytes) {
  const u64 n = (bytes + FB_PAGE - 1) >> FB_PAGE_SHIFT;
  if (n > h->pages || bytes > ~0ull - FB_PAGE) return 0;
  u32 p, ended, begun, moves;
  do {
    moves = 0;
    ended = fb_load(&h->moved);
    p = fb_gather_pages(h, n, &moves);
    begun = fb_load(&h->moving) - moves;
    // As for slots: what somebody else moved may be there now.
  } while (p == FB_NO_PAGE && begun != ended);
  if (p == FB_NO_PAGE) return 0;
  // One wait for all of them.
  for (u64 i = 1; i < n; i++) fb_mark(&h->page[p + i].kind, FB_PAGE_TAIL);
  fb_mark(&h->page[p].pages, (u32)n);
  fb_store(&h->page[p].kind, FB_PAGE_LARGE);
  return h->arena + ((u64)p << FB_PAGE_SHIFT);
}

FB_DEVICE u32 fb_refuse(Heap *h, const void *at, u32 why) {
  fb_add64(&h->bad[why], 1);
  fb_store64(&h->last_bad, (u64)at);
  return why;
}

FB_DEVICE u32 fb_free_large(Heap *h, u32 p) {
  // Only one of those who free it sees it live.
  const u64 n = fb_load(&h->page[p].pages);
  if (fb_cas(&h->page[p].kind, FB_PAGE_LARGE, FB_PAGE_FREE) != FB_PAGE_LARGE) return FB_DOUBLE;
  // Before they are in the pool.
  for (u64 i = 1; i < n; i++) fb_mark(&h->page[p + i].kind, FB_PAGE_FREE);
  for (u64 i = p; i < p + n;) {
    const u64 end = p + n < (i / 64 + 1) * 64 ? p + n : (i / 64 + 1) * 64, count = end - i;
    fb_set_add_mask(&h->sets, FB_SET_POOL, (u32)(i / 64), (count == 64 ? ~0ull : (1ull << count) - 1) << (i & 63));
    i = end;
  }
  return FB_FREED;
}

// The `n`th set bit; there is one.
FB_DEVICE u32 fb_nth(u32 bits, u32 n) {
  u32 at = 0;
  for (u32 half = 16; half > 0; half /= 2) {
    const u32 below = fb_ones(bits >> at & ((1u << half) - 1));
    if (n < below) continue;
    n -= below;
    at += half;
  }
  return at;
}

// Lanes that want the same size take their slots together.
FB_DEVICE void *fb_malloc_slot(Heap *h, u32 c) {
  const u32 present = fb_present(), peers = fb_alike(present, c), lane = fb_in_warp(), leader = fb_lowest(peers);
  u32 left = fb_ones(peers), rank = fb_ones(peers & ((1u << lane) - 1));
  void *mine = 0;
  do {
    u64 taken = 0;
    if (lane == leader && left > 0) taken = fb_take_slots(h, c, left);
    taken = fb_from(present, taken, leader);
    const u32 bits = (u32)taken, n = fb_ones(bits);
    if (rank < n) mine = fb_slot(h, (u32)(taken >> 32), c, fb_nth(bits, rank));
    // Whoever has been served is behind all others.
    rank = rank < n ? FB_SERVED : rank - n;
    left = n ? left - n : 0;
  } while (fb_some_say(present, left > 0));
  // Before one of them frees it, it is counted.
  fb_meet(present);
  return mine;
}

// False when it was free. Lanes that free slots of one word free them together; otherwise each does, all at the same time.
FB_DEVICE bool fb_free_slot(Heap *h, u32 word, u32 c, u32 bit) {
  const u32 present = fb_present(), lane = fb_in_warp(), leader = fb_lowest(present), mine = 1u << bit;
  const bool together = fb_all_alike(present, word);
  bool first = true;
  u32 bits = mine, old = 0;
  if (together) {
    bits = fb_union(present, mine);
    first = fb_ones(bits) == fb_ones(present) || lane == fb_lowest(fb_alike(present, bit));
    // What each of them wrote there is done before the leader says that it is free.
    fb_meet(present);
  }
  if (!together || lane == leader) {
    old = (u32)fb_give(h, word, c, bits);
    fb_mark(&fb_kept(&h->hints)[fb_place(h, c)], word + 1);
  }
  if (together) old = (u32)fb_from(present, old, leader);
  return first && !(old & mine);
}

// `bytes` bytes, aligned to 16 at least; null for none, and when there is no room.
FB_DEVICE void *fb_malloc(Heap *h, u64 bytes) {
  if (bytes == 0) return 0;
  return bytes > FB_LARGEST_SLOT ? fb_malloc_large(h, bytes) : fb_malloc_slot(h, fb_class_of((u32)bytes));
}

// Gives back what fb_malloc gave. Null is nothing. What is not to be freed is refused and counted: FB_FREED otherwise.
FB_DEVICE u32 fb_free(Heap *h, void *at) {
  if (!at) return FB_FREED;
  const u64 offset = (u64)at - (u64)fb_kept(&h->arena);
  if (offset >= fb_kept(&h->pages) << FB_PAGE_SHIFT) return fb_refuse(h, at, FB_FOREIGN);
  const u32 p = (u32)(offset >> FB_PAGE_SHIFT), inside = (u32)offset & (FB_PAGE - 1);
  const u32 kind = fb_peek(&fb_page(h, p)->kind);
  if (kind == FB_PAGE_FREE) return fb_refuse(h, at, FB_DOUBLE);
  if (kind == FB_PAGE_TAIL) return fb_refuse(h, at, FB_INTERIOR);
  if (kind == FB_PAGE_LARGE) {
    if (inside) return fb_refuse(h, at, FB_INTERIOR);
    return fb_free_large(h, p) ? fb_refuse(h, at, FB_DOUBLE) : FB_FREED;
  }
  const u32 c = kind - 1, slot = fb_slots_in(c, inside);
  if (slot * fb_class_bytes(c) != inside || slot >= fb_class_slots(c)) return fb_refuse(h, at, FB_INTERIOR);
  if (fb_free_slot(h, p * FB_PAGE_WORDS + slot / 32, c, slot & 31)) return FB_FREED;
  return fb_refuse(h, at, FB_DOUBLE);
}

// How many bytes fit where `at` is, which fb_malloc gave.
FB_DEVICE u64 fb_usable(Heap *h, const void *at) {
  const u32 p = (u32)(((u64)at - (u64)fb_kept(&h->arena)) >> FB_PAGE_SHIFT), kind = fb_peek(&fb_page(h, p)->kind);
  return kind == FB_PAGE_LARGE ? (u64)fb_load(&fb_page(h, p)->pages) << FB_PAGE_SHIFT : fb_class_bytes(kind - 1);
}
