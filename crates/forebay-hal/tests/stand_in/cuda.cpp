// A stand-in for libcuda.so.1 and libnvrtc.so.12 that runs on the host's cores: for tests of Forebay's CUDA backend on
// machines without a GPU. It is no GPU and no measure of one.
//
// What it is strict about is what a real driver is strict about and what is easily got wrong:
//  - work is asynchronous, a thread per stream; freed device memory is unmapped;
//  - calls that need a current context fail without one; handles must be the driver's own;
//  - a kernel that touches memory it must not makes the context unusable: every later call fails;
//  - with STAND_IN_DELAYS set, streams stop now and then, so that one that should have waited for another is found;
//  - graph nodes run in an order that their dependencies allow, and otherwise the latest first;
//  - with STAND_IN_SCARCE=N one in N calls that need memory finds none, with STAND_IN_FAULTS=N one in N commands faults;
//  - with STAND_IN_TURNS set, kernels have their turns with those of other processes (turns.h).
// "Compiling" turns CUDA C++ into a shared library with the host's g++. There are no barriers and no shared memory.
// With STAND_IN_PTX=99 it plays a GPU of compute capability 9.9, which no compiler knows, so that NVIDIA's own makes PTX for it
// (that of 9.0), and runs that (`ptx/`): what a GPU would run, with warps, barriers and shared memory.

#include "machine.h"

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
#include "virtual.h"

API int cuMemHostAlloc(void** p, size_t n, unsigned) {
  READY;
  void* m = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (m == MAP_FAILED) return OUT_OF_MEMORY;
  std::lock_guard<std::mutex> g(memory_lock);
  host_memory[m] = n;
  *p = m;
  return OK;
}
// For tests: bytes that are allocated, on the device and for it on the host.
API uint64_t stand_in_bytes() {
  std::lock_guard<std::mutex> g(memory_lock);
  uint64_t n = used;
  for (auto& m : host_memory) n += m.second;
  return n;
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
static int copy(const char* call, void* to, const void* from, size_t n, void* stream) {
  READY;
  if (finds_no_memory(call)) return OUT_OF_MEMORY;
  STREAM(s, stream);
  s->push([=] { memmove(to, from, n); });
  return OK;
}
API int cuMemcpyHtoDAsync_v2(uint64_t d, const void* h, size_t n, void* s) {
  return in_device(d, n) && !in_device((uint64_t)h, 1) ? copy(__func__, (void*)d, h, n, s) : INVALID_VALUE;
}
API int cuMemcpyDtoHAsync_v2(void* h, uint64_t d, size_t n, void* s) {
  return in_device(d, n) && !in_device((uint64_t)h, 1) ? copy(__func__, h, (void*)d, n, s) : INVALID_VALUE;
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
  return in_device(t, n) && in_device(f, n) ? copy(__func__, (void*)t, (void*)f, n, s) : INVALID_VALUE;
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
#include "parts.h"

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
  // What was skipped, since something before it had faulted, is not done.
  return e->stream->executed >= e->at ? (int)sticky : NOT_READY;
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

#include "checkpoints.h"
#include "nvrtc.h"
