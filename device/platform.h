// What the resident runtime and the heap need of the machine, for GPUs and for the CPU. Everything else is written in terms
// of it.
//
// Scopes: `_sys` orders with the host, the others within the device. On the CPU a block is one thread and has one lane.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#if defined(__CUDACC__)

#define FB_DEVICE __device__ __forceinline__
#define FB_GPU 1
// The host starts kernels, rather than calling functions.
#define FB_KERNELS 1

FB_DEVICE u32 fb_load_sys(const u32 *p) { u32 v; asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
FB_DEVICE void fb_store_sys(u32 *p, u32 v) { asm volatile("st.release.sys.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
FB_DEVICE u64 fb_load64_sys(const u64 *p) { u64 v; asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
// The same, which the lanes of a warp do at once, some of them `beside` another whose word is of the same piece.
FB_DEVICE u64 fb_load64_beside_sys(const u64 *p, bool) { return fb_load64_sys(p); }
// In no order with others.
FB_DEVICE u64 fb_peek64_sys(const u64 *p) { u64 v; asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
FB_DEVICE u32 fb_peek(const u32 *p) { u32 v; asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
// Adds, and waits for nothing.
FB_DEVICE void fb_bump(u32 *p, u32 v) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
FB_DEVICE u64 fb_peek64(const u64 *p) { u64 v; asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
FB_DEVICE void fb_mark(u32 *p, u32 v) { asm volatile("st.relaxed.gpu.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
FB_DEVICE void fb_mark64(u64 *p, u64 v) { asm volatile("st.relaxed.gpu.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
// What nothing changes while the kernel runs: read once, however often it is asked for.
template <class T> FB_DEVICE T fb_kept(const T *p) {
  static_assert(sizeof(T) == 8 || sizeof(T) == 4, "a word");
  if (sizeof(T) == 8) {
    u64 v;
    asm("ld.global.nc.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return (T)v;
  }
  u32 v;
  asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return (T)(u64)v;
}
// These wait for no stores, and what comes after them is not told so; but what follows from their values, as an address or
// in a branch, comes after them.
FB_DEVICE u32 fb_count(u32 *p, u32 v) { u32 o; asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(o) : "l"(p), "r"(v) : "memory"); return o; }
FB_DEVICE u64 fb_clear64(u64 *p, u64 v) { u64 o; asm volatile("atom.acquire.gpu.global.and.b64 %0, [%1], %2;" : "=l"(o) : "l"(p), "l"(v) : "memory"); return o; }
FB_DEVICE u64 fb_strike64(u64 *p, u64 v) { u64 o; asm volatile("atom.relaxed.gpu.global.and.b64 %0, [%1], %2;" : "=l"(o) : "l"(p), "l"(v) : "memory"); return o; }
FB_DEVICE u64 fb_try64(u64 *p, u64 is, u64 v) { u64 o; asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;" : "=l"(o) : "l"(p), "l"(is), "l"(v) : "memory"); return o; }
// What was done before it is seen by whoever acts on these bits.
FB_DEVICE u64 fb_release64(u64 *p, u64 v) { u64 o; asm volatile("atom.release.gpu.global.or.b64 %0, [%1], %2;" : "=l"(o) : "l"(p), "l"(v) : "memory"); return o; }
// A compare-and-swap that waits for no stores. Loads whose values were used before it are before it.
FB_DEVICE u32 fb_try(u32 *p, u32 is, u32 v) { u32 o; asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(o) : "l"(p), "r"(is), "r"(v) : "memory"); return o; }
// What was done before is seen, on the device, before what is done after.
FB_DEVICE void fb_fence(void) { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Of two who each do something, come here, and look for what the other did, one sees it.
FB_DEVICE void fb_fence_all(void) { asm volatile("fence.sc.gpu;" ::: "memory"); }
// Behind what was written to memory of the host, before the task ends: the host hears of that.
FB_DEVICE void fb_to_host(void) { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// Sixteen bytes at once: whoever sees the last word sees the others.
FB_DEVICE void fb_store_quad_sys(u32 *p, u32 a, u32 b, u32 c, u32 last) {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1203
  const u64 low = a | (u64)b << 32, high = c | (u64)last << 32;
  asm volatile("{ .reg .b128 quad; mov.b128 quad, {%1, %2}; st.relaxed.sys.b128 [%0], quad; }" :: "l"(p), "l"(low), "l"(high) : "memory");
#else
  asm volatile("st.volatile.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(a), "r"(b), "r"(c), "r"(last) : "memory");
#endif
}
// What the lanes of a block share.
FB_DEVICE u32 fb_here_add(u32 *p, u32 v) { u32 o; asm volatile("{ .reg .u64 a; cvta.to.shared.u64 a, %1; atom.relaxed.cta.shared.add.u32 %0, [a], %2; }" : "=r"(o) : "l"(p), "r"(v) : "memory"); return o; }
FB_DEVICE void fb_here_min(u32 *p, u32 v) { asm volatile("{ .reg .u64 a; cvta.to.shared.u64 a, %0; red.relaxed.cta.shared.min.u32 [a], %1; }" :: "l"(p), "r"(v) : "memory"); }
FB_DEVICE u32 fb_load(const u32 *p) { u32 v; asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
FB_DEVICE void fb_store(u32 *p, u32 v) { asm volatile("st.release.gpu.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
// A word that somebody may look at, in no order with others.
FB_DEVICE void fb_note(u32 *p, u32 v) { asm volatile("st.relaxed.sys.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
// Adds and gives what was there before; everything before it is seen by whoever sees the sum, and the other way round.
FB_DEVICE u32 fb_add(u32 *p, u32 v) { u32 o; asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(o) : "l"(p), "r"(v) : "memory"); return o; }
FB_DEVICE u32 fb_or(u32 *p, u32 v) { u32 o; asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;" : "=r"(o) : "l"(p), "r"(v) : "memory"); return o; }
FB_DEVICE u32 fb_exchange(u32 *p, u32 v) { u32 o; asm volatile("atom.acq_rel.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(o) : "l"(p), "r"(v) : "memory"); return o; }
FB_DEVICE u32 fb_cas(u32 *p, u32 is, u32 v) { u32 o; asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(o) : "l"(p), "r"(is), "r"(v) : "memory"); return o; }
FB_DEVICE u64 fb_load64(const u64 *p) { u64 v; asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
FB_DEVICE void fb_store64(u64 *p, u64 v) { asm volatile("st.release.gpu.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory"); }
FB_DEVICE u64 fb_add64(u64 *p, u64 v) { u64 o; asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(o) : "l"(p), "l"(v) : "memory"); return o; }
FB_DEVICE u64 fb_or64(u64 *p, u64 v) { u64 o; asm volatile("atom.acq_rel.gpu.global.or.b64 %0, [%1], %2;" : "=l"(o) : "l"(p), "l"(v) : "memory"); return o; }
FB_DEVICE u64 fb_and64(u64 *p, u64 v) { u64 o; asm volatile("atom.acq_rel.gpu.global.and.b64 %0, [%1], %2;" : "=l"(o) : "l"(p), "l"(v) : "memory"); return o; }
FB_DEVICE u64 fb_cas64(u64 *p, u64 is, u64 v) { u64 o; asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;" : "=l"(o) : "l"(p), "l"(is), "l"(v) : "memory"); return o; }
FB_DEVICE u32 fb_ones(u32 v) { return (u32)__popc(v); }
FB_DEVICE u32 fb_lowest(u64 v) { return (u32)__ffsll((long long)v) - 1; }
FB_DEVICE u32 fb_highest(u64 v) { return 63 - (u32)__clzll((long long)v); }
// Where the thread is: its multiprocessor, and its warp there or nearly so.
FB_DEVICE u32 fb_processor(void) { u32 v; asm volatile("mov.u32 %0, %%smid;" : "=r"(v)); return v; }
FB_DEVICE u32 fb_in_warp(void) { u32 v; asm volatile("mov.u32 %0, %%laneid;" : "=r"(v)); return v; }
FB_DEVICE u32 fb_warp(void) { u32 v; asm volatile("mov.u32 %0, %%warpid;" : "=r"(v)); return v; }
FB_DEVICE void fb_relax(void) {
#if __CUDA_ARCH__ >= 700
  __nanosleep(40);
#endif
}
// For a block that has found nothing `round` times. Its SM has nothing else to do, but what it looks at is in memory that
// others use: it rests between two looks, unless the host's words are its own to look at, and after some milliseconds
// everybody looks half as often.
FB_DEVICE void fb_idle(u32 round, bool keeps) {
  if (!keeps) fb_relax();
#if __CUDA_ARCH__ >= 700
  if (round > 8192) __nanosleep(400);
#endif
}
FB_DEVICE u32 fb_lane(void) { return threadIdx.x; }
FB_DEVICE u32 fb_lanes(void) { return blockDim.x; }
FB_DEVICE void fb_barrier(void) { __syncthreads(); }
#define FB_WARP 32
// For the lanes of the first warp of a block, who look for work together: their numbers, whether each says so (a bit for
// each), what one of them says, and a place where they meet.
FB_DEVICE u32 fb_in_crew(void) { return threadIdx.x; }
FB_DEVICE u32 fb_votes(bool yes) { return __ballot_sync(~0u, yes); }
FB_DEVICE u32 fb_tell(u32 v, u32 from) { return __shfl_sync(~0u, v, from); }
FB_DEVICE u64 fb_tell64(u64 v, u32 from) { return __shfl_sync(~0u, v, from); }
FB_DEVICE void fb_together(void) { __syncwarp(); }
// Lanes of a warp that happen to be at the same place. Then, for all of them at once (groups of them would be served one
// after another, and come apart): who of them says the same, whether all or some do, what one of them says, all their bits,
// and a place where they meet: what each did before is done for all.
FB_DEVICE u32 fb_present(void) { return __activemask(); }
FB_DEVICE u32 fb_alike(u32 present, u32 v) { return __match_any_sync(present, v); }
FB_DEVICE bool fb_all_alike(u32 present, u32 v) { int all; __match_all_sync(present, v, &all); return all; }
FB_DEVICE bool fb_some_say(u32 present, bool yes) { return __any_sync(present, yes); }
FB_DEVICE u64 fb_from(u32 present, u64 v, u32 lane) { return __shfl_sync(present, v, lane); }
FB_DEVICE void fb_meet(u32 present) { __syncwarp(present); }
FB_DEVICE u32 fb_union(u32 present, u32 bits) {
#if __CUDA_ARCH__ >= 800
  return __reduce_or_sync(present, bits);
#else
  u32 all = 0;
  for (u32 rest = present; rest; rest &= rest - 1) all |= __shfl_sync(present, bits, fb_lowest(rest));
  return all;
#endif
}
FB_DEVICE u64 fb_cycles(void) { return (u64)clock64(); }

#else

#define FB_DEVICE static inline
#include <sched.h>
#include <string.h>
#include <unistd.h>

// Tests make every step a place where another thread may come in between.
#ifndef FB_STEP
#define FB_STEP()
#endif
FB_DEVICE u32 fb_load_sys(const u32 *p) { FB_STEP(); return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
FB_DEVICE void fb_store_sys(u32 *p, u32 v) { FB_STEP(); __atomic_store_n(p, v, __ATOMIC_RELEASE); }
FB_DEVICE void fb_note(u32 *p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
FB_DEVICE u64 fb_load64_sys(const u64 *p) { FB_STEP(); return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
FB_DEVICE u64 fb_load64_beside_sys(const u64 *p, bool beside) { if (!beside) FB_STEP(); return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
FB_DEVICE u64 fb_peek64_sys(const u64 *p) { FB_STEP(); return __atomic_load_n(p, __ATOMIC_RELAXED); }
FB_DEVICE u32 fb_peek(const u32 *p) { FB_STEP(); return __atomic_load_n(p, __ATOMIC_RELAXED); }
FB_DEVICE void fb_bump(u32 *p, u32 v) { FB_STEP(); __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
// What a GPU does in order because one needs the other's value, the CPU is told.
FB_DEVICE u64 fb_peek64(const u64 *p) { FB_STEP(); return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
FB_DEVICE void fb_mark(u32 *p, u32 v) { FB_STEP(); __atomic_store_n(p, v, __ATOMIC_RELEASE); }
FB_DEVICE void fb_mark64(u64 *p, u64 v) { FB_STEP(); __atomic_store_n(p, v, __ATOMIC_RELEASE); }
template <class T> FB_DEVICE T fb_kept(const T *p) { return *p; }
FB_DEVICE u32 fb_count(u32 *p, u32 v) { FB_STEP(); return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
FB_DEVICE u64 fb_clear64(u64 *p, u64 v) { FB_STEP(); return __atomic_fetch_and(p, v, __ATOMIC_ACQUIRE); }
FB_DEVICE u64 fb_strike64(u64 *p, u64 v) { FB_STEP(); return __atomic_fetch_and(p, v, __ATOMIC_ACQUIRE); }
FB_DEVICE u64 fb_try64(u64 *p, u64 is, u64 v) { FB_STEP(); __atomic_compare_exchange_n(p, &is, v, false, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE); return is; }
FB_DEVICE u64 fb_release64(u64 *p, u64 v) { FB_STEP(); return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }
FB_DEVICE u32 fb_try(u32 *p, u32 is, u32 v) { FB_STEP(); __atomic_compare_exchange_n(p, &is, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE); return is; }
// Nothing to do: what follows it here is stored with release.
FB_DEVICE void fb_fence(void) {}
// ThreadSanitizer knows no fences, and the steps before and after are ordered where it runs.
FB_DEVICE void fb_fence_all(void) {
#ifndef __SANITIZE_THREAD__
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
FB_DEVICE void fb_to_host(void) {}
FB_DEVICE void fb_store_quad_sys(u32 *p, u32 a, u32 b, u32 c, u32 last) {
  FB_STEP();
  p[0] = a;
  p[1] = b;
  p[2] = c;
  __atomic_store_n(&p[3], last, __ATOMIC_RELEASE);
}
FB_DEVICE u32 fb_load(const u32 *p) { FB_STEP(); return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
FB_DEVICE void fb_store(u32 *p, u32 v) { FB_STEP(); __atomic_store_n(p, v, __ATOMIC_RELEASE); }
FB_DEVICE u32 fb_add(u32 *p, u32 v) { FB_STEP(); return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
FB_DEVICE u32 fb_or(u32 *p, u32 v) { FB_STEP(); return __atomic_fetch_or(p, v, __ATOMIC_ACQ_REL); }
FB_DEVICE u32 fb_exchange(u32 *p, u32 v) { FB_STEP(); return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL); }
FB_DEVICE u32 fb_cas(u32 *p, u32 is, u32 v) { FB_STEP(); __atomic_compare_exchange_n(p, &is, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE); return is; }
FB_DEVICE u64 fb_load64(const u64 *p) { FB_STEP(); return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
FB_DEVICE void fb_store64(u64 *p, u64 v) { FB_STEP(); __atomic_store_n(p, v, __ATOMIC_RELEASE); }
FB_DEVICE u64 fb_add64(u64 *p, u64 v) { FB_STEP(); return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
FB_DEVICE u64 fb_or64(u64 *p, u64 v) { FB_STEP(); return __atomic_fetch_or(p, v, __ATOMIC_ACQ_REL); }
FB_DEVICE u64 fb_and64(u64 *p, u64 v) { FB_STEP(); return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); }
FB_DEVICE u64 fb_cas64(u64 *p, u64 is, u64 v) { FB_STEP(); __atomic_compare_exchange_n(p, &is, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE); return is; }
FB_DEVICE u32 fb_ones(u32 v) { return (u32)__builtin_popcount(v); }
FB_DEVICE u32 fb_lowest(u64 v) { return (u32)__builtin_ctzll(v); }
FB_DEVICE u32 fb_highest(u64 v) { return 63 - (u32)__builtin_clzll(v); }
// A number for the thread, from 0 on in the order of first use; a test may say it.
FB_DEVICE u32 fb_processor(void) {
#ifdef FB_PROCESSOR
  return FB_PROCESSOR;
#else
  static u32 next;
  static thread_local u32 mine = 0;
  if (mine == 0) mine = __atomic_add_fetch(&next, 1, __ATOMIC_RELAXED);
  return mine - 1;
#endif
}
FB_DEVICE void fb_relax(void) { sched_yield(); }
// Cores are not the grid's own: after a while it looks only now and then, and after a third of a second more seldom yet. (In a
// virtual machine to wake costs 20 µs of a core: every 100 µs, and the slack that the system adds, that is an eighth of one.)
static const u32 FB_YIELDS = 4000, FB_LOOKS_OFTEN = 2000;  // so many rounds each, then for as long as it takes
static const u32 FB_OFTEN_US = 100, FB_SELDOM_US = 500;
FB_DEVICE void fb_idle(u32 round, bool) {
  if (round < FB_YIELDS) sched_yield();
  else usleep(round < FB_YIELDS + FB_LOOKS_OFTEN ? FB_OFTEN_US : FB_SELDOM_US);
}
// A test may give a block several lanes, each a thread: then it says what is in the other branch.
#ifndef FB_LANES
FB_DEVICE u32 fb_warp(void) { return 0; }
FB_DEVICE u32 fb_lane(void) { return 0; }
FB_DEVICE u32 fb_lanes(void) { return 1; }
FB_DEVICE void fb_barrier(void) {}
#define FB_WARP 1
FB_DEVICE u32 fb_in_warp(void) { return 0; }
FB_DEVICE u32 fb_in_crew(void) { return 0; }
FB_DEVICE u32 fb_votes(bool yes) { return yes; }
FB_DEVICE u32 fb_tell(u32 v, u32 from) { return v; }
FB_DEVICE u64 fb_tell64(u64 v, u32 from) { return v; }
FB_DEVICE void fb_together(void) {}
FB_DEVICE u32 fb_present(void) { return 1; }
FB_DEVICE u32 fb_alike(u32, u32) { return 1; }
FB_DEVICE bool fb_all_alike(u32, u32) { return true; }
FB_DEVICE bool fb_some_say(u32, bool yes) { return yes; }
FB_DEVICE u64 fb_from(u32, u64 v, u32) { return v; }
FB_DEVICE u32 fb_union(u32, u32 bits) { return bits; }
FB_DEVICE void fb_meet(u32) {}
FB_DEVICE u32 fb_here_add(u32 *p, u32 v) { const u32 is = *p; *p += v; return is; }
FB_DEVICE void fb_here_min(u32 *p, u32 v) { if (v < *p) *p = v; }
#endif
// None where there is no counter that is cheap to read; a test may say it.
FB_DEVICE u64 fb_cycles(void) {
#if defined(FB_CYCLES)
  return FB_CYCLES;
#elif defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return 0;
#endif
}
// A driver for tests that runs kernels on the host: a block is a thread of one lane there, too.
#ifdef FB_KERNELS_ON_HOST
#define FB_KERNELS 1
#endif

#endif

// Ten microseconds or so.
#define FB_DUE_CYCLES 20000
// Whether so long has passed since `*last` that words which others rarely write are worth a look again.
FB_DEVICE bool fb_due(u64 *last) {
  const u64 now = fb_cycles();
  if (now != 0 && now - *last < FB_DUE_CYCLES) return false;
  *last = now;
  return true;
}
