// Setting a heap up, and looking at it: for one thread or many, called with the number of the thread and how many there are.
#pragma once

// What the host is told. Bytes are those of slots and pages, not those that were asked for.
struct alignas(8) HeapUse {
  // All that could be had.
  u64 arena;
  // In pages that are nobody's, and the longest row of them.
  u64 free;
  u64 longest;
  // Taken, in slots and in pieces of whole pages.
  u64 slots;
  u64 large;
  // In pages of slots, and not taken: room for these sizes only, until all of a page is free.
  u64 slack;
  // Frees that were refused: foreign, interior, double; and the last such pointer.
  u64 foreign;
  u64 interior;
  u64 twice;
  u64 last_bad;
};

static_assert(sizeof(HeapUse) == 80, "as crates/forebay/src/resident/heap.rs has it");

FB_DEVICE u64 fb_round_up(u64 v, u64 to) { return (v + to - 1) / to * to; }

// Words of a set of so many pages; where its levels are.
FB_DEVICE u32 fb_measure_set(u64 pages, PageSets *s) {
  u32 words = 0;
  s->levels = 0;
  do {
    pages = (pages + 63) / 64;
    s->at[s->levels++] = words;
    words += (u32)pages;
  } while (pages > 1);
  return s->stride = words;
}

// Divides `bytes` at `memory`. False when there is no room for a page, or for more than FB_MAX_PAGES.
FB_DEVICE bool fb_heap_divide(void *memory, u64 bytes, u32 processors, u32 warps, Heap *h) {
  const u64 begin = (u64)memory, end = begin + bytes;
  if (processors == 0 || warps == 0 || bytes < FB_PAGE || end < begin) return false;
  // As many pages as there is room for, with what they need besides.
  for (u64 pages = bytes / (FB_PAGE + 1045);; pages--) {
    if (pages == 0 || pages > FB_MAX_PAGES) return false;
    u64 at = fb_round_up(begin, 128) + sizeof(Heap);
    h->pages = pages;
    h->page = (HeapPage *)at;
    at += pages * sizeof(HeapPage);
    h->words = (u64 *)at;
    at += pages * FB_PAGE_WORDS * 8;
    h->sets.words = (u64 *)at;
    at += (u64)fb_measure_set(pages, &h->sets) * FB_SETS * 8;
    h->homes = (u32 *)at;
    at += (u64)processors * FB_CLASSES * warps * 4;
    h->hints = (u32 *)at;
    at += (u64)processors * FB_CLASSES * warps * 4;
    h->arena = (unsigned char *)fb_round_up(at, 4096);
    h->processors = processors;
    h->warps = warps;
    if ((u64)h->arena <= end && (end - (u64)h->arena) >> FB_PAGE_SHIFT >= pages) return true;
  }
}

// Makes `bytes` at `memory` a heap. It is there, at the first multiple of 128, when all threads have returned true; false,
// and nothing is touched, when there is no room for a page.
FB_DEVICE bool fb_heap_init(void *memory, u64 bytes, u32 processors, u32 warps, u64 thread, u64 threads) {
  Heap divided;
  if (!fb_heap_divide(memory, bytes, processors, warps, &divided)) return false;
  Heap *h = (Heap *)fb_round_up((u64)memory, 128);
  for (u32 i = 0; i < 4; i++) divided.bad[i] = 0;
  divided.last_bad = divided.moving = divided.moved = 0;
  if (thread == 0) *h = divided;
  u32 *zero = (u32 *)divided.page, *to = divided.hints + (u64)processors * FB_CLASSES * warps;
  const u64 pool = (u64)FB_SET_POOL * divided.sets.stride, n = divided.sets.stride;
  for (u64 i = thread; i < (u64)(to - zero); i += threads) {
    u32 *at = zero + i;
    if (at < (u32 *)(divided.sets.words + pool) || at >= (u32 *)(divided.sets.words + pool + n)) *at = 0;
  }
  // Every page is in the pool.
  u64 below = divided.pages;
  for (u32 level = 0; level < divided.sets.levels; level++) {
    const u64 count = (below + 63) / 64;
    for (u64 i = thread; i < count; i += threads) {
      const u64 left = below - i * 64;
      divided.sets.words[pool + divided.sets.at[level] + i] = left >= 64 ? ~0ull : (1ull << left) - 1;
    }
    below = count;
  }
  return true;
}

// Adds what these threads see to `to`, which was zero before. Exact while nobody allocates or frees.
FB_DEVICE void fb_heap_look(Heap *h, HeapUse *to, u64 thread, u64 threads) {
  if (thread == 0) {
    to->arena = h->pages << FB_PAGE_SHIFT;
    to->foreign = fb_load64(&h->bad[FB_FOREIGN]);
    to->interior = fb_load64(&h->bad[FB_INTERIOR]);
    to->twice = fb_load64(&h->bad[FB_DOUBLE]);
    to->last_bad = fb_load64(&h->last_bad);
    u64 run = 0, longest = 0;
    for (u64 i = 0; i < h->pages; i++) {
      const u64 v = fb_load64(fb_set_word(&h->sets, FB_SET_POOL, 0, (u32)(i / 64)));
      run = v >> (i & 63) & 1 ? run + 1 : 0;
      if (run > longest) longest = run;
    }
    to->longest = longest << FB_PAGE_SHIFT;
  }
  u64 free = 0, slots = 0, large = 0, slack = 0;
  for (u64 i = thread; i < h->pages; i += threads) {
    const u32 kind = fb_load(&h->page[i].kind);
    if (kind == FB_PAGE_FREE) free += FB_PAGE;
    else if (kind > FB_CLASSES) large += FB_PAGE;
    else {
      const u64 used = (u64)fb_load(&h->page[i].used) * fb_class_bytes(kind - 1);
      slots += used;
      slack += FB_PAGE - used;
    }
  }
  fb_add64(&to->free, free);
  fb_add64(&to->slots, slots);
  fb_add64(&to->large, large);
  fb_add64(&to->slack, slack);
}

#ifdef FB_KERNELS

extern "C" __global__ void fb_heap_setup(void *memory, u64 bytes, u32 processors, u32 warps, u32 *ok) {
  const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
  const bool done = fb_heap_init(memory, bytes, processors, warps, thread, threads);
  if (thread == 0) *ok = done;
}

// `to` is zero before.
extern "C" __global__ void fb_heap_usage(Heap *h, HeapUse *to) {
  fb_heap_look(h, to, (u64)blockIdx.x * blockDim.x + threadIdx.x, (u64)gridDim.x * blockDim.x);
}

#else

extern "C" __attribute__((visibility("default"))) u32 fb_heap_setup(void *memory, u64 bytes, u32 processors, u32 warps) {
  return fb_heap_init(memory, bytes, processors, warps, 0, 1);
}

extern "C" __attribute__((visibility("default"))) void fb_heap_usage(Heap *h, HeapUse *to) { fb_heap_look(h, to, 0, 1); }

#endif
