// A stand-in for NVML, for tests on machines without a GPU: processes are those named in the folder of the CUDA stand-in,
// and as busy as the processor says; each has as many bytes of the GPU's memory as its file PID.memory says, or a megabyte. There are FOREBAY_STAND_IN_GPUS GPUs (one, if it does not say), and all are on all of them. Like NVML it takes samples a few times a second,
// whenever it is asked for them, and says nothing of who does nothing.
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long u64;
enum { OK = 0, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, MOST = 64 };
struct info { unsigned pid; u64 memory; unsigned gpu_instance, compute_instance; };
struct sample { unsigned pid; u64 at_us; unsigned sm, memory, encoder, decoder; };

static const u64 PERIOD_NS = 200000000;
static struct { unsigned pid; u64 cpu_ns, percent; } seen[MOST];
static unsigned count;
static u64 last_ns;

static u64 clock_ns(clockid_t c) {
  struct timespec t;
  return clock_gettime(c, &t) ? 0 : t.tv_sec * 1000000000ull + t.tv_nsec;
}

static unsigned processes(unsigned *pids) {
  unsigned n = 0;
  const char *folder = getenv("FOREBAY_STAND_IN_STATES");
  DIR *d = opendir(folder ? folder : "/nowhere");
  for (struct dirent *e; d && (e = readdir(d)) && n < MOST;)
    if (strspn(e->d_name, "0123456789") == strlen(e->d_name)) pids[n++] = atoi(e->d_name);
  if (d) closedir(d);
  return n;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void look(void) {
  u64 now = clock_ns(CLOCK_MONOTONIC);
  unsigned pids[MOST], n = processes(pids);
  typeof(seen) next = {0};
  for (unsigned i = 0; i < n; i++) {
    next[i].pid = pids[i];
    next[i].cpu_ns = clock_ns((~pids[i] << 3) | 2);
    for (unsigned j = 0; j < count; j++)
      if (seen[j].pid == pids[i]) next[i].percent = (next[i].cpu_ns - seen[j].cpu_ns) * 100 / (now - last_ns);
  }
  memcpy(seen, next, sizeof seen);
  count = n;
  last_ns = now;
}

static void *sampler(void *none) {
  for (;;) {
    struct timespec period = {0, PERIOD_NS};
    nanosleep(&period, NULL);
    pthread_mutex_lock(&lock);
    look();
    pthread_mutex_unlock(&lock);
  }
  return none;
}

static void start(void) {
  pthread_t thread;
  pthread_create(&thread, NULL, sampler, NULL);
}

int nvmlInit_v2(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  return pthread_once(&once, start), OK;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int e) { return e ? "stand-in: error" : "fine"; }
static unsigned gpus(void) {
  const char *n = getenv("FOREBAY_STAND_IN_GPUS");
  return n ? atoi(n) : 1;
}

int nvmlDeviceGetCount_v2(unsigned *n) { return *n = gpus(), OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { return *d = (void *)(u64)(i + 1), i < gpus() ? OK : NOT_FOUND; }
int nvmlDeviceGetMinorNumber(void *d, unsigned *n) { return *n = (u64)d - 1, OK; }

static u64 memory_of(unsigned pid) {
  char path[4096];
  u64 bytes = 1 << 20;
  snprintf(path, sizeof path, "%s/%u.memory", getenv("FOREBAY_STAND_IN_STATES"), pid);
  FILE *f = fopen(path, "r");
  if (f && fscanf(f, "%llu", &bytes) != 1) bytes = 1 << 20;
  if (f) fclose(f);
  return bytes;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, struct info *out) {
  unsigned pids[MOST], have = processes(pids), room = *n;
  *n = have;
  if (have > room) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < have; i++) out[i] = (struct info){pids[i], memory_of(pids[i]), 0, 0};
  return OK;
}

int nvmlDeviceGetProcessUtilization(void *d, struct sample *out, unsigned *n, u64 since) {
  pthread_mutex_lock(&lock);
  unsigned have = 0, room = out ? *n : 0;
  // What it keeps, whatever there is of it.
  if (room < 72) return pthread_mutex_unlock(&lock), INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < count && last_ns / 1000 > since; i++) {
    if (!seen[i].percent) continue;
    if (have < room) out[have] = (struct sample){seen[i].pid, last_ns / 1000, seen[i].percent > 100 ? 100 : seen[i].percent};
    have++;
  }
  pthread_mutex_unlock(&lock);
  *n = have;
  return !have ? NOT_FOUND : have > room ? INSUFFICIENT_SIZE : OK;
}
