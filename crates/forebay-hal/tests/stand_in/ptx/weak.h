// How memory is seen by the lanes of `lanes.h`, as weak as PTX lets it be.
#pragma once

#include "lanes.h"

namespace ptx {

inline void Launched::spread(Block& b, const Pending& x) {
  if (x.bytes == 16) _mm_store_si128((__m128i*)x.p, _mm_set_epi64x((long long)x.v[1], (long long)x.v[0]));
  else put((char*)x.p, x.v[0], x.bytes);
  b.seen.erase(x.p / 32);
}

inline void Launched::spread(Block& b, std::vector<Pending>& all) {
  for (auto& x : all) spread(b, x);
  all.clear();
}

inline void Launched::spread_all(Block& b) {
  spread(b, b.pending);
  for (auto& l : b.lanes) spread(b, l.pending);
}

inline void Launched::spread_some(Block& b, std::vector<Pending>& all) {
  if (all.empty()) return;
  size_t which = lot() % all.size();
  for (size_t k = 0; k < which; k++) if (overlap(all[k], all[which].p, all[which].bytes)) which = k;
  spread(b, all[which]);
  all.erase(all.begin() + which);
}

inline void Launched::releases(Block& b, Lane& l, bool of_block) {
  if (of_block) {
    for (auto& x : l.pending) {
      if (x.shared) spread(b, x);
      else b.pending.push_back(x);
    }
    l.pending.clear();
    // Not for ever: whoever loads looks among them.
    while (b.pending.size() > 256) spread_some(b, b.pending);
    return;
  }
  spread(b, b.pending);
  spread(b, l.pending);
}

inline void Launched::store(Block& b, Lane& l, char* p, u64 v, u64 high, unsigned bytes) {
  const Pending x{(u64)p, {v, high}, bytes, shared_};
  if (!weak_ || !(elsewhere_ || shared_)) return spread(b, x);
  // What its block has stored there came before.
  settle(b, b.pending, p, bytes);
  b.seen.erase(x.p / 32);
  l.pending.push_back(x);
  if (l.pending.size() > 32) spread_some(b, l.pending);
}

inline u64 Launched::load(Block& b, Lane& l, const Instruction& i, const char* p, unsigned bytes) {
  if (!weak_ || !(elsewhere_ || shared_)) return fetch(p, bytes);
  u64 v;
  if (shared_) {
    v = fetch(p, bytes);
  } else if (i.strong) {
    b.seen.erase((u64)p / 32);
    v = at_once(p, bytes);
  } else {
    auto& from = i.kept ? b.kept : b.seen;
    if (from.size() > 4096) from.clear();
    auto at = from.find((u64)p / 32);
    if (at == from.end()) {
      at = from.emplace((u64)p / 32, fetch_sector((u64)p / 32)).first;
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

inline void Launched::acquires(Block& b, const Instruction& i) {
  if (!i.of_block) b.seen.clear();
}

inline void Launched::settle(Block& b, std::vector<Pending>& all, const char* p, unsigned bytes) {
  for (size_t k = 0; k < all.size();) {
    if (overlap(all[k], (u64)p, bytes)) {
      spread(b, all[k]);
      all.erase(all.begin() + k);
    } else {
      k++;
    }
  }
}

inline char* Launched::place(const Block& b, Lane& l, const Instruction& i, u64 at, size_t n) {
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
  elsewhere_ = shared_ = false;
  const bool in_shared = p >= shared && p + n <= shared + shared_size, in_local = p >= local && p + n <= local + k_.local_bytes;
  if (i.space == Space::param || (in_shared && (i.space == Space::shared || i.space == Space::generic)) ||
      (in_local && (i.space == Space::local || i.space == Space::generic))) {
    shared_ = in_shared && i.space != Space::param;
    if (timed_) touched_.push_back(p);
    return (char*)p;
  }
  if (i.space == Space::shared || i.space == Space::local) fail(FAULT_ADDRESS, i, b, l, "address " + hex(at) + " of its own memory");
  elsewhere_ = true;
  if (timed_) touched_.push_back(p);
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

// Those who read together read a sector once.
inline u64 Launched::at_once(const char* p, unsigned bytes) {
  const u64 sector = (u64)p / 32;
  auto at = std::find_if(at_once_.begin(), at_once_.end(), [=](auto& s) { return s.first == sector; });
  if (at == at_once_.end()) at = at_once_.insert(at, {sector, fetch_sector(sector)});
  u64 v;
  memcpy(&v, (const char*)at->second.v + ((u64)p & 31), bytes);
  return cut(v, bytes);
}

__attribute__((target("avx"))) inline Launched::Sector Launched::fetch_whole(u64 sector) {
  Sector s;
  _mm256_storeu_si256((__m256i*)s.v, _mm256_load_si256((const __m256i*)(sector * 32)));
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return s;
}

// All of it at one time, as far as the host's processor can.
inline Launched::Sector Launched::fetch_sector(u64 sector) {
  static const bool can = __builtin_cpu_supports("avx");
  if (can) return fetch_whole(sector);
  Sector s;
  for (unsigned k = 0; k < 4; k++) s.v[k] = fetch((const char*)(sector * 32) + 8 * k, 8);
  return s;
}

inline u64 Launched::fetch(const char* p, unsigned bytes) {
  switch (bytes) {
    case 1: return __atomic_load_n((const uint8_t*)p, __ATOMIC_SEQ_CST);
    case 2: return __atomic_load_n((const uint16_t*)p, __ATOMIC_SEQ_CST);
    case 4: return __atomic_load_n((const uint32_t*)p, __ATOMIC_SEQ_CST);
    default: return __atomic_load_n((const u64*)p, __ATOMIC_SEQ_CST);
  }
}

inline void Launched::put(char* p, u64 v, unsigned bytes) {
  switch (bytes) {
    case 1: __atomic_store_n((uint8_t*)p, (uint8_t)v, __ATOMIC_RELEASE); break;
    case 2: __atomic_store_n((uint16_t*)p, (uint16_t)v, __ATOMIC_RELEASE); break;
    case 4: __atomic_store_n((uint32_t*)p, (uint32_t)v, __ATOMIC_RELEASE); break;
    default: __atomic_store_n((u64*)p, v, __ATOMIC_RELEASE);
  }
}

inline bool Launched::change(char* p, u64& is, u64 v, unsigned bytes) {
  if (bytes == 4) {
    uint32_t e = (uint32_t)is;
    bool done = __atomic_compare_exchange_n((uint32_t*)p, &e, (uint32_t)v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    is = e;
    return done;
  }
  return __atomic_compare_exchange_n((u64*)p, &is, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

}  // namespace ptx
