// Parts of the device: two multiprocessors, which can be one part each. Kernels run on the host all the same.
#pragma once

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
