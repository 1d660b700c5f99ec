// Threads are threads, and steps of the device's code are places where another one may come in between.
#include <sched.h>
#include <unistd.h>
#include <atomic>
#include <thread>
#include <vector>
// A test may have a thread be away for so long that others get far, µs.
static thread_local unsigned away;
static inline void fb_step() {
  static std::atomic<unsigned> seeds{1};
  static thread_local unsigned x = seeds.fetch_add(0x9E3779B9u) | 1;
  x ^= x << 13; x ^= x >> 17; x ^= x << 5;
  if ((x & 15) == 0 && away) usleep(away);
  else if ((x & 15) == 0) sched_yield();
}
#define FB_STEP fb_step

// Threads that run beside each other until all have ended; in turns.cpp, by turns.
struct Crew {
  std::vector<std::thread> all;
  explicit Crew(unsigned) {}
  template <class F> void add(F body) { all.emplace_back(body); }
  void run() {
    for (auto &t : all) t.join();
  }
};

#define FB_LOCAL 4
#define FB_TAKES 3
