// How a block takes many slots of a ring at a time: where the host submits faster than blocks take what they see in a look, and
// each of these costs all of them a race for the ring's head.
#pragma once

// How many slots it looks at, for each lane of its first warp.
#define FB_MANY_EACH ((FB_MANY + FB_WARP - 1) / FB_WARP)
// Who was not the first has learned where the head is, and tries there at once; so often, which is as long as between two looks.
#define FB_TRIES 4
// Words that a lane reads before it puts them where they belong: all are on their way at once.
#define FB_BATCH 8
// Where a warp has eight lanes, or several times as many, each of them has the same word of a slot all the time. So far apart are
// its slots, and so many are read together, of which no part is left out.
#define FB_WHOLE (FB_WARP % FB_WORDS == 0)
#define FB_APART (FB_WARP / FB_WORDS)
#define FB_TASK_WORDS (sizeof(Task) / 4)
#define FB_READ_TOGETHER (FB_WHOLE ? FB_BATCH * FB_WARP / FB_WORDS : 1)

// How many slots from a ring's head on are filled, each with a task of one item for one lane, and without a limit; up to `most`,
// of which the ring has so many.
FB_DEVICE u32 fb_filled(Grid *g, u32 ring, u32 ticket, u32 most) {
  const u64 *slots = (const u64 *)g->rings[ring].slots;
  const u32 size = g->rings[ring].size, size_bits = fb_lowest(size);
  u64 last[FB_MANY_EACH], round[FB_MANY_EACH];
  for (u32 part = 0; part < FB_MANY_EACH; part++) {
    const u32 i = part * FB_WARP + fb_in_crew();
    const u64 *slot = slots + (u64)((ticket + i) & (size - 1)) * FB_WORDS;
    last[part] = i < most ? fb_peek64_sys(slot + FB_LAST_WORD) : 0;
    round[part] = i < most ? fb_peek64_sys(slot + FB_ROUND_WORD) : 0;
  }
  u32 n = 0;
  for (u32 part = 0; part < FB_MANY_EACH; part++) {
    const u32 i = part * FB_WARP + fb_in_crew(), function = (u32)last[part], is = ticket + i;
    // As fb_is_round, without a look at the ring for each.
    const u32 begun = (u32)(round[part] >> 32) >> FB_ROOT_BITS, expected = (((is >> size_bits) + 1) << FB_ROOT_BITS) >> FB_ROOT_BITS;
    const bool there = (i < most) & ((u32)(last[part] >> 32) == is + 1) & (begun == expected);
    const bool small = ((function & FB_SINGLE) != 0) & (fb_kind(function & ~FB_SINGLE) == FB_BY_THREAD) & ((u32)round[part] == 0);
    // As long as all before it are.
    const u32 in_row = fb_lowest(~(u64)fb_votes(there & small));
    if (n == part * FB_WARP) n += in_row < FB_WARP ? in_row : FB_WARP;
  }
  return n;
}

// Where the two halves of a slot's word belong in its task, and what becomes of them.
struct Half {
  u32 at, keeps, has;
};
FB_DEVICE Half fb_low_half(u32 word, u32 ring) {
  if (word == FB_LAST_WORD) return {FB_OFFSET(Task, function) / 4, ~FB_SINGLE, 0};
  if (word == FB_ROUND_WORD) return {FB_OFFSET(Task, priority) / 4, 0, ring};
  return {2 * fb_word_of(word + 1), ~0u, 0};
}
FB_DEVICE Half fb_high_half(u32 word) {
  if (word == FB_LAST_WORD) return {FB_OFFSET(Task, counted) / 4, 0, FB_ALONE};
  if (word == FB_ROUND_WORD) return {FB_OFFSET(Task, root) / 4, (1u << FB_ROOT_BITS) - 1, 0};
  return {2 * fb_word_of(word + 1) + 1, ~0u, 0};
}

// Takes the `n` slots of which fb_filled has told, a multiple of FB_READ_TOGETHER, unless another block was first: as fb_receive,
// but that a lane reads a word of a slot, and its neighbours the others. (What is the same all the time is asked for once here:
// behind an access to memory compilers would ask again.)
FB_DEVICE bool fb_receive_many(Context *c, u32 ring, u32 n) {
  Grid *g = c->grid;
  Own *o = c->own;
  const u64 *slots = (const u64 *)g->rings[ring].slots;
  const u32 ticket = o->next[ring], lane = fb_in_crew(), mask = g->rings[ring].size - 1, all = n * FB_WORDS;
  // The first one is on top.
  u32 *top = (u32 *)&o->tasks[o->count + n - 1];
  // Whoever sees the last one sees what was written before it, the others among that. (Where slots are memory of the device,
  // of which the host's lines arrive in no order, each half of each has been seen.)
  fb_load64_sys(slots + (u64)((ticket + n - 1) & mask) * FB_WORDS + FB_LAST_WORD);
  fb_together();
  const Half low_always = fb_low_half(lane % FB_WORDS, ring), high_always = fb_high_half(lane % FB_WORDS);
  for (u32 begin = 0; begin < all; begin += FB_BATCH * FB_WARP) {
    const u32 first = (begin + lane) / FB_WORDS;
    u64 words[FB_BATCH];
    for (u32 part = 0; part < FB_BATCH; part++) {
      const u32 k = begin + part * FB_WARP + lane, i = FB_WHOLE ? first + part * FB_APART : k / FB_WORDS;
      words[part] = FB_WHOLE || k < all ? fb_peek64_sys(slots + ((ticket + i) & mask) * FB_WORDS + k % FB_WORDS) : 0;
    }
    u32 *low_first = top - first * FB_TASK_WORDS + low_always.at, *high_first = top - first * FB_TASK_WORDS + high_always.at;
    for (u32 part = 0; part < FB_BATCH; part++) {
      const u32 k = begin + part * FB_WARP + lane;
      if (FB_WHOLE) {
        low_first[-(int)(part * FB_APART * FB_TASK_WORDS)] = ((u32)words[part] & low_always.keeps) | low_always.has;
        high_first[-(int)(part * FB_APART * FB_TASK_WORDS)] = ((u32)(words[part] >> 32) & high_always.keeps) | high_always.has;
      } else if (k < all) {
        const Half low = fb_low_half(k % FB_WORDS, ring), high = fb_high_half(k % FB_WORDS);
        u32 *t = top - k / FB_WORDS * FB_TASK_WORDS;
        t[low.at] = ((u32)words[part] & low.keeps) | low.has;
        t[high.at] = ((u32)(words[part] >> 32) & high.keeps) | high.has;
      }
    }
  }
  fb_together();
  const u64 is = fb_head_word(ticket, 0);
  const u64 head = fb_tell64(lane == 0 ? fb_try64(fb_head(g, ring), is, fb_head_word(ticket + n, 0)) : 0, 0);
  const bool ours = head == is;
  // Their roots begin, with nothing in them but their numbers.
  static_assert(FB_OFFSET(Root, remaining) == 0 && FB_OFFSET(Root, seq) == 12 && sizeof(Root) == 8 * FB_WORDS, "words");
  Root *roots = g->roots;
  for (u32 begin = 0; begin < all && ours; begin += FB_BATCH * FB_WARP) {
    for (u32 part = 0; part < FB_BATCH; part++) {
      const u32 k = begin + part * FB_WARP + lane, i = k / FB_WORDS, word = k % FB_WORDS;
      if (!FB_WHOLE && k >= all) continue;
      ((u64 *)&roots[((const Task *)top - i)->root])[word] = word == 1 ? (u64)(ticket + i + 1) << 32 : 0;
    }
  }
  fb_together();
  if (lane == 0) {
    o->next[ring] = ours ? ticket + n : (u32)head;
    o->keeper[ring] = ours ? 0 : (u32)(head >> 32);
    if (ours) o->count += n;
  }
  fb_together();
  return ours;
}

// Takes what has been seen in a ring, of which the first slot is filled: some tasks for lanes, or the first one. Of many as many as
// the block can run at a time; where it sees their end, half of them, so that others have some, too. Where they take long, a race for
// each few costs little, and they are done sooner by many blocks, in whose warps fewer lanes have ways of their own.
FB_DEVICE bool fb_receive_some(Context *c, const Look *l, u64 marks, u32 ring, u32 room) {
  const u32 seen = fb_in_row(l, marks, ring), size = c->grid->rings[ring].size;
  const u32 at_once = FB_AT_A_TIME < FB_MANY ? FB_AT_A_TIME : FB_MANY, has = at_once < size ? at_once : size;
  const u32 most = room < has ? room : has;
  const bool may = !c->own->slow && !fb_keeps(c->own, ring);
  u32 tries = may && seen == fb_places(ring) && seen < most ? FB_TRIES : 0;
  const bool many = tries > 0;
  for (; tries > 0; tries--) {
    const u32 filled = fb_filled(c->grid, ring, c->own->next[ring], most), some = filled < most ? filled / 2 : filled;
    const u32 n = some / FB_READ_TOGETHER * FB_READ_TOGETHER;
    if (n <= seen) break;
    if (fb_receive_many(c, ring, n)) return true;
  }
  // Where another block was first, what the look saw is not at the head any more.
  if (many && tries < FB_TRIES) return false;
  return fb_receive(c, l, ring, seen < room ? seen : room);
}
