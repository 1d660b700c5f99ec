// What an instruction of one lane of `lanes.h` does.
#pragma once

#include "lanes.h"

namespace ptx {

inline bool Launched::quick(Block& b, const Instruction& i, Lane** group, unsigned size) {
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
      if (elsewhere_ || shared_) {
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
      if (timed_) {
        slept_ = read(b, l, i.s[0]) & 0xFFFFFFFF;
        break;
      }
      if (awake_.time_since_epoch().count() == 0)
        awake_ = std::chrono::steady_clock::now() + std::chrono::nanoseconds(read(b, l, i.s[0]) & 0xFFFFFFFF);
      l.asleep = true;
      l.asleep_until = awake_;
      break;
    default: break;
  }
}

}  // namespace ptx
