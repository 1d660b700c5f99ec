// Runs PTX (`ptx.h`) on the host, lane by lane, as a GPU since Volta may: lanes of a warp that are at the same instruction go
// together, but in which order those that are not come, and how far each gets, is drawn by lot. What a GPU leaves undefined
// or forbids is an error here: memory of nobody's, addresses that are not aligned, a vote without those that it names, a
// barrier at which not everybody arrives.
// Memory is as weak as PTX lets it be, where that can be played: what a lane stores stays its own until it says otherwise or for
// a while that is drawn by lot, in any order; what it loads as nobody else's may be what its block saw there before, until it
// asks for what others did; and what it says never changes is read once. Loads are not brought forward.
#pragma once

#include <sched.h>
#include <unistd.h>
#include <x86intrin.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <string>
#include <unordered_map>
#include <vector>

#include "ptx.h"

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
  struct Pending { u64 p; u64 v[2]; unsigned bytes; };
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
  struct Warp { unsigned first, count; };
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
  // Whether the address at hand is in memory that others have, too.
  bool elsewhere_ = false;
  const bool weak_ = !getenv("STAND_IN_STRONG");
  // How long what is stored may stay where it is: a kernel is quick about it, or slow.
  unsigned patience_ = 4;

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
  bool quick(Block& b, const Instruction& i, Lane** group, unsigned size) {
    const Type t = i.type;
    if (t.as == As::floating || t.as == As::predicate || !i.several.empty() || t.bytes > 8 || i.d.kind != Operand::reg) return false;
    const unsigned bytes = t.bytes, bits = t.bits();
    const bool sign = t.as == As::with_sign;
    auto all = [&](auto f) {
      for (unsigned k = 0; k < size; k++) {
        Lane& l = *group[k];
        l.pc++;
        if (i.guard != ~0u && (bool)(l.at(i.guard) & 1) == i.unless) continue;
        const u64 x = cut(read(b, l, i.s[0]), bytes), y = i.sources > 1 ? cut(read(b, l, i.s[1]), bytes) : 0;
        l.at(i.d.slot) = cut(f(x, y, l), bytes);
      }
      return true;
    };
    switch (i.op) {
      case Op::mov: return all([](u64 x, u64, Lane&) { return x; });
      case Op::add: return all([](u64 x, u64 y, Lane&) { return x + y; });
      case Op::sub: return all([](u64 x, u64 y, Lane&) { return x - y; });
      case Op::and_: return all([](u64 x, u64 y, Lane&) { return x & y; });
      case Op::or_: return all([](u64 x, u64 y, Lane&) { return x | y; });
      case Op::xor_: return all([](u64 x, u64 y, Lane&) { return x ^ y; });
      case Op::not_: return all([](u64 x, u64, Lane&) { return ~x; });
      case Op::shl:
        if (bytes < 4) return false;
        return all([&](u64 x, u64 y, Lane&) { return (uint32_t)y >= bits ? 0 : x << (uint32_t)y; });
      case Op::shr:
        if (bytes < 4 || sign) return false;
        return all([&](u64 x, u64 y, Lane&) { return (uint32_t)y >= bits ? 0 : x >> (uint32_t)y; });
      case Op::mul: {
        if (i.high || bytes < 4 || (i.wide && bytes != 4)) return false;
        for (unsigned k = 0; k < size; k++) {
          Lane& l = *group[k];
          l.pc++;
          if (i.guard != ~0u && (bool)(l.at(i.guard) & 1) == i.unless) continue;
          const u64 x = cut(read(b, l, i.s[0]), bytes), y = cut(read(b, l, i.s[1]), bytes);
          const u64 r = sign ? (u64)extend(x, bytes) * (u64)extend(y, bytes) : x * y;
          l.at(i.d.slot) = i.wide ? r : cut(r, bytes);
        }
        return true;
      }
      case Op::setp:
        if (i.both != Sub::none || i.also.kind == Operand::reg) return false;
        // Its result is no value of its type.
        for (unsigned k = 0; k < size; k++) {
          Lane& l = *group[k];
          l.pc++;
          if (i.guard != ~0u && (bool)(l.at(i.guard) & 1) == i.unless) continue;
          l.at(i.d.slot) = compares(i.sub, t, cut(read(b, l, i.s[0]), bytes), cut(read(b, l, i.s[1]), bytes));
        }
        return true;
      case Op::selp: return all([&](u64 x, u64 y, Lane& l) { return truth(b, l, i.s[2]) ? x : y; });
      default: return false;
    }
  }

  // Instructions of several lanes. Whoever comes waits; the last one does it for all.
  bool meet(Block& b, Warp& w, const Instruction& i, Lane** group, unsigned size) {
    bool same = true;
    for (unsigned k = 0; k < size; k++) {
      Lane& l = *group[k];
      if (i.guard != ~0u && (bool)(l.at(i.guard) & 1) == i.unless) { l.pc++; same = false; continue; }
      if (i.op == Op::bar) {
        l.barrier = unsigned(read(b, l, i.s[0]));
        if (i.sources > 1 && read(b, l, i.s[1]) != lanes_) fail(FAULT_LAUNCH, i, b, l, "a barrier for some threads is not known here");
        l.state = at_barrier;
        b.waiting++;
      } else {
        l.mask = i.op == Op::activemask ? 0 : (uint32_t)read(b, l, i.s[i.sources - 1]);
        l.state = meets;
        const unsigned lane = unsigned(&l - &b.lanes[w.first]);
        if (i.op != Op::activemask && !(l.mask >> lane & 1)) fail(FAULT_LAUNCH, i, b, l, "a lane is not among those that it names: " + hex(l.mask));
        if (w.count < 32 && l.mask != ~0u && l.mask >> w.count) fail(FAULT_LAUNCH, i, b, l, "lanes that there are none of: " + hex(l.mask));
      }
    }
    if (i.op == Op::bar) return barrier(b), false;
    if (i.op == Op::activemask) {
      // Those that came together, or fewer.
      uint32_t mask = 0;
      const bool apart = lot() % 16 == 0;
      for (unsigned k = 0; k < size; k++) if (group[k]->state == meets) mask |= 1u << unsigned(group[k] - &b.lanes[w.first]);
      for (unsigned k = 0; k < size; k++) {
        Lane& l = *group[k];
        if (l.state != meets) continue;
        write(l, i.d, apart ? 1u << unsigned(&l - &b.lanes[w.first]) : mask, i.type);
        l.state = runs;
        l.pc++;
      }
      return same && !apart;
    }
    for (unsigned k = 0; k < size; k++) if (group[k]->state == meets) complete(b, w, i, *group[k]);
    for (unsigned k = 0; k < size; k++) same = same && group[k]->state == runs && group[k]->pc == group[0]->pc;
    return same;
  }

  void barrier(Block& b) {
    if (!b.waiting) return;
    for (unsigned which = 0; which < 16; which++) {
      size_t there = 0, ended_ = 0;
      for (auto& l : b.lanes) {
        there += l.state == at_barrier && l.barrier == which;
        ended_ += l.state == ended;
      }
      if (!there || there + ended_ != b.lanes.size()) continue;
      for (auto& l : b.lanes)
        if (l.state == at_barrier && l.barrier == which) {
          l.state = runs;
          l.pc++;
          b.waiting--;
          releases(b, l, true);
        }
    }
  }

  void complete(Block& b, Warp& w, const Instruction& i, Lane& at) {
    Lane* all = &b.lanes[w.first];
    uint32_t mask = at.mask;
    if (w.count < 32) mask &= (1u << w.count) - 1;
    for (unsigned k = 0; k < w.count; k++) {
      if (!(mask >> k & 1)) continue;
      const Lane& l = all[k];
      // Nobody waits for those who have ended.
      if (l.state == ended) {
        mask &= ~(1u << k);
        continue;
      }
      if (l.state != meets) return;
      const Instruction& its = k_.code[l.pc];
      // Lanes that meet may do so in different places; those that tell each other something may not.
      if (l.mask != at.mask || its.op != i.op || (i.op != Op::warp_bar && l.pc != at.pc)) return;
    }
    u64 values[32] = {}, results[32] = {}, also[32] = {};
    for (unsigned k = 0; k < w.count; k++) if (mask >> k & 1 && i.op != Op::warp_bar)
      values[k] = i.op == Op::vote ? read(b, all[k], i.s[0]) : read(b, all[k], i.s[0], i.type);
    uint32_t yes = 0;
    switch (i.op) {
      case Op::warp_bar: break;
      case Op::vote:
        for (unsigned k = 0; k < w.count; k++) if (mask >> k & 1 && ((values[k] & 1) != i.s[0].negated)) yes |= 1u << k;
        for (unsigned k = 0; k < w.count; k++)
          results[k] = i.sub == Sub::ballot ? yes : i.sub == Sub::any ? yes != 0 : i.sub == Sub::all ? yes == mask : yes == mask || !yes;
        break;
      case Op::shfl:
        for (unsigned k = 0; k < w.count; k++) {
          if (!(mask >> k & 1)) continue;
          const unsigned by = read(b, all[k], i.s[1]) & 31, c = read(b, all[k], i.s[2]), bound = c & 31, piece = c >> 8 & 31;
          const unsigned most = (k & piece) | (bound & ~piece), least = k & piece;
          unsigned from = k;
          bool inside = false;
          if (i.sub == Sub::up) { from = k - by; inside = (int)from >= (int)most; }
          if (i.sub == Sub::down) { from = k + by; inside = from <= most; }
          if (i.sub == Sub::bfly) { from = k ^ by; inside = from <= most; }
          if (i.sub == Sub::idx) { from = least | (by & ~piece); inside = from <= most; }
          if (!inside) from = k;
          // Whoever is not among them says anything.
          results[k] = from < 32 && mask >> from & 1 ? values[from] : 0xBAD5EEDBAD5EEDu + lot();
          also[k] = inside;
        }
        break;
      case Op::match:
        for (unsigned k = 0; k < w.count; k++) {
          uint32_t same = 0;
          for (unsigned o = 0; o < w.count; o++) if (mask >> o & 1 && values[o] == values[k]) same |= 1u << o;
          results[k] = i.sub == Sub::any ? same : same == mask ? mask : 0;
          also[k] = same == mask;
        }
        break;
      case Op::redux: {
        u64 r = 0;
        bool first = true;
        for (unsigned k = 0; k < w.count; k++) {
          if (!(mask >> k & 1)) continue;
          r = first ? values[k] : joined(i.sub, i.type, r, values[k], 0);
          first = false;
        }
        for (u64& x : results) x = r;
        break;
      }
      default: break;
    }
    const u64 order = lot();
    for (unsigned n = 0; n < w.count; n++) {
      const unsigned k = (n + order) % w.count;
      if (!(mask >> k & 1)) continue;
      if (i.op == Op::vote) all[k].at(i.d.slot) = results[k];
      else if (i.op != Op::warp_bar && i.d.kind == Operand::reg) write(all[k], i.d, results[k], i.type);
      if (i.also.kind == Operand::reg) all[k].at(i.also.slot) = also[k];
      if (i.op == Op::warp_bar) releases(b, all[k], true);
      all[k].state = runs;
      all[k].pc++;
    }
  }

  // ------------------------------------------------------------ values

  static u64 cut(u64 v, unsigned bytes) { return bytes >= 8 ? v : v & ((u64(1) << bytes * 8) - 1); }
  static int64_t extend(u64 v, unsigned bytes) {
    const unsigned s = 64 - 8 * std::min(bytes, 8u);
    return int64_t(v << s) >> s;
  }
  static float f32(u64 v) { float f; uint32_t u = (uint32_t)v; memcpy(&f, &u, 4); return f; }
  static double f64(u64 v) { double f; memcpy(&f, &v, 8); return f; }
  static u64 bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
  static u64 bits(double f) { u64 u; memcpy(&u, &f, 8); return u; }

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
      case clock64: return __rdtsc();
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
  void spread(Block& b, const Pending& x) {
    if (x.bytes == 16) _mm_store_si128((__m128i*)x.p, _mm_set_epi64x((long long)x.v[1], (long long)x.v[0]));
    else put((char*)x.p, x.v[0], x.bytes);
    b.seen.erase(x.p / 32);
  }
  void spread(Block& b, std::vector<Pending>& all) {
    for (auto& x : all) spread(b, x);
    all.clear();
  }
  void spread_all(Block& b) {
    spread(b, b.pending);
    for (auto& l : b.lanes) spread(b, l.pending);
  }
  // One of them, but not before another of the same place.
  void spread_some(Block& b, std::vector<Pending>& all) {
    if (all.empty()) return;
    size_t which = lot() % all.size();
    for (size_t k = 0; k < which; k++) if (overlap(all[k], all[which].p, all[which].bytes)) which = k;
    spread(b, all[which]);
    all.erase(all.begin() + which);
  }
  // What a lane has stored is its block's from here on, or everybody's, with all that it knows of.
  void releases(Block& b, Lane& l, bool of_block) {
    if (of_block) {
      b.pending.insert(b.pending.end(), l.pending.begin(), l.pending.end());
      l.pending.clear();
      return;
    }
    spread(b, b.pending);
    spread(b, l.pending);
  }
  void store(Block& b, Lane& l, char* p, u64 v, u64 high, unsigned bytes) {
    const Pending x{(u64)p, {v, high}, bytes};
    if (!weak_ || !elsewhere_) return spread(b, x);
    // What its block has stored there came before.
    settle(b, b.pending, p, bytes);
    b.seen.erase(x.p / 32);
    l.pending.push_back(x);
    if (l.pending.size() > 32) spread_some(b, l.pending);
  }
  u64 load(Block& b, Lane& l, const Instruction& i, const char* p, unsigned bytes) {
    if (!weak_ || !elsewhere_) return fetch(p, bytes);
    u64 v;
    if (i.strong) {
      b.seen.erase((u64)p / 32);
      v = fetch(p, bytes);
    } else {
      auto& from = i.kept ? b.kept : b.seen;
      if (from.size() > 4096) from.clear();
      auto at = from.find((u64)p / 32);
      if (at == from.end()) {
        Sector s;
        const char* whole = (const char*)((u64)p & ~u64(31));
        for (unsigned k = 0; k < 4; k++) s.v[k] = fetch(whole + 8 * k, 8);
        at = from.emplace((u64)p / 32, s).first;
      }
      memcpy(&v, (const char*)at->second.v + ((u64)p & 31), bytes);
      v = cut(v, bytes);
    }
    for (auto* all : {&b.pending, &l.pending})
      for (auto& x : *all) {
        if (!overlap(x, (u64)p, bytes)) continue;
        for (unsigned k = 0; k < bytes; k++) {
          const u64 at = (u64)p + k;
          if (at >= x.p && at < x.p + x.bytes) {
            const u64 byte = ((const unsigned char*)x.v)[at - x.p];
            v = (v & ~(u64(255) << 8 * k)) | byte << 8 * k;
          }
        }
      }
    return v;
  }
  // What others have done is seen from here on.
  static void acquires(Block& b, const Instruction& i) {
    if (!i.of_block) b.seen.clear();
  }
  // What was stored in a place comes before what follows there.
  void settle(Block& b, std::vector<Pending>& all, const char* p, unsigned bytes) {
    for (size_t k = 0; k < all.size();) {
      if (overlap(all[k], (u64)p, bytes)) {
        spread(b, all[k]);
        all.erase(all.begin() + k);
      } else {
        k++;
      }
    }
  }

  char* place(const Block& b, Lane& l, const Instruction& i, u64 at, size_t n) {
    const u64 shared = (u64)aligned(const_cast<char*>(b.shared.data())), shared_size = k_.shared_bytes + dynamic_, local = (u64)l.local;
    u64 p = at;
    switch (i.space) {
      case Space::param:
        if (i.of_call) p += local;
        else if (at + n > k_.parameter_bytes) fail(FAULT_ADDRESS, i, b, l, "beyond the parameters");
        else p += (u64)parameters_.data();
        break;
      case Space::shared: p += shared; break;
      case Space::local: p += local; break;
      default: break;
    }
    if (i.space != Space::param && p % n) fail(FAULT_ALIGNMENT, i, b, l, "address " + hex(p) + " of " + std::to_string(n) + " bytes");
    elsewhere_ = false;
    const bool in_shared = p >= shared && p + n <= shared + shared_size, in_local = p >= local && p + n <= local + k_.local_bytes;
    if (i.space == Space::param || (in_shared && (i.space == Space::shared || i.space == Space::generic)) ||
        (in_local && (i.space == Space::local || i.space == Space::generic)))
      return (char*)p;
    if (i.space == Space::shared || i.space == Space::local) fail(FAULT_ADDRESS, i, b, l, "address " + hex(at) + " of its own memory");
    elsewhere_ = true;
    const unsigned now = m_.generation->load(std::memory_order_acquire);
    if (now != generation_) {
      for (auto& k : known_) k = Known();
      generation_ = now;
    }
    for (auto& k : known_) if (p >= k.first && p + n <= k.end) return (char*)p;
    Known k;
    if (!m_.may(p, n, k.first, k.end)) fail(FAULT_ADDRESS, i, b, l, "address " + hex(p) + " of " + std::to_string(n) + " bytes");
    known_[known_at_++ % 4] = k;
    return (char*)p;
  }

  static u64 fetch(const char* p, unsigned bytes) {
    switch (bytes) {
      case 1: return __atomic_load_n((const uint8_t*)p, __ATOMIC_SEQ_CST);
      case 2: return __atomic_load_n((const uint16_t*)p, __ATOMIC_SEQ_CST);
      case 4: return __atomic_load_n((const uint32_t*)p, __ATOMIC_SEQ_CST);
      default: return __atomic_load_n((const u64*)p, __ATOMIC_SEQ_CST);
    }
  }
  static void put(char* p, u64 v, unsigned bytes) {
    switch (bytes) {
      case 1: __atomic_store_n((uint8_t*)p, (uint8_t)v, __ATOMIC_RELEASE); break;
      case 2: __atomic_store_n((uint16_t*)p, (uint16_t)v, __ATOMIC_RELEASE); break;
      case 4: __atomic_store_n((uint32_t*)p, (uint32_t)v, __ATOMIC_RELEASE); break;
      default: __atomic_store_n((u64*)p, v, __ATOMIC_RELEASE);
    }
  }
  static bool change(char* p, u64& is, u64 v, unsigned bytes) {
    if (bytes == 4) {
      uint32_t e = (uint32_t)is;
      bool done = __atomic_compare_exchange_n((uint32_t*)p, &e, (uint32_t)v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
      is = e;
      return done;
    }
    return __atomic_compare_exchange_n((u64*)p, &is, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  }

  static u64 joined(Sub what, Type t, u64 a, u64 b, u64 c) {
    const bool sign = t.as == As::with_sign;
    switch (what) {
      case Sub::add: return t.as != As::floating ? a + b : t.bytes == 4 ? bits(f32(a) + f32(b)) : bits(f64(a) + f64(b));
      case Sub::min: return sign ? (extend(a, t.bytes) < extend(b, t.bytes) ? a : b) : std::min(a, b);
      case Sub::max: return sign ? (extend(a, t.bytes) > extend(b, t.bytes) ? a : b) : std::max(a, b);
      case Sub::and_: return a & b;
      case Sub::or_: return a | b;
      case Sub::xor_: return a ^ b;
      case Sub::exch: return b;
      case Sub::cas: return a == b ? c : a;
      case Sub::inc: return a >= b ? 0 : a + 1;
      case Sub::dec: return a == 0 || a > b ? b : a - 1;
      default: return a;
    }
  }

  void one(Block& b, Lane& l, const Instruction& i);
  bool compares(Sub s, Type t, u64 a, u64 b) const;
  u64 converted(const Block& b, const Lane& l, const Instruction& i, u64 v) const;
};

inline bool Launched::compares(Sub s, Type t, u64 a, u64 b) const {
  if (t.as == As::floating) {
    const double x = t.bytes == 4 ? f32(a) : f64(a), y = t.bytes == 4 ? f32(b) : f64(b);
    const bool none = std::isnan(x) || std::isnan(y);
    switch (s) {
      case Sub::eq: return x == y;
      case Sub::ne: return !none && x != y;
      case Sub::lt: return x < y;
      case Sub::le: return x <= y;
      case Sub::gt: return x > y;
      case Sub::ge: return x >= y;
      case Sub::equ: return none || x == y;
      case Sub::neu: return none || x != y;
      case Sub::ltu: return none || x < y;
      case Sub::leu: return none || x <= y;
      case Sub::gtu: return none || x > y;
      case Sub::geu: return none || x >= y;
      case Sub::num: return !none;
      default: return none;
    }
  }
  const int64_t x = extend(a, t.bytes), y = extend(b, t.bytes);
  const bool sign = t.as == As::with_sign;
  switch (s) {
    case Sub::eq: return a == b;
    case Sub::ne: return a != b;
    case Sub::lt: case Sub::lo: return sign ? x < y : a < b;
    case Sub::le: case Sub::ls: return sign ? x <= y : a <= b;
    case Sub::gt: case Sub::hi: return sign ? x > y : a > b;
    default: return sign ? x >= y : a >= b;
  }
}

inline u64 Launched::converted(const Block& b, const Lane& l, const Instruction& i, u64 v) const {
  const Type f = i.from, t = i.type;
  if (f.as == As::floating) {
    const double x = f.bytes == 4 ? f32(v) : f64(v);
    if (t.as == As::floating) {
      double r = x;
      if (i.toward_zero) r = std::trunc(x);
      if (i.sat) r = std::isnan(x) ? 0 : std::min(1.0, std::max(0.0, x));
      return t.bytes == 4 ? bits((float)r) : bits(r);
    }
    const double r = i.toward_zero ? std::trunc(x) : i.down ? std::floor(x) : std::nearbyint(x);
    if (std::isnan(r)) return 0;
    const unsigned n = t.bits();
    if (t.as == As::with_sign) {
      const double most = std::ldexp(1.0, n - 1);
      return r >= most ? (u64(1) << (n - 1)) - 1 : r <= -most ? u64(1) << (n - 1) : (u64)(int64_t)r;
    }
    return r <= 0 ? 0 : r >= std::ldexp(1.0, n) ? ~u64(0) : (u64)r;
  }
  const u64 w = f.as == As::with_sign ? (u64)extend(v, f.bytes) : cut(v, f.bytes);
  if (t.as == As::floating) {
    if (f.as == As::with_sign) return t.bytes == 4 ? bits((float)(int64_t)w) : bits((double)(int64_t)w);
    return t.bytes == 4 ? bits((float)w) : bits((double)w);
  }
  if (i.sat) fail(FAULT_LAUNCH, i, b, l, "a saturating conversion of whole numbers is not known here");
  return w;
}

inline void Launched::one(Block& b, Lane& l, const Instruction& i) {
  const Type t = i.type;
  const bool sign = t.as == As::with_sign, real = t.as == As::floating;
  auto s = [&](unsigned n) { return read(b, l, i.s[n], t); };
  auto gives = [&](u64 v) { write(l, i.d, v, t); };
  auto signs = [&](unsigned n) { return extend(s(n), t.bytes); };
  auto reals = [&](auto f) {
    if (t.bytes == 4) gives(bits(f(f32(s(0)), f32(s(1)), f32(s(2)))));
    else gives(bits(f(f64(s(0)), f64(s(1)), f64(s(2)))));
  };
  l.pc++;
  switch (i.op) {
    case Op::mov:
      if (!i.several.empty()) {
        const unsigned each = t.bytes / i.several.size();
        if (i.unpacks) {
          for (size_t k = 0; k < i.several.size(); k++) {
            const u64 v = each == 8 ? l.at(i.s[0].slot + k) : read(b, l, i.s[0]) >> (8 * each * k);
            write(l, i.several[k], v, {As::bits, (uint8_t)each});
          }
        } else if (t.bytes == 16) {
          for (size_t k = 0; k < 2; k++) l.at(i.d.slot + k) = read(b, l, i.several[k]);
        } else {
          u64 v = 0;
          for (size_t k = 0; k < i.several.size(); k++) v |= cut(read(b, l, i.several[k]), each) << (8 * each * k);
          gives(v);
        }
      } else if (t.as == As::predicate) {
        gives(truth(b, l, i.s[0]));
      } else {
        gives(s(0));
      }
      break;
    case Op::add: if (real) reals([](auto x, auto y, auto) { return x + y; }); else gives(s(0) + s(1)); break;
    case Op::sub: if (real) reals([](auto x, auto y, auto) { return x - y; }); else gives(s(0) - s(1)); break;
    case Op::mul:
    case Op::mad: {
      if (real) {
        if (i.op == Op::mad) reals([](auto x, auto y, auto z) { return std::fma(x, y, z); });
        else reals([](auto x, auto y, auto) { return x * y; });
        break;
      }
      const unsigned n = t.bits();
      u64 r;
      if (i.high) {
        r = sign ? (u64)(((__int128)signs(0) * signs(1)) >> n) : (u64)(((unsigned __int128)s(0) * s(1)) >> n);
      } else {
        r = sign ? (u64)signs(0) * (u64)signs(1) : s(0) * s(1);
      }
      Type to = t;
      if (i.wide) to.bytes *= 2;
      if (i.op == Op::mad) r += read(b, l, i.s[2], to);
      write(l, i.d, r, to);
      break;
    }
    case Op::fma:
      if (i.down) {
        const int before = fegetround();
        fesetround(FE_DOWNWARD);
        volatile float x = f32(s(0)), y = f32(s(1)), z = f32(s(2));
        const double exact = (double)x * (double)y;
        volatile float r = (float)(exact + (double)z);
        fesetround(before);
        gives(bits((float)r));
      } else {
        reals([](auto x, auto y, auto z) { return std::fma(x, y, z); });
      }
      break;
    case Op::div:
      if (real) reals([](auto x, auto y, auto) { return x / y; });
      else if (!s(1)) gives(~u64(0));
      else if (sign) gives(signs(1) == -1 ? (u64)-signs(0) : (u64)(signs(0) / signs(1)));
      else gives(s(0) / s(1));
      break;
    case Op::rem:
      if (!s(1)) gives(s(0));
      else if (sign) gives(signs(1) == -1 ? 0 : (u64)(signs(0) % signs(1)));
      else gives(s(0) % s(1));
      break;
    case Op::abs: if (real) reals([](auto x, auto, auto) { return std::fabs(x); }); else gives(signs(0) < 0 ? (u64)-signs(0) : s(0)); break;
    case Op::neg: if (real) gives(s(0) ^ u64(1) << (t.bits() - 1)); else gives((u64)-signs(0)); break;
    case Op::min: if (real) reals([](auto x, auto y, auto) { return std::fmin(x, y); }); else gives(joined(Sub::min, t, s(0), s(1), 0)); break;
    case Op::max: if (real) reals([](auto x, auto y, auto) { return std::fmax(x, y); }); else gives(joined(Sub::max, t, s(0), s(1), 0)); break;
    case Op::and_: if (t.as == As::predicate) gives(truth(b, l, i.s[0]) && truth(b, l, i.s[1])); else gives(s(0) & s(1)); break;
    case Op::or_: if (t.as == As::predicate) gives(truth(b, l, i.s[0]) || truth(b, l, i.s[1])); else gives(s(0) | s(1)); break;
    case Op::xor_: if (t.as == As::predicate) gives(truth(b, l, i.s[0]) != truth(b, l, i.s[1])); else gives(s(0) ^ s(1)); break;
    case Op::not_: if (t.as == As::predicate) gives(!truth(b, l, i.s[0])); else gives(~s(0)); break;
    case Op::cnot: gives(s(0) == 0); break;
    case Op::shl: { const u64 n = uint32_t(read(b, l, i.s[1])); gives(n >= t.bits() ? 0 : s(0) << n); break; }
    case Op::shr: {
      const u64 n = std::min<u64>(uint32_t(read(b, l, i.s[1])), t.bits());
      if (sign) gives((u64)(signs(0) >> std::min<u64>(n, 63)));
      else gives(n >= t.bits() ? 0 : s(0) >> n);
      break;
    }
    case Op::shf: {
      u64 n = uint32_t(s(2));
      n = i.wraps ? n & 31 : std::min<u64>(n, 32);
      const u64 both = s(1) << 32 | s(0);
      gives(i.sub == Sub::left ? (n == 0 ? s(1) : both >> (32 - n)) : both >> n);
      break;
    }
    case Op::prmt: {
      const u64 both = s(1) << 32 | s(0), how = s(2);
      u64 r = 0;
      for (unsigned k = 0; k < 4; k++) {
        const unsigned which = how >> 4 * k & 15;
        u64 byte = both >> 8 * (which & 7) & 255;
        if (which & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << 8 * k;
      }
      gives(r);
      break;
    }
    case Op::bfi: {
      const u64 at = read(b, l, i.s[2]) & 255, n = read(b, l, i.s[3]) & 255;
      u64 mask = n >= 64 ? ~u64(0) : (u64(1) << n) - 1;
      mask = at >= 64 ? 0 : mask << at;
      gives((s(1) & ~mask) | (at >= 64 ? 0 : s(0) << at & mask));
      break;
    }
    case Op::bfe: {
      const u64 at = read(b, l, i.s[1]) & 255, n = read(b, l, i.s[2]) & 255;
      const u64 v = at >= t.bits() ? (sign && signs(0) < 0 ? ~u64(0) : 0) : sign ? (u64)(signs(0) >> at) : s(0) >> at;
      if (n == 0) gives(0);
      else if (n >= 64) gives(v);
      else gives(sign ? (u64)((int64_t)(v << (64 - n)) >> (64 - n)) : v & ((u64(1) << n) - 1));
      break;
    }
    case Op::lop3: {
      const u64 how = read(b, l, i.s[3]);
      u64 r = 0;
      for (unsigned k = 0; k < 8; k++)
        if (how >> k & 1) r |= (k & 4 ? s(0) : ~s(0)) & (k & 2 ? s(1) : ~s(1)) & (k & 1 ? s(2) : ~s(2));
      gives(r);
      break;
    }
    case Op::popc: write(l, i.d, (u64)__builtin_popcountll(s(0)), {As::bits, 4}); break;
    case Op::clz: write(l, i.d, s(0) ? (u64)__builtin_clzll(s(0)) - (64 - t.bits()) : t.bits(), {As::bits, 4}); break;
    case Op::brev: {
      u64 r = 0;
      for (unsigned k = 0; k < t.bits(); k++) r |= (s(0) >> k & 1) << (t.bits() - 1 - k);
      gives(r);
      break;
    }
    case Op::sqrt: reals([](auto x, auto, auto) { return std::sqrt(x); }); break;
    case Op::rcp: reals([](auto x, auto, auto) { return 1 / x; }); break;
    case Op::rsqrt: reals([](auto x, auto, auto) { return 1 / std::sqrt(x); }); break;
    case Op::ex2: reals([](auto x, auto, auto) { return std::exp2(x); }); break;
    case Op::lg2: reals([](auto x, auto, auto) { return std::log2(x); }); break;
    case Op::cvt: gives(converted(b, l, i, read(b, l, i.s[0]))); break;
    case Op::cvta: {
      const u64 base = i.space == Space::shared  ? (u64)aligned(const_cast<char*>(b.shared.data()))
                       : i.space == Space::local ? (u64)l.local
                                                 : 0;
      gives(i.to ? s(0) - base : s(0) + base);
      break;
    }
    case Op::setp: {
      bool r = compares(i.sub, t, s(0), s(1)), other = !r;
      if (i.both != Sub::none) {
        const bool third = truth(b, l, i.s[2]);
        auto with = [&](bool x) { return i.both == Sub::and_ ? x && third : i.both == Sub::or_ ? x || third : x != third; };
        r = with(r);
        other = with(other);
      }
      l.at(i.d.slot) = r;
      if (i.also.kind == Operand::reg) l.at(i.also.slot) = other;
      break;
    }
    case Op::selp: gives(truth(b, l, i.s[2]) ? s(0) : s(1)); break;
    case Op::ld: {
      const size_t n = std::max<size_t>(1, i.several.size());
      const char* p = place(b, l, i, read(b, l, i.s[0]), t.bytes * n);
      // Narrow values fill their registers.
      const Type whole{As::bits, 8};
      if (t.bytes == 16) {
        for (unsigned k = 0; k < 2; k++) l.at(i.d.slot + k) = load(b, l, i, p + 8 * k, 8);
        break;
      }
      u64 v[8];
      for (size_t k = 0; k < n; k++) v[k] = load(b, l, i, p + t.bytes * k, t.bytes);
      if (i.acquires) acquires(b, i);
      for (size_t k = 0; k < n; k++) {
        const Operand& to = i.several.empty() ? i.d : i.several[k];
        write(l, to, sign && t.bytes < 4 ? (u64)extend(v[k], t.bytes) : v[k], whole);
      }
      break;
    }
    case Op::st: {
      const size_t n = std::max<size_t>(1, i.several.size());
      char* p = place(b, l, i, read(b, l, i.s[0]), t.bytes * n);
      if (i.releases) releases(b, l, i.of_block);
      if (t.bytes == 16) {
        store(b, l, p, l.at(i.s[1].slot), l.at(i.s[1].slot + 1), 16);
        break;
      }
      for (size_t k = 0; k < n; k++) store(b, l, p + t.bytes * k, read(b, l, i.several.empty() ? i.s[1] : i.several[k]), 0, t.bytes);
      // In its time, which is not now for whoever waits for it.
      if (i.releases && elsewhere_) releases(b, l, i.of_block);
      break;
    }
    case Op::atom:
    case Op::red: {
      if (t.bytes < 4) fail(FAULT_LAUNCH, i, b, l, "an atomic of less than a word");
      char* p = place(b, l, i, read(b, l, i.s[0]), t.bytes);
      if (i.releases) releases(b, l, i.of_block);
      if (elsewhere_) {
        settle(b, b.pending, p, t.bytes);
        settle(b, l.pending, p, t.bytes);
        b.seen.erase((u64)p / 32);
      }
      u64 is = fetch(p, t.bytes);
      const u64 with = s(1), third = i.sources > 2 ? s(2) : 0;
      while (!change(p, is, cut(joined(i.sub, t, is, with, third), t.bytes), t.bytes)) {}
      if (i.op == Op::atom) gives(is);
      if (i.acquires) acquires(b, i);
      break;
    }
    case Op::bra: l.pc = i.target; break;
    case Op::ret:
      l.state = ended;
      b.left--;
      releases(b, l, true);
      barrier(b);
      // Whoever waits for it in its warp.
      for (auto& w : b.warps) {
        Lane* first = &b.lanes[w.first];
        if (&l < first || &l >= first + w.count) continue;
        for (unsigned k = 0; k < w.count; k++)
          if (first[k].state == meets) complete(b, w, k_.code[first[k].pc], first[k]);
      }
      break;
    case Op::trap: fail(FAULT_TRAP, i, b, l, "trap");
    case Op::call: {
      releases(b, l, false);
      acquires(b, i);
      auto argument = [&](unsigned n) { u64 v; memcpy(&v, l.local + i.s[n].is, 8); return v; };
      if (i.callee == Callee::malloc) {
        const u64 p = m_.allocate(argument(0));
        memcpy(l.local + i.d.is, &p, 8);
      } else if (i.callee == Callee::free) {
        m_.release(argument(0));
      } else {
        fail(FAULT_LAUNCH, i, b, l, "printing is not known here");
      }
      break;
    }
    case Op::fence:
      if (i.releases) releases(b, l, i.of_block);
      __atomic_thread_fence(__ATOMIC_SEQ_CST);
      if (i.acquires) acquires(b, i);
      break;
    case Op::nanosleep:
      l.asleep = true;
      l.asleep_until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(read(b, l, i.s[0]) & 0xFFFFFFFF);
      break;
    default: break;
  }
}

}  // namespace ptx
