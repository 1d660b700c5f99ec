// What a block keeps to itself: tasks, and the count of those of one root.
#pragma once

// Tasks of other blocks' that one takes at a time, and slots of the rings that it sees in a look.
#ifndef FB_LOCAL
#ifdef FB_GPU
#define FB_LOCAL 256
#define FB_TAKES 32
#define FB_SEES_URGENT 8
#define FB_SEES 16
// Slots that it takes at a time where more are filled: as many as the block runs at a time, but not more than these.
#define FB_MANY 128
#define FB_AT_A_TIME fb_lanes()
// Tasks that took longer, in cycles, are not taken so many at a time.
#define FB_LONG FB_DUE_CYCLES
// With fewer tasks than this, some that were put aside come back.
#define FB_LOW 128
// A block that waits keeps a ring, and sees all of its first slot at a look. Not where a block is a thread, which may be away
// for long.
#define FB_KEEPS true
#define FB_SEES_WHOLE true
#else
#define FB_LOCAL 64
#define FB_TAKES 8
#define FB_SEES_URGENT 1
#define FB_SEES 1
#define FB_MANY 1
#define FB_AT_A_TIME 1
#define FB_LONG FB_DUE_CYCLES
#define FB_LOW 1
#define FB_KEEPS false
#define FB_SEES_WHOLE false
#endif
#endif
// Tasks that run at the same time in a block, at most.
#define FB_MOST 256

// A task's `counted`: by its block (Held); in its root's `remaining`; or nowhere, since it is all that there is of its root.
#define FB_HELD 0u
#define FB_COUNTED 1u
#define FB_ALONE 2u

// Tasks of one root that a block counts for itself, so that what it makes and does costs no atomic operation: while any are
// left, the root's `remaining` has `units` for them, at least one.
struct Held {
  u32 root;
  u32 units;
  u32 left;
};

// While tasks run, their lanes add to `count`, `spilled`, `held.units` and `held.left` as they make some; between that, the
// lanes of the first warp have it.
struct Own {
  // The last ones are done first. Beyond FB_LOCAL there is only what was taken, and what came by post meanwhile.
  Task tasks[FB_LOCAL + FB_TAKES + 1];
  u32 count;
  // Tasks that were put aside, in the device's memory.
  u32 spilled;
  Held held;
  // What it takes for each ring's head and for its keeper, and what it is itself as a keeper.
  u32 next[2];
  u32 keeper[2];
  u32 me;
  // The stop word, as it was seen last.
  u32 stop;
  // Others that had nothing to do when it looked last.
  u32 others_idle;
  // It is counted among those; it may look at the rings.
  bool idle;
  bool permitted;
  // Others may put something into its post, or are about to.
  bool open;
  // Its heartbeat as it is, so that it need not be read.
  bool busy;
  u32 epoch;
  // Tasks since it looked around, and when that was.
  u32 turns;
  u64 looked;
  // When those that run now began, and whether the last ones took long, as far as is known.
  u64 began;
  bool slow;
};

// How a block is, in one piece.
FB_DEVICE void fb_note_all(Beat *b, u32 epoch, u32 busy, u32 function, u32 root) {
  static_assert(FB_OFFSET(Beat, busy) == 4 && FB_OFFSET(Beat, function) == 8 && FB_OFFSET(Beat, root) == 12, "words");
  fb_store_quad_sys(&b->epoch, epoch, busy, function, root);
}

// Where a task function finds what it may use.
struct Context {
  Grid *grid;
  u32 block;
  u32 root;
  // The task's: its ring, and whether its root has a limit.
  u32 priority;
  Own *own;
  // The task.
  Task *self;
  // Of a task for each item: the first one for this lane (or warp), and how many further the next one is.
  u64 item, items;
  // Only this lane has something to do (fb_goes_on).
  bool one_lane;
};

// From now on the context is that of a task.
FB_DEVICE void fb_turn_to(Context *c, Task *t) {
  c->self = t;
  c->root = t->root;
  c->priority = t->priority;
}

// Arguments as a task has them, with nothing behind them. In words, as nearly all come.
FB_DEVICE void fb_put_args(Task *t, const void *args, u32 bytes) {
  const unsigned char *from = (const unsigned char *)args;
  const u32 all = bytes < sizeof t->args ? bytes : (u32)sizeof t->args;
  for (u32 i = 0; i < sizeof t->args; i += 8) {
    u64 word = 0;
    if (i + 8 <= all) memcpy(&word, from + i, 8);
    else for (u32 k = i; k < all; k++) word |= (u64)from[k] << (k - i) * 8;
    ((u64 *)t->args)[i / 8] = word;
  }
}

// Keeps a task; false when there is no room. Any lane may call it.
FB_DEVICE bool fb_keep(Context *c, const Task *t) {
  Own *o = c->own;
  u32 at = fb_here_add(&o->count, 1);
  if (at < FB_LOCAL) {
    fb_copy(&o->tasks[at], t);
    return true;
  }
  fb_here_add(&o->count, (u32)-1);
  const u32 room = c->grid->aside_size;
  at = fb_here_add(&o->spilled, 1);
  if (at < room) {
    fb_copy(&c->grid->aside[(u64)c->block * room + at], t);
    return true;
  }
  fb_here_add(&o->spilled, (u32)-1);
  return false;
}

// Brings back some of what was put aside. Called by the first warp.
FB_DEVICE void fb_refill(Context *c) {
  Own *o = c->own;
  if (o->count >= FB_LOW || o->spilled == 0) return;
  const u32 half = FB_LOCAL / 2, n = o->spilled < half ? o->spilled : half;
  const Task *from = c->grid->aside + (u64)c->block * c->grid->aside_size + (o->spilled - n);
  for (u32 i = fb_in_crew(); i < n; i += FB_WARP) fb_copy(&o->tasks[o->count + i], &from[i]);
  fb_together();
  if (fb_in_crew() == 0) {
    o->count += n;
    o->spilled -= n;
  }
  fb_together();
}

// Another task of the root of the one that runs. What is kept may be counted by the block.
FB_DEVICE u32 fb_count_kept(Context *c) {
  if (c->self->counted != FB_HELD) return FB_COUNTED;
  fb_here_add(&c->own->held.left, 1);
  return FB_HELD;
}
FB_DEVICE void fb_count_all(Context *c) {
  const bool alone = c->self->counted == FB_ALONE;
  fb_bump(&c->grid->roots[c->root].remaining, alone ? 2 : 1);
  if (alone) c->self->counted = FB_COUNTED;
}

// A task is about to run: from now on the block counts for its root, if it does not for another one.
FB_DEVICE void fb_hold(Held *h, Task *t) {
  if (t->counted != FB_COUNTED || t->root != h->root) return;
  fb_here_add(&h->units, 1);
  fb_here_add(&h->left, 1);
  t->counted = FB_HELD;
}

// `n` tasks of the root that the block counts for become others'. Their units come from those that it has if it keeps none.
FB_DEVICE void fb_lend(Grid *g, Held *h, u32 n) {
  if (n == 0) return;
  u32 add = n;
  if (fb_here_add(&h->left, 0u - n) == n) {
    add -= h->units;
    h->units = 0;
  }
  if (add != 0) fb_bump(&g->roots[h->root].remaining, add);
}
