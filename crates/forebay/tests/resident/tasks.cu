// What the tests of the grid submit, on the CPU and on GPUs. A `TASK` is run by all lanes of a block.
FB_DEVICE u64 arg(const Task *t, u32 i) { return ((const u64 *)t->args)[i]; }
// What is counted is the host's, who reads it when it hears of the task's end.
FB_DEVICE void count(u64 address, u64 by) {
#ifdef FB_GPU
  atomicAdd((u64 *)address, by);
#else
  __atomic_fetch_add((u64 *)address, by, __ATOMIC_RELAXED);
#endif
  fb_to_host();
}
// The same for the lanes of a block together: each addition goes across the bus.
FB_DEVICE void count_together(u64 address, u64 by) {
#ifdef FB_GPU
  for (u32 i = FB_WARP / 2; i > 0; i /= 2) by += __shfl_down_sync(~0u, by, i);
#endif
  if (fb_lane() % FB_WARP == 0) count(address, by);
}
TASK(add) {
  if (fb_lane() == 0) *(u64 *)fb_result(c) = arg(t, 0) + arg(t, 1);
}
TASK(sum) {
  u64 sum = 0;
  for (u64 i = t->first + fb_lane(); i < t->first + t->count; i += fb_lanes()) sum += i;
  count_together(arg(t, 0), sum);
}
// A tree: each task makes two of one less; the leaves count.
TASK(tree) {
  if (fb_lane() != 0) return;
  const u64 depth = arg(t, 0);
  if (depth == 0) { count(arg(t, 1), 1); return; }
  const u64 args[2] = {depth - 1, arg(t, 1)};
  for (u32 i = 0; i < 2; i++)
    if (!fb_spawn(c, FN_tree, 0, 1, args, sizeof args)) {
      // No room: all of that half at once.
      count(arg(t, 1), 1ull << (depth - 1));
      count(arg(t, 2), 1);
    }
}
// A diamond: one task, `n` that wait for it, one that waits for all of them.
TASK(diamond) {
  if (fb_lane() != 0) return;
  const u64 n = arg(t, 0);
  const u64 last[2] = {arg(t, 1), n};
  const u32 end = fb_node(c, (u32)n, FN_diamond_end, 0, 1, last, sizeof last);
  if (end == FB_NONE) { fb_fail(c->grid, c->root, FB_FIRST_OWN); return; }
  for (u64 i = 0; i < n; i++) {
    const u64 args[2] = {arg(t, 1), end};
    if (!fb_spawn(c, FN_diamond_side, i, 1, args, sizeof args)) {
      count(arg(t, 1), 1);
      fb_release(c, end);
    }
  }
}
TASK(diamond_side) {
  if (fb_lane() != 0) return;
  count(arg(t, 0), 1);
  fb_release(c, (u32)arg(t, 1));
}
TASK(diamond_end) {
  // All sides have been here.
  if (fb_lane() == 0) *(u64 *)fb_result(c) = *(const volatile u64 *)arg(t, 0) == arg(t, 1);
}
TASK(endless) {
  while (fb_burn(c, 1)) {}
}
TASK(deaf) {
  // Says that it has begun, and waits for a word.
  if (arg(t, 1)) fb_store_sys((u32 *)arg(t, 1), 1);
  const u32 *word = (const u32 *)arg(t, 0);
  while (!fb_load_sys(word)) {}
}
TASK(fails) { if (fb_lane() == 0) fb_fail(c->grid, c->root, FB_FIRST_OWN << 3); }
TASK(unknown) { if (fb_lane() == 0) fb_spawn(c, 999, 0, 1, 0, 0); }
// Numbers as a list on the heap: its sum, and with a second argument also a piece that is freed twice.
TASK(heap) {
  if (fb_lane() != 0) return;
  struct Link { Link *next; u64 value; unsigned char more[40]; };
  Link *all = 0;
  u64 made = 0, sum = 0;
  for (; made < arg(t, 0); made++) {
    Link *l = (Link *)fb_new(c, sizeof(Link));
    if (!l) break;
    l->next = all;
    l->value = made;
    all = l;
  }
  while (all) {
    Link *l = all;
    all = l->next;
    sum += l->value;
    fb_delete(c, l);
    if (!all && arg(t, 1)) fb_delete(c, l);
  }
  ((u64 *)fb_result(c))[0] = made;
  ((u64 *)fb_result(c))[1] = sum;
}
TASK(keep) { if (fb_lane() == 0) *(void **)fb_result(c) = fb_new(c, arg(t, 0)); }
// A range whose items a node waits for; it gets what they have added up.
TASK(gather) {
  if (fb_lane() != 0) return;
  const u64 last[2] = {arg(t, 0), arg(t, 1)};
  const u32 end = fb_node(c, (u32)arg(t, 1), FN_diamond_end, 0, 1, last, sizeof last);
  const u64 part[2] = {arg(t, 0), end};
  if (end == FB_NONE) { fb_fail(c->grid, c->root, FB_FIRST_OWN); return; }
  if (!fb_spawn(c, FN_gathered, 0, arg(t, 1), part, sizeof part)) {
    count(arg(t, 0), arg(t, 1));
    fb_release_many(c, end, (u32)arg(t, 1));
  }
}
TASK(gathered) {
  if (fb_lane() != 0) return;
  count(arg(t, 0), t->count);
  fb_release_many(c, (u32)arg(t, 1), (u32)t->count);
}
TASK(again) {
  // Makes itself anew until somebody lifts the gate.
  if (fb_lane() == 0 && fb_load_sys((const u32 *)arg(t, 0)) == 0) fb_spawn(c, FN_again, 0, 1, t->args, 8);
}
TASK(pend) {
  // Is not done before somebody else releases what waits.
  const u64 args[2] = {20, 3};
  if (fb_lane() == 0) fb_store_sys((u32 *)arg(t, 0), fb_node(c, 1, FN_add, 0, 1, args, sizeof args) + 1);
}
TASK(unpend) { if (fb_lane() == 0) fb_release(c, (u32)arg(t, 0)); }
TASK(lift) { if (fb_lane() == 0) fb_store_sys((u32 *)arg(t, 0), 1); }
TASK_PER_THREAD(thread_adds) { count(arg(t, 0), i); }
TASK_PER_WARP(warp_adds) { if (fb_in_warp() == 0) count(arg(t, 0), i); }
TASK(order) {
  // Puts its number behind those that were here before.
  u64 *list = (u64 *)arg(t, 0);
  if (fb_lane() == 0) list[1 + list[0]++] = arg(t, 1);
  fb_to_host();
}
// Every word of what was submitted follows from the first one; what it was, and 1, if so.
TASK_PER_THREAD(is_whole) {
  bool whole = t->count == 1;
  for (u64 k = 0; k < 4; k++) whole &= ((const u64 *)t->args)[k] == i * (2 * k + 3);
  *(u64 *)fb_result(c) = whole ? i + 1 : 0;
}
