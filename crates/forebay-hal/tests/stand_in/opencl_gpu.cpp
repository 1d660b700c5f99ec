// A stand-in for the OpenCL driver of a GPU, for machines that have none: it passes calls on to the driver of a processor, and is
// as strict as such a driver may be, so that what only works on processors is found.
//
// 1. It says that it is a GPU: memory of its own, nothing shared with the processor, no parts, no queues out of order, groups of
//    256 items at most.
// 2. Commands begin only once their queue is flushed: by clFlush, clFinish, a blocking call, a wait for an event of the queue, or
//    the queue's release. Asking how an event stands flushes nothing.
// 3. Host memory that a buffer is made of is copied, and not looked at again.
// 4. What is mapped is a copy: it is brought from the buffer, or is rubbish where that is told to be of no interest, and is written
//    back when unmapped.
// 5. No buffer has more than a quarter of the memory.
// 6. Groups must divide the space of items; a group may be left to the driver.
//
// It is linked to the system's loader, where calls go that are not here. STAND_IN_GPU_SAID names a file that gets a line for each
// device that is asked for its kind.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <mutex>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

typedef void *Id, *Event;
typedef const Event* Events;

enum { GPU = 4 };
enum { INVALID_VALUE = -30, INVALID_QUEUE_PROPERTIES = -35, INVALID_GROUP = -54, INVALID_BUFFER_SIZE = -61 };
static const size_t MOST_ITEMS = 256;

// A function of the real loader, by its name.
template <class F>
static F* real(F*, const char* name) {
  static void* loader = dlopen("libOpenCL.so.1", RTLD_NOW | RTLD_NOLOAD);
  return (F*)dlsym(loader, name);
}
#define REAL(name) ([] { static auto f = real((decltype(&name))nullptr, #name); return f; }())

API int clFlush(Id);
API int clFinish(Id);
API int clReleaseCommandQueue(Id);
API Id clCreateUserEvent(Id context, int* status);
API int clSetUserEventStatus(Event, int);
API int clReleaseEvent(Event);
API int clRetainEvent(Event);
API int clWaitForEvents(uint32_t, Events);
API int clGetEventInfo(Event, uint32_t what, size_t room, void* to, size_t* needed);
API int clSetEventCallback(Event, int32_t at, void (*)(Event, int, void*), void*);

// What holds a queue's commands back until it is flushed (rule 2).
struct Held {
  Id context;
  Event gate;  // None while nothing is held back.
};
static std::mutex LOCK;
static std::map<Id, Held> QUEUES;

struct Mapped {
  size_t offset, bytes;
  bool written;
};
static std::map<void*, Mapped> MAPPED;

static void open_gate(Id queue) {
  Event gate = nullptr;
  {
    std::lock_guard<std::mutex> guard(LOCK);
    auto found = QUEUES.find(queue);
    if (found != QUEUES.end()) std::swap(gate, found->second.gate);
  }
  if (!gate) return;
  clSetUserEventStatus(gate, 0);
  clReleaseEvent(gate);
}

// The events that a command waits for, and the gate.
struct Waits {
  std::vector<Event> all;
  Waits(Id queue, uint32_t n, Events list) : all(list, list + n) {
    std::lock_guard<std::mutex> guard(LOCK);
    auto& held = QUEUES[queue];
    int status;
    if (!held.gate) held.gate = clCreateUserEvent(held.context, &status);
    // The list's own: another thread may flush meanwhile.
    clRetainEvent(held.gate);
    all.push_back(held.gate);
  }
  ~Waits() { clReleaseEvent(all.back()); }
  uint32_t n() const { return (uint32_t)all.size(); }
  Events list() const { return all.data(); }
};

API int clGetDeviceInfo(Id device, uint32_t what, size_t room, void* to, size_t* needed);
API int clGetContextInfo(Id context, uint32_t what, size_t room, void* to, size_t* needed);

// What a buffer has at most.
static uint64_t most_bytes(Id device) {
  uint64_t all = 0;
  REAL(clGetDeviceInfo)(device, 0x101F, sizeof all, &all, nullptr);
  return all / 4;
}

API int clGetPlatformInfo(Id platform, uint32_t what, size_t room, void* to, size_t* needed) {
  static const char NAME[] = "GPU stand-in";
  if (what != 0x0902) return REAL(clGetPlatformInfo)(platform, what, room, to, needed);
  if (needed) *needed = sizeof NAME;
  if (to && room < sizeof NAME) return INVALID_VALUE;
  if (to) memcpy(to, NAME, sizeof NAME);
  return 0;
}

API int clGetDeviceInfo(Id device, uint32_t what, size_t room, void* to, size_t* needed) {
  int status = REAL(clGetDeviceInfo)(device, what, room, to, needed);
  if (status || !to) return status;
  auto number = [&](uint64_t n) { memcpy(to, &n, room < 8 ? room : 8); };
  switch (what) {
    case 0x1000:
      number(GPU);
      if (const char* path = getenv("STAND_IN_GPU_SAID")) std::ofstream(path, std::ios::app) << "a GPU\n";
      break;
    case 0x1004: number(MOST_ITEMS); break;
    case 0x1005:
      for (size_t i = 0; i < room / sizeof(size_t); i++) ((size_t*)to)[i] = i == 2 ? 64 : MOST_ITEMS;
      break;
    case 0x102A: number(2); break;  // Queues: profiling, but not out of order.
    case 0x1010: number(most_bytes(device)); break;
    case 0x1035: number(0); break;  // Memory in common with the host.
    case 0x1043: number(0); break;  // Parts.
    case 0x1044: memset(to, 0, room); break;  // Ways to make them.
    case 0x1053: number(1); break;  // Shared virtual memory: coarse-grained.
  }
  return status;
}

API int clWaitForEvents(uint32_t n, Events list) {
  for (uint32_t i = 0; i < n; i++) {
    Id queue = nullptr;
    if (!REAL(clGetEventInfo)(list[i], 0x11D0, sizeof queue, &queue, nullptr) && queue) open_gate(queue);
  }
  return REAL(clWaitForEvents)(n, list);
}

// Drivers that cannot do it may not have it: whoever has not asked for the ways crashes there.
API int clCreateSubDevices(Id, const intptr_t*, uint32_t, Id*, uint32_t*) { abort(); }

API int clGetKernelWorkGroupInfo(Id kernel, Id device, uint32_t what, size_t room, void* to, size_t* needed) {
  int status = REAL(clGetKernelWorkGroupInfo)(kernel, device, what, room, to, needed);
  if (!status && to && what == 0x11B0 && *(size_t*)to > MOST_ITEMS) *(size_t*)to = MOST_ITEMS;
  return status;
}

API Id clCreateCommandQueue(Id context, Id device, uint64_t properties, int* status) {
  if (properties & 1) {
    if (status) *status = INVALID_QUEUE_PROPERTIES;
    return nullptr;
  }
  Id queue = REAL(clCreateCommandQueue)(context, device, properties, status);
  std::lock_guard<std::mutex> guard(LOCK);
  if (queue) QUEUES[queue] = Held{context, nullptr};
  return queue;
}

API int clReleaseCommandQueue(Id queue) {
  open_gate(queue);
  {
    std::lock_guard<std::mutex> guard(LOCK);
    QUEUES.erase(queue);
  }
  return REAL(clReleaseCommandQueue)(queue);
}

API int clFlush(Id queue) {
  open_gate(queue);
  return REAL(clFlush)(queue);
}

API int clFinish(Id queue) {
  open_gate(queue);
  return REAL(clFinish)(queue);
}

API Id clCreateBuffer(Id context, uint64_t flags, size_t size, void* host, int* status) {
  const uint64_t USE = 1 << 3, COPY = 1 << 5;
  if (flags & USE) flags = (flags & ~USE) | COPY;
  Id device = nullptr;
  if (!clGetContextInfo(context, 0x1081, sizeof device, &device, nullptr) && size > most_bytes(device)) {
    if (status) *status = INVALID_BUFFER_SIZE;
    return nullptr;
  }
  return REAL(clCreateBuffer)(context, flags, size, host, status);
}

API int clEnqueueNDRangeKernel(Id queue, Id kernel, uint32_t dimensions, const size_t* offset, const size_t* items,
                               const size_t* group, uint32_t n, Events list, Event* event) {
  size_t in_group = 1;
  for (uint32_t d = 0; group && d < dimensions; d++) {
    if (!group[d] || items[d] % group[d] || group[d] > (d == 2 ? 64 : MOST_ITEMS)) return INVALID_GROUP;
    in_group *= group[d];
  }
  if (in_group > MOST_ITEMS) return INVALID_GROUP;
  Waits w(queue, n, list);
  return REAL(clEnqueueNDRangeKernel)(queue, kernel, dimensions, offset, items, group, w.n(), w.list(), event);
}

API int clEnqueueReadBuffer(Id queue, Id buffer, uint32_t blocking, size_t offset, size_t bytes, void* to, uint32_t n,
                            Events list, Event* event) {
  Waits w(queue, n, list);
  if (blocking) open_gate(queue);
  return REAL(clEnqueueReadBuffer)(queue, buffer, blocking, offset, bytes, to, w.n(), w.list(), event);
}

API int clEnqueueWriteBuffer(Id queue, Id buffer, uint32_t blocking, size_t offset, size_t bytes, const void* from,
                             uint32_t n, Events list, Event* event) {
  Waits w(queue, n, list);
  if (blocking) open_gate(queue);
  return REAL(clEnqueueWriteBuffer)(queue, buffer, blocking, offset, bytes, from, w.n(), w.list(), event);
}

API int clEnqueueCopyBuffer(Id queue, Id from, Id to, size_t from_offset, size_t to_offset, size_t bytes, uint32_t n,
                            Events list, Event* event) {
  Waits w(queue, n, list);
  return REAL(clEnqueueCopyBuffer)(queue, from, to, from_offset, to_offset, bytes, w.n(), w.list(), event);
}

API int clEnqueueFillBuffer(Id queue, Id buffer, const void* pattern, size_t of, size_t offset, size_t bytes, uint32_t n,
                            Events list, Event* event) {
  Waits w(queue, n, list);
  return REAL(clEnqueueFillBuffer)(queue, buffer, pattern, of, offset, bytes, w.n(), w.list(), event);
}

// An empty list means everything before it, and so does the gate together with an in-order queue.
API int clEnqueueMarkerWithWaitList(Id queue, uint32_t n, Events list, Event* event) {
  Waits w(queue, n, list);
  return REAL(clEnqueueMarkerWithWaitList)(queue, w.n(), w.list(), event);
}

API int clEnqueueBarrierWithWaitList(Id queue, uint32_t n, Events list, Event* event) {
  Waits w(queue, n, list);
  return REAL(clEnqueueBarrierWithWaitList)(queue, w.n(), w.list(), event);
}

API void* clEnqueueMapBuffer(Id queue, Id buffer, uint32_t blocking, uint64_t flags, size_t offset, size_t bytes, uint32_t n,
                             Events list, Event* event, int* status) {
  const uint64_t READ = 1, WRITE = 2, INVALIDATE = 4;
  void* at = malloc(bytes ? bytes : 1);
  memset(at, 0xA5, bytes);
  int done;
  if (!blocking) {
    done = INVALID_VALUE;  // Nobody here does.
  } else if (flags & INVALIDATE) {
    Event told = nullptr;
    done = clEnqueueMarkerWithWaitList(queue, n, list, &told);
    open_gate(queue);
    if (!done) done = clWaitForEvents(1, &told);
    if (event && !done) *event = told;
    else if (told) clReleaseEvent(told);
  } else {
    done = clEnqueueReadBuffer(queue, buffer, 1, offset, bytes, at, n, list, event);
  }
  if (status) *status = done;
  if (done) {
    free(at);
    return nullptr;
  }
  std::lock_guard<std::mutex> guard(LOCK);
  MAPPED[at] = Mapped{offset, bytes, !(flags & READ) || flags & WRITE};
  return at;
}

static void no_more(Event event, int, void* copy) {
  free(copy);
  clReleaseEvent(event);
}

API int clEnqueueUnmapMemObject(Id queue, Id buffer, void* at, uint32_t n, Events list, Event* event) {
  Mapped m;
  {
    std::lock_guard<std::mutex> guard(LOCK);
    auto found = MAPPED.find(at);
    if (found == MAPPED.end()) return INVALID_VALUE;
    m = found->second;
    MAPPED.erase(found);
  }
  Event told = nullptr;
  int status = m.written ? clEnqueueWriteBuffer(queue, buffer, 0, m.offset, m.bytes, at, n, list, &told)
                         : clEnqueueMarkerWithWaitList(queue, n, list, &told);
  if (status) return status;
  if (event) {
    clRetainEvent(told);
    *event = told;
  }
  return clSetEventCallback(told, 0, no_more, at);
}
