// A block is six threads, in warps of three.
#define FB_SEES_URGENT 2
#define FB_SEES 3
#define FB_MANY 6
#define FB_AT_A_TIME 6
#define FB_LONG ~0ull
#define FB_LOW 2
#define FB_KEEPS true
// They look at different times, which lanes of a warp do not.
#define FB_SEES_WHOLE false
#define FB_LANES 6
#define FB_WARP 3
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
// Where lanes wait for each other: asleep, as six threads that yield keep two cores from the one that all wait for. The order of
// `asleep` and `round` is left to chance, so that the sanitizer concludes nothing from it; who is not woken wakes by itself.
// Only a barrier orders what they do elsewhere: what they tell each other does not, and then
// the sanitizer must not believe that it does.
struct Meeting {
  std::atomic<unsigned> here{0}, round{0}, asleep{0};
  void meet(unsigned n, std::memory_order come = std::memory_order_acq_rel, std::memory_order go = std::memory_order_acquire) {
    const unsigned is = round.load(std::memory_order_relaxed);
    if (here.fetch_add(1, come) + 1 == n) {
      here.store(0, std::memory_order_relaxed);
      round.fetch_add(1, come);
      if (asleep.fetch_add(0, std::memory_order_relaxed)) syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, ~0u >> 1, 0, 0, 0);
      return;
    }
    for (unsigned i = 0; i < 3; i++) {
      if (round.load(go) != is) return;
      sched_yield();
    }
    const timespec most = {0, 10000000};
    asleep.fetch_add(1, std::memory_order_relaxed);
    while (round.load(go) == is) syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, is, &most, 0, 0);
    asleep.fetch_sub(1, std::memory_order_relaxed);
  }
  void pass(unsigned n) { meet(n, std::memory_order_relaxed, std::memory_order_relaxed); }
};
struct Meetings {
  Meeting all, warp[FB_LANES / FB_WARP];
  std::atomic<unsigned long long> said[FB_LANES];
  void say(unsigned lane, unsigned long long v) { said[lane].store(v, std::memory_order_relaxed); }
  unsigned long long said_by(unsigned lane) { return said[lane].load(std::memory_order_relaxed); }
};
static thread_local Meetings *meetings;
static thread_local unsigned lane;
static inline unsigned fb_lane() { return lane; }
static inline unsigned fb_lanes() { return FB_LANES; }
static inline unsigned fb_in_crew() { return lane; }
static inline unsigned fb_warp() { return lane / FB_WARP; }
static inline unsigned fb_in_warp() { return lane % FB_WARP; }
static inline void fb_barrier() { meetings->all.meet(FB_LANES); }
static inline void fb_together() { meetings->warp[lane / FB_WARP].meet(FB_WARP); }
// Without an order for anything else.
static inline void fb_pass(unsigned lanes) { meetings->warp[lane / FB_WARP].pass(lanes); }
static inline unsigned fb_lane_of(unsigned i) { return lane / FB_WARP * FB_WARP + i; }
static inline unsigned long long fb_tell64(unsigned long long v, unsigned from) {
  meetings->say(lane, v);
  fb_pass(FB_WARP);
  const unsigned long long told = meetings->said_by(fb_lane_of(from));
  fb_pass(FB_WARP);
  return told;
}
static inline unsigned fb_tell(unsigned v, unsigned from) { return (unsigned)fb_tell64(v, from); }
static inline unsigned fb_votes(bool yes) {
  unsigned votes = 0;
  for (unsigned i = 0; i < FB_WARP; i++) votes |= (unsigned)fb_tell64(yes, i) << i;
  return votes;
}
// The lanes that call something together: a test says which of a warp.
static thread_local unsigned together = (1u << FB_WARP) - 1;
static inline void fb_meet(unsigned present) { meetings->warp[lane / FB_WARP].meet(__builtin_popcount(present)); }
static inline unsigned fb_present() { return together; }
static inline unsigned fb_alike(unsigned present, unsigned v) {
  const unsigned lanes = __builtin_popcount(present);
  unsigned alike = 0;
  meetings->say(lane, v);
  fb_pass(lanes);
  for (unsigned i = 0; i < FB_WARP; i++) if (present >> i & 1) alike |= (meetings->said_by(fb_lane_of(i)) == v) << i;
  fb_pass(lanes);
  return alike;
}
static inline bool fb_all_alike(unsigned present, unsigned v) { return fb_alike(present, v) == present; }
static inline unsigned long long fb_from(unsigned present, unsigned long long v, unsigned from) {
  const unsigned lanes = __builtin_popcount(present);
  meetings->say(lane, v);
  fb_pass(lanes);
  const unsigned long long told = meetings->said_by(fb_lane_of(from));
  fb_pass(lanes);
  return told;
}
static inline unsigned fb_union(unsigned present, unsigned bits) {
  unsigned all = 0;
  for (unsigned i = 0; i < FB_WARP; i++) if (present >> i & 1) all |= (unsigned)fb_from(present, bits, i);
  return all;
}
static inline bool fb_some_say(unsigned present, bool yes) { return fb_union(present, yes) != 0; }
static inline unsigned fb_here_add(unsigned *p, unsigned v) { fb_step(); return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
static inline void fb_here_min(unsigned *p, unsigned v) {
  unsigned is = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (v < is && !__atomic_compare_exchange_n(p, &is, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}
