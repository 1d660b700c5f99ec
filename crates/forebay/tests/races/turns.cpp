// Threads by turns: all of them on one, and at each step of the device's code it is drawn who goes on. The same seed is the
// same schedule, and schedules that threads hardly ever meet are as likely as others: one can be away for as long as it takes
// all others to end.

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

struct Turns {
  struct One {
    ucontext_t at;
    std::unique_ptr<char[]> stack;
    std::function<void()> body;
    long rank = 0;
    bool ended = false;
  };
  // Many times what the longest of them needs.
  static constexpr unsigned long long MOST_STEPS = 3000000, STACK = 128 << 10;

  unsigned seed, random, now = 0;
  // Who goes on is drawn at one step of so many; 0: the one of the highest rank goes on, and ranks change at some steps.
  unsigned every;
  unsigned long long steps = 0, changes[3];
  long lowest = 0;
  std::vector<std::unique_ptr<One>> all;
  ucontext_t caller;
  static Turns *running;

  explicit Turns(unsigned seed) : seed(seed), random(seed * 2654435761u | 1) {
    const unsigned how = draw() % 6;
    every = how < 2 ? 0 : 1u << (how - 2) * 2;
    for (auto &c : changes) c = draw() % (1u << (4 + draw() % 10));
  }

  unsigned draw() {
    random ^= random << 13;
    random ^= random >> 17;
    return random ^= random << 5;
  }

  void add(std::function<void()> body) {
    all.push_back(std::make_unique<One>());
    One &o = *all.back();
    o.body = std::move(body);
    o.stack.reset(new char[STACK]);
    o.rank = draw() >> 8;
    getcontext(&o.at);
    o.at.uc_stack.ss_sp = o.stack.get();
    o.at.uc_stack.ss_size = STACK;
    makecontext(&o.at, &Turns::begin, 0);
  }

  // Until all have ended.
  void run() {
    running = this;
    now = chosen();
    swapcontext(&caller, &all[now]->at);
    running = nullptr;
  }

  static void begin() {
    Turns *t = running;
    t->all[t->now]->body();
    t->all[t->now]->ended = true;
    t->go(t->chosen());
  }

  // One step; `rests`: it waits for another one.
  void step(bool rests) {
    if (++steps > MOST_STEPS) {
      fprintf(stderr, "seed %u: somebody waits for what never comes\n", seed);
      exit(1);
    }
    bool change = rests;
    for (auto c : changes) change |= c == steps;
    // Whoever goes on and on may be waiting in a way that is not seen.
    change |= steps % 4096 == 0;
    // Behind all others, so that everybody goes on some time.
    if (change) all[now]->rank = --lowest;
    if (every ? rests || draw() % every == 0 : change) go(chosen());
  }

  // all.size() when there is nobody.
  unsigned chosen() {
    unsigned best = all.size(), living = 0;
    for (unsigned i = 0; i < all.size(); i++) {
      if (all[i]->ended) continue;
      living++;
      if (every ? draw() % living == 0 : best == all.size() || all[i]->rank > all[best]->rank) best = i;
    }
    return best;
  }

  void go(unsigned to) {
    if (to == now) return;
    One &from = *all[now];
    if (to == all.size()) {
      setcontext(&caller);
    } else {
      now = to;
      swapcontext(&from.at, &all[to]->at);
    }
  }
};

Turns *Turns::running = nullptr;

static inline void fb_step() {
  if (Turns::running) Turns::running->step(false);
}
static inline int fb_rest() {
  if (Turns::running) Turns::running->step(true);
  return 0;
}
#include <sched.h>
#include <unistd.h>
#define sched_yield fb_rest
#define usleep(us) fb_rest()
#define FB_STEP fb_step
#define FB_PROCESSOR (Turns::running ? Turns::running->now : 0)
#define FB_CYCLES (Turns::running ? Turns::running->steps * 1000 : 0)
using Crew = Turns;
#define FB_LOCAL 4
#define FB_TAKES 3
