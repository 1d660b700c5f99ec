// The shortest way to a task for one lane and without a limit, from the host or from another block: a block that waits and keeps
// a ring sees a whole slot, or one that keeps none sees that there is something in its post. Its first lane runs that at once,
// while the block's other warps stay where they wait. What the task's root and others are to know is written by a lane each,
// at the same time.
#pragma once

// The block waits no more, for the host's eyes and others'. By one lane.
FB_DEVICE void fb_run_at_once(Context *c, u32 function, u32 root) {
  Own *o = c->own;
  const u32 epoch = o->epoch + 1;
  fb_bump(&c->grid->state->idle, (u32)-1);
  o->idle = false;
  o->busy = true;
  o->epoch = epoch;
  fb_note_all(&c->grid->beats[c->block], epoch, 1, function, root);
}

// Takes what has come in a ring that the block keeps if it is such a task: it is in `now`, for the first lane. The block waits
// no more then.
FB_DEVICE bool fb_take_at_once(Context *c, const Look *l, u32 ring, bool limited, Task *now) {
  Grid *g = c->grid;
  Own *o = c->own;
  const u32 lane = fb_in_crew(), first = fb_first_place(ring), place = lane - first;
  const u64 last = fb_tell64(l->word[0], first), round = fb_tell64(l->word[0], first + 1 + FB_ROUND_WORD);
  const u32 function = (u32)last & ~FB_SINGLE, root = (u32)(round >> 32) & ((1u << FB_ROOT_BITS) - 1), seq = (u32)(last >> 32);
  if (!((u32)last & FB_SINGLE) || (u32)round != 0 || limited || fb_kind(function) != FB_BY_THREAD) return false;
  static_assert(FB_OFFSET(Task, root) == 4 && FB_OFFSET(Task, priority) == 24 && FB_OFFSET(Task, counted) == 28, "words");
  if (place >= 1 && place < FB_WORDS && place != 1 + FB_ROUND_WORD) ((u64 *)now)[fb_word_of(place)] = l->word[0];
  if (lane == 0) {
    ((u64 *)now)[0] = (u64)root << 32 | function;
    ((u64 *)now)[3] = (u64)FB_ALONE << 32 | ring;
  }
  // Its root begins, with nothing in it.
  static_assert(FB_OFFSET(Root, remaining) == 0 && FB_OFFSET(Root, seq) == 12 && FB_OFFSET(Root, result) == 16, "words");
  if (lane < (FB_OFFSET(Root, result) + sizeof g->roots->result) / 8) ((u64 *)&g->roots[root])[lane] = lane == 1 ? (u64)seq << 32 : 0;
  // As ever, what is given back is given back behind what was read.
  fb_together();
  State *state = g->state;
  if (lane < 2 && l->keeps) {
    const u32 next = l->next + (lane == ring ? 1 : 0);
    fb_mark64((u64 *)&state->heads[lane], fb_head_word(next, 0));
    o->next[lane] = next;
    o->keeper[lane] = 0;
  }
  if (lane == 0) fb_run_at_once(c, function, root);
  fb_together();
  return true;
}

// How much of a task has come by post; FB_POST_WORDS are all of it.
FB_DEVICE u32 fb_has_come(const Look *l) {
  u32 there = 0;
  for (u32 part = 0; part < FB_PARTS_OF(l); part++)
    there += fb_ones(fb_votes((l->of_post >> part & 1) && fb_is_there(l->word[part])));
  return there;
}

// Takes it: true if it is to run at once and is in `now`, else it is on top of what the block has. The block waits no more
// then, but for the first.
FB_DEVICE bool fb_take_post(Context *c, const Look *l, bool limited, Task *now) {
  Own *o = c->own;
  static_assert(FB_OFFSET(Task, root) == 4 && FB_OFFSET(Task, count) == 16 && FB_OFFSET(Task, priority) == 24, "halves");
  const u32 function = (u32)fb_seen(l, FB_POST_PLACE(0)), root = (u32)fb_seen(l, FB_POST_PLACE(1));
  const bool one = (u32)fb_seen(l, FB_POST_PLACE(4)) == 1 && (u32)fb_seen(l, FB_POST_PLACE(5)) == 0;
  const bool free = !((u32)fb_seen(l, FB_POST_PLACE(6)) & FB_LIMITED) && !limited;
  const bool at_once = one && free && fb_kind(function) == FB_BY_THREAD;
  u32 *to = (u32 *)(at_once ? now : &o->tasks[o->count]);
  for (u32 part = 0; part < FB_PARTS_OF(l); part++) {
    if (!(l->of_post >> part & 1)) continue;
    to[fb_post_word(part * FB_WARP + fb_in_crew())] = (u32)l->word[part];
    // The bit is set behind this.
    fb_mark64((u64 *)l->at[part], 0);
  }
  fb_together();
  if (fb_in_crew() == 0) {
    o->open = false;
    if (at_once) fb_run_at_once(c, function, root);
    else o->count++;
  }
  fb_together();
  return at_once;
}

// The lane that runs it.
FB_DEVICE bool fb_begin_at_once(Context *c, Task *now) {
  if (fb_lane() != 0) return false;
  fb_turn_to(c, now);
  c->item = 0;
  c->items = 1;
  c->one_lane = false;
  return true;
}
