// A stand-in for libcuda.so.1 and libnvrtc.so.12 that runs on the host's cores: for tests of Forebay's CUDA backend on
// machines without a GPU. It is no GPU and no measure of one.
//
// What it is strict about is what a real driver is strict about and what is easily got wrong:
//  - work is asynchronous, a thread per stream; freed device memory is unmapped;
//  - calls that need a current context fail without one; handles must be the driver's own;
//  - a kernel that touches memory it must not makes the context unusable: every later call fails;
//  - with STAND_IN_DELAYS set, streams stop now and then, so that one that should have waited for another is found;
//  - graph nodes run in an order that their dependencies allow, and otherwise the latest first;
//  - with STAND_IN_TURNS set, kernels have their turns with those of other processes (turns.h).
// "Compiling" turns CUDA C++ into a shared library with the host's g++. There are no barriers and no shared memory.
// With STAND_IN_PTX=99 it plays a GPU of compute capability 9.9, which no compiler knows, so that NVIDIA's own makes PTX for it
// (that of 9.0), and runs that (`ptx/`): what a GPU would run, with warps, barriers and shared memory.

#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
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

struct Stream {
  std::mutex m;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  uint64_t enqueued = 0, executed = 0;
  bool stop = false;
  std::thread thread;
  void run() {
    unsigned random = getenv("STAND_IN_DELAYS") ? 1 + (unsigned)(uintptr_t)this / 64 : 0;
    std::unique_lock<std::mutex> l(m);
    for (;;) {
      changed.wait(l, [&] { return stop || !work.empty(); });
      if (work.empty()) return;
      auto f = std::move(work.front());
      work.pop_front();
      l.unlock();
      if (random && (random = random * 1103515245 + 12345) >> 29 == 0) usleep(1000);
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
    changed.wait(l, [&] { return executed >= until; });
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

#define READY                                    \
  if (!initialised) return NOT_INITIALIZED;      \
  if (int e = sticky) return e;                  \
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

// ---------------------------------------------------------------- driver API

// NVIDIA's compiler asks for what is not told anybody; it does without.
API int cuGetExportTable(const void**, const void*) { return NOT_FOUND; }
API int cuInit(unsigned) {
  if (!initialised) {
    struct sigaction a {};
    a.sa_sigaction = on_fault;
    a.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &a, &before_segv);
    sigaction(SIGBUS, &a, &before_bus);
    initialised = true;
  }
  return OK;
}
API int cuDriverGetVersion(int* v) { *v = 12000; return OK; }
API int cuDeviceGetCount(int* n) { *n = device_count(); return initialised ? OK : NOT_INITIALIZED; }
API int cuDeviceGet(int* d, int i) { *d = i; return i >= 0 && i < device_count() ? OK : INVALID_DEVICE; }
API int cuDeviceGetName(char* s, int n, int) { snprintf(s, n, "stand-in on the host (no GPU)"); return OK; }
API int cuDeviceGetAttribute(int* v, int a, int d) {
  if (a == 20) return *v = is_closed(d) ? 2 : is_taken(d) ? 3 : 0, OK;
  // Compute capability 1.0 existed, but not with any compiler that this is used beside: no cache key is shared.
  // Where on the bus the first one is (33), if anybody wants to know.
  if (a == 33) return *v = number("STAND_IN_BUS", 0), OK;
  // Its clock (13) makes it stronger than any processor.
  // One that NVIDIA's compiler knows by older ones only, if it is that one's PTX that is to be run.
  const int ptx = number("STAND_IN_PTX", 10);
  *v = a == 13 ? 1000000000 : a == 16 ? number("STAND_IN_UNITS", 2) : a == 75 ? ptx / 10 : a == 76 ? ptx % 10 : 0;
  return OK;
}
API int cuDeviceTotalMem_v2(size_t* n, int) { *n = MEMORY; return OK; }
API int cuDevicePrimaryCtxRetain(void** c, int d) {
  if (is_closed(d) || is_taken(d)) return DEVICE_UNAVAILABLE;
  // One whose memory others have taken to the last: a context needs some, too.
  if (d == number("STAND_IN_FULL", -1)) return OUT_OF_MEMORY;
  // Whoever wants to know finds a line for each context that was asked for.
  if (const char* path = getenv("STAND_IN_CONTEXTS")) std::ofstream(path, std::ios::app) << d << "\n";
  turns::begin();
  *c = &context_tags[d];
  return sticky;
}
API int cuDevicePrimaryCtxRelease_v2(int) { return OK; }
static void forget_memory();
// Everything of the context goes, whether anybody still needs it or not.
API int cuDevicePrimaryCtxReset_v2(int d) {
  if (d < 0 || d >= device_count()) return INVALID_DEVICE;
  std::map<Stream*, std::shared_ptr<Stream>> old;
  {
    std::lock_guard<std::mutex> g(streams_lock);
    old.swap(streams);
  }
  for (auto& s : old) {
    {
      std::lock_guard<std::mutex> g(s.second->m);
      s.second->stop = true;
      s.second->work.clear();
      s.second->changed.notify_all();
    }
    s.second->thread.join();
  }
  forget_memory();
  resets++;
  sticky = 0;
  return OK;
}
API int cuCtxGetCurrent(void** c) { *c = current; return OK; }
// Code that is loaded has the heap as it is.
static bool loaded;
API int cuCtxSetLimit(int limit, size_t n) { READY; return limit == 2 && n && !loaded ? OK : INVALID_VALUE; }
API int cuCtxSetCurrent(void* c) {
  if (c && !is_context(c)) return INVALID_CONTEXT;
  current = c;
  current_since = resets;
  return OK;
}
API int cuGetErrorName(int e, const char** s) {
  switch (e) {
    case OK: *s = "CUDA_SUCCESS"; return OK;
    case INVALID_VALUE: *s = "CUDA_ERROR_INVALID_VALUE"; return OK;
    case OUT_OF_MEMORY: *s = "CUDA_ERROR_OUT_OF_MEMORY"; return OK;
    case INVALID_IMAGE: *s = "CUDA_ERROR_INVALID_IMAGE"; return OK;
    case INVALID_CONTEXT: *s = "CUDA_ERROR_INVALID_CONTEXT"; return OK;
    case INVALID_HANDLE: *s = "CUDA_ERROR_INVALID_HANDLE"; return OK;
    case NOT_FOUND: *s = "CUDA_ERROR_NOT_FOUND"; return OK;
    case INVALID_RESOURCE_CONFIGURATION: *s = "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"; return OK;
    case NOT_SUPPORTED: *s = "CUDA_ERROR_NOT_SUPPORTED"; return OK;
    case INVALID_PTX: *s = "CUDA_ERROR_INVALID_PTX"; return OK;
    case MISALIGNED_ADDRESS: *s = "CUDA_ERROR_MISALIGNED_ADDRESS"; return OK;
    case LAUNCH_FAILED: *s = "CUDA_ERROR_LAUNCH_FAILED"; return OK;
    case ILLEGAL_ADDRESS: *s = "CUDA_ERROR_ILLEGAL_ADDRESS"; return OK;
    default: return INVALID_VALUE;
  }
}
API int cuMemAlloc_v2(uint64_t* p, size_t n) {
  READY;
  if (!n) return INVALID_VALUE;
  std::lock_guard<std::mutex> g(memory_lock);
  if (n > MEMORY || used + n > MEMORY) return OUT_OF_MEMORY;
  void* m = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (m == MAP_FAILED) return OUT_OF_MEMORY;
  used += n;
  *p = (uint64_t)m;
  device_memory[*p] = n;
  return OK;
}
API int cuMemFree_v2(uint64_t p) {
  READY;
  synchronise_all();
  std::lock_guard<std::mutex> g(memory_lock);
  auto it = device_memory.find(p);
  if (it == device_memory.end()) return INVALID_VALUE;
  used -= it->second;
  memory_changes++;
  munmap((void*)p, it->second);
  device_memory.erase(it);
  return OK;
}
// Virtual memory management: an allocation is a file, so that somebody else can map it, too.
struct Allocation { int fd; size_t n; };
struct Location { int kind, id; };
struct Prop { int kind, handles; Location at; void* win32; unsigned char flags[8]; };
struct Access { Location at; int flags; };
static const size_t GRANULARITY = size_t(2) << 20;
static std::set<Allocation*> allocations;
static std::map<uint64_t, size_t> reserved;
static std::map<uint64_t, Allocation*> mapped;
static bool right(const Prop* p) { return p && p->kind == 1 && p->handles == 1 && p->at.kind == 1 && p->at.id == 0 && !p->win32; }

API int cuMemGetAllocationGranularity(size_t* n, const Prop* p, int) {
  READY;
  if (!right(p)) return INVALID_VALUE;
  *n = GRANULARITY;
  return OK;
}
API int cuMemCreate(uint64_t* handle, size_t n, const Prop* p, uint64_t flags) {
  READY;
  if (!right(p) || flags || !n || n % GRANULARITY) return INVALID_VALUE;
  std::lock_guard<std::mutex> g(memory_lock);
  if (n > MEMORY || used + n > MEMORY) return OUT_OF_MEMORY;
  int fd = memfd_create("vram", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, n)) return OUT_OF_MEMORY;
  used += n;
  auto* a = new Allocation{fd, n};
  allocations.insert(a);
  *handle = (uint64_t)a;
  return OK;
}
API int cuMemRelease(uint64_t handle) {
  READY;
  std::lock_guard<std::mutex> g(memory_lock);
  auto* a = (Allocation*)handle;
  if (!allocations.count(a)) return INVALID_VALUE;
  for (auto& m : mapped) if (m.second == a) return INVALID_VALUE;  // A real one would wait; nobody should rely on it.
  allocations.erase(a);
  used -= a->n;
  close(a->fd);
  delete a;
  return OK;
}
API int cuMemAddressReserve(uint64_t* p, size_t n, size_t, uint64_t, uint64_t) {
  READY;
  if (!n || n % GRANULARITY) return INVALID_VALUE;
  void* m = mmap(nullptr, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return OUT_OF_MEMORY;
  std::lock_guard<std::mutex> g(memory_lock);
  *p = (uint64_t)m;
  reserved[*p] = n;
  return OK;
}
API int cuMemAddressFree(uint64_t p, size_t n) {
  READY;
  std::lock_guard<std::mutex> g(memory_lock);
  auto it = reserved.find(p);
  if (it == reserved.end() || it->second != n || mapped.count(p)) return INVALID_VALUE;
  munmap((void*)p, n);
  reserved.erase(it);
  return OK;
}
API int cuMemMap(uint64_t p, size_t n, size_t offset, uint64_t handle, uint64_t flags) {
  READY;
  std::lock_guard<std::mutex> g(memory_lock);
  auto* a = (Allocation*)handle;
  auto it = reserved.find(p);
  if (!allocations.count(a) || it == reserved.end() || it->second != n || a->n != n || offset || flags) return INVALID_VALUE;
  mapped[p] = a;
  return OK;
}
API int cuMemSetAccess(uint64_t p, size_t n, const Access* access, size_t count) {
  READY;
  std::lock_guard<std::mutex> g(memory_lock);
  auto it = mapped.find(p);
  if (it == mapped.end() || it->second->n != n || count != 1 || access->flags != 3) return INVALID_VALUE;
  void* m = mmap((void*)p, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, it->second->fd, 0);
  if (m == MAP_FAILED) return OUT_OF_MEMORY;
  device_memory[p] = n;
  return OK;
}
API int cuMemUnmap(uint64_t p, size_t n) {
  READY;
  synchronise_all();
  std::lock_guard<std::mutex> g(memory_lock);
  auto it = mapped.find(p);
  if (it == mapped.end() || it->second->n != n) return INVALID_VALUE;
  mmap((void*)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  mapped.erase(it);
  memory_changes++;
  device_memory.erase(p);
  return OK;
}
API int cuMemExportToShareableHandle(void* to, uint64_t handle, int kind, uint64_t) {
  READY;
  std::lock_guard<std::mutex> g(memory_lock);
  auto* a = (Allocation*)handle;
  if (!allocations.count(a) || kind != 1) return INVALID_VALUE;
  *(int*)to = dup(a->fd);
  return OK;
}
// Drivers before 610 export, and refuse to map; this one exports only when it plays a newer one.
API int cuMemGetHandleForAddressRange(void* to, uint64_t p, size_t n, int kind, uint64_t flags) {
  READY;
  std::lock_guard<std::mutex> g(memory_lock);
  auto it = mapped.find(p);
  if (it == mapped.end() || it->second->n != n || kind != 1 || flags) return INVALID_VALUE;
  if (!getenv("STAND_IN_DMA_BUF")) return NOT_SUPPORTED;
  *(int*)to = dup(it->second->fd);
  return OK;
}
API int cuMemHostAlloc(void** p, size_t n, unsigned) {
  READY;
  void* m = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (m == MAP_FAILED) return OUT_OF_MEMORY;
  std::lock_guard<std::mutex> g(memory_lock);
  host_memory[m] = n;
  *p = m;
  return OK;
}
static void forget_memory() {
  std::lock_guard<std::mutex> g(memory_lock);
  memory_changes++;
  for (auto it = device_memory.begin(); it != device_memory.end();) {
    if (mapped.count(it->first)) { ++it; continue; }
    used -= it->second;
    munmap((void*)it->first, it->second);
    it = device_memory.erase(it);
  }
  for (auto& m : host_memory) munmap(m.first, m.second);
  host_memory.clear();
}
API int cuMemFreeHost(void* p) {
  READY;
  synchronise_all();
  std::lock_guard<std::mutex> g(memory_lock);
  auto it = host_memory.find(p);
  if (it == host_memory.end()) return INVALID_VALUE;
  memory_changes++;
  munmap(p, it->second);
  host_memory.erase(it);
  return OK;
}
static int copy(void* to, const void* from, size_t n, void* stream) {
  READY;
  STREAM(s, stream);
  s->push([=] { memmove(to, from, n); });
  return OK;
}
API int cuMemcpyHtoDAsync_v2(uint64_t d, const void* h, size_t n, void* s) {
  return in_device(d, n) && !in_device((uint64_t)h, 1) ? copy((void*)d, h, n, s) : INVALID_VALUE;
}
API int cuMemcpyDtoHAsync_v2(void* h, uint64_t d, size_t n, void* s) {
  return in_device(d, n) && !in_device((uint64_t)h, 1) ? copy(h, (void*)d, n, s) : INVALID_VALUE;
}
// These wait for what streams have got, as the legacy stream does.
API int cuMemcpyHtoD_v2(uint64_t d, const void* h, size_t n) {
  READY;
  if (!in_device(d, n) || in_device((uint64_t)h, 1)) return INVALID_VALUE;
  synchronise_all();
  memcpy((void*)d, h, n);
  return OK;
}
API int cuMemcpyDtoH_v2(void* h, uint64_t d, size_t n) {
  READY;
  if (!in_device(d, n) || in_device((uint64_t)h, 1)) return INVALID_VALUE;
  synchronise_all();
  memcpy(h, (void*)d, n);
  return OK;
}
// Memory is not told apart by device here; that both contexts are some, and the stream the destination's, is up to the caller.
API int cuMemcpyPeerAsync(uint64_t to, void* to_context, uint64_t from, void* from_context, size_t n, void* stream) {
  READY;
  STREAM(s, stream);
  if (!is_context(to_context) || !is_context(from_context) || to_context != current) return INVALID_CONTEXT;
  if (!in_device(to, n) || !in_device(from, n)) return INVALID_VALUE;
  s->push([=] { memcpy((void*)to, (void*)from, n); });
  return OK;
}
API int cuDeviceCanAccessPeer(int* can, int, int) { *can = 1; return OK; }
API int cuCtxEnablePeerAccess(void* peer, unsigned flags) {
  READY;
  static std::set<std::pair<void*, void*>> enabled;
  if (flags || !is_context(peer) || peer == current) return INVALID_VALUE;
  return enabled.insert({current, peer}).second ? OK : 704;
}
API int cuMemcpyDtoDAsync_v2(uint64_t t, uint64_t f, size_t n, void* s) {
  return in_device(t, n) && in_device(f, n) ? copy((void*)t, (void*)f, n, s) : INVALID_VALUE;
}
API int cuMemsetD8Async(uint64_t d, unsigned char v, size_t n, void* stream) {
  READY;
  STREAM(s, stream);
  if (!in_device(d, n)) return INVALID_VALUE;
  s->push([=] { memset((void*)d, v, n); });
  return OK;
}
API int cuModuleLoadData(void** m, const void* image) {
  READY;
  loaded = true;
  if (getenv("STAND_IN_PTX") && !memcmp(image, "//", 2) + !memcmp(image, "\n//", 3)) {
    try {
      auto program = ptx::Parser((const char*)image, [](size_t n) { return (void*)code_allocate(n); }).parse();
      synchronise_all();
      *m = new Module{nullptr, std::move(program)};
      return OK;
    } catch (const ptx::Refused& why) {
      fprintf(stderr, "stand-in: PTX, %s\n", why.what());
      return INVALID_PTX;
    }
  }
  if (memcmp(image, "STANDIN", 8)) return INVALID_IMAGE;
  uint64_t n;
  memcpy(&n, (const char*)image + 8, 8);
  int fd = memfd_create("kernel", 0);
  if (fd < 0 || write(fd, (const char*)image + 16, n) != (ssize_t)n) return INVALID_IMAGE;
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  // The descriptor stays open: the loader knows libraries by path, and a number used again would be an old library.
  if (!library) return INVALID_IMAGE;
  if (void* own = dlsym(library, "stand_in_guarded")) *(void (**)(void (*)(void*), void*))own = guarded;
  // As a real one may: it waits for kernels that never end, if somebody loads code beside them.
  synchronise_all();
  *m = new Module{library, nullptr};
  return OK;
}
API int cuModuleUnload(void* m) {
  READY;
  synchronise_all();
  if (auto& program = ((Module*)m)->program) for (auto& v : program->memory) code_release((uint64_t)v.first);
  else dlclose(((Module*)m)->library);
  delete (Module*)m;
  return OK;
}
API int cuModuleGetFunction(void** f, void* m, const char* name) {
  READY;
  if (auto program = ((Module*)m)->program) {
    auto it = program->kernels.find(name);
    if (it == program->kernels.end()) return NOT_FOUND;
    const ptx::Kernel& k = it->second;
    auto run = [program, &k](void** p, Dim grid, Dim block, unsigned shared) { run_ptx(k, p, grid, block, shared); };
    auto* made = new Function{run, {}, k.bound, {false}};
    for (auto& p : k.parameters) made->sizes.push_back(p.size);
    *f = made;
    return OK;
  }
  std::string run = std::string("stand_in_run_") + name, sizes = std::string("stand_in_sizes_") + name;
  void* r = dlsym(((Module*)m)->library, run.c_str());
  auto s = (size_t(*)(size_t*))dlsym(((Module*)m)->library, sizes.c_str());
  if (!r || !s) return NOT_FOUND;
  size_t all[64];
  size_t n = s(all);
  auto bound = (unsigned*)dlsym(((Module*)m)->library, (std::string("stand_in_bound_") + name).c_str());
  auto of_library = (void (*)(void**, Dim, Dim))r;
  auto go = [of_library](void** p, Dim grid, Dim block, unsigned) { of_library(p, grid, block); };
  auto* made = new Function{go, {all, all + n}, *bound, {false}};
  if (!strcmp(name, "spin") && n == 2) made->ns_of_a_round = turns::ns_of_a_round();
  *f = made;
  return OK;
}
API int cuFuncLoad(void* f) {
  READY;
  ((Function*)f)->load();
  return OK;
}
static int new_stream(void** out) {
  auto s = std::make_shared<Stream>();
  s->thread = std::thread([s] { s->run(); });
  std::lock_guard<std::mutex> g(streams_lock);
  streams[s.get()] = s;
  *out = s.get();
  return OK;
}
API int cuStreamCreate(void** out, unsigned) {
  READY;
  return new_stream(out);
}
// Parts of the device: two multiprocessors, which can be one part each. Kernels run on the host all the same.
struct Resource { int kind; char padding[92]; unsigned count, least, alignment; char rest[36]; };
static_assert(sizeof(Resource) == 144, "");
struct Green { std::set<void*> streams; };
static std::set<Resource*> descriptions;
static std::set<Green*> greens;
static const char SPLIT = 77;  // in the padding of what comes from a split
API int cuDeviceGetDevResource(int d, Resource* r, int kind) {
  if (!initialised) return NOT_INITIALIZED;
  if (d < 0 || d >= device_count()) return INVALID_DEVICE;
  if (kind != 1) return INVALID_RESOURCE_TYPE;
  *r = {1, {}, 2, 1, 1, {}};
  return OK;
}
API int cuDevSmResourceSplitByCount(Resource* out, unsigned* n, const Resource* in, Resource* rest, unsigned flags, unsigned least) {
  if (in->kind != 1) return INVALID_RESOURCE_TYPE;
  if (in->padding[0] == SPLIT || in->count != 2 || flags) return INVALID_RESOURCE_CONFIGURATION;
  if (least > in->count || !out || *n != 1) return INVALID_VALUE;
  *out = {1, {SPLIT}, least, 1, 1, {}};
  *rest = {in->count == least ? 0 : 1, {SPLIT}, in->count - least, 1, 1, {}};
  return OK;
}
API int cuDevResourceGenerateDesc(void** d, Resource* r, unsigned n) {
  if (n != 1 || r->kind != 1 || r->padding[0] != SPLIT) return INVALID_RESOURCE_CONFIGURATION;
  std::lock_guard<std::mutex> g(streams_lock);
  *d = *descriptions.insert(new Resource(*r)).first;
  return OK;
}
API int cuGreenCtxCreate(void** c, void* description, int, unsigned flags) {
  READY;
  std::lock_guard<std::mutex> g(streams_lock);
  if (!descriptions.count((Resource*)description) || flags != 1) return INVALID_VALUE;
  *c = *greens.insert(new Green).first;
  return OK;
}
API int cuGreenCtxStreamCreate(void** out, void* c, unsigned flags, int) {
  READY;
  {
    std::lock_guard<std::mutex> g(streams_lock);
    if (!greens.count((Green*)c)) return INVALID_CONTEXT;
  }
  if (flags != 1) return INVALID_VALUE;
  int e = new_stream(out);
  std::lock_guard<std::mutex> g(streams_lock);
  ((Green*)c)->streams.insert(*out);
  return e;
}
API int cuGreenCtxDestroy(void* c) {
  READY;
  std::lock_guard<std::mutex> g(streams_lock);
  if (!greens.erase((Green*)c)) return INVALID_CONTEXT;
  for (void* s : ((Green*)c)->streams)
    if (streams.count((Stream*)s)) {
      fprintf(stderr, "stand-in: a part is destroyed before its stream\n");
      abort();
    }
  delete (Green*)c;
  return OK;
}
API int cuStreamSynchronize(void* stream) {
  READY;
  STREAM(s, stream);
  uint64_t n;
  {
    std::lock_guard<std::mutex> g(s->m);
    n = s->enqueued;
  }
  s->wait(n);
  return sticky;
}
API int cuStreamDestroy_v2(void* stream) {
  READY;
  STREAM(s, stream);
  {
    std::lock_guard<std::mutex> g(streams_lock);
    streams.erase(s.get());
    for (Green* c : greens) c->streams.erase(s.get());
  }
  {
    std::lock_guard<std::mutex> g(s->m);
    s->stop = true;
    s->changed.notify_all();
  }
  s->thread.join();
  return OK;
}
API int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                       void* stream, void** params, void**) {
  READY;
  STREAM(s, stream);
  Dim grid{gx, gy, gz}, block{bx, by, bz};
  if (bad_shape(grid, block)) return INVALID_VALUE;
  if (block.x * block.y * block.z > ((Function*)f)->bound) return LAUNCH_OUT_OF_RESOURCES;
  ((Function*)f)->load();
  if (double ns = ((Function*)f)->ns_of_a_round) {
    // How long it takes is known before it begins, so it is in the GPU's queue at once.
    uint64_t kernel = turns::ask(uint64_t(*(uint32_t*)params[1] * ns));
    s->push([kernel] { turns::wait(kernel); });
    return OK;
  }
  auto l = std::make_shared<Launch>(Launch::of((Function*)f, grid, block, shared, params));
  s->push([l] { turns::during([&] { l->run(); }); });
  return OK;
}
API int cuLaunchHostFunc(void* stream, void (*f)(void*), void* data) {
  READY;
  STREAM(s, stream);
  s->push([=] { f(data); });
  return OK;
}

struct Event { std::shared_ptr<Stream> stream; uint64_t at = 0; };
API int cuEventCreate(void** e, unsigned) { READY; *e = new Event; return OK; }
API int cuEventDestroy_v2(void* e) { READY; delete (Event*)e; return OK; }
API int cuEventRecord(void* e, void* stream) {
  READY;
  STREAM(s, stream);
  std::lock_guard<std::mutex> g(s->m);
  ((Event*)e)->stream = s;
  ((Event*)e)->at = s->enqueued;
  return OK;
}
API int cuStreamWaitEvent(void* stream, void* handle, unsigned flags) {
  READY;
  STREAM(s, stream);
  auto* e = (Event*)handle;
  if (flags) return INVALID_VALUE;
  auto from = e->stream;
  uint64_t at = e->at;
  if (from && from != s) s->push([from, at] { from->wait(at); });
  return OK;
}
API int cuEventQuery(void* handle) {
  READY;
  auto* e = (Event*)handle;
  if (!e->stream) return OK;
  std::lock_guard<std::mutex> g(e->stream->m);
  return e->stream->executed >= e->at ? OK : NOT_READY;
}
API int cuEventSynchronize(void* handle) {
  READY;
  auto* e = (Event*)handle;
  if (e->stream) e->stream->wait(e->at);
  return sticky;
}
API int cuGraphCreate(void** g, unsigned) { READY; *g = new Graph; return OK; }
API int cuGraphDestroy(void* g) { delete (Graph*)g; return OK; }
API int cuGraphAddKernelNode_v2(void** out, void* graph, void* const* before, size_t n, const NodeParams* p) {
  READY;
  Dim grid{p->grid[0], p->grid[1], p->grid[2]}, block{p->block[0], p->block[1], p->block[2]};
  if (bad_shape(grid, block) || p->kern || p->ctx) return INVALID_VALUE;
  auto node = std::make_shared<GraphNode>(GraphNode{Launch::of(p->f, grid, block, p->shared, p->params), {}});
  auto& nodes = ((Graph*)graph)->nodes;
  for (size_t i = 0; i < n; i++) {
    bool known = false;
    for (auto& o : nodes) known = known || o.get() == before[i];
    if (!known) return INVALID_VALUE;
    node->before.insert((GraphNode*)before[i]);
  }
  nodes.push_back(node);
  *out = node.get();
  return OK;
}
API int cuGraphInstantiateWithFlags(void** out, void* graph, unsigned long long) {
  READY;
  auto* e = new Exec;
  e->nodes = ((Graph*)graph)->nodes;
  for (auto& n : e->nodes) e->launches.emplace(n.get(), n->launch);
  *out = e;
  return OK;
}
API int cuGraphExecKernelNodeSetParams_v2(void* exec, void* node, const NodeParams* p) {
  READY;
  auto* e = (Exec*)exec;
  auto it = e->launches.find((GraphNode*)node);
  if (it == e->launches.end()) return INVALID_VALUE;
  Dim grid{p->grid[0], p->grid[1], p->grid[2]}, block{p->block[0], p->block[1], p->block[2]};
  if (bad_shape(grid, block)) return INVALID_VALUE;
  it->second = Launch::of(p->f, grid, block, p->shared, p->params);
  return OK;
}
API int cuGraphLaunch(void* exec, void* stream) {
  READY;
  STREAM(s, stream);
  // A copy: later updates do not affect this launch.
  auto launches = std::make_shared<std::map<GraphNode*, Launch>>(((Exec*)exec)->launches);
  auto nodes = ((Exec*)exec)->nodes;
  s->push([=] { turns::during([&] { run_graph(nodes, *launches); }); });
  return OK;
}
API int cuGraphExecDestroy(void* e) { delete (Exec*)e; return OK; }
API int cuGetProcAddress_v2(const char* name, void** p, int, uint64_t, int* status) {
  for (const char* suffix : {"_v2", ""}) {
    *p = dlsym(RTLD_DEFAULT, (std::string(name) + suffix).c_str());
    // Opened without global symbols: ask this library itself.
    if (!*p) {
      static void* self = [] {
        Dl_info i;
        dladdr((void*)&cuInit, &i);
        return dlopen(i.dli_fname, RTLD_NOW | RTLD_NOLOAD);
      }();
      *p = dlsym(self, (std::string(name) + suffix).c_str());
    }
    if (*p) {
      if (status) *status = 0;
      return OK;
    }
  }
  return NOT_FOUND;
}

// ---------------------------------------------------------------- checkpoints of other processes

// Their states are files, since whoever asks next is another process: 0 running, 1 locked, 2 saved.
static std::string state_file(int pid) {
  const char* folder = getenv("FOREBAY_STAND_IN_STATES");
  return std::string(folder ? folder : "/nowhere") + "/" + std::to_string(pid);
}
API int cuCheckpointProcessGetState(int pid, int* state) {
  std::ifstream f(state_file(pid));
  return f >> *state ? OK : INVALID_VALUE;
}
static int step(int pid, int from, int to) {
  int state;
  if (!initialised) return NOT_INITIALIZED;
  if (cuCheckpointProcessGetState(pid, &state)) return INVALID_VALUE;
  if (state != from) return 401;  // illegal state
  std::ofstream(state_file(pid)) << to;
  return OK;
}
// Where it is wanted, who is locked is stopped.
static int stop(int pid, int status, int signal) {
  if (!status && getenv("FOREBAY_STAND_IN_STOPS")) kill(pid, signal);
  return status;
}
// Where it is wanted, a process with something that does not end is not locked, which takes as long as it was given; how
// long that was is noted.
API int cuCheckpointProcessLock(int pid, void* args) {
  if (std::ifstream(state_file(pid) + ".long")) {
    unsigned ms = args ? *(unsigned*)args : 0;
    std::ofstream(state_file(pid) + ".long", std::ios::app) << ms << "\n";
    usleep(ms * 1000);
    return NOT_READY;
  }
  return stop(pid, step(pid, 0, 1), SIGSTOP);
}
API int cuCheckpointProcessCheckpoint(int pid, void*) {
  // A process with memory that cannot be moved.
  if (std::ifstream(state_file(pid) + ".shared")) return NOT_SUPPORTED;
  return step(pid, 1, 2);
}
API int cuCheckpointProcessRestore(int pid, void*) {
  if (std::ifstream(state_file(pid) + ".full")) return OUT_OF_MEMORY;
  return step(pid, 2, 1);
}
API int cuCheckpointProcessUnlock(int pid, void*) { return stop(pid, step(pid, 1, 0), SIGCONT); }

#include "nvrtc.h"
