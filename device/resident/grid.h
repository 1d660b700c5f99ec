// The resident grid as its tasks see it: tasks and nodes that they make, results, memory. docs/resident.md has the protocol
// as numbered rules; the names of flags are those of layout.h.
#pragma once

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

// How many others have nothing to do. On a GPU everybody's word is looked at now and then only.
FB_DEVICE u32 fb_others_idle(Context *c) {
#ifdef FB_GPU
  return c->own->others_idle;
#else
  const int idle = (int)fb_load(&c->grid->state->idle);
  return idle > 0 ? (u32)idle : 0;
#endif
}

// Which task functions run many at a time, if they have one item each: by a lane, or by a warp. The others have all lanes.
#define FB_BY_BLOCK 0u
#define FB_BY_THREAD 1u
#define FB_BY_WARP 2u

// Both made from the program's functions: false for a number that is none of them.
FB_DEVICE bool fb_call(u32 function, Context *c, const Task *t);
FB_DEVICE u32 fb_kind(u32 function);

// A task as part of the same root: rather the block's own, or everybody's.
FB_DEVICE bool fb_make(Context *c, u32 function, u64 first, u64 count, const void *args, u32 bytes, u32 own) {
  Task t;
  t.function = function;
  t.root = c->root;
  t.first = first;
  t.count = count;
  t.priority = c->priority;
  fb_put_args(&t, args, bytes);
  Grid *g = c->grid;
  Queue *q = &g->state->queues[t.priority & 1];
  for (u32 tries = 0; tries < 2; own = !own, tries++) {
    if (own) {
      t.counted = fb_count_kept(c);
      if (t.counted == FB_COUNTED) fb_count_all(c);
      if (fb_keep(c, &t)) return true;
      if (t.counted == FB_HELD) fb_here_add(&c->own->held.left, (u32)-1);
      else fb_bump(&g->roots[c->root].remaining, (u32)-1);
    } else if (count == 1 && fb_others_idle(c) > 0) {
      // Counted before it is another's.
      t.counted = FB_COUNTED;
      fb_count_all(c);
      if (fb_put_post(c, &t)) return true;
      if (fb_reserve(q)) {
        fb_put_reserved(q, &t);
        return true;
      }
      fb_bump(&g->roots[c->root].remaining, (u32)-1);
    } else if (fb_reserve(q)) {
      t.counted = FB_COUNTED;
      fb_count_all(c);
      fb_put_reserved(q, &t);
      return true;
    }
  }
  return false;
}

// A task for whoever has time; false when there is no room (the caller may do it itself). What is one's own is quickest,
// unless others have nothing to do.
// Of a TASK one lane at a time calls it, of a TASK_PER_WARP one lane of the warp, of a TASK_PER_THREAD every lane as it likes.
FB_DEVICE bool fb_spawn(Context *c, u32 function, u64 first, u64 count, const void *args, u32 bytes) {
  return fb_make(c, function, first, count, args, bytes, fb_others_idle(c) == 0);
}

// The same of one that follows the caller, which is about to end: it begins soonest in the same block, whoever is idle.
FB_DEVICE bool fb_follow(Context *c, u32 function, u64 first, u64 count, const void *args, u32 bytes) {
  return fb_make(c, function, first, count, args, bytes, 1);
}

// A task that begins when `pending` others have said so (fb_release). Its number, or FB_NONE when there is no room.
// Called as fb_spawn is.
FB_DEVICE u32 fb_node(Context *c, u32 pending, u32 function, u64 first, u64 count, const void *args, u32 bytes) {
  Grid *g = c->grid;
  Task free;
  Queue *q = &g->state->queues[c->priority & 1];
  if (pending == 0 || !fb_reserve(q)) return FB_NONE;
  if (!fb_take(&g->state->free_nodes, &free)) {
    fb_bump(&q->space, 1);
    return FB_NONE;
  }
  const u32 n = (u32)free.first;
  Node *node = &g->nodes[n];
  node->task.function = function;
  node->task.root = c->root;
  node->task.first = first;
  node->task.count = count;
  node->task.priority = c->priority;
  node->task.counted = FB_COUNTED;
  fb_put_args(&node->task, args, bytes);
  fb_count_all(c);
  fb_store(&node->pending, pending);
  return n;
}

// `done` of those that node `n` waits for are done. The last one makes it a task. Called by one lane for each.
FB_DEVICE void fb_release_many(Context *c, u32 n, u32 done) {
  Grid *g = c->grid;
  Node *node = &g->nodes[n];
  if (done == 0 || fb_add(&node->pending, 0u - done) != done) return;
  Task t = node->task;
  Task free = t;
  free.first = n;
  fb_put(&g->state->free_nodes, &free);
  // Its place in the queue it has had since it was made.
  Queue *q = &g->state->queues[t.priority & 1];
  const bool idle = fb_others_idle(c) > 0;
  if (idle ? t.count == 1 && fb_put_post(c, &t) : fb_keep(c, &t)) fb_bump(&q->space, 1);
  else fb_put_reserved(q, &t);
}

FB_DEVICE void fb_release(Context *c, u32 n) { fb_release_many(c, n, 1); }

// Takes `n` of the root's fuel; false when it is used up, and the task had better return.
FB_DEVICE bool fb_burn(Context *c, u32 n) {
  if (!(c->priority & FB_LIMITED)) return true;
  Root *r = &c->grid->roots[c->root];
  if ((int)fb_add(&r->fuel, 0u - n) >= (int)n) return true;
  fb_fail(c->grid, c->root, FB_OUT_OF_FUEL);
  return false;
}

// The root's result: 40 bytes that the host gets with the completion.
FB_DEVICE unsigned char *fb_result(Context *c) { return (unsigned char *)c->grid->roots[c->root].result; }

// A task function for all lanes of a block together: `c` is the context, `t` the task.
#define TASK(name)                                   \
  FB_DEVICE u32 fb_kind_##name(void) { return FB_BY_BLOCK; } \
  FB_DEVICE void name(Context *c, const Task *t)
// One that is called for each item of the task's range, `i`, by a lane or by a whole warp; `fb_in_warp` is the lane's number.
// Lanes or warps of a block have different items, and may end at different times: they never wait for each other
// (fb_barrier). Tasks with one item run many at a time in a block.
#define FB_ITEMS(name, kind)                                                                                           \
  FB_DEVICE u32 fb_kind_##name(void) { return kind; }                                                                          \
  FB_DEVICE void name##_item(Context *c, const Task *t, u64 i);                                                        \
  FB_DEVICE void name(Context *c, const Task *t) {                                                                     \
    const u64 first = t->first, end = first + t->count;                                                                \
    for (u64 i = first + c->item; i < end; i += c->items) name##_item(c, t, i);                                        \
  }                                                                                                                    \
  FB_DEVICE void name##_item(Context *c, const Task *t, u64 i)
#define TASK_PER_THREAD(name) FB_ITEMS(name, FB_BY_THREAD)
#define TASK_PER_WARP(name) FB_ITEMS(name, FB_BY_WARP)

// For tasks of a dataflow graph: where the bytes of a port are.
struct Span {
  unsigned char *data;
  u64 bytes;
};

FB_DEVICE Span fb_span(const Task *t, u32 port) { return (*(const Span *const *)t->args)[port]; }

// A root is done: the host hears. The completion goes in pieces each of which says whether it is there, so that none of
// them waits for another.
FB_DEVICE void fb_complete(Grid *g, u32 root) {
  Root *r = &g->roots[root];
  Done *d = &g->done[root];
  u32 words[12];
  for (u32 i = 0; i < 10; i++) words[i] = r->result[i];
  words[10] = fb_peek(&r->status);
  words[11] = 0;
  const u32 seq = r->seq;
  fb_fence();
  for (u32 i = 0; i < 4; i++) fb_store_quad_sys(d->quads[i].words, words[3 * i], words[3 * i + 1], words[3 * i + 2], seq);
}

// `n` of a root's tasks are done.
FB_DEVICE void fb_subtract(Grid *g, u32 root, u32 n) {
  if (fb_add(&g->roots[root].remaining, 0u - n) == n) fb_complete(g, root);
}

// A task is done. Called by one of its lanes.
FB_DEVICE void fb_finish(Context *c, const Task *t) {
  if (t->counted == FB_HELD) fb_here_add(&c->own->held.left, (u32)-1);
  else if (t->counted == FB_COUNTED) fb_subtract(c->grid, t->root, 1);
  else fb_complete(c->grid, t->root);
}
