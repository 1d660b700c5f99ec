// The resident grid: blocks that take tasks from the host's rings, from each other and from what their own tasks make.
// docs/resident.md has the protocol as numbered rules; the names of flags are those of layout.h.
#pragma once

#ifndef FB_LOCAL
// Tasks that a block keeps to itself; beyond, half of them are given to everybody.
#define FB_LOCAL 64
// Tasks that are taken from everybody's queue at a time.
#define FB_BATCH 8
#endif
// Tasks between two looks at whether others are idle, on a GPU.
#define FB_LOOK 8

// Tasks of one root that a block counts for itself, so that what it makes and does costs no atomic operation: while any are
// left, the root's `remaining` has `units` for them.
struct Held {
  u32 root;
  u32 units;
  u32 left;
};

// What a block keeps to itself; one lane at a time touches it.
struct Own {
  Task tasks[FB_LOCAL];
  u32 count;
  Held held;
  // The tickets that it holds in each ring.
  u32 tickets[2];
  // It is counted in the grid's `idle`, and (FB_LOOK) what it found there when it looked last.
  u32 idle;
  bool others_idle;
  // Its heartbeat as it is, so that it need not be read.
  u32 epoch;
  bool busy;
  // Tasks so far, and when it looked at the stop word.
  u32 turns;
  u64 looked;
};

// Where a task function finds what it may use.
struct Context {
  Grid *grid;
  u32 block;
  u32 root;
  // The task's: its ring, and whether its root has a limit.
  u32 priority;
  Own *own;
};

FB_DEVICE void fb_fail(Grid *g, u32 root, u32 status) { fb_or(&g->roots[root].status, status); }

// Memory from the grid's heap: null when there is no room, or no heap. Any lane may ask.
FB_DEVICE void *fb_new(Context *c, u64 bytes) {
  Heap *h = (Heap *)c->grid->heap;
  return h ? fb_malloc(h, bytes) : 0;
}

// Gives it back; what fb_new has not given, or has been given back before, is refused, and the root's status says so.
FB_DEVICE bool fb_delete(Context *c, void *at) {
  Heap *h = (Heap *)c->grid->heap;
  if (!at || (h && fb_free(h, at) == FB_FREED)) return true;
  fb_fail(c->grid, c->root, FB_BAD_FREE);
  return false;
}

// Whether others have nothing to do. On a GPU everybody's word is looked at now and then only.
FB_DEVICE bool fb_others_idle(Context *c) {
#ifdef FB_GPU
  return c->own->others_idle;
#else
  return (int)fb_load(&c->grid->idle) > 0;
#endif
}

// Gives a task to everybody; priority 0 is taken first. Others do not know what this block counts for itself.
FB_DEVICE bool fb_share(Context *c, Task *t) {
  Grid *g = c->grid;
  Queue *q = &g->queues[t->priority & 1];
  if (!fb_reserve(q)) return false;
  if (!t->counted) {
    // The last one that the block has takes one of its units along, any other a new one.
    Held *h = &c->own->held;
    const u32 add = --h->left > 0 ? 1 : 1 - h->units;
    if (add != 0) fb_add(&g->roots[t->root].remaining, add);
    t->counted = 1;
  }
  fb_put_reserved(q, t);
  return true;
}

// A task for whoever has time, as part of the same root; false when there is no room (the caller may do it itself).
// Called by one lane.
FB_DEVICE bool fb_spawn(Context *c, u32 function, u64 first, u64 count, const void *args, u32 bytes) {
  Grid *g = c->grid;
  Task t;
  t.function = function;
  t.root = c->root;
  t.first = first;
  t.count = count;
  t.priority = c->priority;
  for (u32 i = 0; i < sizeof t.args; i++) t.args[i] = i < bytes ? ((const unsigned char *)args)[i] : 0;
  Own *o = c->own;
  t.counted = o->held.left == 0 || o->held.root != c->root;
  if (t.counted) fb_add(&g->roots[c->root].remaining, 1);
  else o->held.left++;
  // What is one's own is quickest, unless others have nothing to do.
  if (o->count < FB_LOCAL && (!fb_others_idle(c) || !fb_share(c, &t))) {
    o->tasks[o->count++] = t;
    return true;
  }
  if (o->count < FB_LOCAL || fb_share(c, &t)) return true;
  if (t.counted) fb_add(&g->roots[c->root].remaining, (u32)-1);
  else o->held.left--;
  return false;
}

// A task that begins when `pending` others have said so (fb_release). Its number, or FB_NONE when there is no room.
// Called by one lane.
FB_DEVICE u32 fb_node(Context *c, u32 pending, u32 function, u64 first, u64 count, const void *args, u32 bytes) {
  Grid *g = c->grid;
  Task free;
  Queue *q = &g->queues[c->priority & 1];
  if (pending == 0 || !fb_reserve(q)) return FB_NONE;
  if (fb_take(&g->free_nodes, &free, 1) == 0) {
    fb_add(&q->space, 1);
    return FB_NONE;
  }
  const u32 n = (u32)free.first;
  Node *node = &g->nodes[n];
  node->task.function = function;
  node->task.root = c->root;
  node->task.first = first;
  node->task.count = count;
  node->task.priority = c->priority;
  node->task.counted = 1;
  for (u32 i = 0; i < sizeof node->task.args; i++) node->task.args[i] = i < bytes ? ((const unsigned char *)args)[i] : 0;
  fb_add(&g->roots[c->root].remaining, 1);
  fb_store(&node->pending, pending);
  return n;
}

// `done` of those that node `n` waits for are done. The last one makes it a task. Called by one lane.
FB_DEVICE void fb_release_many(Context *c, u32 n, u32 done) {
  Grid *g = c->grid;
  Node *node = &g->nodes[n];
  if (done == 0 || fb_add(&node->pending, 0u - done) != done) return;
  Task t = node->task;
  Task free = t;
  free.first = n;
  fb_put(&g->free_nodes, &free);
  // Its place in the queue it has had since it was made.
  Queue *q = &g->queues[t.priority & 1];
  Own *o = c->own;
  if (o->count < FB_LOCAL && !fb_others_idle(c)) {
    o->tasks[o->count++] = t;
    fb_add(&q->space, 1);
    return;
  }
  fb_put_reserved(q, &t);
}

FB_DEVICE void fb_release(Context *c, u32 n) { fb_release_many(c, n, 1); }

// Takes `n` of the root's fuel; false when it is used up, and the task had better return.
FB_DEVICE bool fb_burn(Context *c, u32 n) {
  if (!(c->priority & FB_LIMITED)) return true;
  Root *r = &c->grid->roots[c->root];
  if ((int)fb_add(&r->fuel, (u32)-(int)n) >= (int)n) return true;
  fb_fail(c->grid, c->root, FB_OUT_OF_FUEL);
  return false;
}

// The root's result: 40 bytes that the host gets with the completion.
FB_DEVICE unsigned char *fb_result(Context *c) { return c->grid->roots[c->root].result; }

// The function table, made from the program's functions: false for a number that is none of them.
FB_DEVICE bool fb_call(u32 function, Context *c, const Task *t);

// A task function for all lanes of a block together: `c` is the context, `t` the task.
#define TASK(name) FB_DEVICE void name(Context *c, const Task *t)
// One that is called for each item of the task's range, `i`, by a lane or by a whole warp; `fb_in_warp` is the lane's number.
// Lanes or warps of a block have different items, and may end at different times.
#define FB_ITEMS(name, lane, step)                                                    \
  FB_DEVICE void name##_item(Context *c, const Task *t, u64 i);                        \
  FB_DEVICE void name(Context *c, const Task *t) {                                     \
    for (u64 i = t->first + (lane); i < t->first + t->count; i += (step)) name##_item(c, t, i); \
  }                                                                                    \
  FB_DEVICE void name##_item(Context *c, const Task *t, u64 i)
#define TASK_PER_THREAD(name) FB_ITEMS(name, fb_lane(), fb_lanes())
#define TASK_PER_WARP(name) FB_ITEMS(name, fb_lane() / FB_WARP, (fb_lanes() + FB_WARP - 1) / FB_WARP)

// For tasks of a dataflow graph: where the bytes of a port are.
struct Span {
  unsigned char *data;
  u64 bytes;
};

FB_DEVICE Span fb_span(const Task *t, u32 port) { return (*(const Span *const *)t->args)[port]; }

// A task is about to run: from now on the block counts for its root, if it does not for another one.
FB_DEVICE void fb_hold(Held *h, Task *t) {
  if (!t->counted) return;
  if (h->left == 0) {
    h->root = t->root;
    h->units = 0;
  } else if (h->root != t->root) {
    return;
  }
  h->units++;
  h->left++;
  t->counted = 0;
}

// `n` of a root's tasks are done; the last ones tell the host.
FB_DEVICE void fb_subtract(Grid *g, u32 root, u32 n) {
  Root *r = &g->roots[root];
  if (fb_add(&r->remaining, (u32)-(int)n) != n) return;
  Done *d = &g->done[root];
  fb_copy(d->result, r->result, sizeof d->result);
  d->status = fb_load(&r->status);
  fb_store_sys(&d->seq, r->seq);
}

// A task is done.
FB_DEVICE void fb_done(Grid *g, Held *h, const Task *t) {
  if (t->counted) fb_subtract(g, t->root, 1);
  else if (--h->left == 0) fb_subtract(g, h->root, h->units);
}

// The slot of a ring's ticket, if the host has filled it: it becomes a root and its first task.
FB_DEVICE bool fb_receive(Grid *g, u32 ring, u32 ticket, Task *t) {
  Ring *r = &g->rings[ring];
  const u32 at = ticket & (r->size - 1);
  Slot *s = &r->slots[at];
  if (fb_load_sys(&s->seq) != ticket + 1) return false;
  const u32 root = r->first_root + at;
  Root *to = &g->roots[root];
  to->fuel = s->fuel;
  to->seq = ticket + 1;
  fb_clear(to->result, sizeof to->result);
  fb_store(&to->status, 0);
  fb_store(&to->remaining, 1);
  t->function = s->function;
  t->root = root;
  t->first = s->first;
  t->count = s->count;
  t->priority = s->fuel ? ring | FB_LIMITED : ring;
  t->counted = 1;
  fb_copy(t->args, s->args, sizeof t->args);
  return true;
}

// A sign of life.
FB_DEVICE void fb_beat(Grid *g, u32 block, Own *o) { fb_note(&g->beats[block].epoch, ++o->epoch); }

FB_DEVICE void fb_count_idle(Grid *g, Own *o, u32 idle) {
  if (o->idle != idle) fb_add(&g->idle, idle - o->idle);
  o->idle = idle;
}

// What a block does next. Called by lane 0.
FB_DEVICE u32 fb_next(Grid *g, u32 block, Task *t, Own *o) {
  u32 stop = 0;
  for (u32 round = 0;; round++) {
    // Between tasks that follow each other closely a look at the host's word would cost more than they do.
    if (round > 0 || fb_due(&o->looked)) stop = fb_load_sys(&g->control->stop);
    if (stop == FB_STOP_NOW) break;
    bool found = true;
    if (fb_receive(g, 0, o->tickets[0], t)) o->tickets[0] = fb_add(&g->rings[0].head, 1);
    else if (fb_take(&g->queues[0], t, 1)) {}
    else if (o->count > 0) *t = o->tasks[--o->count];
    else if (fb_receive(g, 1, o->tickets[1], t)) o->tickets[1] = fb_add(&g->rings[1].head, 1);
    else if ((o->count = fb_take(&g->queues[1], o->tasks, FB_BATCH)) > 0) *t = o->tasks[--o->count];
    else found = false;
    if (found) {
      fb_count_idle(g, o, 0);
      return 1;
    }
    // Of what was submitted before the word was written nothing is missed: the rings were looked at after it.
    if (stop == FB_STOP_DRAIN) break;
    fb_count_idle(g, o, 1);
    if (o->busy) fb_store_sys(&g->beats[block].busy, 0);
    o->busy = false;
    if ((round & 255) == 0) fb_beat(g, block, o);
    fb_idle(round);
  }
  fb_count_idle(g, o, 0);
  fb_store_sys(&g->beats[block].busy, 0);
  return 0;
}

// A range is done in pieces, so that others can have some of it: the rest goes back, half of it to whoever is idle.
FB_DEVICE void fb_split(Context *c, Task *t) {
  const u64 grain = c->grid->grain;
  while (t->count > grain) {
    const u64 half = fb_others_idle(c) ? t->count / 2 : t->count - grain;
    if (!fb_spawn(c, t->function, t->first + t->count - half, half, t->args, sizeof t->args)) return;
    t->count -= half;
    if (t->count <= grain) return;
  }
}

// What a block does with a task before its lanes run it. Called by lane 0; false when it is not to be run.
FB_DEVICE bool fb_begin(Context *c, Task *t) {
  Grid *g = c->grid;
  Own *o = c->own;
  Beat *b = &g->beats[c->block];
  c->root = t->root;
  c->priority = t->priority;
  fb_note(&b->function, t->function);
  fb_note(&b->root, t->root);
  if (!o->busy) fb_store_sys(&b->busy, 1);
  o->busy = true;
#ifdef FB_GPU
  if (o->turns++ % FB_LOOK == 0) o->others_idle = (int)fb_load(&g->idle) > 0;
#endif
  fb_hold(&o->held, t);
  if (t->priority & FB_LIMITED) {
    if (fb_load(&g->roots[t->root].status) & FB_OUT_OF_FUEL) return false;
    if (!fb_burn(c, 1)) return false;
  }
  fb_split(c, t);
  return true;
}

FB_DEVICE void fb_end(Context *c, const Task *t) {
  Own *o = c->own;
  fb_done(c->grid, &o->held, t);
  fb_beat(c->grid, c->block, o);
  // Half of what is piling up is for everybody.
  if (o->count > FB_LOCAL / 2 && fb_others_idle(c)) {
    while (o->count > FB_LOCAL / 4 && fb_share(c, &o->tasks[o->count - 1])) --o->count;
  }
}

FB_DEVICE void fb_enter(Grid *g, Own *o) {
  o->count = o->idle = o->epoch = o->turns = 0;
  o->held = Held{0, 0, 0};
  o->others_idle = o->busy = false;
  o->looked = 0;
  for (u32 i = 0; i < 2; i++) o->tickets[i] = fb_add(&g->rings[i].head, 1);
}

#ifdef FB_KERNELS

extern "C" __global__ void fb_grid(Grid *g) {
  __shared__ Task task;
  __shared__ Own own;
  __shared__ u32 state, run;
  Context c = {g, blockIdx.x, 0, 0, &own};
  if (fb_lane() == 0) fb_enter(g, &own);
  for (;;) {
    if (fb_lane() == 0) {
      state = fb_next(g, c.block, &task, &own);
      run = state && fb_begin(&c, &task);
    }
    fb_barrier();
    if (!state) return;
    c.root = task.root;
    c.priority = task.priority;
    if (run && !fb_call(task.function, &c, &task) && fb_lane() == 0) fb_fail(g, task.root, FB_UNKNOWN_FUNCTION);
    fb_barrier();
    if (fb_lane() == 0) fb_end(&c, &task);
  }
}

#else

extern "C" __attribute__((visibility("default"))) void fb_block(Grid *g, u32 block) {
  Task task;
  Own own;
  Context c = {g, block, 0, 0, &own};
  fb_enter(g, &own);
  while (fb_next(g, block, &task, &own)) {
    if (fb_begin(&c, &task) && !fb_call(task.function, &c, &task)) fb_fail(g, task.root, FB_UNKNOWN_FUNCTION);
    fb_end(&c, &task);
  }
}

#endif
