// A task from one block to another that waits: it goes where only that one looks, by an atomic operation and stores, and
// begins at once there. What finds nobody who waits goes to everybody (queue.h).
//
// Rules:
// 1. Each of the first FB_POSTS blocks has a post, with room for a task. A block's bit in `waiting` says that it waits and has
//    nothing, and that its post is nobody's. Whoever clears it has the post: another block, which then puts a task there; or
//    the block, which then waits no more.
// 2. The bit is set behind everything that was read of the post and cleared in it, and who clears the bit to put something does
//    so before that.
// 3. Each word of a post is half a word of a task below a 1, so that it says itself whether it is there, and none waits for
//    another. They are written behind what was made before, which is seen with them.
// 4. A block that finds its bit cleared by another waits for the task, which is on its way: who has cleared it puts one, and
//    waits for nobody before that.
// 5. A block that keeps a ring has no bit: it would have to clear it before it begins what comes there.
// 6. A task in a post is one of its root's `remaining`, like those for everybody.
#pragma once

static_assert(FB_POST_WORDS * 4 == sizeof(Task), "a post is a task");

// So many are asked, at most: an atomic operation each.
#define FB_POST_TRIES 2

FB_DEVICE u64 fb_bit_of(u32 block) { return 1ull << (block & 63); }
FB_DEVICE u64 *fb_bits_with(Grid *g, u32 block) { return &g->state->waiting[block / 64]; }
FB_DEVICE bool fb_is_there(u64 word) { return word >> 32 != 0; }

// Puts a task, which is counted, into the post of a block that waits; false if none was found. The first that is asked is
// another for each block and lane, the second one of those beside it that wait.
FB_DEVICE bool fb_put_post(Context *c, const Task *t) {
  Grid *g = c->grid;
  // (Without a division, which takes longer than all else here.)
  const u32 blocks = g->blocks, next = c->block + 1 + fb_lane(), behind = next < blocks ? next : next - blocks;
  u32 to = behind < blocks ? behind : c->block;
  for (u32 tries = 0; tries < FB_POST_TRIES && to < FB_POSTS; tries++) {
    const u64 waited = fb_clear64(fb_bits_with(g, to), ~fb_bit_of(to));
    if (waited & fb_bit_of(to)) {
      u32 halves[FB_POST_WORDS];
      for (u32 k = 0; k < FB_POST_WORDS; k++) halves[k] = ((const u32 *)t)[k];
      fb_fence();
      for (u32 k = 0; k < FB_POST_WORDS; k++) fb_mark64(&g->posts[to].words[k], 1ull << 32 | halves[k]);
      return true;
    }
    if (waited == 0) break;
    to = (to & ~63u) + fb_lowest(waited);
  }
  return false;
}

// The block waits: others may put something into its post. By one lane, as the next.
FB_DEVICE void fb_open_post(Grid *g, Own *o) {
  const u32 block = o->me - 1;
  if (o->open || block >= FB_POSTS) return;
  fb_release64(fb_bits_with(g, block), fb_bit_of(block));
  o->open = true;
}

// It waits no more. What another has put in, or is about to, is the block's, below what it is about to do.
FB_DEVICE void fb_close_post(Grid *g, Own *o) {
  const u32 block = o->me - 1;
  if (!o->open) return;
  o->open = false;
  if (fb_strike64(fb_bits_with(g, block), ~fb_bit_of(block)) & fb_bit_of(block)) return;
  Task *to = &o->tasks[o->count];
  if (o->count > 0) fb_copy(to, to - 1);
  if (o->count > 0) to--;
  for (u32 k = 0; k < FB_POST_WORDS; k++) {
    u64 *word = &g->posts[block].words[k];
    u64 is;
    while (!fb_is_there(is = fb_load64(word))) fb_relax();
    ((u32 *)to)[k] = (u32)is;
    fb_mark64(word, 0);
  }
  o->count++;
}
