// The device that the stand-in plays: its contexts, memory, streams, faults, and how it runs kernels and graphs of them.
#pragma once

#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ptx/lanes.h"
#include "turns.h"

#define API extern "C" __attribute__((visibility("default")))

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, DEVICE_UNAVAILABLE = 46, NO_DEVICE = 100, INVALID_DEVICE = 101,
       INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
       ILLEGAL_ADDRESS = 700, LAUNCH_OUT_OF_RESOURCES = 701, INVALID_PTX = 218, MISALIGNED_ADDRESS = 716, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, INVALID_RESOURCE_TYPE = 914, INVALID_RESOURCE_CONFIGURATION = 915 };

static const size_t MEMORY = size_t(2) << 30;
static std::atomic<int> sticky{0};
static bool initialised = false;
// A context for each device, of which STAND_IN_DEVICES says how many there are.
static int context_tags[64];
static int number(const char* variable, int otherwise) {
  const char* n = getenv(variable);
  return n ? atoi(n) : otherwise;
}
static int device_count() { return number("STAND_IN_DEVICES", 1); }
// One that is closed to programs (nvidia-smi -c), and one that is for one program at a time, which another one has.
static bool is_closed(int d) { return d == number("STAND_IN_CLOSED", -1); }
static bool is_taken(int d) { return d == number("STAND_IN_TAKEN", -1); }
static bool is_context(void* c) { return c >= (void*)context_tags && c < (void*)(context_tags + device_count()); }
static thread_local void* current = nullptr;
static thread_local unsigned current_since = 0;
// A context that was reset has to be made current again.
static std::atomic<unsigned> resets{0};

// ---------------------------------------------------------------- memory

static std::mutex memory_lock;
static std::map<uint64_t, size_t> device_memory;
static std::map<void*, size_t> host_memory;
// What kernels and their code have for themselves.
static std::map<uint64_t, size_t> code_memory;
static size_t used = 0;
// Counts changes of all these.
static std::atomic<unsigned> memory_changes{0};

// Whether a kernel may touch these bytes, and what they are in.
static bool may_touch(uint64_t p, size_t n, uint64_t& first, uint64_t& end) {
  std::lock_guard<std::mutex> g(memory_lock);
  auto in = [&](uint64_t at, size_t size) {
    first = at;
    end = at + size;
    return p >= first && p + n <= end;
  };
  for (auto* all : {&device_memory, &code_memory}) {
    auto it = all->upper_bound(p);
    if (it != all->begin() && (--it, in(it->first, it->second))) return true;
  }
  auto it = host_memory.upper_bound((void*)p);
  return it != host_memory.begin() && (--it, in((uint64_t)it->first, it->second));
}
static uint64_t code_allocate(uint64_t n) {
  std::lock_guard<std::mutex> g(memory_lock);
  void* p = n < MEMORY ? calloc(1, (n + 255) / 256 * 256 + 256) : nullptr;
  if (!p) return 0;
  code_memory[(uint64_t)p] = n;
  memory_changes++;
  return (uint64_t)p;
}
static void code_release(uint64_t p) {
  std::lock_guard<std::mutex> g(memory_lock);
  memory_changes++;
  if (code_memory.erase(p)) free((void*)p);
}

static bool in_device(uint64_t p, size_t n) {
  std::lock_guard<std::mutex> g(memory_lock);
  auto it = device_memory.upper_bound(p);
  if (it == device_memory.begin()) return false;
  --it;
  return p >= it->first && p + n <= it->first + it->second;
}

// ---------------------------------------------------------------- streams

// One in so many, drawn: the same ones each time for the same STAND_IN_SEED, if the calls are.
static bool drawn(std::atomic<uint64_t>& calls, int one_in) {
  uint64_t x = (uint64_t(number("STAND_IN_SEED", 1)) << 32 | ++calls) * 0x9E3779B97F4A7C15;
  x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9;
  return (x ^ x >> 29) % one_in == 0;
}

// The call of the driver that this thread made last.
static thread_local const char* last_call = "a stream";

// Until it is there. The C library (glibc before 2.41, bug 25847) loses a wake-up now and then, so everybody looks again.
template <class There>
static void await(std::condition_variable& changed, std::unique_lock<std::mutex>& l, There there) {
  while (!changed.wait_for(l, std::chrono::milliseconds(200), there)) {
  }
}

struct Stream {
  std::mutex m;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  uint64_t enqueued = 0, executed = 0;
  bool stop = false;
  std::thread thread;
  void run() {
    // One command in so many faults.
    static const int falls = number("STAND_IN_FAULTS", 0);
    static std::atomic<uint64_t> done{0};
    unsigned random = getenv("STAND_IN_DELAYS") ? 1 + (unsigned)(uintptr_t)this / 64 : 0;
    std::unique_lock<std::mutex> l(m);
    for (;;) {
      await(changed, l, [&] { return stop || !work.empty(); });
      if (work.empty()) return;
      auto f = std::move(work.front());
      work.pop_front();
      l.unlock();
      if (random && (random = random * 1103515245 + 12345) >> 29 == 0) usleep(1000);
      if (!sticky && falls && drawn(done, falls)) sticky = LAUNCH_FAILED;
      if (!sticky) f();
      l.lock();
      executed++;
      changed.notify_all();
    }
  }
  void push(std::function<void()> f) {
    std::lock_guard<std::mutex> g(m);
    work.push_back(std::move(f));
    enqueued++;
    changed.notify_all();
  }
  void wait(uint64_t until) {
    std::unique_lock<std::mutex> l(m);
    auto there = [&] { return executed >= until; };
    if (changed.wait_for(l, std::chrono::seconds(20), there)) return;
    // Where nothing goes on any more, somebody will want to know who waits for what.
    fprintf(stderr, "stand-in: %s has waited for 20 s for a stream, which has done %llu of %llu\n", last_call,
            (unsigned long long)executed, (unsigned long long)until);
    await(changed, l, there);
  }
};

static std::mutex streams_lock;
static std::map<Stream*, std::shared_ptr<Stream>> streams;

static std::shared_ptr<Stream> stream_of(void* s) {
  std::lock_guard<std::mutex> g(streams_lock);
  auto it = streams.find((Stream*)s);
  return it == streams.end() ? nullptr : it->second;
}

static void synchronise_all() {
  std::vector<std::shared_ptr<Stream>> all;
  {
    std::lock_guard<std::mutex> g(streams_lock);
    for (auto& s : streams) all.push_back(s.second);
  }
  for (auto& s : all) {
    uint64_t n;
    {
      std::lock_guard<std::mutex> g(s->m);
      n = s->enqueued;
    }
    s->wait(n);
  }
}

// As on a GPU that others have filled: the next call of the one that this file names finds no memory, and the file goes; or
// one in so many, drawn, of all that need some.
static bool finds_no_memory(const char* call) {
  static const char* path = getenv("STAND_IN_NO_MEMORY_FOR");
  static const int scarce = number("STAND_IN_SCARCE", 0);
  static const std::set<std::string> need = {
      "cuMemAlloc_v2", "cuMemHostAlloc", "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemExportToShareableHandle",
      "cuModuleLoadData", "cuModuleGetFunction", "cuFuncLoad", "cuStreamCreate", "cuEventCreate",
      "cuLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemsetD8Async",
      "cuGraphCreate", "cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags", "cuGraphExecKernelNodeSetParams_v2",
      "cuGraphLaunch"};
  static std::atomic<uint64_t> calls{0};
  if (scarce && need.count(call) && drawn(calls, scarce)) return true;
  std::string which;
  return path && std::ifstream(path) >> which && which == call && !remove(path);
}
#define READY                                        \
  last_call = __func__;                              \
  if (!initialised) return NOT_INITIALIZED;          \
  if (int e = sticky) return e;                      \
  if (finds_no_memory(__func__)) return OUT_OF_MEMORY; \
  if (!is_context(current) || current_since != resets) return INVALID_CONTEXT
#define STREAM(name, handle)                     \
  auto name = stream_of(handle);                 \
  if (!name) return INVALID_HANDLE

// ---------------------------------------------------------------- faults

static thread_local sigjmp_buf escape;
static thread_local bool in_kernel = false;
static struct sigaction before_segv, before_bus;

static void on_fault(int number, siginfo_t* info, void* where) {
  if (in_kernel) {
    in_kernel = false;
    siglongjmp(escape, 1);
  }
  struct sigaction& old = number == SIGSEGV ? before_segv : before_bus;
  if (old.sa_flags & SA_SIGINFO) return old.sa_sigaction(number, info, where);
  signal(number, SIG_DFL);
}

// ---------------------------------------------------------------- kernels

struct Dim { unsigned x, y, z; };
struct Module { void* library; std::shared_ptr<ptx::Program> program; };
struct Function {
  std::function<void(void**, Dim, Dim, unsigned)> run;
  std::vector<size_t> sizes;
  // Threads that a block may have.
  unsigned bound;
  // Its code is on the device.
  std::atomic<bool> loaded{false};
  // Of one that is not run, but only has its time on the GPU.
  double ns_of_a_round = 0;
  // Loading code waits for what runs.
  void load() {
    if (!loaded.exchange(true)) synchronise_all();
  }
};

struct Launch {
  Function* f;
  Dim grid, block;
  unsigned shared;
  std::vector<std::vector<char>> args;
  static Launch of(Function* f, Dim grid, Dim block, unsigned shared, void** params) {
    Launch l{f, grid, block, shared, {}};
    for (size_t i = 0; i < f->sizes.size(); i++)
      l.args.emplace_back((char*)params[i], (char*)params[i] + f->sizes[i]);
    return l;
  }
  void run() {
    std::vector<void*> p;
    for (auto& a : args) p.push_back(a.data());
    if (sigsetjmp(escape, 1)) {
      sticky = ILLEGAL_ADDRESS;
      return;
    }
    in_kernel = true;
    f->run(p.data(), grid, block, shared);
    in_kernel = false;
  }
};

// A block of a kernel whose blocks run at once.
static void guarded(void (*f)(void*), void* at) {
  if (sigsetjmp(escape, 1)) {
    sticky = ILLEGAL_ADDRESS;
    return;
  }
  in_kernel = true;
  f(at);
  in_kernel = false;
}

// A kernel of NVIDIA's compiler.
static void run_ptx(const ptx::Kernel& k, void** arguments, Dim grid, Dim block, unsigned shared) {
  static std::atomic<uint64_t> launches{0};
  static const ptx::Machine machine{may_touch, &memory_changes, &sticky, code_allocate, code_release, (unsigned)number("STAND_IN_UNITS", 2)};
  const uint64_t seed = number("STAND_IN_SEED", 1) * 1000003 + launches++;
  try {
    ptx::Launched(k, machine, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared, arguments, seed).run();
  } catch (const ptx::Fault& f) {
    fprintf(stderr, "stand-in: %s\n", f.what.c_str());
    sticky = f.code;
  }
}

static bool bad_shape(Dim grid, Dim block) {
  return !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z || block.x * block.y * block.z > 1024 ||
         grid.y > 65535 || grid.z > 65535;
}

// ---------------------------------------------------------------- graphs

struct GraphNode { Launch launch; std::set<GraphNode*> before; };
struct Graph { std::vector<std::shared_ptr<GraphNode>> nodes; };
struct Exec { std::map<GraphNode*, Launch> launches; std::vector<std::shared_ptr<GraphNode>> nodes; };

struct NodeParams {  // CUDA_KERNEL_NODE_PARAMS_v2
  Function* f;
  unsigned grid[3], block[3], shared;
  void **params, **extra, *kern, *ctx;
};
static_assert(sizeof(NodeParams) == 72, "");

static void run_graph(const std::vector<std::shared_ptr<GraphNode>>& nodes, std::map<GraphNode*, Launch>& launches) {
  std::set<GraphNode*> done;
  while (done.size() < nodes.size()) {
    bool any = false;
    for (auto it = nodes.rbegin(); it != nodes.rend(); ++it) {
      GraphNode* n = it->get();
      if (done.count(n)) continue;
      bool free = true;
      for (auto* b : n->before) free = free && done.count(b);
      if (!free) continue;
      launches.at(n).run();
      if (sticky) return;
      done.insert(n);
      any = true;
      break;
    }
    if (!any) abort();
  }
}
