// What a block does all its life: find work, choose, run.
#pragma once

// Rounds between two looks around as long as there is work.
#define FB_LOOK 8

// Parts of a range for others: how many, how many items each has, from which on, up to where, and the first one's ticket.
struct Deal {
  u32 parts;
  u32 ticket;
  u64 each, first, end;
};

// What the lanes of a block share.
struct Shared {
  // A copy, at hand.
  Grid grid;
  Own own;
  // The tasks that run now, how many may, how many of these are alike, and lanes for each of several.
  Task tasks[FB_MOST];
  u32 n;
  u32 alike;
  u32 wide;
  // Of a single one: it is to be run; what of it others are to have.
  bool run;
  Deal deal;
};

// Up to fb_choose the lanes of the first warp do everything together.

// Others have nothing to do: some of what the block has, from the top, is for everybody.
FB_DEVICE void fb_give(Context *c, u32 most) {
  Grid *g = c->grid;
  Own *o = c->own;
  // Where the one on top belongs.
  const u32 priority = o->tasks[o->count - 1].priority & 1;
  Queue *q = &g->state->queues[priority];
  u32 n = fb_tell(fb_in_crew() == 0 ? fb_obtain(&q->space, most) : 0, 0), held = 0;
  Task *from = o->tasks + (o->count - n);
  for (u32 part = 0; part * FB_WARP < n; part++) {
    const u32 i = part * FB_WARP + fb_in_crew();
    Task *t = i < n ? &from[i] : 0;
    held += fb_ones(fb_votes(t && t->counted == FB_HELD));
    if (t && t->counted == FB_ALONE) fb_bump(&g->roots[t->root].remaining, 1);
    if (t) t->counted = FB_COUNTED;
  }
  fb_together();
  // All are counted before any is another's.
  if (fb_in_crew() == 0) {
    fb_lend(g, &o->held, held);
    o->count -= n;
  }
  fb_together();
  if (n > 0) fb_put_many(q, from, n);
}

FB_DEVICE void fb_count_idle(Grid *g, Own *o, bool idle) {
  if (o->idle != idle) fb_bump(&g->state->idle, idle ? 1 : (u32)-1);
  o->idle = idle;
}

// Where the host's words are in its own memory, only some of the blocks look there at a time: the bus is not for everybody.
FB_DEVICE void fb_ask_permit(Grid *g, Own *o) {
  if (!g->limited || o->permitted) return;
  const bool some = fb_in_crew() == 0 && (int)fb_load(&g->state->permits) > 0;
  const u32 got = fb_tell(some ? fb_obtain(&g->state->permits, 1) : 0, 0);
  fb_together();
  if (fb_in_crew() == 0) o->permitted = got == 1;
  fb_together();
}
// The same, if it was seen that it may be had; false then.
FB_DEVICE bool fb_permit(Grid *g, Own *o, const Look *l) {
  if (!g->limited || o->permitted || (int)(u32)(fb_seen(l, FB_IDLE_AT) >> 32) <= 0) return true;
  fb_ask_permit(g, o);
  return false;
}
FB_DEVICE void fb_return_permit(Grid *g, Own *o) {
  if (!g->limited || !o->permitted) return;
  fb_bump(&g->state->permits, 1);
  o->permitted = false;
}

// The block waits no more: what it has only while it does is others'. By one lane.
FB_DEVICE void fb_wait_no_more(Context *c) {
  fb_close_post(c->grid, c->own);
  fb_leave_rings(c->grid, c->own);
  fb_count_idle(c->grid, c->own, false);
  fb_return_permit(c->grid, c->own);
}

// Takes what has been seen, if nobody else is quicker: what is urgent, then what the block has, then the rest.
FB_DEVICE bool fb_take_seen(Context *c, const Look *l, u64 marks) {
  Grid *g = c->grid;
  Own *o = c->own;
  const u32 room = FB_LOCAL + FB_TAKES - o->count;
  for (u32 ring = 0; ring < 2; ring++) {
    if (room > 0 && (marks >> fb_first_place(ring) & 1) && fb_receive_some(c, l, marks, ring, room)) return true;
    if (room > 0 && (marks >> (FB_QUEUES_AT + ring) & 1)) {
      const u32 each = (u32)fb_seen(l, FB_QUEUES_AT + ring) / g->blocks, most = room < FB_TAKES ? room : FB_TAKES;
      const u32 n = fb_take_many(&g->state->queues[ring], o->tasks + o->count, each < 1 ? 1 : each < most ? each : most);
      if (fb_in_crew() == 0) o->count += n;
      fb_together();
      if (n > 0) return true;
    }
    if (o->count > 0) {
      const u32 half = o->count / 2;
      if (half > 0 && o->others_idle && (int)(u32)fb_seen(l, FB_IDLE_AT) > (int)(u32)fb_seen(l, FB_QUEUES_AT + 1))
        fb_give(c, half < FB_TAKES ? half : FB_TAKES);
      return true;
    }
  }
  return false;
}

// Whether two looks saw the same, as far as somebody who waits cares.
FB_DEVICE bool fb_same(const Look *a, const Look *b, bool limited) {
  u32 different = 0;
  for (u32 part = 0; part < FB_PARTS_OF(a); part++) {
    const bool cares = (part * FB_WARP + fb_in_crew() != FB_IDLE_AT) | limited;
    different |= fb_votes(cares & (a->word[part] != b->word[part]));
  }
  return different == 0;
}

// Looks until there are tasks on top of the block's own, or one has come that is to run at once, which is in `now`.
#define FB_ENDS 0u
#define FB_FOUND 1u
#define FB_AT_ONCE 2u
FB_DEVICE u32 fb_find(Context *c, Task *now) {
  Grid *g = c->grid;
  Own *o = c->own;
  fb_refill(c);
  // Between tasks that follow each other closely a look would cost more than they do.
  if (o->count > 0) {
    const bool due = fb_in_crew() == 0 && fb_due(&o->looked);
    if (!fb_tell(o->turns % FB_LOOK == 0 || due, 0)) return FB_FOUND;
    // Who has work of his own looks at what is urgent, too.
    fb_ask_permit(g, o);
  }
  const bool limited = g->limited != 0;
  Look l;
  fb_aim(g, o, &l);
  fb_look(&l);
  for (u32 round = 0;;) {
    const u32 come = fb_come(&l);
    if (come != FB_NONE) {
      if (fb_take_at_once(c, &l, come, limited, now)) return FB_AT_ONCE;
      fb_receive_kept(c, &l, come);
      if (fb_in_crew() == 0) fb_wait_no_more(c);
      fb_together();
      return FB_FOUND;
    }
    if (fb_has_come(&l) == FB_POST_WORDS) {
      if (fb_take_post(c, &l, limited, now)) return FB_AT_ONCE;
      if (fb_in_crew() == 0) fb_wait_no_more(c);
      fb_together();
      return FB_FOUND;
    }
    const u64 heads[2] = {fb_seen(&l, FB_HEADS_AT), fb_seen(&l, FB_HEADS_AT + 1)}, marks = fb_marks(o, &l, heads);
    const u32 known = o->stop, stop = marks >> FB_STOP_AT & 1 ? (u32)fb_seen(&l, FB_STOP_AT) : 0;
    const bool permitted = o->permitted;
    const int idle = (int)(u32)fb_seen(&l, FB_IDLE_AT);
    bool moved = false;
    for (u32 i = 0; i < 2; i++) moved |= !fb_keeps(o, i) && heads[i] != fb_head_word(o->next[i], o->keeper[i]);
    const int others = idle - (o->idle ? 1 : 0);
    const bool news = moved || stop != known || o->others_idle != (others > 0 ? (u32)others : 0);
    // Nobody still reads what is changed next: what lanes tell each other orders nothing else.
    fb_together();
    if (news && fb_in_crew() == 0) {
      // Those who may not look there hear from those who may.
      if (g->limited && permitted && stop != known) fb_note(&g->state->stop, stop);
      o->stop = stop;
      for (u32 i = 0; i < 2; i++) {
        if (fb_keeps(o, i)) continue;
        o->next[i] = (u32)heads[i];
        o->keeper[i] = (u32)(heads[i] >> 32);
      }
      o->others_idle = others > 0 ? (u32)others : 0;
    }
    if (news) fb_together();
    if (stop == FB_STOP_NOW) return FB_ENDS;
    if ((marks != 0 || o->count > 0) && fb_take_seen(c, &l, marks)) {
      if (fb_in_crew() == 0) fb_wait_no_more(c);
      fb_together();
      return FB_FOUND;
    }
    // What was submitted before the word was written is in a slot by the time that the word is seen, so it is seen by the
    // next look, which is everybody's: with the word seen nobody keeps a ring.
    const bool kept = fb_is_kept(o, 0) || fb_is_kept(o, 1);
    if (known == FB_STOP_DRAIN && stop == FB_STOP_DRAIN && permitted && !kept) {
      // Nobody still reads how many tasks there are, of which one may come by post until the end.
      fb_together();
      return FB_ENDS;
    }
    const bool settled = fb_permit(g, o, &l);
    // Who has looked at a ring that is nobody's, and found nothing, keeps it.
    const bool keeps = FB_KEEPS && marks == 0 && !moved && stop == 0 && permitted;
    fb_together();
    if (fb_in_crew() == 0) {
      for (u32 i = 0; i < 2 && keeps; i++) {
        if (o->keeper[i] != 0) continue;
        fb_close_post(g, o);
        fb_keep_ring(g, o, i);
      }
      if (stop != 0) fb_leave_rings(g, o);
      if (stop == 0 && o->count == 0 && !fb_keeps(o, 0) && !fb_keeps(o, 1)) fb_open_post(g, o);
      fb_count_idle(g, o, true);
      if (o->busy) fb_note(&g->beats[c->block].busy, 0);
      o->busy = false;
    }
    fb_together();
    // Where there was nothing, there is nothing until something is different.
    const bool nothing = marks == 0 && !moved && known == stop && settled && o->count == 0;
    if (nothing) fb_aim_waiting(g, o, &l);
    else fb_aim(g, o, &l);
    Look last;
    const bool by_post = nothing && o->open;
    do {
      if ((round & 255) == 0 && fb_in_crew() == 0) fb_note(&g->beats[c->block].epoch, ++o->epoch);
      fb_idle(round++, fb_keeps(o, 0) || fb_keeps(o, 1));
      last = l;
      fb_look(&l);
      // The rest of what has begun to come by post is on its way. (Who keeps a ring has none to ask for.)
      for (u32 there = by_post ? fb_has_come(&l) : 0; there != 0 && there != FB_POST_WORDS; there = fb_has_come(&l)) fb_look(&l);
    } while (nothing && fb_same(&last, &l, limited));
  }
}

// Which tasks a block runs next: how many, and how wide. None: it ends. True if it is one that the first lane runs at once,
// and nobody else hears of.
FB_DEVICE bool fb_choose(Context *c, Shared *s) {
  Own *o = c->own;
  const u32 found = fb_find(c, &s->tasks[0]);
  if (found == FB_AT_ONCE) return true;
  if (fb_in_crew() != 0) return false;
  if (found == FB_ENDS) fb_wait_no_more(c);
  // (What came by post until then is done first, unless nothing more is to be.)
  if (found == FB_ENDS && (o->count == 0 || o->stop == FB_STOP_NOW)) {
    fb_note(&c->grid->beats[c->block].busy, 0);
    s->n = 0;
    return false;
  }
  const Task *t = &o->tasks[o->count - 1];
  const u32 kind = fb_kind(t->function);
  const u32 places = kind == FB_BY_THREAD ? fb_lanes() : kind == FB_BY_WARP ? fb_lanes() / FB_WARP : 1;
  const u32 most = places < FB_MOST ? places : FB_MOST;
  s->wide = kind == FB_BY_WARP ? FB_WARP : 1;
  s->alike = s->n = t->count != 1 || (t->priority & FB_LIMITED) ? 1 : o->count < most ? o->count : most;
  return false;
}

// Whether a task can run beside the one on top.
FB_DEVICE bool fb_fits(const Task *t, const Task *top) {
  return t->count == 1 && !(t->priority & FB_LIMITED) && fb_kind(t->function) == fb_kind(top->function);
}

// So few items of a range are worth another block's while.
FB_DEVICE u64 fb_least(const Context *c, u32 function) {
  const u64 grain = c->grid->grain, kind = fb_kind(function);
  const u64 wide = 4 * (u64)(kind == FB_BY_WARP ? fb_lanes() / FB_WARP : fb_lanes());
  return kind == FB_BY_BLOCK || grain < wide ? grain : wide;
}

// A range is dealt out to all who have nothing to do, in equal parts: `t` is the block's own then. Called by lane 0.
FB_DEVICE void fb_deal(Context *c, Task *t, Deal *d) {
  Grid *g = c->grid;
  Queue *q = &g->state->queues[t->priority & 1];
  d->parts = 0;
  const u64 idle = fb_others_idle(c), worth = (t->count - 1) / fb_least(c, t->function);
  if (idle == 0 || worth == 0) return;
  // At most as many as the queue has room for, and each gets some.
  const u32 places = fb_obtain(&q->space, (u32)(idle < worth ? idle : worth));
  if (places == 0) return;
  d->each = (t->count - 1) / (places + 1) + 1;
  d->parts = (u32)((t->count - 1) / d->each);
  if (d->parts < places) fb_bump(&q->space, places - d->parts);
  d->first = t->first + d->each;
  d->end = t->first + t->count;
  t->count = d->each;
  fb_bump(&g->roots[t->root].remaining, d->parts);
  // They are not idle any more, for all that is known.
  c->own->others_idle = 0;
}

// The parts become others'. Called by all lanes of the block.
FB_DEVICE void fb_hand_out(Context *c, const Task *t, const Deal *d) {
  Queue *q = &c->grid->state->queues[t->priority & 1];
  for (u32 i = fb_lane(); i < d->parts; i += fb_lanes()) {
    Task part = *t;
    part.first = d->first + i * d->each;
    part.count = d->end - part.first < d->each ? d->end - part.first : d->each;
    part.counted = FB_COUNTED;
    fb_put_at(q, d->ticket + i, &part);
  }
  fb_barrier();
  if (fb_lane() == 0) fb_bump(&q->count, d->parts);
}

// A range is done in pieces, so that what is urgent comes between and others can have some of it: the rest goes back.
FB_DEVICE void fb_split(Context *c, Task *t) {
  const u64 grain = c->grid->grain;
  if (t->count <= grain) return;
  const u64 rest = t->count - grain;
  if (fb_spawn(c, t->function, t->first + grain, rest, t->args, sizeof t->args)) t->count = grain;
}

// Before a block runs tasks, of which `t` is the first. Called by lane 0.
FB_DEVICE void fb_begin(Context *c, const Task *t) {
  Own *o = c->own;
  Beat *b = &c->grid->beats[c->block];
  fb_note(&b->function, t->function);
  fb_note(&b->root, t->root);
  if (!o->busy) fb_note(&b->busy, 1);
  o->busy = true;
  o->turns++;
  if (FB_MANY > 1) o->began = fb_cycles();
  if (o->held.left == 0) o->held.root = t->root;
}

// The same of a single task, for all lanes or one: false when it is not to be run.
FB_DEVICE bool fb_begin_single(Context *c, Task *t, Deal *d) {
  d->parts = 0;
  fb_begin(c, t);
  fb_turn_to(c, t);
  // Several lanes may make tasks, none of whom is the first.
  if (t->counted == FB_ALONE && t->count != 1) {
    fb_bump(&c->grid->roots[t->root].remaining, 1);
    t->counted = FB_COUNTED;
  }
  fb_hold(&c->own->held, t);
  if (t->priority & FB_LIMITED) {
    if (fb_load(&c->grid->roots[t->root].status) & FB_OUT_OF_FUEL) return false;
    // A range of tasks that were submitted together is none itself.
    if (t->function != FB_EACH && !fb_burn(c, 1)) return false;
  }
  if (t->count > 1) fb_deal(c, t, d);
  fb_split(c, t);
  // At the very last: nobody waits for anything else while he has tickets for which others wait.
  if (d->parts > 0) d->ticket = fb_count(&c->grid->state->queues[t->priority & 1].tail, d->parts);
  return true;
}

// After them. Called by lane 0.
FB_DEVICE void fb_end(Context *c) {
  Held *h = &c->own->held;
  if (h->left == 0 && h->units > 0) {
    const u32 units = h->units;
    h->units = 0;
    fb_subtract(c->grid, h->root, units);
  }
  if (FB_MANY > 1) c->own->slow = fb_cycles() - c->own->began > FB_LONG;
  fb_note(&c->grid->beats[c->block].epoch, ++c->own->epoch);
}

FB_DEVICE void fb_enter(Grid *g, Own *o, u32 block) {
  o->count = o->spilled = o->epoch = o->turns = o->stop = 0;
  o->held = Held{0, 0, 0};
  o->idle = o->busy = false;
  o->others_idle = 0;
  o->permitted = !g->limited;
  o->open = false;
  o->looked = o->began = 0;
  // Until something is known.
  o->slow = FB_LONG != ~0ull;
  o->me = block + 1;
  for (u32 i = 0; i < 2; i++) {
    const u64 head = fb_load64(fb_head(g, i));
    o->next[i] = (u32)head;
    o->keeper[i] = (u32)(head >> 32);
  }
}

// The task that the block's only lane has run has made another of the kind, and there is nothing else: it takes its place at
// once, without the block's other lanes, whom it would have nothing for. Both are counted by the block, so that its count of
// the root's tasks just goes down. Called by that lane. When it is time for a look around there is one, as ever.
FB_DEVICE bool fb_goes_on(Context *c) {
  if (!c->one_lane) return false;
  Own *o = c->own;
  Task *t = c->self;
#ifndef FB_GPU
  // A processor foresees its branches, and its clock takes longer than many a task.
  if (o->count != 1 || o->spilled != 0) return false;
#endif
  // Its words: compilers copy structures byte by byte.
  static_assert(FB_OFFSET(Task, root) == 4 && FB_OFFSET(Task, count) == 16 && FB_OFFSET(Task, counted) == 28, "words");
  u64 next[sizeof *t / 8];
  for (u32 k = 0; k < sizeof *t / 8; k++) next[k] = ((const u64 *)&o->tasks[0])[k];
  const u32 count = o->count, spilled = o->spilled, left = o->held.left, before = t->function;
  const u64 looked = o->looked, now = fb_cycles();
  // All at once: a branch for each would take longer than what it saves.
  const bool alone = (count == 1) & (spilled == 0) & (now != 0) & (now - looked < FB_DUE_CYCLES);
  const bool alike = ((u32)(next[0] >> 32) == c->root) & (next[2] == 1) & (next[3] == ((u64)FB_HELD << 32 | c->priority));
  if (!(alone & alike)) return false;
  const u32 function = (u32)next[0];
  if (function != before) {
    if (fb_kind(function) != FB_BY_THREAD) return false;
    fb_note(&c->grid->beats[c->block].function, function);
  }
  o->count = 0;
  o->held.left = left - 1;
  for (u32 k = 0; k < sizeof *t / 8; k++) ((u64 *)t)[k] = next[k];
  return true;
}

// What a lane does of a task: the only place from which task functions are called, so that their code is there once.
FB_DEVICE void fb_do(Context *c, const Task *t) {
  // The range of tasks that the host has submitted together: each item is one of them.
  u32 function = t->function;
  const bool each = function == FB_EACH;
  const u64 end = t->first + t->count, step = c->items;
  Task one;
  for (u64 i = t->first + c->item; !each || i < end; i += step) {
    if (each) {
      for (u32 k = 0; k < sizeof one / 8; k++) ((u64 *)&one)[k] = fb_peek64_sys((const u64 *)&c->grid->calls[i] + k);
      one.root = c->root;
      one.priority = c->priority;
      if (fb_kind(one.function) != FB_BY_THREAD) {
        if (!fb_spawn(c, one.function, one.first, one.count, one.args, sizeof one.args)) fb_fail(c->grid, c->root, FB_NO_ROOM);
        continue;
      }
      if (!fb_burn(c, 1)) return;
      c->item = 0;
      c->items = 1;
    }
    if (!fb_call(each ? one.function : function, c, each ? &one : t) && fb_lane() == 0) fb_fail(c->grid, c->root, FB_UNKNOWN_FUNCTION);
    if (!each && !fb_goes_on(c)) return;
    if (!each) function = t->function;
  }
}

// The task on top, for all lanes of the block; false when it is not to be run.
FB_DEVICE bool fb_take_single(Context *c, Shared *s) {
  Task *t = &s->tasks[0];
  // A word for each lane, as far as there are so many.
  if (fb_lane() < FB_WARP) {
    const u64 *top = (const u64 *)&s->own.tasks[s->own.count - 1];
    const u32 words = sizeof *t / 8, lane = fb_in_crew();
    if (lane < words) ((u64 *)t)[lane] = top[lane];
    for (u32 k = lane + FB_WARP; FB_WARP < words && k < words; k += FB_WARP) ((u64 *)t)[k] = top[k];
    fb_together();
  }
  if (fb_lane() == 0) {
    s->own.count--;
    s->run = fb_begin_single(c, t, &s->deal);
  }
  fb_barrier();
  fb_turn_to(c, t);
  if (s->deal.parts > 0) fb_hand_out(c, t, &s->deal);
  const u32 kind = fb_kind(t->function);
  const bool by_warp = kind == FB_BY_WARP;
  c->item = by_warp ? fb_lane() / FB_WARP : fb_lane();
  c->items = by_warp ? fb_lanes() / FB_WARP : fb_lanes();
  c->one_lane = fb_lane() == 0 && kind == FB_BY_THREAD && t->count == 1 && t->counted == FB_HELD && !(t->priority & FB_LIMITED);
  return s->run;
}

// Up to `n` tasks at the same time, of which each has `wide` lanes; false when this lane has none.
FB_DEVICE bool fb_take_row(Context *c, Shared *s, u32 n) {
  Own *o = &s->own;
  const u32 top = o->count - 1, lane = fb_lane();
  // As many as are alike, from the top.
  if (lane > 0 && lane < n && !fb_fits(&o->tasks[top - lane], &o->tasks[top])) fb_here_min(&s->alike, lane);
  fb_barrier();
  n = s->alike;
  if (lane < n) fb_copy(&s->tasks[lane], &o->tasks[top - lane]);
  if (lane == 0) {
    o->count -= n;
    fb_begin(c, &s->tasks[0]);
  }
  // From here on tasks make others.
  fb_barrier();
  const bool by_warp = s->wide > 1;
  const u32 i = by_warp ? lane / FB_WARP : lane;
  if (i >= n) return false;
  if (!by_warp || lane % FB_WARP == 0) fb_hold(&o->held, &s->tasks[i]);
  if (by_warp) fb_together();
  fb_turn_to(c, &s->tasks[i]);
  c->item = 0;
  c->items = 1;
  c->one_lane = false;
  return true;
}

// After the tasks that were chosen. One that all lanes have had is done when all of them are.
FB_DEVICE void fb_end_all(Context *c, const Shared *s, bool single, bool mine) {
  if (single) {
    fb_barrier();
    if (fb_lane() == 0) fb_finish(c, c->self);
  } else if (mine) {
    const bool by_warp = s->wide > 1;
    if (by_warp) fb_together();
    if (!by_warp || fb_lane() % FB_WARP == 0) fb_finish(c, c->self);
  }
  fb_barrier();
}

FB_DEVICE void fb_stay(const Grid *grid, u32 block, Shared *s) {
  Context c = {&s->grid, block, 0, 0, &s->own, 0, 0, 1, false};
  if (fb_lane() == 0) {
    s->grid = *grid;
    fb_enter(&s->grid, &s->own, block);
  }
  fb_barrier();
  for (;;) {
    // What only the first lane has is nothing for which it waits for other warps, or they for it.
    const bool at_once = fb_lane() < FB_WARP && fb_choose(&c, s);
    u32 n = 0;
    bool mine;
    if (at_once) {
      mine = fb_begin_at_once(&c, &s->tasks[0]);
    } else {
      fb_barrier();
      n = s->n;
      if (n == 0) return;
      mine = n == 1 ? fb_take_single(&c, s) : fb_take_row(&c, s, n);
    }
    if (mine) fb_do(&c, c.self);
    if (at_once) {
      if (mine) fb_finish(&c, c.self);
      fb_together();
      continue;
    }
    fb_end_all(&c, s, n == 1, mine);
    if (fb_lane() == 0) fb_end(&c);
    if (fb_lane() < FB_WARP) fb_together();
  }
}

#ifdef FB_KERNELS

// The registers of a block with so many threads have to fit a multiprocessor.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_grid(const Grid *g) {
  __shared__ Shared s;
  fb_stay(g, blockIdx.x, &s);
}

#elif !defined(FB_LANES)

extern "C" __attribute__((visibility("default"))) void fb_block(Grid *g, u32 block) {
  Shared s;
  fb_stay(g, block, &s);
}

#endif
