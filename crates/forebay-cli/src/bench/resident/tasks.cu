// Task functions of `forebay bench resident`, and kernels that they are compared with on a GPU. Behind the text of the grid.
#ifndef FB_GPU
#include <math.h>
#include <stdlib.h>
#endif
// What the lanes of a block share. A block of the CPU has one lane; a test may give it more.
#ifdef FB_GPU
#define SHARED(type, name) __shared__ type name
#elif !defined SHARED
#define SHARED(type, name) type name
#endif

FB_DEVICE u64 arg(const Task *t, u32 i) { return ((const u64 *)t->args)[i]; }

TASK_PER_THREAD(echo) { *(u64 *)fb_result(c) = arg(t, 0) + 1; }

// A chain of tasks of which each makes the next: for itself, or for whoever has time. The latter counts how often that was
// another block.
TASK_PER_THREAD(chain) {
  const u64 left[1] = {arg(t, 0) - 1};
  if (left[0] == 0 || !fb_follow(c, FN_chain, 0, 1, left, sizeof left)) *(u64 *)fb_result(c) = left[0];
}
TASK_PER_THREAD(hop) {
  const u64 next[3] = {arg(t, 0) - 1, c->block, arg(t, 2) + (arg(t, 1) != c->block)};
  if (next[0] == 0 || !fb_spawn(c, FN_hop, 0, 1, next, sizeof next)) {
    ((u64 *)fb_result(c))[0] = next[0];
    ((u64 *)fb_result(c))[1] = next[2];
  }
}

FB_DEVICE u32 mix(u32 v) { return v * 2654435761u + 1; }
TASK_PER_THREAD(work) { ((u32 *)arg(t, 0))[i] = mix(((u32 *)arg(t, 0))[i]); }

TASK_PER_THREAD(tree) {
  const u64 depth = arg(t, 0);
  if (depth == 0) return;
  const u64 child[1] = {depth - 1};
  for (u32 i = 0; i < 2; i++)
    if (!fb_spawn(c, FN_tree, 0, 1, child, sizeof child)) fb_add64((u64 *)fb_result(c), (2ull << (depth - 1)) - 1);
}

// ReLU and softmax of 256 numbers, by one lane group of FB_WARP.
FB_DEVICE float over_warp_max(float v) {
#ifdef FB_GPU
  for (u32 d = 16; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
#endif
  return v;
}
FB_DEVICE float over_warp_sum(float v) {
#ifdef FB_GPU
  for (u32 d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
#endif
  return v;
}
FB_DEVICE void softmax_of(const float *in, float *out, u32 lane) {
  float most = 0, sum = 0;
  for (u32 k = lane; k < 256; k += FB_WARP) most = in[k] > most ? in[k] : most;
  most = over_warp_max(most);
  for (u32 k = lane; k < 256; k += FB_WARP) sum += out[k] = expf((in[k] > 0 ? in[k] : 0) - most);
  sum = over_warp_sum(sum);
  for (u32 k = lane; k < 256; k += FB_WARP) out[k] /= sum;
}
TASK_PER_WARP(softmax) { softmax_of((const float *)arg(t, 0) + i * 256, (float *)arg(t, 1) + i * 256, fb_in_warp()); }

// Many items at a time, for ranges and the kernel that they are compared with: on a GPU sixteen bytes in a piece, four pieces
// of a lane on their way at once. (For the CPU the compiler knows better.)
#ifndef FB_GPU
FB_DEVICE void mix_all(u32 *to, u64 first, u64 end, u64 thread, u64 threads) {
  for (u64 i = first + thread; i < end; i += threads) to[i] = mix(to[i]);
}
#else
struct alignas(16) Four { u32 v[4]; };
FB_DEVICE void mix_all(u32 *to, u64 first, u64 end, u64 thread, u64 threads) {
  // Where pieces begin and end, among items.
  const u64 skew = (u64)to / 4 & 3, begin = ((first + skew + 3) & ~3ull) - skew, last = ((end + skew) & ~3ull) - skew;
  const u64 head = begin < end ? begin : end;
  for (u64 i = first + thread; i < head; i += threads) to[i] = mix(to[i]);
  if (begin >= last) {
    for (u64 i = head + thread; i < end; i += threads) to[i] = mix(to[i]);
    return;
  }
  Four *quads = (Four *)(to + begin);
  const u64 n = (last - begin) / 4;
  for (u64 q = thread; q < n; q += 4 * threads) {
    Four some[4];
    for (u32 k = 0; k < 4; k++) if (q + k * threads < n) some[k] = quads[q + k * threads];
    for (u32 k = 0; k < 4; k++) {
      for (u32 j = 0; j < 4; j++) some[k].v[j] = mix(some[k].v[j]);
      if (q + k * threads < n) quads[q + k * threads] = some[k];
    }
  }
  for (u64 i = last + thread; i < end; i += threads) to[i] = mix(to[i]);
}
#endif
TASK(sweep) { mix_all((u32 *)arg(t, 0), t->first, t->first + t->count, fb_lane(), fb_lanes()); }

// Breadth-first search: a level with few vertices is done by the block that has it, which keeps the list of the next one to
// itself; one with many is a range for all blocks, and a node that waits for all of its vertices is the next level.
struct Search { const u32 *offsets, *edges; u32 *distances; u32 *frontier[2]; u32 count[2]; };
// (A test has small graphs, and says so.)
#ifndef FEW
#define FEW 1024
// From so many edges on a vertex is a whole warp's.
#define MANY 32
// Now and then a search gives way to others.
#ifdef FB_GPU
#define TURNS 4096
#else
#define TURNS 64
#endif
#endif

// Four edges of a lane, from `e` on, as far as there are: their trips to memory are under way together. Whether the other
// end was found now, and which it is, goes to `found`, which all lanes of a warp call.
template <class Found> FB_DEVICE void four_edges(const u32 *edges, u32 *distances, u32 level, u64 e, u64 step, u64 last, bool look, Found found) {
  u32 w[4], was[4];
  for (u32 k = 0; k < 4; k++) w[k] = e + k * step < last ? edges[e + k * step] : FB_NONE;
  for (u32 k = 0; k < 4; k++) was[k] = w[k] == FB_NONE ? 0 : look ? fb_peek(&distances[w[k]]) : FB_NONE;
  for (u32 k = 0; k < 4; k++) if (was[k] == FB_NONE) was[k] = fb_try(&distances[w[k]], FB_NONE, level + 1);
  for (u32 k = 0; k < 4; k++) found(w[k] != FB_NONE && was[k] == FB_NONE, w[k]);
}

// The vertices [first, end) of a list. `look`: most of the other ends are known already, and a look costs less than trying.
template <class Found> FB_DEVICE void each_edge(const Search *s, u32 level, const u32 *from, u64 first, u64 end, u64 warp, u64 warps, u32 lane, bool look, Found found) {
  const u32 *offsets = s->offsets, *edges = s->edges;
  u32 *distances = s->distances;
  // A lane has a vertex; with few vertices, fewer lanes do, of all warps.
  const u64 fair = (end - first) / warps, per = fair < 1 ? 1 : fair < FB_WARP ? fair : FB_WARP;
  for (u64 base = first + warp * per; base < end; base += warps * per) {
    u32 e = 0, last = 0;
    if (lane < per && base + lane < end) {
      const u32 v = from[base + lane];
      e = offsets[v];
      last = offsets[v + 1];
    }
    for (u32 many = fb_votes(last - e >= MANY); many; many &= many - 1) {
      const u32 whose = fb_lowest(many);
      const u64 begin = fb_tell(e, whose), until = fb_tell(last, whose);
      for (u64 at = begin; at < until; at += 4 * FB_WARP) four_edges(edges, distances, level, at + lane, FB_WARP, until, look, found);
      if (lane == whose) e = last;
    }
    for (u64 at = e; fb_votes(at < last); at += 4) four_edges(edges, distances, level, at, 1, last, look, found);
  }
}

// All that a warp found goes to a list of the device's with one addition.
FB_DEVICE void expand(Search *s, u32 level, u32 *count, u64 first, u64 end, u64 warp, u64 warps, u32 lane) {
  u32 *to = s->frontier[(level + 1) & 1];
  each_edge(s, level, s->frontier[level & 1], first, end, warp, warps, lane, true, [=](bool is, u32 w) {
    const u32 votes = fb_votes(is);
    if (votes == 0) return;
    const u32 one = fb_lowest(votes), at = fb_tell(lane == one ? fb_count(count, fb_ones(votes)) : 0, one);
    if (is) to[at + fb_ones(votes & ((1u << lane) - 1))] = w;
  });
}
FB_DEVICE void by_block(Search *s, u32 level, u64 first, u64 end) {
  const u32 warps = (fb_lanes() + FB_WARP - 1) / FB_WARP;
  expand(s, level, &s->count[(level + 1) & 1], first, end, fb_lane() / FB_WARP, warps, fb_lane() % FB_WARP);
}
// Levels of few vertices, in lists of the block's own. Three counts take turns: this level's, the next one's, and the one that
// is cleared. Ends where there are none, or more than there is room for (those are in memory), or after TURNS.
FB_DEVICE u32 by_one_block(Search *s, u32 l, u32 (*mine)[FEW], u32 *counts) {
  const u32 warps = (fb_lanes() + FB_WARP - 1) / FB_WARP;
  for (u32 turn = 0;; turn++, l++) {
    fb_barrier();
    const u32 n = counts[l % 3];
    if (n == 0 || n > FEW || turn == TURNS) return l;
    if (fb_lane() == 0) counts[(l + 2) % 3] = 0;
    u32 *next = &counts[(l + 1) % 3], *here = mine[(l + 1) & 1], *there = s->frontier[(l + 1) & 1];
    each_edge(s, l, mine[l & 1], 0, n, fb_lane() / FB_WARP, warps, fb_lane() % FB_WARP, false, [=](bool is, u32 w) {
      if (!is) return;
      const u32 at = fb_here_add(next, 1);
      *(at < FEW ? &here[at] : &there[at]) = w;
    });
  }
}
TASK(many) {
  by_block((Search *)arg(t, 0), (u32)arg(t, 1), t->first, t->first + t->count);
  fb_barrier();
  if (fb_lane() == 0) fb_release_many(c, (u32)arg(t, 2), (u32)t->count);
}
// One level as a range, for a host that waits for each.
TASK(one_level) { by_block((Search *)arg(t, 0), (u32)arg(t, 1), t->first, t->first + t->count); }
struct Lists { u32 mine[2][FEW], counts[3], node; bool given; };
TASK(level) {
  SHARED(Lists, lists);
  u32 (*const mine)[FEW] = lists.mine, *const counts = lists.counts;
  Search *s = (Search *)arg(t, 0);
  for (u32 l = (u32)arg(t, 1);; l++) {
    fb_barrier();
    if (fb_lane() == 0) {
      counts[l % 3] = fb_load(&s->count[l & 1]);
      counts[(l + 1) % 3] = 0;
    }
    fb_barrier();
    if (counts[l % 3] <= FEW) {
      for (u32 i = fb_lane(); i < counts[l % 3]; i += fb_lanes()) mine[l & 1][i] = s->frontier[l & 1][i];
      l = by_one_block(s, l, mine, counts);
      for (u32 i = fb_lane(); i < counts[l % 3] && i < FEW; i += fb_lanes()) s->frontier[l & 1][i] = mine[l & 1][i];
    }
    const u32 n = counts[l % 3];
    fb_barrier();
    if (fb_lane() == 0) {
      fb_store(&s->count[l & 1], n);
      fb_store(&s->count[(l + 1) & 1], 0);
      lists.node = FB_NONE;
      lists.given = n == 0;
      const u64 next[2] = {(u64)s, l + 1}, again[2] = {(u64)s, l};
      if (n == 0) *(u64 *)fb_result(c) = l;
      else if (n <= FEW) lists.given = fb_spawn(c, FN_level, 0, 1, again, sizeof again);
      else lists.node = fb_node(c, n, FN_level, 0, 1, next, sizeof next);
      const u64 part[3] = {(u64)s, l, lists.node};
      if (lists.node != FB_NONE) lists.given = fb_spawn(c, FN_many, 0, n, part, sizeof part);
    }
    fb_barrier();
    if (lists.given) return;
    // There was no room for others' part, so it is done here, and with it the wait of the next level, if there is one that waits.
    by_block(s, l, 0, n);
    if (lists.node == FB_NONE) continue;
    fb_barrier();
    if (fb_lane() == 0) fb_release_many(c, lists.node, n);
    return;
  }
}

// What the grid is compared with: ordinary kernels.
#ifdef FB_KERNELS
FB_DEVICE u64 thread_of(void) { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
FB_DEVICE u64 threads_of(void) { return (u64)gridDim.x * blockDim.x; }

extern "C" __global__ void echo_alone(u64 *to, u64 v) {
  if (thread_of() == 0) *to = v + 1;
}
extern "C" __global__ void work_alone(u32 *to, u64 first, u64 n) { mix_all(to, first, first + n, thread_of(), threads_of()); }
extern "C" __global__ void softmax_alone(const float *in, float *out, u64 n) {
  for (u64 i = thread_of() / FB_WARP; i < n; i += threads_of() / FB_WARP) softmax_of(in + i * 256, out + i * 256, threadIdx.x % FB_WARP);
}
extern "C" __global__ void level_alone(Search *s, u32 level, u32 n) {
  expand(s, level, &s->count[(level + 1) & 1], 0, n, thread_of() / FB_WARP, threads_of() / FB_WARP, threadIdx.x % FB_WARP);
}
// All levels in one kernel whose blocks, all there at once, wait for each other after each. Three counts take turns, so that
// one wait is enough: level's own, the next one's, and the one that is cleared.
extern "C" __global__ void search_at_once(Search *s, u32 *met, u32 *counts) {
  const u32 lanes = fb_lanes(), thread = blockIdx.x * lanes + fb_lane(), warps = gridDim.x * lanes / FB_WARP;
  for (u32 level = 0;; level++) {
    const u32 n = fb_load(&counts[level % 3]);
    if (n == 0) break;
    if (thread == 0) fb_store(&counts[(level + 2) % 3], 0);
    expand(s, level, &counts[(level + 1) % 3], 0, n, thread / FB_WARP, warps, thread % FB_WARP);
    fb_barrier();
    if (fb_lane() == 0) {
      const u32 all = (level + 1) * gridDim.x;
      fb_add(met, 1);
      while (fb_load(met) < all) fb_relax();
    }
    fb_barrier();
  }
}

// GROSR's design, for comparison: one block, a ring in memory of the host, one task at a time by all of its threads. A slot is
// a sequence number, a function and two numbers; an answer is a sequence number and a result.
struct Asked { u32 sequence, function; u64 args[2]; u64 rest[5]; };
struct Answer { u32 sequence, unused; u64 result; };
extern "C" __global__ void one_block_at_once(Asked *ring, Answer *answers, u32 slots) {
  __shared__ u32 function;
  __shared__ u64 a, b;
  for (u32 k = 0;; k++) {
    Asked *slot = &ring[k % slots];
    fb_barrier();
    if (threadIdx.x == 0) {
      while (fb_load_sys(&slot->sequence) != k + 1) {}
      function = slot->function;
      a = slot->args[0];
      b = slot->args[1];
    }
    fb_barrier();
    if (function == 0) return;
    if (function == 2 && threadIdx.x == 0) ((u32 *)a)[b] = mix(((u32 *)a)[b]);
    fb_barrier();
    if (threadIdx.x == 0) {
      answers[k % slots].result = a + 1;
      fb_store_sys(&answers[k % slots].sequence, k + 1);
    }
  }
}

// The heap against others: each thread has `rounds` times N pieces at once. `way`: 0 the heap, 1 the device's own malloc, 2 a
// pool that was divided before. Pieces that could be had and kept what was written are counted.
template <u32 N, bool MIXED> FB_DEVICE void pieces(Heap *h, u32 way, unsigned char *pool, u32 rounds, u64 *done) {
  u64 had = 0;
  for (u32 round = 0; round < rounds; round++) {
    u32 *held[N];
    for (u32 k = 0; k < N; k++) {
      u64 r = (thread_of() * rounds + round) * N + k;
      r *= 0x9E3779B97F4A7C15ull;
      const u64 bytes = MIXED ? 64 + (r >> 40) % 449 : 64;
      held[k] = (u32 *)(way == 0 ? fb_malloc(h, bytes) : way == 1 ? malloc(bytes) : pool + (thread_of() * N + k) * 512);
      if (held[k]) *(volatile u32 *)held[k] = (u32)thread_of() + k;
    }
    for (u32 k = 0; k < N; k++) {
      if (held[k] && *(volatile u32 *)held[k] == (u32)thread_of() + k) had++;
      if (way == 0) fb_free(h, held[k]);
      if (way == 1) free(held[k]);
    }
  }
  fb_add64(done, had);
}
extern "C" __global__ void churn(Heap *h, u32 way, unsigned char *pool, u32 rounds, u64 *done) { pieces<1, false>(h, way, pool, rounds, done); }
extern "C" __global__ void outstanding(Heap *h, u32 way, unsigned char *pool, u32 rounds, u64 *done) { pieces<16, false>(h, way, pool, rounds, done); }
extern "C" __global__ void mixed(Heap *h, u32 way, unsigned char *pool, u32 rounds, u64 *done) { pieces<4, true>(h, way, pool, rounds, done); }
#endif
