// Values of registers: numbers of a type, in 64 bits.
#pragma once

#include <algorithm>
#include <cmath>

#include "program.h"

namespace ptx {

inline u64 cut(u64 v, unsigned bytes) { return bytes >= 8 ? v : v & ((u64(1) << bytes * 8) - 1); }
inline int64_t extend(u64 v, unsigned bytes) {
  const unsigned s = 64 - 8 * std::min(bytes, 8u);
  return int64_t(v << s) >> s;
}
inline float f32(u64 v) { float f; uint32_t u = (uint32_t)v; memcpy(&f, &u, 4); return f; }
inline double f64(u64 v) { double f; memcpy(&f, &v, 8); return f; }
inline u64 bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
inline u64 bits(double f) { u64 u; memcpy(&u, &f, 8); return u; }

// What an atomic operation makes of what is there.
inline u64 joined(Sub what, Type t, u64 a, u64 b, u64 c) {
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

inline bool compares(Sub s, Type t, u64 a, u64 b) {
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

}  // namespace ptx
