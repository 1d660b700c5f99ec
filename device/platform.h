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
// For a block that has found nothing `round` times: its SM has nothing else to do.
FB_DEVICE void fb_idle(u32 round) { fb_relax(); }
FB_DEVICE u32 fb_lane(void) { return threadIdx.x; }
FB_DEVICE u32 fb_lanes(void) { return blockDim.x; }
FB_DEVICE void fb_barrier(void) { __syncthreads(); }
#define FB_WARP 32
// Ten microseconds or so.
#define FB_DUE_CYCLES 20000
// Whether so long has passed since `*last` that words which others rarely write are worth a look again.
FB_DEVICE bool fb_due(u64 *last) {
  const u64 now = (u64)clock64();
  if (now - *last < FB_DUE_CYCLES) return false;
  *last = now;
  return true;
}

#else

#define FB_DEVICE static inline
#include <sched.h>
#include <unistd.h>

// Tests make every step a place where another thread may come in between.
#ifndef FB_STEP
#define FB_STEP()
#endif
FB_DEVICE u32 fb_load_sys(const u32 *p) { FB_STEP(); return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
FB_DEVICE void fb_store_sys(u32 *p, u32 v) { FB_STEP(); __atomic_store_n(p, v, __ATOMIC_RELEASE); }
FB_DEVICE void fb_note(u32 *p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
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
FB_DEVICE u64 fb_and64(u64 *p, u64 v) { FB_STEP(); return __atomic_fetch_and(p, v, __ATOMIC_ACQ_REL); }
FB_DEVICE u64 fb_cas64(u64 *p, u64 is, u64 v) { FB_STEP(); __atomic_compare_exchange_n(p, &is, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE); return is; }
FB_DEVICE u32 fb_ones(u32 v) { return (u32)__builtin_popcount(v); }
FB_DEVICE u32 fb_lowest(u64 v) { return (u32)__builtin_ctzll(v); }
FB_DEVICE u32 fb_highest(u64 v) { return 63 - (u32)__builtin_clzll(v); }
// A number for the thread, from 0 on in the order of first use.
FB_DEVICE u32 fb_processor(void) {
  static u32 next;
  static thread_local u32 mine = 0;
  if (mine == 0) mine = __atomic_add_fetch(&next, 1, __ATOMIC_RELAXED);
  return mine - 1;
}
FB_DEVICE u32 fb_in_warp(void) { return 0; }
FB_DEVICE u32 fb_warp(void) { return 0; }
FB_DEVICE void fb_relax(void) { sched_yield(); }
// Cores are not the grid's own: after a while it looks only now and then.
FB_DEVICE void fb_idle(u32 round) { if (round < 4000) sched_yield(); else usleep(100); }
FB_DEVICE u32 fb_lane(void) { return 0; }
FB_DEVICE u32 fb_lanes(void) { return 1; }
FB_DEVICE void fb_barrier(void) {}
#define FB_WARP 1
FB_DEVICE bool fb_due(u64 *last) { return true; }
// A driver for tests that runs kernels on the host: a block is a thread of one lane there, too.
#ifdef FB_KERNELS_ON_HOST
#define FB_KERNELS 1
#endif

#endif

// Copies between structs of the layout, whose bytes of that kind begin and end at multiples of 8: by single bytes they would
// be as many transactions on the bus.
FB_DEVICE void fb_copy(void *to, const void *from, u32 bytes) {
  for (u32 i = 0; i < bytes / 8; i++) ((u64 *)to)[i] = ((const u64 *)from)[i];
}
FB_DEVICE void fb_clear(void *to, u32 bytes) {
  for (u32 i = 0; i < bytes / 8; i++) ((u64 *)to)[i] = 0;
}
