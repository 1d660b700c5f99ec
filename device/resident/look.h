// How a block looks around, and takes what the host has submitted. The lanes of its first warp do it together.
#pragma once

// What is looked at, each by a lane: the slots behind what the block takes for the rings' heads, the stop word, what is for
// everybody, how many are idle, and the heads. One who waits and keeps no ring has the words of his post in places of slots behind
// the first ones, as far as there are any.
#define FB_STOP_AT (FB_SEES_URGENT + FB_SEES)
#define FB_QUEUES_AT (FB_STOP_AT + 1)
#define FB_IDLE_AT (FB_QUEUES_AT + 2)
#define FB_HEADS_AT (FB_IDLE_AT + 1)
#ifdef FB_GPU
#define FB_PLACES (FB_HEADS_AT + 2)
#define FB_POST_PLACE(k) ((k) < FB_SEES_URGENT - 1 ? 1 + (k) : 2 + (k))
static_assert(FB_POST_PLACE(FB_POST_WORDS - 1) < FB_STOP_AT, "a post has room in a look");
#else
#define FB_POST_PLACE(k) (FB_HEADS_AT + 2 + (k))
#define FB_PLACES FB_POST_PLACE(FB_POST_WORDS)
#endif
#define FB_PARTS_FOR(places) (((places) + FB_WARP - 1) / FB_WARP)
#define FB_PARTS FB_PARTS_FOR(FB_PLACES)
// How many of these have something to see. On a GPU there is one, and it has; elsewhere only who waits sees the post's.
#ifdef FB_GPU
#define FB_PARTS_OF(l) FB_PARTS
static_assert(FB_PARTS == 1, "a look is one load");
#else
#define FB_PARTS_OF(l) ((l)->parts)
#endif

// Words of a slot: which has the round, and which the function and the number.
#define FB_WORDS 8
#define FB_ROUND_WORD 1
#define FB_LAST_WORD 7
static_assert(FB_OFFSET(Slot, root) == 8 * FB_ROUND_WORD + 4 && FB_OFFSET(Slot, seq) == 8 * FB_LAST_WORD + 4, "words");
static_assert(!FB_SEES_WHOLE || (FB_SEES_URGENT >= FB_WORDS && FB_SEES >= FB_WORDS), "a slot has room in a look");

// Where this lane looks, and what it saw: of place i lane i % FB_WARP has part i / FB_WARP. Of the rings with a bit in
// `whole` the places are all words of the first slot, the last word at the first place.
struct Look {
  const u64 *at[FB_PARTS];
  u64 word[FB_PARTS];
#ifndef FB_GPU
  u32 parts;
#endif
  u32 whole;
  // What this lane's word has above these bits once there is something to take in a ring that is kept.
  u32 expected, bits;
  // Whether this lane's words are of the post: a bit for each part.
  u64 of_post;
  // Of the ring with this lane's number: whether the block keeps it, and its head.
  bool keeps;
  u32 next;
};

FB_DEVICE u32 fb_first_place(u32 ring) { return ring == 0 ? 0 : FB_SEES_URGENT; }
FB_DEVICE u32 fb_places(u32 ring) { return ring == 0 ? FB_SEES_URGENT : FB_SEES; }

// The words of a slot.
FB_DEVICE const u64 *fb_slot(Grid *g, u32 ring, u32 ticket) {
  Ring *r = &g->rings[ring];
  return (const u64 *)&r->slots[ticket & (r->size - 1)];
}
// What stands above a slot's root when it is filled with this ticket.
FB_DEVICE u32 fb_round(const Grid *g, u32 ring, u32 ticket) {
  return ((ticket >> fb_lowest(g->rings[ring].size)) + 1) << FB_ROOT_BITS;
}

// A ring's head and its keeper.
FB_DEVICE u64 *fb_head(Grid *g, u32 ring) { return (u64 *)&g->state->heads[ring]; }
FB_DEVICE u64 fb_head_word(u32 next, u32 keeper) { return (u64)keeper << 32 | next; }
FB_DEVICE bool fb_keeps(const Own *o, u32 ring) { return FB_KEEPS && o->keeper[ring] == o->me; }
FB_DEVICE bool fb_is_kept(const Own *o, u32 ring) { return FB_KEEPS && o->keeper[ring] != 0 && o->keeper[ring] != o->me; }

FB_DEVICE const u64 *fb_place(Grid *g, const Own *o, u32 i) {
  if (i < FB_STOP_AT) {
    const u32 ring = i >= FB_SEES_URGENT;
    return o->permitted ? fb_slot(g, ring, o->next[ring] + (i - fb_first_place(ring))) + FB_LAST_WORD : 0;
  }
  if (i == FB_STOP_AT) return (const u64 *)(o->permitted ? &g->control->stop : &g->state->stop);
  if (i == FB_IDLE_AT) return (const u64 *)&g->state->idle;
  if (i >= FB_HEADS_AT) return i < FB_HEADS_AT + 2 ? fb_head(g, i - FB_HEADS_AT) : 0;
  return (const u64 *)&g->state->queues[i - FB_QUEUES_AT].count;
}

FB_DEVICE void fb_aim(Grid *g, const Own *o, Look *l) {
  l->whole = 0;
  l->of_post = 0;
#ifndef FB_GPU
  l->parts = FB_PARTS_FOR(FB_HEADS_AT + 2);
#endif
  for (u32 part = 0; part < FB_PARTS_OF(l); part++) {
    const u32 i = part * FB_WARP + fb_in_crew();
    l->at[part] = i < FB_PLACES ? fb_place(g, o, i) : 0;
  }
}

// Where one who waits looks at a ring: at its first slot only, as he looks all the time and others use the memory, too; at all
// of that if it is his to take; and not at all if it is another's.
FB_DEVICE const u64 *fb_place_waiting(Grid *g, const Own *o, u32 whole, u32 ring, u32 k) {
  const u64 *slot = fb_slot(g, ring, o->next[ring]);
  if (!o->permitted || fb_is_kept(o, ring)) return 0;
  if (k == 0) return slot + FB_LAST_WORD;
  return whole >> ring & 1 && k < FB_WORDS ? slot + (k - 1) : 0;
}
// Which word of a post is at a place; none of them is FB_POST_WORDS or more.
FB_DEVICE u32 fb_post_word(u32 place) {
#ifdef FB_GPU
  if (place == 0 || place == FB_SEES_URGENT) return FB_POST_WORDS;
  return place < FB_SEES_URGENT ? place - 1 : place - 2;
#else
  return place - FB_POST_PLACE(0);
#endif
}

FB_DEVICE void fb_aim_waiting(Grid *g, const Own *o, Look *l) {
  fb_aim(g, o, l);
  for (u32 ring = 0; ring < 2; ring++)
    if (FB_SEES_WHOLE && g->halves && fb_keeps(o, ring)) l->whole |= 1u << ring;
  for (u32 part = 0; part < FB_PARTS_OF(l); part++) {
    const u32 i = part * FB_WARP + fb_in_crew(), ring = i >= FB_SEES_URGENT;
    if (i >= FB_STOP_AT) continue;
    l->at[part] = fb_place_waiting(g, o, l->whole, ring, i - fb_first_place(ring));
  }
#ifndef FB_GPU
  // Nothing was seen there yet: what comes before the first look there is news, too (fb_same).
  for (; l->parts < FB_PARTS && o->open; l->parts++) {
    l->at[l->parts] = 0;
    l->word[l->parts] = 0;
  }
#endif
  for (u32 part = 0; part < FB_PARTS_OF(l) && o->open; part++) {
    const u32 k = fb_post_word(part * FB_WARP + fb_in_crew());
    if (k >= FB_POST_WORDS) continue;
    l->at[part] = &g->posts[o->me - 1].words[k];
    l->of_post |= 1ull << part;
  }
  const u32 ring = fb_in_crew() >= FB_SEES_URGENT, place = fb_in_crew() - fb_first_place(ring), ticket = o->next[ring];
  const bool sees = fb_in_crew() < FB_STOP_AT && (l->whole >> ring & 1);
  const bool urgent = fb_in_crew() == fb_first_place(0);
  l->keeps = fb_in_crew() < 2 && fb_keeps(o, fb_in_crew());
  l->next = fb_in_crew() < 2 ? o->next[fb_in_crew()] : 0;
  // A round has fewer bits than what no word has.
  l->expected = FB_NONE;
  l->bits = 32 + FB_ROOT_BITS;
  if (sees && place == 1 + FB_ROUND_WORD) l->expected = fb_round(g, ring, ticket) >> FB_ROOT_BITS;
  if ((sees && place == 0) || urgent) {
    l->expected = ticket + 1;
    l->bits = 32;
  }
}

// All that there is to see, at once: a load for all lanes, so that of a slot's words they see the same time. Lanes that came
// apart before (who aims where is a branch) are together again first: that compilers see to it is a habit of theirs, no promise.
FB_DEVICE void fb_look(Look *l) {
  fb_together();
  for (u32 part = 0; part < FB_PARTS_OF(l); part++) {
    const u32 i = part * FB_WARP + fb_in_crew(), ring = i >= FB_SEES_URGENT;
    const bool beside = i < FB_STOP_AT && i != fb_first_place(ring) && (l->whole >> ring & 1);
    l->word[part] = l->at[part] ? fb_load64_beside_sys(l->at[part], beside) : 0;
  }
}

// With one part its number is no question, and the words stay in registers.
FB_DEVICE u32 fb_part(u32 place) { return FB_PARTS == 1 ? 0 : place / FB_WARP; }
FB_DEVICE u64 fb_seen(const Look *l, u32 place) { return fb_tell64(l->word[fb_part(place)], place % FB_WARP); }

// Whether the head of a ring is where the block takes it to be, and it may take what is there.
FB_DEVICE bool fb_may_take(const Own *o, u32 ring, u64 head) { return fb_keeps(o, ring) || head == o->next[ring]; }

// Whether a slot's first half is of the present round, too.
FB_DEVICE bool fb_is_round(const Grid *g, u32 ring, u32 ticket, u64 word) {
  return (u32)(word >> 32) >> FB_ROOT_BITS == fb_round(g, ring, ticket) >> FB_ROOT_BITS;
}

// A bit for each place at which there is something: a slot that is filled and nobody's yet; a stop word; a task for
// everybody. `heads` are the words of these.
FB_DEVICE u64 fb_marks(const Own *o, const Look *l, const u64 heads[2]) {
  const bool urgent = fb_may_take(o, 0, heads[0]), ordinary = fb_may_take(o, 1, heads[1]);
  u64 marks = 0;
  for (u32 part = 0; part < FB_PARTS_OF(l); part++) {
    const u32 i = part * FB_WARP + fb_in_crew(), ring = i >= FB_SEES_URGENT, low = (u32)l->word[part];
    bool is = false;
    if (i < FB_STOP_AT) {
      const u32 k = i - fb_first_place(ring);
      const bool last_word = (k == 0 || !(l->whole >> ring & 1)) && !(l->of_post >> part & 1);
      is = (ring ? ordinary : urgent) && last_word && l->at[part] && (u32)(l->word[part] >> 32) == o->next[ring] + k + 1;
    } else if (i < FB_IDLE_AT) {
      is = i == FB_STOP_AT ? low != 0 : (int)low > 0;
    }
    marks |= (u64)fb_votes(is) << (part * FB_WARP);
  }
  return marks;
}

// Of filled slots, of which there is one, how many a block takes: those with tasks of one item for one lane each, or the
// first one.
FB_DEVICE u32 fb_in_row(const Look *l, u64 marks, u32 ring) {
  const u32 first = fb_first_place(ring), n = fb_places(ring);
  u64 small = 0;
  for (u32 part = first / FB_WARP; part < FB_PARTS_OF(l) && part * FB_WARP < first + n; part++) {
    const u32 function = (u32)l->word[part];
    const bool one = (function & FB_SINGLE) && fb_kind(function & ~FB_SINGLE) == FB_BY_THREAD;
    small |= (u64)fb_votes(one) << (part * FB_WARP);
  }
  const u64 others = ~((small & marks) >> first) | 1ull << n;
  const u32 in_row = fb_lowest(others);
  return in_row == 0 ? 1 : in_row;
}

// Which word of a task a place of a slot is: all but the first one, which has the last word, and the one with the round.
FB_DEVICE u32 fb_word_of(u32 place) {
  static_assert(FB_OFFSET(Task, first) == 8 && FB_OFFSET(Task, count) == 16 && FB_OFFSET(Task, args) == 32, "words");
  return place == 1 ? 1 : place == FB_WORDS - 1 ? 2 : place + 1;
}

// What a place of a slot says of its task, but for root and fuel: the first one has the last word.
FB_DEVICE void fb_put_seen(Task *t, u32 place, u64 word) {
  static_assert(FB_OFFSET(Slot, first) == 0 && FB_OFFSET(Slot, args) == 16 && FB_OFFSET(Slot, count) == 48, "words");
  if (place == 0) {
    t->function = (u32)word & ~FB_SINGLE;
    t->counted = FB_ALONE;
  } else {
    ((u64 *)t)[fb_word_of(place)] = word;
  }
}

// The rest, from the word that says which root it has and how much fuel.
FB_DEVICE void fb_put_round(Task *t, u32 ring, u64 word) {
  t->root = (u32)(word >> 32) & ((1u << FB_ROOT_BITS) - 1);
  t->priority = (u32)word ? ring | FB_LIMITED : ring;
}

// The root of a ticket's task begins.
FB_DEVICE void fb_begin_root(Grid *g, u64 word, u32 ticket) {
  Root *to = &g->roots[(u32)(word >> 32) & ((1u << FB_ROOT_BITS) - 1)];
  to->status = 0;
  to->fuel = (u32)word;
  to->seq = ticket + 1;
  for (u32 k = 0; k < 10; k++) to->result[k] = 0;
}

// Takes `n` filled slots from a ring's head, unless another block was first: they become roots and their first tasks, on
// top of what the block has. What the lanes of a warp read at the same time of 32 bytes that were written at once, is of one
// time, so that of a slot that is seen whole each half is old or new; and what a lane reads behind what tells that a half is
// there, is of that half.
FB_DEVICE bool fb_receive(Context *c, const Look *l, u32 ring, u32 n) {
  Grid *g = c->grid;
  Own *o = c->own;
  const u32 ticket = o->next[ring], first = fb_first_place(ring);
  const bool keeps = fb_keeps(o, ring);
  const bool whole = l->whole >> ring & 1;
  // Of which places the lanes have the words that say root and fuel. (A slot that is seen whole is the only one.)
  const u32 begin = whole ? first + 1 + FB_ROUND_WORD : first;
  // Read before they are taken, by the lane that saw that they are filled: once they are, the host may fill them again. What
  // is above the block's tasks is nothing if another one takes them.
  u64 rounds[FB_PARTS];
  bool there = true;
  for (u32 part = 0; part < FB_PARTS_OF(l); part++) {
    const u32 i = part * FB_WARP + fb_in_crew();
    if (whole && i >= first && i < first + FB_WORDS && i != begin) fb_put_seen(&o->tasks[o->count], i - first, l->word[part]);
    if (i < begin || i >= begin + n) continue;
    // The first one on top.
    Task *t = &o->tasks[o->count + (n - 1 - (i - begin))];
    u64 &round = rounds[part];
    round = l->word[part];
    if (!whole) {
      const u64 *slot = fb_slot(g, ring, ticket + (i - first));
      u64 words[FB_LAST_WORD];
      round = words[FB_ROUND_WORD] = fb_peek64_sys(&slot[FB_ROUND_WORD]);
      for (u32 k = 0; k < FB_LAST_WORD; k++)
        if (k != FB_ROUND_WORD) words[k] = fb_peek64_sys(&slot[k]);
      fb_put_seen(t, 0, l->word[part]);
      for (u32 k = 0; k < FB_LAST_WORD; k++)
        if (k != FB_ROUND_WORD) fb_put_seen(t, k + 1, words[k]);
    }
    there &= fb_is_round(g, ring, ticket + (i - begin), round);
    fb_put_round(t, ring, round);
  }
  fb_together();
  // The other half of a slot whose last word is there is on its way.
  if (fb_votes(!there)) return false;
  // Of what a block keeps nobody else takes anything.
  const u64 is = fb_head_word(ticket, 0), then = fb_head_word(ticket + n, 0);
  u64 head = is;
  if (fb_in_crew() == 0) {
    if (keeps) fb_mark64(fb_head(g, ring), then);
    else head = fb_try64(fb_head(g, ring), is, then);
  }
  head = fb_tell64(head, 0);
  const bool ours = head == is;
  for (u32 part = 0; part < FB_PARTS_OF(l) && ours; part++) {
    const u32 i = part * FB_WARP + fb_in_crew();
    if (i < begin || i >= begin + n) continue;
    fb_begin_root(g, rounds[part], ticket + (i - begin));
  }
  fb_together();
  if (fb_in_crew() == 0) {
    o->next[ring] = ours ? ticket + n : (u32)head;
    o->keeper[ring] = ours ? 0 : (u32)(head >> 32);
    if (ours) o->count += n;
  }
  fb_together();
  return ours;
}

// The ring that the block keeps and in whose first slot there is a whole task now; FB_NONE if there is none, or anything else
// to be done first. Behind fb_aim_waiting.
FB_DEVICE u32 fb_come(const Look *l) {
  if (FB_PARTS != 1 || l->whole == 0) return FB_NONE;
  // Without branches, on the way of every task from the host: a slot's word, or what there is besides (no stop word is negative).
  const u32 i = fb_in_crew();
  const bool of_slot = i < FB_STOP_AT, other = i >= FB_STOP_AT && i < FB_IDLE_AT;
  const bool filled = (u32)(l->word[0] >> l->bits) == l->expected, is = (int)(u32)l->word[0] > 0;
  const u32 votes = fb_votes((of_slot & filled) | (other & is));
  const u32 both = 1 | 1u << (1 + FB_ROUND_WORD);
  if (votes >> FB_STOP_AT) return FB_NONE;
  if ((votes & both) == both) return 0;
  // What is urgent is not the block's alone, or not there as a whole.
  if (votes & 1) return FB_NONE;
  return (votes >> FB_SEES_URGENT & both) == both ? 1 : FB_NONE;
}

// Takes what has come there: a root and its first task, the block's only one. As fb_receive, without what is known here: that
// it is one task, and its own to take.
FB_DEVICE void fb_receive_kept(Context *c, const Look *l, u32 ring) {
  Grid *g = c->grid;
  Own *o = c->own;
  const u32 ticket = o->next[ring], place = fb_in_crew() - fb_first_place(ring);
  Task *t = &o->tasks[o->count];
  if (fb_in_crew() >= fb_first_place(ring) && place < FB_WORDS) {
    if (place != 1 + FB_ROUND_WORD) {
      fb_put_seen(t, place, l->word[0]);
    } else {
      fb_put_round(t, ring, l->word[0]);
      fb_begin_root(g, l->word[0], ticket);
    }
  }
  fb_together();
  if (fb_in_crew() == 0) {
    // As ever, what is given back is given back behind what was read.
    fb_mark64(fb_head(g, ring), fb_head_word(ticket + 1, 0));
    o->next[ring] = ticket + 1;
    o->keeper[ring] = 0;
    o->count++;
  }
}

// The block waits, and keeps a ring that is nobody's and has nothing: whatever comes is its own to take, at once.
FB_DEVICE void fb_keep_ring(Grid *g, Own *o, u32 ring) {
  const u64 is = fb_head_word(o->next[ring], 0), head = fb_try64(fb_head(g, ring), is, fb_head_word(o->next[ring], o->me));
  o->next[ring] = (u32)head;
  o->keeper[ring] = head == is ? o->me : (u32)(head >> 32);
}

// It gives back what it keeps.
FB_DEVICE void fb_leave_rings(Grid *g, Own *o) {
  for (u32 ring = 0; ring < 2; ring++) {
    if (!fb_keeps(o, ring)) continue;
    fb_mark64(fb_head(g, ring), fb_head_word(o->next[ring], 0));
    o->keeper[ring] = 0;
  }
}
