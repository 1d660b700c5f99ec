// A bounded queue for everybody on the device: places are given out by tickets, nobody repeats anything in a loop on a
// shared counter.
//
// Rules:
// 1. `count` is what may be taken, `space` what may be put. Whoever wants n subtracts n at once and gives back what there
//    was not; between the two others may be told of less than there is, never of more.
// 2. A ticket from `tail` (or `head`) is a cell. Its `seq` says whose turn it is: ticket t is put when it is t, and taken
//    when it is t + 1; then it becomes t + size, the next round's.
// 3. A cell is waited for only by whoever holds its ticket, and only for whoever held an earlier one: nobody waits in a
//    circle.
// 4. What was put is announced in `count` after it is in its cell, for all that the one who puts it can see.
// 5. Only `seq` orders anything: whoever has a ticket waits for his cell, so that none of the counts has to say that what it
//    counts is there yet, or waits for what was written.
#pragma once

// A task as its words: compilers copy its arguments byte by byte.
FB_DEVICE void fb_copy(Task *to, const Task *from) {
  u64 words[sizeof *to / 8];
  for (u32 k = 0; k < sizeof *to / 8; k++) words[k] = ((const u64 *)from)[k];
  for (u32 k = 0; k < sizeof *to / 8; k++) ((u64 *)to)[k] = words[k];
}

// Of n that one wants of what a word counts, so many as there are.
FB_DEVICE u32 fb_obtain(u32 *word, u32 n) {
  const int there = (int)fb_count(word, 0u - n);
  const u32 got = there <= 0 ? 0 : (u32)there < n ? (u32)there : n;
  if (got < n) fb_bump(word, n - got);
  return got;
}

// Keeps a place for one that will be put later; false when there is none.
FB_DEVICE bool fb_reserve(Queue *q) { return fb_obtain(&q->space, 1) == 1; }

FB_DEVICE void fb_put_at(Queue *q, u32 ticket, const Task *task) {
  Cell *c = &q->cells[ticket & (q->size - 1)];
  while (fb_load(&c->seq) != ticket) fb_relax();
  fb_copy(&c->task, task);
  fb_store(&c->seq, ticket + 1);
}

FB_DEVICE void fb_take_at(Queue *q, u32 ticket, Task *to) {
  Cell *c = &q->cells[ticket & (q->size - 1)];
  while (fb_load(&c->seq) != ticket + 1) fb_relax();
  fb_copy(to, &c->task);
  fb_store(&c->seq, ticket + q->size);
}

FB_DEVICE void fb_put_reserved(Queue *q, const Task *task) {
  fb_put_at(q, fb_count(&q->tail, 1), task);
  fb_bump(&q->count, 1);
}

FB_DEVICE bool fb_put(Queue *q, const Task *task) {
  if (!fb_reserve(q)) return false;
  fb_put_reserved(q, task);
  return true;
}

// Takes one, if there is one.
FB_DEVICE bool fb_take(Queue *q, Task *to) {
  // A look costs less than an attempt.
  if ((int)fb_load(&q->count) <= 0 || fb_obtain(&q->count, 1) == 0) return false;
  fb_take_at(q, fb_count(&q->head, 1), to);
  fb_bump(&q->space, 1);
  return true;
}

// Takes up to `most`; how many it got. Called by the lanes of a warp together, who take a cell each.
FB_DEVICE u32 fb_take_many(Queue *q, Task *to, u32 most) {
  u32 n = 0, ticket = 0;
  if (fb_in_crew() == 0) {
    n = fb_obtain(&q->count, most);
    if (n > 0) ticket = fb_count(&q->head, n);
  }
  n = fb_tell(n, 0);
  ticket = fb_tell(ticket, 0);
  for (u32 i = fb_in_crew(); i < n; i += FB_WARP) fb_take_at(q, ticket + i, &to[i]);
  fb_together();
  if (n > 0 && fb_in_crew() == 0) fb_bump(&q->space, n);
  return n;
}

// Puts `n` in places that were kept for them. Called by the lanes of a warp together.
FB_DEVICE void fb_put_many(Queue *q, const Task *from, u32 n) {
  const u32 ticket = fb_tell(fb_in_crew() == 0 ? fb_count(&q->tail, n) : 0, 0);
  for (u32 i = fb_in_crew(); i < n; i += FB_WARP) fb_put_at(q, ticket + i, &from[i]);
  fb_together();
  if (fb_in_crew() == 0) fb_bump(&q->count, n);
}
