// Instructions of several lanes of `lanes.h`: barriers, votes, and what lanes tell each other.
#pragma once

#include "lanes.h"

namespace ptx {

inline bool Launched::meet(Block& b, Warp& w, const Instruction& i, Lane** group, unsigned size) {
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
    const bool apart = !timed_ && lot() % 16 == 0;
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

inline void Launched::barrier(Block& b) {
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
        freed_ = true;
      }
  }
}

inline void Launched::complete(Block& b, Warp& w, const Instruction& i, Lane& at) {
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

}  // namespace ptx
