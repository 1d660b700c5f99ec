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
// 4. What was put is announced in `count` after it is in its cell.
#pragma once

// Keeps a place for one that will be put later; false when there is none.
FB_DEVICE bool fb_reserve(Queue *q) {
  if ((int)fb_add(&q->space, (u32)-1) > 0) return true;
  fb_add(&q->space, 1);
  return false;
}

FB_DEVICE void fb_put_reserved(Queue *q, const Task *task) {
  const u32 t = fb_add(&q->tail, 1);
  Cell *c = &q->cells[t & (q->size - 1)];
  while (fb_load(&c->seq) != t) fb_relax();
  c->task = *task;
  fb_store(&c->seq, t + 1);
  fb_add(&q->count, 1);
}

FB_DEVICE bool fb_put(Queue *q, const Task *task) {
  if (!fb_reserve(q)) return false;
  fb_put_reserved(q, task);
  return true;
}

// Takes up to `most`; how many it got.
FB_DEVICE u32 fb_take(Queue *q, Task *to, u32 most) {
  // A look costs less than an attempt, and most looks find nothing.
  if ((int)fb_load(&q->count) <= 0) return 0;
  const int there = (int)fb_add(&q->count, (u32)-(int)most);
  const u32 n = there <= 0 ? 0 : (u32)there < most ? (u32)there : most;
  if (n < most) fb_add(&q->count, most - n);
  if (n == 0) return 0;
  const u32 h = fb_add(&q->head, n);
  for (u32 i = 0; i < n; i++) {
    Cell *c = &q->cells[(h + i) & (q->size - 1)];
    while (fb_load(&c->seq) != h + i + 1) fb_relax();
    to[i] = c->task;
    fb_store(&c->seq, h + i + q->size);
  }
  fb_add(&q->space, n);
  return n;
}
