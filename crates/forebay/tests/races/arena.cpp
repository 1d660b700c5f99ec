// An arena, and who has which bytes of it. Appended to the heap's text; the heap's tests come behind it.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define CHECK(what)                                                                 \
  do {                                                                              \
    if (!(what)) {                                                                  \
      fprintf(stderr, "seed %u: line %d: %s\n", seed, __LINE__, #what);             \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)

struct Arena {
  std::unique_ptr<unsigned char[]> memory;
  Heap *heap;
  // Who has each 16 bytes.
  std::unique_ptr<std::atomic<u32>[]> owners;
  u64 granules;
  u32 seed;

  Arena(u64 bytes, u32 processors, u32 warps, u32 seed) : memory(new unsigned char[bytes]), seed(seed) {
    memset(memory.get(), 0xA5, bytes);
    CHECK(fb_heap_init(memory.get(), bytes, processors, warps, 0, 1));
    heap = (Heap *)fb_round_up((u64)memory.get(), 128);
    CHECK(heap->arena + (heap->pages << FB_PAGE_SHIFT) <= memory.get() + bytes);
    granules = (heap->pages << FB_PAGE_SHIFT) / 16;
    owners.reset(new std::atomic<u32>[granules]());
  }
  HeapUse use() {
    HeapUse u;
    memset((void *)&u, 0, sizeof u);
    for (u32 t = 0; t < 3; t++) fb_heap_look(heap, &u, t, 3);
    return u;
  }
  void own(void *at, u64 bytes, u32 me) {
    const u64 first = ((unsigned char *)at - heap->arena) / 16, n = (bytes + 15) / 16;
    CHECK((u64)at % 16 == 0 && first + n <= granules);
    for (u64 i = first; i < first + n; i++) CHECK(owners[i].exchange(me, std::memory_order_relaxed) == 0);
    // Not memset: where the compiler knows it, the sanitizer does not see it.
    for (u64 i = 0; i < bytes && i < 256; i++) ((volatile unsigned char *)at)[i] = (unsigned char)me;
  }
  void leave(void *at, u64 bytes, u32 me) {
    const u64 first = ((unsigned char *)at - heap->arena) / 16, n = (bytes + 15) / 16;
    for (u64 i = 0; i < bytes && i < 256; i++) CHECK(((unsigned char *)at)[i] == (unsigned char)me);
    for (u64 i = first; i < first + n; i++) CHECK(owners[i].exchange(0, std::memory_order_relaxed) == me);
  }
  // Nothing is in a set too little, and what is counted is what is taken.
  void settled() {
    for (u32 p = 0; p < heap->pages; p++) {
      const HeapPage &page = heap->page[p];
      if (page.kind == FB_PAGE_FREE) {
        CHECK(fb_set_has(&heap->sets, FB_SET_POOL, p));
      } else if (page.kind <= FB_CLASSES) {
        const u32 c = page.kind - 1;
        u32 free = 0;
        for (u32 w = 0; w < fb_class_words(c); w++) free += fb_ones((u32)heap->words[p * FB_PAGE_WORDS + w]);
        CHECK(free + page.used == fb_class_slots(c));
        CHECK(free == 0 || fb_set_has(&heap->sets, c, p));
        CHECK(page.used != 0 || fb_set_has(&heap->sets, FB_SET_EMPTY, p));
      }
    }
  }
  // Nothing is taken, and all of it can be had in one piece.
  void whole() {
    settled();
    HeapUse u = use();
    CHECK(u.slots == 0 && u.large == 0 && u.free + u.slack == u.arena);
    void *all = fb_malloc(heap, u.arena);
    CHECK(all == heap->arena);
    u = use();
    CHECK(u.large == u.arena && u.free == 0 && u.longest == 0 && u.slack == 0);
    CHECK(fb_malloc(heap, 1) == 0 && fb_malloc(heap, 1 << 20) == 0);
    CHECK(fb_free(heap, all) == FB_FREED);
    CHECK(use().longest == u.arena);
  }
};

struct Piece {
  void *at;
  u64 bytes;
};
