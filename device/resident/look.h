// How a block looks around, and takes what the host has submitted. The lanes of its first warp do it together.
#pragma once

// What is looked at, each by a lane: the slots behind what the block takes for the rings' heads, the stop word, what is for
// everybody, and how many are idle.
#define FB_STOP_AT (FB_SEES_URGENT + FB_SEES)
#define FB_QUEUES_AT (FB_STOP_AT + 1)
#define FB_IDLE_AT (FB_QUEUES_AT + 2)
#define FB_PLACES (FB_IDLE_AT + 1)
#define FB_PARTS ((FB_PLACES + FB_WARP - 1) / FB_WARP)

// Where this lane looks, and what it saw: of place i lane i % FB_WARP has part i / FB_WARP.
struct Look {
  const u64 *at[FB_PARTS];
  u64 word[FB_PARTS];
};

FB_DEVICE u32 fb_first_place(u32 ring) { return ring == 0 ? 0 : FB_SEES_URGENT; }
FB_DEVICE u32 fb_places(u32 ring) { return ring == 0 ? FB_SEES_URGENT : FB_SEES; }

// The words of a slot, the last of which is its function and its number.
FB_DEVICE const u64 *fb_slot(Grid *g, u32 ring, u32 ticket) {
  Ring *r = &g->rings[ring];
  return (const u64 *)&r->slots[ticket & (r->size - 1)];
}

FB_DEVICE const u64 *fb_place(Grid *g, const Own *o, u32 i) {
  if (i < FB_STOP_AT) {
    const u32 ring = i >= FB_SEES_URGENT;
    return o->permitted ? fb_slot(g, ring, o->next[ring] + (i - fb_first_place(ring))) + 7 : 0;
  }
  if (i == FB_STOP_AT) return (const u64 *)(o->permitted ? &g->control->stop : &g->state->stop);
  if (i == FB_IDLE_AT) return (const u64 *)&g->state->idle;
  return (const u64 *)&g->state->queues[i - FB_QUEUES_AT].count;
}

FB_DEVICE void fb_aim(Grid *g, const Own *o, Look *l) {
  for (u32 part = 0; part < FB_PARTS; part++) {
    const u32 i = part * FB_WARP + fb_in_crew();
    l->at[part] = i < FB_PLACES ? fb_place(g, o, i) : 0;
  }
}

// Who waits looks at the first slot of each ring only: he looks all the time, and others use the memory, too.
FB_DEVICE void fb_aim_less(Look *l) {
  for (u32 part = 0; part < FB_PARTS; part++) {
    const u32 i = part * FB_WARP + fb_in_crew();
    if (i >= FB_STOP_AT || i == fb_first_place(0) || i == fb_first_place(1)) continue;
    l->at[part] = 0;
    l->word[part] = 0;
  }
}

// All that there is to see, at once.
FB_DEVICE void fb_look(Look *l) {
  for (u32 part = 0; part < FB_PARTS; part++) l->word[part] = l->at[part] ? fb_load64_sys(l->at[part]) : 0;
}

FB_DEVICE u64 fb_seen(const Look *l, u32 place) { return fb_tell64(l->word[place / FB_WARP], place % FB_WARP); }

// A bit for each place at which there is something: a slot that is filled and nobody's yet, as far as the block knows where
// the head is; a stop word; a task for everybody.
FB_DEVICE u64 fb_marks(const Own *o, const Look *l) {
  u64 marks = 0;
  for (u32 part = 0; part < FB_PARTS; part++) {
    const u32 i = part * FB_WARP + fb_in_crew(), ring = i >= FB_SEES_URGENT, low = (u32)l->word[part];
    bool is = false;
    if (i < FB_STOP_AT) is = l->at[part] && (u32)(l->word[part] >> 32) == o->next[ring] + (i - fb_first_place(ring)) + 1;
    else if (i < FB_IDLE_AT) is = i == FB_STOP_AT ? low != 0 : (int)low > 0;
    marks |= (u64)fb_votes(is) << (part * FB_WARP);
  }
  return marks;
}

// Of filled slots, of which there is one, how many a block takes: those with tasks of one item for one lane each, or the
// first one.
FB_DEVICE u32 fb_in_row(const Look *l, u64 marks, u32 ring) {
  const u32 first = fb_first_place(ring), n = fb_places(ring);
  u64 small = 0;
  for (u32 part = first / FB_WARP; part < FB_PARTS && part * FB_WARP < first + n; part++) {
    const u32 function = (u32)l->word[part];
    const bool one = (function & FB_SINGLE) && fb_kind(function & ~FB_SINGLE) == FB_BY_THREAD;
    small |= (u64)fb_votes(one) << (part * FB_WARP);
  }
  const u64 others = ~((small & marks) >> first) | 1ull << n;
  const u32 in_row = fb_lowest(others);
  return in_row == 0 ? 1 : in_row;
}

// The head of a ring has passed what the block takes for it: the slot there was filled again.
FB_DEVICE bool fb_is_behind(const Own *o, const Look *l, u32 ring) {
  const u32 seq = (u32)(fb_seen(l, fb_first_place(ring)) >> 32);
  return o->permitted && (int)(seq - (o->next[ring] + 1)) > 0;
}

// Takes `n` filled slots from a ring's head, unless another block was first: they become roots and their first tasks, on
// top of what the block has.
FB_DEVICE bool fb_receive(Context *c, const Look *l, u32 ring, u32 n) {
  Grid *g = c->grid;
  Own *o = c->own;
  const u32 ticket = o->next[ring], first = fb_first_place(ring);
  // Read before they are taken, by the lane that saw that they are filled: once they are, the host may fill them again. What
  // is above the block's tasks is nothing if another one takes them.
  u32 root[FB_PARTS], fuel[FB_PARTS];
  for (u32 part = 0; part < FB_PARTS; part++) {
    const u32 i = part * FB_WARP + fb_in_crew();
    if (i < first || i >= first + n) continue;
    const u64 *slot = fb_slot(g, ring, ticket + (i - first));
    u64 words[7];
    for (u32 k = 0; k < 7; k++) words[k] = fb_peek64_sys(&slot[k]);
    fuel[part] = (u32)words[6];
    root[part] = (u32)(words[6] >> 32);
    // The first one on top.
    Task *t = &o->tasks[o->count + (n - 1 - (i - first))];
    t->function = (u32)l->word[part] & ~FB_SINGLE;
    t->root = root[part];
    t->first = words[0];
    t->count = words[1];
    t->priority = fuel[part] ? ring | FB_LIMITED : ring;
    t->counted = FB_ALONE;
    for (u32 k = 0; k < 4; k++) ((u64 *)t->args)[k] = words[2 + k];
  }
  fb_together();
  const u32 head = fb_tell(fb_in_crew() == 0 ? fb_try(&g->state->heads[ring].next, ticket, ticket + n) : 0, 0);
  const bool ours = head == ticket;
  for (u32 part = 0; part < FB_PARTS && ours; part++) {
    const u32 i = part * FB_WARP + fb_in_crew();
    if (i < first || i >= first + n) continue;
    Root *to = &g->roots[root[part]];
    to->status = 0;
    to->fuel = fuel[part];
    to->seq = ticket + (i - first) + 1;
    for (u32 k = 0; k < 10; k++) to->result[k] = 0;
  }
  fb_together();
  if (fb_in_crew() == 0) {
    o->next[ring] = ours ? ticket + n : head;
    if (ours) o->count += n;
  }
  fb_together();
  return ours;
}
