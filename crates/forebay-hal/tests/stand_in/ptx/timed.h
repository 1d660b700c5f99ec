// How long a GPU might take for what `lanes.h` runs: for whoever wants to know where time goes and has no GPU. An estimate, good
// for comparing one way with another, not a measurement: latencies are rough, and of what is queued where only the worst is
// known: issue slots, the path to memory of each multiprocessor, and atomics at one address. Warps go on in the order of
// their time; each issues in order, and waits for what an instruction needs.
#pragma once

#include "lanes.h"

namespace ptx {

// In cycles of some 1.8 GHz, as an H200 has. A flag from multiprocessor to multiprocessor and back takes 0.89 us there, which
// is four of LEVEL_2 and what the loop takes; it does 1.37 G atomics a second at one address, and 80 G anywhere.
enum : u64 {
  ARITHMETIC = 5, WIDE = 10, DIVISION = 40, BRANCH = 8, SHUFFLE = 24, VOTE = 14, MEETING = 8, BARRIER = 12,
  SHARED = 28, LEVEL_1 = 38, LEVEL_2 = 290, FENCE = 200, ATOMIC = 14, ATOMIC_SECTOR = 3, NEXT_BLOCK = 300,
};

inline void Launched::enter(Block* b, unsigned w) {
  if (b->warps[w].queued) return;
  b->warps[w].queued = true;
  turns_.push({b->warps[w].now, entered_++, b, w});
}

inline void Launched::run_timed(const char* path) {
  const u64 all = u64(grid_.x) * grid_.y * grid_.z;
  size_t each = std::max(1u, std::min(32u, 1024 / lanes_));
  if (const size_t bytes = k_.shared_bytes + dynamic_) each = std::max<size_t>(1, std::min<size_t>(each, (227 << 10) / bytes));
  units_.resize(m_.processors);
  std::vector<std::unique_ptr<Block>> here;
  u64 begun = 0, end = 0, first = 0, others = 0;
  auto start = [&](unsigned unit, u64 at) {
    here.push_back(begin(begun++));
    Block* b = here.back().get();
    b->processor = unit;
    for (unsigned w = 0; w < b->warps.size(); w++) {
      b->warps[w].now = at;
      b->warps[w].ready.assign(k_.slots + 1, 0);
      enter(b, w);
    }
  };
  for (size_t k = 0; k < each; k++) for (unsigned u = 0; u < m_.processors && begun < all; u++) start(u, 0);
  for (u64 turn = 1; !here.empty(); turn++) {
    if (turn % 65536 == 0) {
      if (*m_.lost) return;
      sched_yield();
    }
    if (turns_.empty()) stuck(here);
    const Turn next = turns_.top();
    turns_.pop();
    Block& b = *next.block;
    b.warps[next.warp].queued = false;
    timed(b, next);
    if (b.left > 0) continue;
    u64 at = 0;
    for (size_t w = 0; w < b.warps.size(); w++) {
      at = std::max(at, b.warps[w].now);
      (w == 0 ? first : others) += b.warps[w].issued;
    }
    end = std::max(end, at);
    const unsigned unit = b.processor;
    here.erase(std::find_if(here.begin(), here.end(), [&](auto& x) { return x.get() == &b; }));
    if (begun < all) start(unit, at + NEXT_BLOCK);
  }
  if (FILE* f = fopen(path, "a")) {
    fprintf(f, "%s blocks %llu lanes %u cycles %llu instructions of first warps %llu of others %llu\n", k_.name.c_str(),
            (unsigned long long)all, lanes_, (unsigned long long)end, (unsigned long long)first, (unsigned long long)others);
    fclose(f);
  }
}

// Instructions that are none in the machine's code.
inline bool Launched::is_free(const Instruction& i) {
  const bool whole = i.type.as != As::floating && i.from.as != As::floating && i.type.bytes >= 4 && i.from.bytes >= 4;
  return i.op == Op::nothing || i.op == Op::cvta || (i.op == Op::cvt && whole) || (i.op == Op::mov && i.several.empty());
}

// When a warp has what an instruction needs.
inline u64 Launched::can_issue(Block& b, Warp& w, const Instruction& i) {
  u64 t = w.now;
  auto needs = [&](const Operand& o) { if (o.kind == Operand::reg) t = std::max(t, w.ready[o.slot]); };
  for (unsigned k = 0; k < i.sources; k++) needs(i.s[k]);
  if (i.op != Op::ld) for (auto& o : i.several) needs(o);
  if (i.guard != ~0u) t = std::max(t, w.ready[i.guard]);
  if (!is_free(i)) t = std::max(t, units_[b.processor].issue[(&w - b.warps.data()) % 4]);
  // What it has stored is everybody's first.
  if (i.releases && !i.of_block && !w.released) t = std::max(t + FENCE, w.stored);
  return t;
}

// One instruction of a warp, if its time has come.
inline void Launched::timed(Block& b, const Turn& turn) {
  Warp& w = b.warps[turn.warp];
  Lane* all = &b.lanes[w.first];
  unsigned can[32], n = 0;
  for (unsigned i = 0; i < w.count; i++) if (all[i].state == runs) can[n++] = i;
  if (n == 0) return;
  // Who is furthest back, and sometimes another, who may be waited for.
  unsigned leader = can[lot() % 4096 == 0 ? lot() % n : 0];
  if (leader == can[0]) for (unsigned i = 0; i < n; i++) if (all[can[i]].pc < all[leader].pc) leader = can[i];
  Lane* group[32];
  unsigned size = 0;
  for (unsigned i = 0; i < n; i++) if (all[can[i]].pc == all[leader].pc) group[size++] = &all[can[i]];
  const uint32_t pc = group[0]->pc;
  const Instruction& i = k_.code[pc];
  const u64 t = can_issue(b, w, i);
  if (t > turn.at && !turns_.empty() && t > turns_.top().at) {
    w.released = i.releases;
    w.now = t;
    return enter(&b, turn.warp);
  }
  w.released = false;
  touched_.clear();
  freed_ = false;
  slept_ = 0;
  elsewhere_ = shared_ = false;
  const bool free = is_free(i);
  if (!free) units_[b.processor].issue[turn.warp % 4] = t + 1;
  w.now = t + !free;
  w.issued += !free;
  together(b, w, group, size);
  u64 done = t + (free ? 0 : ARITHMETIC);
  switch (i.op) {
    case Op::ld: case Op::st: case Op::atom: case Op::red: done = of_memory(b, w, i, t); break;
    case Op::bra: w.now = t + (group[0]->pc == pc + 1 && size == n ? 2 : BRANCH); break;
    case Op::shfl: done = t + SHUFFLE; break;
    case Op::vote: case Op::match: case Op::redux: case Op::activemask: done = t + VOTE; break;
    case Op::warp_bar: w.now = t + MEETING; break;
    case Op::div: case Op::rem: done = t + DIVISION * i.type.bytes / 4; break;
    case Op::mul: case Op::mad: if (i.type.bytes == 8) done = t + WIDE; break;
    case Op::nanosleep: w.now += slept_ * 9 / 5; break;
    default: break;
  }
  auto gives = [&](const Operand& o) { if (o.kind == Operand::reg) w.ready[o.slot] = done; };
  gives(i.d);
  gives(i.also);
  if (i.d.kind == Operand::reg && i.type.bytes == 16) w.ready[i.d.slot + 1] = done;
  if (i.op == Op::ld || i.op == Op::mov) for (auto& o : i.several) gives(o);
  // At a barrier the last one lets all go on.
  for (unsigned k = 0; freed_ && k < b.warps.size(); k++) {
    b.warps[k].now = std::max(b.warps[k].now, t + BARRIER);
    if (k != turn.warp) enter(&b, k);
  }
  if (std::any_of(all, all + w.count, [](auto& l) { return l.state == runs; })) enter(&b, turn.warp);
}

// When what a memory instruction gives is there.
inline u64 Launched::of_memory(Block& b, Warp& w, const Instruction& i, u64 t) {
  Unit& unit = units_[b.processor];
  if (i.space == Space::param || touched_.empty()) return t + ARITHMETIC;
  const bool atomic = i.op == Op::atom || i.op == Op::red;
  if (shared_) {
    // Of words in one bank one comes after the other, of atomics at one word too.
    std::set<u64> words;
    for (u64 p : touched_) words.insert(p / 4);
    std::map<u64, unsigned> at;
    unsigned most = 1;
    for (u64 p : words) most = std::max(most, ++at[p % 32]);
    at.clear();
    for (u64 p : touched_) if (atomic) most = std::max(most, 2 * ++at[p / 4]);
    unit.memory = std::max(unit.memory, t) + most;
    return unit.memory + SHARED;
  }
  if (!elsewhere_) return t + LEVEL_1;
  std::set<u64> sectors;
  for (u64 p : touched_) sectors.insert(p / 32);
  u64 done;
  if (i.op == Op::ld && !i.strong && !i.acquires) {
    bool hit = true;
    for (u64 s : sectors) hit = !(i.kept ? unit.kept : unit.seen).insert(s).second && hit;
    unit.memory = std::max(unit.memory, t) + 1;
    return unit.memory + (hit ? LEVEL_1 : LEVEL_2);
  }
  unit.memory = std::max(unit.memory, t) + (atomic ? std::max<u64>(ATOMIC, sectors.size() * ATOMIC_SECTOR) : std::max<u64>(2, sectors.size() / 2));
  done = unit.memory + LEVEL_2;
  // Quarters of a cycle.
  for (u64 p : touched_) {
    if (!atomic) break;
    u64& free = atomics_[p / 4];
    free = std::max(free, 4 * (unit.memory + LEVEL_2 / 2)) + 5;
    done = std::max(done, free / 4 + LEVEL_2 / 2);
  }
  if (i.op == Op::st || i.op == Op::red) {
    w.stored = std::max(w.stored, done);
    return t;
  }
  if (i.acquires) {
    unit.seen.clear();
    w.now = std::max(w.now, done);
  }
  return done;
}

}  // namespace ptx
