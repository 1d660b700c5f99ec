// Turns on the GPU: with STAND_IN_TURNS=N this process has what CUDA's has in the kernel's driver, where a model of that
// answers (forebay-kernel-model), and each of its kernels is done when it has had its time on the model's GPU: N times as long
// as it took of the host's cores. So programs that share the GPU wait for each other, and for whoever steers them. A kernel
// `spin` of a memory and a number of rounds, which takes time and does nothing else, is not run where STAND_IN_SPIN says how many
// ns of the GPU a round takes.
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>

namespace turns {

struct Alloc { uint32_t root, parent, handle, kind; uint64_t params; uint32_t size, status; };
struct Card { uint8_t valid; uint8_t rest[71]; };
static_assert(sizeof(Alloc) == 32 && sizeof(Card) == 72, "");

static int control = -1;
static int times_longer = 0;

static int call(unsigned number, void* p, size_t n) {
  int r;
  do r = ioctl(control, _IOC(_IOC_READ | _IOC_WRITE, 'F', number, n), p); while (r < 0 && errno == EAGAIN);
  return r;
}

static uint32_t make(uint32_t root, uint32_t parent, uint32_t handle, uint32_t kind, void* params, uint32_t size) {
  Alloc a{root, parent, handle, kind, (uint64_t)params, size, 0};
  return call(0x2B, &a, sizeof a) == 0 && a.status == 0 ? a.handle : 0;
}

// What CUDA has for a context on every GPU: two channel groups of five channels.
static void begin() {
  static std::once_flag once;
  std::call_once(once, [] {
    const char* n = getenv("STAND_IN_TURNS");
    if (!n || (control = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC)) < 0) return;
    Card cards[32] = {};
    uint32_t client = call(200, cards, sizeof cards) == 0 ? make(0, 0, 0, 0x41, nullptr, 0) : 0, next = 0x5C000000;
    for (uint32_t gpu = 0; client && gpu < 32 && cards[gpu].valid; gpu++) {
      uint32_t of_device[14] = {gpu, client}, of_subdevice = 0, device = ++next;
      make(client, client, device, 0x80, of_device, sizeof of_device);
      make(client, device, ++next, 0x2080, &of_subdevice, sizeof of_subdevice);
      for (int g = 0; g < 2; g++) {
        uint32_t group = ++next;
        make(client, device, group, 0xA06C, nullptr, 0);
        for (int c = 0; c < 5; c++) make(client, group, ++next, 0xC86F, nullptr, 0);
      }
    }
    if (client) times_longer = atoi(n);
  });
}

static uint64_t host_ns() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return uint64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

static double ns_of_a_round() {
  const char* n = getenv("STAND_IN_SPIN");
  return n && times_longer ? atof(n) : 0;
}

// A kernel is put into the GPU's queue by a call (240) that takes microseconds and makes a number of them, and has had its time
// when another one (241) returns that takes this.
static uint64_t ask(uint64_t ns) {
  uint64_t us = 1 + ns / 1000;
  return call(240, &us, sizeof us) == 0 ? us : 0;
}
static void wait(uint64_t kernel) {
  while (kernel && call(241, &kernel, sizeof kernel) < 0 && errno == EINTR) {}
}

// Does it, and has its turns.
template <class F>
static void during(F&& f) {
  uint64_t from = host_ns();
  f();
  if (times_longer) wait(ask((host_ns() - from) * times_longer));
}

}  // namespace turns
