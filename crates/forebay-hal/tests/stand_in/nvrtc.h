// The stand-in for NVIDIA's run-time compiler: the host's g++, for one lane at a time. Part of `cuda.cpp`.
#pragma once

struct Program { std::string source, log, binary; };

static const char* HEADER = R"(
#include <cmath>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>
#define FB_KERNELS_ON_HOST 1
#define __shared__
namespace stand_in { struct Dim { unsigned x, y, z; }; }
static thread_local stand_in::Dim threadIdx, blockIdx, blockDim, gridDim;
#define __global__ __attribute__((visibility("default")))
#define __launch_bounds__(threads)
#define __device__
#define __forceinline__ inline
#define __restrict__
template <class T> static T min(T a, T b) { return b < a ? b : a; }
template <class T> static T max(T a, T b) { return a < b ? b : a; }
template <class T, class U> static T atomicAdd(T* p, U v) { return __atomic_fetch_add(p, (T)v, __ATOMIC_RELAXED); }
namespace stand_in {
template <class... A, size_t... I> void call(void (*f)(A...), void** p, std::index_sequence<I...>) {
  f(*(A*)p[I]...);
}
template <class... A> void run(void (*f)(A...), void** p, Dim g, Dim b) {
  gridDim = g;
  blockDim = b;
  for (blockIdx.z = 0; blockIdx.z < g.z; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < g.y; blockIdx.y++)
      for (blockIdx.x = 0; blockIdx.x < g.x; blockIdx.x++)
        for (threadIdx.z = 0; threadIdx.z < b.z; threadIdx.z++)
          for (threadIdx.y = 0; threadIdx.y < b.y; threadIdx.y++)
            for (threadIdx.x = 0; threadIdx.x < b.x; threadIdx.x++) call(f, p, std::index_sequence_for<A...>());
}
// Blocks that stay and wait for each other: a thread for each. One that faults ends, as far as the others can tell, never.
extern "C" __attribute__((visibility("default"))) void (*stand_in_guarded)(void (*)(void*), void*) = nullptr;
template <class... A> void run_at_once(void (*f)(A...), void** p, Dim g, Dim b) {
  struct Block { void (*f)(A...); void** p; Dim g, b; unsigned at; };
  std::vector<Block> blocks;
  for (unsigned i = 0; i < g.x; i++) blocks.push_back({f, p, g, b, i});
  std::vector<std::thread> threads;
  for (auto& block : blocks)
    threads.emplace_back([&block] {
      stand_in_guarded([](void* at) {
        auto& k = *(Block*)at;
        gridDim = k.g; blockDim = k.b; blockIdx = {k.at, 0, 0}; threadIdx = {0, 0, 0};
        call(k.f, k.p, std::index_sequence_for<A...>());
      }, &block);
    });
  for (auto& t : threads) t.join();
}
template <class... A> size_t sizes(void (*)(A...), size_t* out) {
  size_t n = 0;
  ((out[n++] = sizeof(A)), ...);
  return n;
}
}
// glibc has another type of that name.
#define ulong cuda_ulong
#line 1 "kernel.cu"
)";

static std::string read_file(const std::string& path) {
  std::ifstream f(path, std::ios::binary);
  std::stringstream s;
  s << f.rdbuf();
  return s.str();
}

API int nvrtcVersion(int* major, int* minor) { *major = 12; *minor = 0; return 0; }
API int nvrtcCreateProgram(void** p, const char* source, const char*, int, const char* const*, const char* const*) {
  *p = new Program{source, "", ""};
  return 0;
}
API int nvrtcDestroyProgram(void** p) { delete (Program*)*p; *p = nullptr; return 0; }
API int nvrtcCompileProgram(void* handle, int, const char* const*) {
  auto* p = (Program*)handle;
  const char* temporary = getenv("TMPDIR");
  std::string base = std::string(temporary ? temporary : P_tmpdir) + "/stand-in-XXXXXX";
  if (!mkdtemp(base.data())) return 1;
  std::string text = std::string(HEADER) + p->source + "\n";
  std::regex kernel(R"((?:KERNEL|__global__)\s+void\s+(?:__launch_bounds__\((\w+)\)\s+)?(\w+)\s*\()");
  for (auto it = std::sregex_iterator(p->source.begin(), p->source.end(), kernel); it != std::sregex_iterator(); ++it) {
    std::string n = (*it)[2], bound = (*it)[1].matched ? std::string((*it)[1]) : "1024";
    text += "extern \"C\" { __global__ unsigned stand_in_bound_" + n + " = " + bound + "; }\n"
             "extern \"C\" __global__ void stand_in_run_" + n +
            "(void** p, stand_in::Dim g, stand_in::Dim b) { stand_in::run" + (n == "fb_grid" || n.find("_at_once") != std::string::npos ? "_at_once" : "") + "(" + n +
            ", p, g, b); }\n" +
            "extern \"C\" __global__ size_t stand_in_sizes_" + n + "(size_t* out) { return stand_in::sizes(" + n +
            ", out); }\n";
  }
  std::ofstream(base + "/kernel.cpp") << text;
  std::string command = "g++ -std=c++17 -O2 -fno-strict-aliasing -w -pthread -ffp-contract=off -fvisibility=hidden -fpermissive -shared -fPIC -Wl,-Bsymbolic -o " + base +
                        "/kernel.so " + base + "/kernel.cpp 2> " + base + "/log";
  int status = system(command.c_str());
  // g++ says kernel.cu:3:10: error: ...; NVRTC says kernel.cu(3): error: ...
  p->log = std::regex_replace(read_file(base + "/log"), std::regex(R"(kernel\.cu:(\d+):\d+: )"), "kernel.cu($1): ");
  if (status == 0) {
    std::string so = read_file(base + "/kernel.so");
    uint64_t n = so.size();
    p->binary = std::string("STANDIN", 8) + std::string((char*)&n, 8) + so;
  }
  if (system(("rm -r " + base).c_str())) return 1;
  return status == 0 ? 0 : 6;
}
API int nvrtcGetProgramLogSize(void* p, size_t* n) { *n = ((Program*)p)->log.size() + 1; return 0; }
API int nvrtcGetProgramLog(void* p, char* out) { strcpy(out, ((Program*)p)->log.c_str()); return 0; }
API int nvrtcGetNumSupportedArchs(int* n) { *n = 1; return 0; }
API int nvrtcGetSupportedArchs(int* to) { *to = 10; return 0; }
API int nvrtcGetPTXSize(void*, size_t*) { return 3; }
API int nvrtcGetPTX(void*, char*) { return 3; }
API int nvrtcGetCUBINSize(void* p, size_t* n) { *n = ((Program*)p)->binary.size(); return 0; }
API int nvrtcGetCUBIN(void* p, char* out) { auto& b = ((Program*)p)->binary; memcpy(out, b.data(), b.size()); return 0; }
