#include "common/crc32c_fold.h"

#include "common/crc32c.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <array>
#include <cstring>

#define GEMINI_FOLD_TARGET __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))

// Folding: replaces 128 bits that are `distance` bits before others by 128 bits at the position of
// the others that have the same remainder. Source: V. Gopal et al., Fast CRC computation for
// generic polynomials using PCLMULQDQ instruction, Intel 2009, in the form for reflected bits.

namespace gemini {
namespace {

constexpr size_t kLaneBytes = 16;
constexpr size_t kRegisterBytes = 4 * kLaneBytes;
constexpr size_t kRoundBytes = 4 * kRegisterBytes;

// x to the power of `bits` modulo the polynomial, as a factor for reflected bits.
constexpr uint64_t power_of_x(int bits) {
  uint32_t power = 0x80000000;
  for (int i = 0; i < bits; ++i) power = (power >> 1) ^ ((power & 1) != 0 ? 0x82f63b78 : 0);
  return uint64_t{power} << 1;
}

struct Factors {
  int64_t low;   // for the first 64 of the 128 bits
  int64_t high;  // for the other 64
};

constexpr Factors factors(int distance) {
  return {static_cast<int64_t>(power_of_x(distance + 32)),
          static_cast<int64_t>(power_of_x(distance - 32))};
}

constexpr Factors kRound = factors(8 * kRoundBytes);
constexpr Factors kRegister = factors(8 * kRegisterBytes);
constexpr Factors kLane = factors(8 * kLaneBytes);

GEMINI_FOLD_TARGET inline __m512i load(const uint8_t* at) { return _mm512_loadu_si512(at); }

GEMINI_FOLD_TARGET inline __m128i load_lane(const uint8_t* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

GEMINI_FOLD_TARGET inline __m512i in_all_lanes(const Factors& by) {
  return _mm512_set_epi64(by.high, by.low, by.high, by.low, by.high, by.low, by.high, by.low);
}

GEMINI_FOLD_TARGET inline __m512i fold(__m512i bits, __m512i by, __m512i into) {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(bits, by, 0x00),
                                   _mm512_clmulepi64_epi128(bits, by, 0x11), into, kXorOfThree);
}

GEMINI_FOLD_TARGET inline __m128i fold_lane(__m128i bits, __m128i into) {
  const __m128i by = _mm_set_epi64x(kLane.high, kLane.low);
  return _mm_xor_si128(into, _mm_xor_si128(_mm_clmulepi64_si128(bits, by, 0x00),
                                           _mm_clmulepi64_si128(bits, by, 0x11)));
}

// The remainder of the four lanes, one after another.
GEMINI_FOLD_TARGET inline uint32_t remainder_of(__m512i bits) {
  alignas(kRegisterBytes) std::array<uint8_t, kRegisterBytes> lanes;
  _mm512_store_si512(lanes.data(), bits);
  __m128i last = load_lane(lanes.data());
  for (size_t at = kLaneBytes; at < lanes.size(); at += kLaneBytes) {
    last = fold_lane(last, load_lane(lanes.data() + at));
  }
  const uint64_t half = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_extract_epi64(last, 0)));
  return static_cast<uint32_t>(
      _mm_crc32_u64(half, static_cast<uint64_t>(_mm_extract_epi64(last, 1))));
}

// Processes all whole registers, at least four; moves `at` and `nbytes` behind them.
GEMINI_FOLD_TARGET uint32_t take_registers(uint32_t crc, const uint8_t*& at, size_t& nbytes) {
  const __m512i begin = _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, static_cast<int64_t>(crc));
  __m512i a = _mm512_xor_si512(load(at), begin);
  __m512i b = load(at + kRegisterBytes);
  __m512i c = load(at + 2 * kRegisterBytes);
  __m512i d = load(at + 3 * kRegisterBytes);
  const __m512i by_round = in_all_lanes(kRound);
  for (at += kRoundBytes, nbytes -= kRoundBytes; nbytes >= kRoundBytes;
       at += kRoundBytes, nbytes -= kRoundBytes) {
    a = fold(a, by_round, load(at));
    b = fold(b, by_round, load(at + kRegisterBytes));
    c = fold(c, by_round, load(at + 2 * kRegisterBytes));
    d = fold(d, by_round, load(at + 3 * kRegisterBytes));
  }
  const __m512i by_register = in_all_lanes(kRegister);
  __m512i last = fold(fold(fold(a, by_register, b), by_register, c), by_register, d);
  for (; nbytes >= kRegisterBytes; at += kRegisterBytes, nbytes -= kRegisterBytes) {
    last = fold(last, by_register, load(at));
  }
  return remainder_of(last);
}

}  // namespace

bool can_fold_crc32c() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") &&
         __builtin_cpu_supports("sse4.2");
}

GEMINI_FOLD_TARGET uint32_t crc32c_fold(const void* data, size_t nbytes) noexcept {
  const auto* at = static_cast<const uint8_t*>(data);
  uint32_t crc = ~0U;
  if (nbytes >= kRoundBytes) crc = take_registers(crc, at, nbytes);
  uint64_t word;
  for (; nbytes >= sizeof word; at += sizeof word, nbytes -= sizeof word) {
    std::memcpy(&word, at, sizeof word);
    crc = static_cast<uint32_t>(_mm_crc32_u64(crc, word));
  }
  for (; nbytes > 0; ++at, --nbytes) crc = _mm_crc32_u8(crc, *at);
  return ~crc;
}

}  // namespace gemini

#else

namespace gemini {

bool can_fold_crc32c() noexcept { return false; }
uint32_t crc32c_fold(const void* data, size_t nbytes) noexcept {
  return crc32c_variants().back().sum(data, nbytes);
}

}  // namespace gemini

#endif
