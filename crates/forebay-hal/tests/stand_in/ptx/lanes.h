// Runs PTX (`program.h`) on the host, lane by lane, as a GPU since Volta may: lanes of a warp that are at the same instruction go
// together, but in which order those that are not come, and how far each gets, is drawn by lot. What a GPU leaves undefined
// or forbids is an error here: memory of nobody's, addresses that are not aligned, a vote without those that it names, a
// barrier at which not everybody arrives.
// Memory is as weak as PTX lets it be, where that can be played: what a lane stores stays its own until it says otherwise or for
// a while that is drawn by lot, in any order; what it loads as nobody else's may be what its block saw there before, until it
// asks for what others did; and what it says never changes is read once. Loads are not brought forward, and what is everybody's
// everybody sees at the same time.
// STAND_IN_SEED draws other lots, STAND_IN_STRONG has memory as the host has it, and STAND_IN_WEAKEN=st.release, say, takes order
// away from all instructions that begin so: for whoever wants to know what tests notice. STAND_IN_TIMED=FILE tells what time a
// GPU might take for each kernel (`timed.h`), with memory as the host has it.
#pragma once

#include <sched.h>
#include <unistd.h>
#include <immintrin.h>
#include <x86intrin.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <map>
#include <queue>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "values.h"

namespace ptx {

struct Fault {
  int code;
  std::string what;
};
enum { FAULT_ADDRESS = 700, FAULT_TRAP = 718, FAULT_ALIGNMENT = 716, FAULT_LAUNCH = 719 };

// What the machine has beside the lanes.
struct Machine {
  // Whether a kernel may touch these bytes; a range that it lies in, whole, for as long as `generation` stays.
  bool (*may)(u64 p, size_t n, u64& first, u64& end);
  const std::atomic<unsigned>* generation;
  // Not 0 once the context is of no more use: then nothing goes on.
  const std::atomic<int>* lost;
  u64 (*allocate)(u64 n);
  void (*release)(u64 p);
  unsigned processors;
};

struct Shape { unsigned x, y, z; };

class Launched {
 public:
  Launched(const Kernel& k, const Machine& m, Shape grid, Shape block, size_t dynamic, void** arguments, u64 seed)
      : k_(k), m_(m), grid_(grid), block_(block), dynamic_(dynamic), random_(seed * 0x9E3779B97F4A7C15u + 1) {
    parameters_.resize(k.parameter_bytes + 16);
    for (size_t i = 0; i < k.parameters.size(); i++) memcpy(&parameters_[k.parameters[i].at], arguments[i], k.parameters[i].size);
    lanes_ = block.x * block.y * block.z;
    const unsigned patience[] = {4, 64, 1024};
    patience_ = patience[lot() % 3];
  }

  // Runs all blocks, some at a time.
  void run() {
    if (const char* path = getenv("STAND_IN_TIMED")) return run_timed(path);
    const u64 all = u64(grid_.x) * grid_.y * grid_.z;
    const size_t each = lanes_ * (k_.slots * 8 + k_.local_bytes) + k_.shared_bytes + dynamic_;
    // As many at a time as one has room for, and a few at least: they may wait for each other.
    size_t most = std::max<size_t>(4 * m_.processors, std::min<size_t>(64, (size_t(32) << 20) / (each + 1)));
    std::vector<std::unique_ptr<Block>> here;
    u64 begun = 0;
    unsigned rested = 0;
    while (begun < all || !here.empty()) {
      while (begun < all && here.size() < most) here.push_back(begin(begun++));
      if (*m_.lost) return;
      bool went = false, sleeps = false;
      for (size_t b = 0; b < here.size(); b++) {
        try {
          for (auto& w : here[b]->warps) step(*here[b], w, went, sleeps);
        } catch (const Fault&) {
          // What was stored before a fault is on its way.
          for (auto& all : here) spread_all(*all);
          throw;
        }
        if (here[b]->left == 0) {
          spread_all(*here[b]);
          here[b] = std::move(here.back());
          here.pop_back();
          b--;
          went = true;
        }
      }
      if (!went && !sleeps) stuck(here);
      // Whoever waits for the host lets it go on.
      if (!went && ++rested % 4 == 0) usleep(20);
      else if (sleeps) sched_yield();
    }
  }

 private:
  struct Pending { u64 p; u64 v[2]; unsigned bytes; bool shared; };
  struct Sector { u64 v[4]; };
  enum State : uint8_t { runs, meets, at_barrier, ended };
  struct Lane {
    uint32_t pc = 0;
    State state = runs;
    uint32_t mask = 0;        // whom it meets
    unsigned barrier = 0;
    std::chrono::steady_clock::time_point asleep_until{};
    bool asleep = false;
    // Those of a warp's lanes lie beside each other.
    u64* slots = nullptr;
    u64& at(size_t slot) { return slots[slot * 32]; }
    u64 at(size_t slot) const { return slots[slot * 32]; }
    char* local = nullptr;
    unsigned x, y, z;
    // What it has stored, for itself only; the oldest first.
    std::vector<Pending> pending;
  };
  struct Warp {
    unsigned first, count;
    // For `timed.h`: when it can go on, when what it has stored is everybody's, when its registers have their values, how much
    // it has done; whether it has a turn, and waits for what it stored already.
    u64 now = 0, stored = 0, issued = 0;
    std::vector<u64> ready = {};
    bool queued = false, released = false;
  };
  struct Block {
    unsigned x, y, z, processor;
    std::vector<Lane> lanes;
    std::vector<Warp> warps;
    std::vector<u64> slots;
    std::vector<char> local, shared;
    size_t left, waiting = 0;
    // What its lanes have stored, for the block only; and what it has seen of memory, also for good.
    std::vector<Pending> pending;
    std::unordered_map<u64, Sector> seen, kept;
  };

  const Kernel& k_;
  const Machine& m_;
  Shape grid_, block_;
  size_t dynamic_;
  u64 random_;
  std::vector<char> parameters_;
  unsigned lanes_;
  // Ranges that were asked about lately.
  struct Known { u64 first = 1, end = 0; } known_[4];
  unsigned known_at_ = 0, generation_ = ~0u;
  // Whether the address at hand is in memory that others have, too, and whether that is the block's.
  bool elsewhere_ = false, shared_ = false;
  const bool timed_ = getenv("STAND_IN_TIMED");
  const bool weak_ = !timed_ && !getenv("STAND_IN_STRONG");
  // How long what is stored may stay where it is: a kernel is quick about it, or slow.
  unsigned patience_ = 4;
  // What the lanes that are at an instruction together have read for it: of 32 bytes they see one time. And when they awake.
  std::vector<std::pair<u64, Sector>> at_once_;
  std::chrono::steady_clock::time_point awake_{};

  // For `timed.h`. A multiprocessor: when it can issue, and use memory, next, and what it has of that at hand.
  struct Unit {
    u64 issue[4] = {}, memory = 0;
    std::unordered_set<u64> seen, kept;
  };
  struct Turn {
    u64 at, number;
    Block* block;
    unsigned warp;
    bool operator<(const Turn& o) const { return at > o.at || (at == o.at && number > o.number); }
  };
  std::vector<Unit> units_;
  std::priority_queue<Turn> turns_;
  u64 entered_ = 0, slept_ = 0;
  // When the next atomic of an address can be done; which addresses an instruction has used; whether a barrier let others go on.
  std::unordered_map<u64, u64> atomics_;
  std::vector<u64> touched_;
  bool freed_ = false;

  void run_timed(const char* path);
  void timed(Block& b, const Turn& turn);
  void enter(Block* b, unsigned w);
  static bool is_free(const Instruction& i);
  u64 can_issue(Block& b, Warp& w, const Instruction& i);
  u64 of_memory(Block& b, Warp& w, const Instruction& i, u64 t);

  u64 lot() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return random_;
  }

  std::unique_ptr<Block> begin(u64 n) {
    std::unique_ptr<Block> b(new Block);
    b->x = n % grid_.x;
    b->y = n / grid_.x % grid_.y;
    b->z = n / grid_.x / grid_.y;
    b->processor = n % m_.processors;
    b->slots.resize(size_t(k_.slots) * ((lanes_ + 31) / 32 * 32));
    // Registers and shared memory begin as whatever was there.
    for (auto& s : b->slots) s = 0xA5A5A5A5DEADBEEFu;
    b->local.assign(k_.local_bytes * lanes_ + 16, (char)0xA5);
    b->shared.assign(k_.shared_bytes + dynamic_ + 32, (char)0xA5);
    b->lanes.resize(lanes_);
    for (unsigned i = 0; i < lanes_; i++) {
      Lane& l = b->lanes[i];
      l.slots = b->slots.data() + size_t(k_.slots) * (i / 32 * 32) + i % 32;
      l.local = aligned(b->local.data()) + k_.local_bytes * i;
      l.x = i % block_.x;
      l.y = i / block_.x % block_.y;
      l.z = i / block_.x / block_.y;
    }
    for (unsigned i = 0; i < lanes_; i += 32) b->warps.push_back({i, std::min(32u, lanes_ - i)});
    b->left = lanes_;
    return b;
  }
  static char* aligned(char* p) { return (char*)(((u64)p + 15) & ~u64(15)); }

  [[noreturn]] void fail(int code, const Instruction& i, const Block& b, const Lane& l, const std::string& what) const {
    throw Fault{code, k_.name + ", PTX line " + std::to_string(i.line) + ", block " + std::to_string(b.x) + ", thread " +
                          std::to_string(l.x) + ": " + what};
  }

  [[noreturn]] void stuck(const std::vector<std::unique_ptr<Block>>& here) const {
    std::string text = k_.name + ": nobody can go on:";
    unsigned said = 0;
    for (auto& b : here)
      for (auto& l : b->lanes)
        if (l.state != ended && said++ < 8)
          text += " block " + std::to_string(b->x) + " thread " + std::to_string(l.x) + " waits in line " +
                  std::to_string(k_.code[l.pc].line) + (l.state == meets ? " for lanes " + hex(l.mask) : " at the barrier") + ";";
    throw Fault{FAULT_LAUNCH, text};
  }
  static std::string hex(u64 v) {
    char t[32];
    snprintf(t, sizeof t, "0x%llx", (unsigned long long)v);
    return t;
  }

  // ------------------------------------------------------------ which lanes go on

  void step(Block& b, Warp& w, bool& went, bool& sleeps) {
    // Among those that can run, one is drawn, or whoever is furthest back, where lanes that came apart meet again.
    Lane* all = &b.lanes[w.first];
    unsigned can[32], n = 0;
    bool any_asleep = false;
    std::chrono::steady_clock::time_point now{};
    for (unsigned i = 0; i < w.count; i++) {
      Lane& l = all[i];
      if (l.state != runs) continue;
      if (l.asleep) {
        if (now.time_since_epoch().count() == 0) now = std::chrono::steady_clock::now();
        if (now < l.asleep_until) { any_asleep = true; continue; }
        l.asleep = false;
      }
      can[n++] = i;
    }
    sleeps = sleeps || any_asleep;
    const u64 draw = lot();
    if (weak_ && (draw >> 44) % patience_ == 0) {
      spread_some(b, all[(draw >> 32) % w.count].pending);
      spread_some(b, b.pending);
    }
    if (n == 0) return;
    unsigned leader = can[0];
    if (draw % 4 == 0) leader = can[(draw >> 8) % n];
    else for (unsigned i = 0; i < n; i++) if (all[can[i]].pc < all[leader].pc) leader = can[i];
    Lane* group[32];
    uint32_t elsewhere[32];
    unsigned size = 0, others = 0;
    for (unsigned i = 0; i < n; i++) {
      Lane& l = all[can[i]];
      if (l.pc == all[leader].pc) group[size++] = &l;
      else elsewhere[others++] = l.pc;
    }
    went = true;
    unsigned quantum = 1 + (draw >> 16) % ((draw >> 40) % 4 == 0 ? 8 : 256);
    // Where others are they go on together.
    if (draw >> 50 & 7) {
      while (quantum-- && together(b, w, group, size) && std::find(elsewhere, elsewhere + others, group[0]->pc) == elsewhere + others) {}
    } else {
      while (quantum-- && together(b, w, group, size)) {}
    }
  }

  // One instruction for all of a group; whether it is together still, and may go on.
  bool together(Block& b, Warp& w, Lane** group, unsigned size) {
    const uint32_t pc = group[0]->pc;
    const Instruction& i = k_.code[pc];
    switch (i.op) {
      case Op::activemask: case Op::vote: case Op::shfl: case Op::match: case Op::redux: case Op::warp_bar: case Op::bar:
        return meet(b, w, i, group, size);
      default: break;
    }
    if (quick(b, i, group, size)) return true;
    at_once_.clear();
    awake_ = {};
    bool same = true;
    uint32_t to = ~0u;
    for (unsigned k = 0; k < size; k++) {
      Lane& l = *group[k];
      if (i.guard != ~0u && (bool)(l.at(i.guard) & 1) == i.unless) l.pc++;
      else one(b, l, i);
      if (l.state != runs || l.asleep) same = false;
      if (to == ~0u) to = l.pc;
      same = same && l.pc == to;
    }
    return same;
  }

  // The most usual ones, for all lanes of a group in one go: false for others.
  bool quick(Block& b, const Instruction& i, Lane** group, unsigned size);

  // Instructions of several lanes. Whoever comes waits; the last one does it for all.
  bool meet(Block& b, Warp& w, const Instruction& i, Lane** group, unsigned size);

  void barrier(Block& b);

  void complete(Block& b, Warp& w, const Instruction& i, Lane& at);

  // ------------------------------------------------------------ values

  u64 read(const Block& b, const Lane& l, const Operand& o) const {
    if (__builtin_expect(o.kind == Operand::reg, 1)) return l.at(o.slot) + o.is;
    switch (o.kind) {
      case Operand::value: return o.is;
      case Operand::special: return special(b, l, o.slot) + o.is;
      default: return 0;
    }
  }
  u64 read(const Block& b, const Lane& l, const Operand& o, Type t) const { return cut(read(b, l, o), t.bytes); }
  static void write(Lane& l, const Operand& o, u64 v, Type t) {
    if (o.kind == Operand::reg) l.at(o.slot) = t.as == As::predicate ? v & 1 : cut(v, t.bytes);
  }
  bool truth(const Block& b, const Lane& l, const Operand& o) const { return (read(b, l, o) & 1) != o.negated; }

  u64 special(const Block& b, const Lane& l, uint32_t which) const {
    const unsigned n = unsigned(&l - b.lanes.data()), lane = n % 32;
    switch (which) {
      case tid_x: return l.x;
      case tid_y: return l.y;
      case tid_z: return l.z;
      case ntid_x: return block_.x;
      case ntid_y: return block_.y;
      case ntid_z: return block_.z;
      case ctaid_x: return b.x;
      case ctaid_y: return b.y;
      case ctaid_z: return b.z;
      case nctaid_x: return grid_.x;
      case nctaid_y: return grid_.y;
      case nctaid_z: return grid_.z;
      case laneid: return lane;
      case warpid: return n / 32;
      case smid: return b.processor;
      case nsmid: return m_.processors;
      case clock32: return (uint32_t)__rdtsc();
      case clock64: return timed_ ? b.warps[n / 32].now : __rdtsc();
      case globaltimer: return (u64)std::chrono::steady_clock::now().time_since_epoch().count();
      case lanemask_eq: return 1u << lane;
      case lanemask_lt: return (1u << lane) - 1;
      case lanemask_le: return (u64(2) << lane) - 1;
      case lanemask_gt: return uint32_t(~((u64(2) << lane) - 1));
      case lanemask_ge: return uint32_t(~((u64(1) << lane) - 1));
      case dynamic_shared: return k_.shared_bytes;
    }
    return 0;
  }

  // ------------------------------------------------------------ memory

  static bool overlap(const Pending& a, u64 p, unsigned bytes) { return a.p < p + bytes && p < a.p + a.bytes; }
  // Something is everybody's now.
  void spread(Block& b, const Pending& x);
  void spread(Block& b, std::vector<Pending>& all);
  void spread_all(Block& b);
  // One of them, but not before another of the same place.
  void spread_some(Block& b, std::vector<Pending>& all);
  // What a lane has stored is its block's from here on, or everybody's, with all that it knows of.
  void releases(Block& b, Lane& l, bool of_block);
  void store(Block& b, Lane& l, char* p, u64 v, u64 high, unsigned bytes);
  u64 load(Block& b, Lane& l, const Instruction& i, const char* p, unsigned bytes);
  // What others have done is seen from here on.
  static void acquires(Block& b, const Instruction& i);
  // What was stored in a place comes before what follows there.
  void settle(Block& b, std::vector<Pending>& all, const char* p, unsigned bytes);

  char* place(const Block& b, Lane& l, const Instruction& i, u64 at, size_t n);

  static u64 fetch(const char* p, unsigned bytes);
  u64 at_once(const char* p, unsigned bytes);
  static Sector fetch_sector(u64 sector);
  static Sector fetch_whole(u64 sector);
  static void put(char* p, u64 v, unsigned bytes);
  static bool change(char* p, u64& is, u64 v, unsigned bytes);

  void one(Block& b, Lane& l, const Instruction& i);
  u64 converted(const Block& b, const Lane& l, const Instruction& i, u64 v) const;
};

}  // namespace ptx

#include "meet.h"
#include "one.h"
#include "timed.h"
#include "weak.h"
