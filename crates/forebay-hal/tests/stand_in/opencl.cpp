// A stand-in for an OpenCL loader with two platforms, for tests of which devices are taken. Nothing runs on these; each of
// which a context is made is named in the file STAND_IN_CONTEXTS.
//
// The first platform has a GPU at bus 0x41 and one at 0x61, both told as Khronos has it; the second has the latter once
// more, told as NVIDIA's drivers once did, one at the same bus of another domain, and a processor and a board of another kind
// that has no compiler, which are on no bus.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>

#define API extern "C" __attribute__((visibility("default")))

struct Device {
  int platform;
  const char* name;
  uint64_t type;
  uint32_t domain, bus;
};
enum { CPU = 2, GPU = 4, ACCELERATOR = 8 };
static const Device DEVICES[] = {
    {0, "first", GPU, 0, 0x41}, {0, "second", GPU, 0, 0x61}, {1, "second again", GPU, 0, 0x61},
    {1, "third", GPU, 1, 0x61}, {1, "processor", CPU, 0, 0}, {1, "board", ACCELERATOR, 0, 0},
};
static const char* PLATFORMS[] = {"one", "two"};

enum { INVALID_VALUE = -30, DEVICE_NOT_FOUND = -1 };

static int answer(const void* from, size_t size, size_t room, void* to, size_t* needed) {
  if (needed) *needed = size;
  if (!to) return 0;
  if (room < size) return INVALID_VALUE;
  memcpy(to, from, size);
  return 0;
}

API int clGetPlatformIDs(uint32_t room, void** to, uint32_t* n) {
  if (n) *n = 2;
  for (uint32_t i = 0; to && i < 2 && i < room; i++) to[i] = (void*)&PLATFORMS[i];
  return 0;
}
API int clGetPlatformInfo(void* p, uint32_t, size_t room, void* to, size_t* needed) {
  const char* name = *(const char**)p;
  return answer(name, strlen(name) + 1, room, to, needed);
}
API int clGetDeviceIDs(void* p, uint64_t, uint32_t room, void** to, uint32_t* n) {
  uint32_t found = 0;
  for (auto& d : DEVICES)
    if ((void*)&PLATFORMS[d.platform] == p) {
      if (to && found < room) to[found] = (void*)&d;
      found++;
    }
  if (n) *n = found;
  return found ? 0 : DEVICE_NOT_FOUND;
}
API int clGetDeviceInfo(void* id, uint32_t what, size_t room, void* to, size_t* needed) {
  auto& d = *(const Device*)id;
  const bool first = d.platform == 0, is_gpu = d.type == GPU;
  const uint32_t place[4] = {d.domain, d.bus, 0, 0}, slot = 0, units = 4, compiles = d.type != ACCELERATOR;
  const uint64_t memory = 1 << 30;
  const void* platform = &PLATFORMS[d.platform];
  switch (what) {
    case 0x1000: return answer(&d.type, 8, room, to, needed);
    case 0x1002: return answer(&units, 4, room, to, needed);
    case 0x101F: return answer(&memory, 8, room, to, needed);
    case 0x1028: return answer(&compiles, 4, room, to, needed);
    case 0x102B: return answer(d.name, strlen(d.name) + 1, room, to, needed);
    case 0x1031: return answer(&platform, 8, room, to, needed);
    case 0x410F: return first ? answer(place, 16, room, to, needed) : INVALID_VALUE;
    case 0x4008: return !first && is_gpu ? answer(&d.bus, 4, room, to, needed) : INVALID_VALUE;
    case 0x4009: return !first && is_gpu ? answer(&slot, 4, room, to, needed) : INVALID_VALUE;
    case 0x400A: return !first && d.domain ? answer(&d.domain, 4, room, to, needed) : INVALID_VALUE;
    default: return INVALID_VALUE;
  }
}
API void* clCreateContext(const intptr_t*, uint32_t, void** ids, void*, void*, int* status) {
  if (const char* path = getenv("STAND_IN_CONTEXTS")) std::ofstream(path, std::ios::app) << ((const Device*)*ids)->name << "\n";
  if (status) *status = 0;
  return *ids;
}
API int clReleaseContext(void*) { return 0; }
API void* clCreateCommandQueue(void* context, void*, uint64_t, int* status) {
  if (status) *status = 0;
  return context;
}
API int clReleaseCommandQueue(void*) { return 0; }
API int clFlush(void*) { return 0; }
API int clFinish(void*) { return 0; }
