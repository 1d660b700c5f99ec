// The driver's management of virtual memory: an allocation is a file, so that somebody else can map it, too.
#pragma once

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
