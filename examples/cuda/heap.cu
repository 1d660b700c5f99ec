// Memory that threads of a kernel take and give back, in any CUDA program. Compile with: nvcc -I device heap.cu
#include <cstdio>

#include "forebay_heap.cuh"

// Each thread makes a list of as many nodes as it has been told, and takes it apart again.
struct Node {
  Node *next;
  unsigned value;
};

__global__ void lists(Heap *heap, unsigned long long *sum, unsigned *without) {
  const unsigned n = 1 + (blockIdx.x * blockDim.x + threadIdx.x) % 16;
  Node *first = nullptr;
  for (unsigned i = 1; i <= n; i++) {
    Node *node = (Node *)fb_malloc(heap, sizeof(Node));
    if (!node) {  // the heap is full; nothing traps
      atomicAdd(without, 1);
      break;
    }
    *node = Node{first, i};
    first = node;
  }
  unsigned long long mine = 0;
  while (first) {
    Node *next = first->next;
    mine += first->value;
    fb_free(heap, first);
    first = next;
  }
  atomicAdd(sum, mine);
}

int main() {
  FbHeap heap;
  cudaError_t e = fb_heap_create(&heap, 256ull << 20);
  if (e != cudaSuccess) {
    fprintf(stderr, "no heap: %s\n", cudaGetErrorString(e));
    return 1;
  }
  struct Found {
    unsigned long long sum;
    unsigned without;
  } *there, found = {};
  cudaMalloc((void **)&there, sizeof *there);
  cudaMemset(there, 0, sizeof *there);
  const unsigned blocks = 256, threads = 256;
  lists<<<blocks, threads>>>(heap.device, &there->sum, &there->without);
  e = cudaMemcpy(&found, there, sizeof found, cudaMemcpyDeviceToHost);
  HeapUse use;
  if (e == cudaSuccess) e = fb_heap_see(&heap, &use);
  fb_heap_destroy(&heap);
  cudaFree(there);
  if (e != cudaSuccess) {
    fprintf(stderr, "%s\n", cudaGetErrorString(e));
    return 1;
  }
  // 1 + … + n for n from 1 to 16, as often as there are threads for each.
  const unsigned long long expected = blocks * threads / 16 * 816ull;
  printf("sum %llu of %llu, %u pieces could not be had, %llu bytes taken at the end\n", found.sum, expected, found.without,
         (unsigned long long)(use.slots + use.large));
  return found.sum == expected && use.slots + use.large == 0 ? 0 : 1;
}
