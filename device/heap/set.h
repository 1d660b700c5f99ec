// Sets of pages as trees of 64-bit words, for everybody at once: adding, removing and finding take a few steps whatever their
// size. A bit of an upper word says that the word below it is not 0.
//
// Rules:
// 1. The lowest level is the truth. Whoever sets the first bit of a word then sets the bit above it; whoever clears the last
//    one then clears the bit above, looks at the word again, and sets the bit again if somebody was quicker.
// 2. So an upper bit may be set in vain, never the other way round once both have finished. Whoever finds one in vain
//    clears it by the same rule.
// 3. A page is taken by whoever cleared its bit.
#pragma once

#define FB_NO_PAGE 0xFFFFFFFFu
// Levels of a tree: 64^5 pages of 64 KiB are more than there is.
#define FB_LEVELS 5

// Where the levels of every tree are, from its first word on.
struct PageSets {
  u64 *words;
  u32 levels;
  u32 stride;
  u32 at[FB_LEVELS];
  u32 unused;
};

FB_DEVICE u64 *fb_set_word(const PageSets *s, u32 set, u32 level, u32 index) {
  return &fb_kept(&s->words)[(u64)set * fb_kept(&s->stride) + fb_kept(&s->at[level]) + index];
}

// The word below this bit has become something (from `level` upwards).
FB_DEVICE void fb_set_upper(const PageSets *s, u32 set, u32 level, u32 index) {
  for (; level < fb_kept(&s->levels); level++, index /= 64)
    if (fb_or64(fb_set_word(s, set, level, index / 64), 1ull << (index & 63)) != 0) return;
}

// The word below this bit has become 0 (from `level` upwards).
FB_DEVICE void fb_clear_upper(const PageSets *s, u32 set, u32 level, u32 index) {
  for (; level < fb_kept(&s->levels); level++, index /= 64) {
    const u64 bit = 1ull << (index & 63), old = fb_and64(fb_set_word(s, set, level, index / 64), ~bit);
    if (fb_load64(fb_set_word(s, set, level - 1, index)) != 0) {
      fb_set_upper(s, set, level, index);
      return;
    }
    if (old != bit) return;
  }
}

// Adds the pages `mask` of a word.
FB_DEVICE void fb_set_add_mask(const PageSets *s, u32 set, u32 word, u64 mask) {
  if (fb_or64(fb_set_word(s, set, 0, word), mask) == 0) fb_set_upper(s, set, 1, word);
}

// Removes the pages `mask` of a word; which of them were there.
FB_DEVICE u64 fb_set_take_mask(const PageSets *s, u32 set, u32 word, u64 mask) {
  const u64 old = fb_and64(fb_set_word(s, set, 0, word), ~mask);
  if (old != 0 && (old & ~mask) == 0) fb_clear_upper(s, set, 1, word);
  return old & mask;
}

FB_DEVICE void fb_set_add(const PageSets *s, u32 set, u32 page) { fb_set_add_mask(s, set, page / 64, 1ull << (page & 63)); }

// Whether a page is there.
FB_DEVICE bool fb_set_has(const PageSets *s, u32 set, u32 page) {
  return fb_peek64(fb_set_word(s, set, 0, page / 64)) >> (page & 63) & 1;
}

FB_DEVICE bool fb_set_take(const PageSets *s, u32 set, u32 page) {
  return fb_set_take_mask(s, set, page / 64, 1ull << (page & 63)) != 0;
}

// Whether there may be any.
FB_DEVICE bool fb_set_any(const PageSets *s, u32 set) {
  return fb_peek64(fb_set_word(s, set, fb_kept(&s->levels) - 1, 0)) != 0;
}

// The next page from `from` on; FB_NO_PAGE when there is none.
FB_DEVICE u32 fb_set_next(const PageSets *s, u32 set, u32 from) {
  const u32 levels = fb_kept(&s->levels);
  u32 level = 0, index = from;
  for (;;) {
    const u32 word = index / 64, words = fb_kept(level + 1 < levels ? &s->at[level + 1] : &s->stride) - fb_kept(&s->at[level]);
    const u64 later = word < words ? fb_peek64(fb_set_word(s, set, level, word)) >> (index & 63) << (index & 63) : 0;
    if (later) {
      index = word * 64 + fb_lowest(later);
      if (level == 0) return index;
      level--;
      index *= 64;
    } else {
      if (++level == levels) return FB_NO_PAGE;
      index = word + 1;
    }
  }
}

// Removes some page: a low one, and not the same one for every `turn`. FB_NO_PAGE when there is none. It begins anew only
// when another has taken what it found, or after it has cleared a bit that was set in vain.
FB_DEVICE u32 fb_set_take_any(const PageSets *s, u32 set, u32 turn) {
  for (;;) {
    u32 index = 0, level = fb_kept(&s->levels);
    while (level-- > 0) {
      const u64 v = fb_peek64(fb_set_word(s, set, level, index));
      if (v == 0) break;
      const u64 later = level == 0 ? v >> (turn & 63) << (turn & 63) : 0;
      index = index * 64 + fb_lowest(later ? later : v);
    }
    if (level == 0xFFFFFFFFu) {
      if (fb_set_take(s, set, index)) return index;
    } else if (level + 1 == fb_kept(&s->levels)) {
      return FB_NO_PAGE;
    } else {
      fb_clear_upper(s, set, level + 1, index);
    }
  }
}
