// Breadth-first search as a CUDA graph whose body is repeated on the device while there is a next level (a conditional node,
// CUDA 12.4 or later). Behind the text of the grid's own benchmark, whose `expand` it shares: graph_while IN OUT REPEATS.
// IN is n, m, n + 1 offsets and m edges, 32 bits each; OUT the distances from vertex 0. Says the median in milliseconds.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

// One level: by everybody; the last block to end says whether there is another. Three counts take turns, as in search_at_once.
__global__ void level_in_loop(Search *s, u32 *level_and_ended, u32 *counts, cudaGraphConditionalHandle more) {
  const u32 level = fb_load(&level_and_ended[0]), n = fb_load(&counts[level % 3]);
  u32 *next = &counts[(level + 1) % 3];
  if (thread_of() == 0) fb_store(&counts[(level + 2) % 3], 0);
  expand(s, level, next, 0, n, thread_of() / FB_WARP, threads_of() / FB_WARP, threadIdx.x % FB_WARP);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicAdd(&level_and_ended[1], 1) == gridDim.x - 1) {
      fb_store(&level_and_ended[1], 0);
      fb_store(&level_and_ended[0], level + 1);
      cudaGraphSetConditional(more, fb_load(next) != 0);
    }
  }
}

static void must(cudaError_t e, const char *what) {
  if (e == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  exit(1);
}
#define MUST(call) must(call, #call)

static std::vector<u32> read_all(const char *path) {
  std::vector<u32> words;
  FILE *f = fopen(path, "rb");
  if (!f) return words;
  fseek(f, 0, SEEK_END);
  words.resize(ftell(f) / 4);
  rewind(f);
  if (fread(words.data(), 4, words.size(), f) != words.size()) words.clear();
  fclose(f);
  return words;
}

static u32 *place(const u32 *from, size_t words) {
  u32 *to = nullptr;
  MUST(cudaMalloc((void **)&to, words * 4 + 4));
  MUST(cudaMemcpy(to, from, words * 4, cudaMemcpyHostToDevice));
  return to;
}

int main(int argc, char **argv) {
  if (argc < 4) return 2;
  const std::vector<u32> in = read_all(argv[1]);
  const int repeats = atoi(argv[3]);
  if (in.size() < 3 || in.size() != 3 + (size_t)in[0] + in[1] || repeats < 1) {
    fprintf(stderr, "%s is no graph\n", argv[1]);
    return 2;
  }
  const u32 n = in[0];
  std::vector<u32> distances(n, ~0u);
  distances[0] = 0;
  u32 *offsets = place(&in[2], n + 1), *edges = place(&in[3 + n], in[1]), *found = place(distances.data(), n);
  u32 *frontier[2] = {place(distances.data(), n), place(distances.data(), n)};
  Search search{};
  search.offsets = offsets, search.edges = edges, search.distances = found;
  search.frontier[0] = frontier[0], search.frontier[1] = frontier[1];
  Search *there = nullptr;
  MUST(cudaMalloc((void **)&there, sizeof search));
  // The level, how many blocks have ended, and the three counts.
  const u32 begin[5] = {0, 0, 1, 0, 0}, zero = 0;
  u32 *state = place(begin, 5);
  cudaStream_t stream;
  MUST(cudaStreamCreate(&stream));
  int processors = 0;
  MUST(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));

  double best = 1e30;
  // Few blocks end a small level sooner, many do a large one faster: the better of both for this graph.
  for (const unsigned blocks : {(unsigned)processors, 8u * processors}) {
    cudaGraph_t graph;
    MUST(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle more;
    MUST(cudaGraphConditionalHandleCreate(&more, graph, 1, cudaGraphCondAssignDefault));
    cudaGraphNodeParams loop = {};
    loop.type = cudaGraphNodeTypeConditional;
    loop.conditional.handle = more;
    loop.conditional.type = cudaGraphCondTypeWhile;
    loop.conditional.size = 1;
    cudaGraphNode_t node;
#if CUDART_VERSION >= 13000
    MUST(cudaGraphAddNode(&node, graph, nullptr, nullptr, 0, &loop));
#else
    MUST(cudaGraphAddNode(&node, graph, nullptr, 0, &loop));
#endif
    u32 *counts = state + 2;
    void *arguments[] = {&there, &state, &counts, &more};
    cudaKernelNodeParams level = {};
    level.func = (void *)level_in_loop;
    level.gridDim = dim3(blocks);
    level.blockDim = dim3(256);
    level.kernelParams = arguments;
    MUST(cudaGraphAddKernelNode(&node, loop.conditional.phGraph_out[0], nullptr, 0, &level));
    cudaGraphExec_t exec;
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<double> times;
    // The first one is not counted.
    for (int i = 0; i <= repeats; i++) {
      MUST(cudaMemcpy(there, &search, sizeof search, cudaMemcpyHostToDevice));
      MUST(cudaMemcpy(found, distances.data(), n * 4ull, cudaMemcpyHostToDevice));
      MUST(cudaMemcpy(frontier[0], &zero, 4, cudaMemcpyHostToDevice));
      MUST(cudaMemcpy(state, begin, sizeof begin, cudaMemcpyHostToDevice));
      MUST(cudaDeviceSynchronize());
      const auto begun = std::chrono::steady_clock::now();
      MUST(cudaGraphLaunch(exec, stream));
      MUST(cudaStreamSynchronize(stream));
      const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begun;
      if (i > 0) times.push_back(took.count());
    }
    std::sort(times.begin(), times.end());
    best = std::min(best, times[times.size() / 2]);
    MUST(cudaGraphExecDestroy(exec));
    MUST(cudaGraphDestroy(graph));
  }
  std::vector<u32> out(n);
  MUST(cudaMemcpy(out.data(), found, n * 4ull, cudaMemcpyDeviceToHost));
  FILE *f = fopen(argv[2], "wb");
  if (!f || fwrite(out.data(), 4, n, f) != n || fclose(f)) return 1;
  printf("%f\n", best);
  return 0;
}
