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

// Sets of pages: one for each class, of pages that have room and no home; then these.
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
  // The page where a processor looks first, + 1, for each class.
  u32 *homes;
  // The word where a warp looks first, + 1, for each processor and class.
  u32 *hints;
  u32 processors;
  u32 warps;
  // Attempts to retire a page that have begun, and that have ended.
  u32 retiring;
  u32 retired;
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

FB_DEVICE u32 fb_class_slots(u32 c) { return FB_PAGE / fb_class_bytes(c); }

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

// Slots of a word are free again. The word as it was.
FB_DEVICE u64 fb_give(Heap *h, u32 word, u32 c, u32 bits) {
  const u32 p = word / FB_PAGE_WORDS;
  const u64 old = fb_or64(&h->words[word], bits);
  const u32 fresh = bits & ~(u32)old;
  if (fresh == 0) return old;
  if ((u32)(old >> 32) != c + 1) {
    // Not a live slot: the page is no longer what it was when this was allocated. As if it had not happened.
    fb_and64(&h->words[word], ~(u64)fresh);
    return old | bits;
  }
  const u32 n = fb_ones(fresh), before = fb_add(&h->page[p].used, 0u - n);
  const u32 slots = fb_class_slots(c);
  if (before >= slots && before - n < slots) fb_set_add(&h->sets, c, p);
  if (before == n) fb_set_add(&h->sets, FB_SET_EMPTY, p);
  return old;
}

// Takes up to `want` slots of a word, if it is of class c.
FB_DEVICE u32 fb_claim(Heap *h, u32 word, u32 c, u32 want, u32 turn) {
  const u64 seen = fb_load64(&h->words[word]);
  if ((u32)(seen >> 32) != c + 1 || (u32)seen == 0) return 0;
  const u32 mask = fb_choose((u32)seen, want, turn);
  const u64 old = fb_and64(&h->words[word], ~(u64)mask);
  const u32 got = (u32)old & mask;
  if (got == 0) return 0;
  fb_add(&h->page[word / FB_PAGE_WORDS].used, fb_ones(got));
  const u32 now = (u32)(old >> 32);
  if (now == c + 1) return got;
  // The page became another class's between both looks: what was taken is that one's.
  fb_give(h, word, now - 1, got);
  return 0;
}

// Takes up to `want` slots from anywhere in a page.
FB_DEVICE u32 fb_claim_in(Heap *h, u32 p, u32 c, u32 want, u32 turn, u32 *word) {
  const u32 n = fb_class_words(c);
  for (u32 i = 0; i < n; i++) {
    *word = p * FB_PAGE_WORDS + (i + turn) % n;
    const u32 got = fb_claim(h, *word, c, want, turn);
    if (got) return got;
  }
  return 0;
}

// Makes a page that its class has no use for nobody's. The caller has taken it from the set of empty pages.
FB_DEVICE bool fb_retire(Heap *h, u32 p) {
  const u32 kind = fb_load(&h->page[p].kind);
  if (kind == FB_PAGE_FREE || kind > FB_CLASSES) return false;
  const u32 c = kind - 1, n = fb_class_words(c);
  u64 *words = &h->words[p * FB_PAGE_WORDS];
  fb_add(&h->retiring, 1);
  u32 taken = 0;
  while (taken < n && fb_cas64(&words[taken], fb_word_full(c, taken), 0) == fb_word_full(c, taken)) taken++;
  const bool all = taken == n;
  if (all) {
    fb_set_take(&h->sets, c, p);
    fb_store(&h->page[p].kind, FB_PAGE_FREE);
  } else {
    // Somebody has a slot. (Of two who try to retire it the second gets not even the first word.)
    while (taken-- > 0) fb_or64(&words[taken], fb_word_full(c, taken));
  }
  fb_add(&h->retired, 1);
  return all;
}

// A page for class c, all of it free; FB_NO_PAGE when there is none.
FB_DEVICE u32 fb_new_page(Heap *h, u32 c, u32 turn) {
  u32 p = fb_set_take_any(&h->sets, FB_SET_POOL, turn);
  while (p == FB_NO_PAGE) {
    // Each look takes a page from the set that some free put there: what it costs has been paid for.
    const u32 empty = fb_set_take_any(&h->sets, FB_SET_EMPTY, turn);
    if (empty == FB_NO_PAGE) return FB_NO_PAGE;
    if (fb_retire(h, empty)) p = empty;
  }
  // First whose it is, then what it has: whoever has a slot may free it at once.
  fb_store(&h->page[p].kind, c + 1);
  for (u32 i = 0; i < fb_class_words(c); i++) fb_store64(&h->words[p * FB_PAGE_WORDS + i], fb_word_full(c, i));
  return p;
}

// The processor's page for the class is now p: what it leaves is for everybody.
FB_DEVICE void fb_move_home(Heap *h, u32 c, u32 processor, u32 p) {
  const u32 left = fb_exchange(&h->homes[processor * FB_CLASSES + c], p + 1);
  if (left == 0 || left == p + 1) return;
  // If it is full now, whoever frees one of its slots says so.
  if (fb_load(&h->page[left - 1].used) < fb_class_slots(c)) fb_set_add(&h->sets, c, left - 1);
}

// Takes up to `want` slots of class c from wherever there are any.
FB_DEVICE u32 fb_search(Heap *h, u32 c, u32 want, u32 processor, u32 turn, u32 *word) {
  const u32 home = fb_load(&h->homes[processor * FB_CLASSES + c]);
  u32 got = home ? fb_claim_in(h, home - 1, c, want, turn, word) : 0;
  while (got == 0) {
    u32 p = fb_set_take_any(&h->sets, c, turn);
    if (p == FB_NO_PAGE && (p = fb_new_page(h, c, turn)) == FB_NO_PAGE) break;
    // A page may be in the set of a class that it has left.
    if (fb_load(&h->page[p].kind) != c + 1) continue;
    fb_move_home(h, c, processor, p);
    got = fb_claim_in(h, p, c, want, turn, word);
  }
  // All that may be left is at home elsewhere.
  for (u32 i = 1; got == 0 && i < h->processors; i++) {
    const u32 other = fb_load(&h->homes[(processor + i) % h->processors * FB_CLASSES + c]);
    if (other) got = fb_claim_in(h, other - 1, c, want, turn, word);
  }
  return got;
}

// Takes up to `want` slots (1 to 32) of class c: their word and bits; 0 when there are none.
FB_DEVICE u32 fb_take_slots(Heap *h, u32 c, u32 want, u32 *word) {
  const u32 processor = fb_processor() % h->processors, warp = fb_warp();
  const u32 turn = processor * 7 + warp;
  u32 *hint = &h->hints[(processor * FB_CLASSES + c) * h->warps + warp % h->warps];
  const u32 hinted = fb_load(hint);
  if (hinted) {
    *word = hinted - 1;
    const u32 got = fb_claim(h, *word, c, want, turn);
    if (got) return got;
  }
  u32 got = 0, ended, begun;
  do {
    ended = fb_load(&h->retired);
    got = fb_search(h, c, want, processor, turn, word);
    begun = fb_load(&h->retiring);
    // What somebody tries to retire cannot be seen for a moment: then what was not found may be there.
  } while (got == 0 && begun != ended);
  if (got) fb_store(hint, *word + 1);
  return got;
}
FB_DEVICE void *fb_slot(Heap *h, u32 word, u32 c, u32 bit) {
  const u64 slot = word % FB_PAGE_WORDS * 32 + bit;
  return h->arena + ((u64)(word / FB_PAGE_WORDS) << FB_PAGE_SHIFT) + slot * fb_class_bytes(c);
}

// Takes pages [first, first + n) from the pool, all of them or none.
FB_DEVICE bool fb_take_range(Heap *h, u64 first, u64 n) {
  for (u64 i = first; i < first + n;) {
    const u64 end = first + n < (i / 64 + 1) * 64 ? first + n : (i / 64 + 1) * 64;
    const u64 count = end - i, mask = (count == 64 ? ~0ull : (1ull << count) - 1) << (i & 63);
    const u64 got = fb_set_take_mask(&h->sets, FB_SET_POOL, (u32)(i / 64), mask);
    if (got != mask) {
      if (got) fb_set_add_mask(&h->sets, FB_SET_POOL, (u32)(i / 64), got);
      for (u64 j = first; j < i; j++) fb_set_add(&h->sets, FB_SET_POOL, (u32)j);
      return false;
    }
    i = end;
  }
  return true;
}

// The beginning of `n` free pages in a row, taken; FB_NO_PAGE when there are none. From the end on, away from small pieces.
FB_DEVICE u32 fb_take_pages(Heap *h, u64 n) {
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
      if (fb_take_range(h, word * 64 + bit, n)) return (u32)(word * 64 + bit);
      run = 0;
    }
  }
  return FB_NO_PAGE;
}

FB_DEVICE void *fb_malloc_large(Heap *h, u64 bytes) {
  const u64 n = (bytes + FB_PAGE - 1) >> FB_PAGE_SHIFT;
  if (n > h->pages || bytes > ~0ull - FB_PAGE) return 0;
  u32 p = fb_take_pages(h, n);
  if (p == FB_NO_PAGE) {
    // What classes have no use for may fill the gap.
    bool any = false;
    for (u32 e; (e = fb_set_take_any(&h->sets, FB_SET_EMPTY, 0)) != FB_NO_PAGE;)
      if (fb_retire(h, e)) {
        fb_set_add(&h->sets, FB_SET_POOL, e);
        any = true;
      }
    if (!any || (p = fb_take_pages(h, n)) == FB_NO_PAGE) return 0;
  }
  for (u64 i = 1; i < n; i++) fb_store(&h->page[p + i].kind, FB_PAGE_TAIL);
  fb_store(&h->page[p].pages, (u32)n);
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
  for (u64 i = 1; i < n; i++) fb_store(&h->page[p + i].kind, FB_PAGE_FREE);
  for (u64 i = p; i < p + n;) {
    const u64 end = p + n < (i / 64 + 1) * 64 ? p + n : (i / 64 + 1) * 64, count = end - i;
    fb_set_add_mask(&h->sets, FB_SET_POOL, (u32)(i / 64), (count == 64 ? ~0ull : (1ull << count) - 1) << (i & 63));
    i = end;
  }
  return FB_FREED;
}

// The `n`th set bit.
FB_DEVICE u32 fb_nth(u32 bits, u32 n) {
  for (; n > 0; n--) bits &= bits - 1;
  return fb_lowest(bits);
}

#ifdef FB_GPU

// Lanes that want the same size take their slots together.
FB_DEVICE void *fb_malloc_slot(Heap *h, u32 c) {
  const u32 peers = __match_any_sync(__activemask(), c);
  const u32 lane = fb_in_warp(), leader = fb_lowest(peers);
  u32 left = fb_ones(peers), rank = fb_ones(peers & ((1u << lane) - 1));
  void *mine = 0;
  while (left > 0) {
    u32 word = 0, bits = 0;
    if (lane == leader) bits = fb_take_slots(h, c, left, &word);
    bits = __shfl_sync(peers, bits, leader);
    word = __shfl_sync(peers, word, leader);
    if (bits == 0) break;
    const u32 n = fb_ones(bits);
    if (rank < n) mine = fb_slot(h, word, c, fb_nth(bits, rank));
    // Whoever has been served is behind all others.
    rank = rank < n ? 0xFFFFFFFFu : rank == 0xFFFFFFFFu ? rank : rank - n;
    left -= n;
  }
  return mine;
}

// Lanes that free slots of the same word free them together.
FB_DEVICE bool fb_free_slot(Heap *h, u32 word, u32 c, u32 bit) {
  const u32 peers = __match_any_sync(__activemask(), word);
  const u32 lane = fb_in_warp(), leader = fb_lowest(peers), mine = 1u << bit;
#if __CUDA_ARCH__ >= 800
  const u32 bits = __reduce_or_sync(peers, mine);
#else
  u32 bits = 0;
  for (u32 rest = peers; rest; rest &= rest - 1) bits |= __shfl_sync(peers, mine, fb_lowest(rest));
#endif
  const bool first = lane == fb_lowest(__match_any_sync(peers, bit));
  u32 old = 0;
  if (lane == leader) {
    old = (u32)fb_give(h, word, c, bits);
    const u32 processor = fb_processor() % h->processors;
    fb_store(&h->hints[(processor * FB_CLASSES + c) * h->warps + fb_warp() % h->warps], word + 1);
  }
  old = __shfl_sync(peers, old, leader);
  return first && !(old & mine);
}

#else

FB_DEVICE void *fb_malloc_slot(Heap *h, u32 c) {
  u32 word;
  const u32 bits = fb_take_slots(h, c, 1, &word);
  return bits ? fb_slot(h, word, c, fb_lowest(bits)) : 0;
}

FB_DEVICE bool fb_free_slot(Heap *h, u32 word, u32 c, u32 bit) {
  const u64 old = fb_give(h, word, c, 1u << bit);
  fb_store(&h->hints[(fb_processor() % h->processors * FB_CLASSES + c) * h->warps], word + 1);
  return !((u32)old & 1u << bit);
}

#endif

// `bytes` bytes, aligned to 16 at least; null for none, and when there is no room.
FB_DEVICE void *fb_malloc(Heap *h, u64 bytes) {
  if (bytes == 0) return 0;
  return bytes > FB_LARGEST_SLOT ? fb_malloc_large(h, bytes) : fb_malloc_slot(h, fb_class_of((u32)bytes));
}

// Gives back what fb_malloc gave. Null is nothing. What is not to be freed is refused and counted: FB_FREED otherwise.
FB_DEVICE u32 fb_free(Heap *h, void *at) {
  if (!at) return FB_FREED;
  const u64 offset = (u64)at - (u64)h->arena;
  if (offset >= h->pages << FB_PAGE_SHIFT) return fb_refuse(h, at, FB_FOREIGN);
  const u32 p = (u32)(offset >> FB_PAGE_SHIFT), inside = (u32)offset & (FB_PAGE - 1);
  const u32 kind = fb_load(&h->page[p].kind);
  if (kind == FB_PAGE_FREE) return fb_refuse(h, at, FB_DOUBLE);
  if (kind == FB_PAGE_TAIL) return fb_refuse(h, at, FB_INTERIOR);
  if (kind == FB_PAGE_LARGE) {
    if (inside) return fb_refuse(h, at, FB_INTERIOR);
    return fb_free_large(h, p) ? fb_refuse(h, at, FB_DOUBLE) : FB_FREED;
  }
  const u32 c = kind - 1, bytes = fb_class_bytes(c), slot = inside / bytes;
  if (slot * bytes != inside || slot >= fb_class_slots(c)) return fb_refuse(h, at, FB_INTERIOR);
  if (fb_free_slot(h, p * FB_PAGE_WORDS + slot / 32, c, slot & 31)) return FB_FREED;
  return fb_refuse(h, at, FB_DOUBLE);
}

// How many bytes fit where `at` is, which fb_malloc gave.
FB_DEVICE u64 fb_usable(Heap *h, const void *at) {
  const u32 p = (u32)(((u64)at - (u64)h->arena) >> FB_PAGE_SHIFT), kind = fb_load(&h->page[p].kind);
  return kind == FB_PAGE_LARGE ? (u64)fb_load(&h->page[p].pages) << FB_PAGE_SHIFT : fb_class_bytes(kind - 1);
}
