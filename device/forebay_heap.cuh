// The heap on its own, for any CUDA C++ program: compile with nvcc -I device.
//
//     FbHeap heap;
//     if (fb_heap_create(&heap, 1ull << 30) != cudaSuccess) …   // a GiB, all of it for pieces but 2 %
//     kernel<<<blocks, threads>>>(heap.device, …);               // in it: fb_malloc(heap, bytes), fb_free(heap, pointer)
//                                                                // (not in a kernel that sets a heap up itself)
//     HeapUse use;
//     fb_heap_see(&heap, &use);                                  // while no kernel uses it
//     fb_heap_destroy(&heap);
//
// Without CUDA the same header is a heap for the threads of a C++ program (for tests); then fb_heap_create is not there, and
// fb_heap_setup and fb_heap_usage do what the kernels of these names do.
#pragma once

#include "platform.h"
#include "heap/set.h"
#include "heap/heap.h"
#include "heap/host.h"

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)

struct FbHeap {
  // For kernels.
  Heap *device;
  void *memory;
};

// A heap of `bytes` on the current device, what describes it included.
static inline cudaError_t fb_heap_create(FbHeap *heap, u64 bytes) {
  int device = 0, processors = 0;
  u32 *ok = nullptr, done = 0;
  heap->device = nullptr;
  heap->memory = nullptr;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (e == cudaSuccess) e = cudaMalloc(&heap->memory, bytes);
  if (e == cudaSuccess) e = cudaMalloc((void **)&ok, sizeof *ok);
  if (e == cudaSuccess) {
    // As many hints as warps that are awake at a time on a processor; few for a small heap.
    fb_heap_setup<<<4 * processors, 256>>>(heap->memory, bytes, (u32)processors, bytes >= 256u << 20 ? 64 : 4, ok);
    e = cudaMemcpy(&done, ok, sizeof done, cudaMemcpyDeviceToHost);
  }
  cudaFree(ok);
  if (e == cudaSuccess && !done) e = cudaErrorInvalidValue;
  if (e != cudaSuccess) {
    cudaFree(heap->memory);
    heap->memory = nullptr;
    return e;
  }
  heap->device = (Heap *)(((u64)heap->memory + 127) / 128 * 128);
  return e;
}

static inline cudaError_t fb_heap_see(const FbHeap *heap, HeapUse *use) {
  HeapUse *to = nullptr;
  cudaError_t e = cudaMalloc((void **)&to, sizeof *to);
  if (e == cudaSuccess) e = cudaMemset(to, 0, sizeof *to);
  if (e == cudaSuccess) {
    fb_heap_usage<<<64, 256>>>(heap->device, to);
    e = cudaMemcpy(use, to, sizeof *to, cudaMemcpyDeviceToHost);
  }
  cudaFree(to);
  return e;
}

static inline void fb_heap_destroy(FbHeap *heap) {
  cudaFree(heap->memory);
  heap->device = nullptr;
  heap->memory = nullptr;
}

#endif
