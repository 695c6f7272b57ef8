#include "adam/exact_squares.h"

#include <algorithm>
#include <bit>
#include <cstddef>

namespace gemini {

namespace {

constexpr int kSignificandBits = 23;
constexpr uint32_t kImplicitOne = 1U << kSignificandBits;
constexpr uint32_t kSpecial = kSquareExponents - 1;

// An element that is not finite adds to its exponent's sum as a count: infinite ones in the lowest
// limb.
constexpr uint64_t kInfinite = 1;
constexpr uint64_t kNoNumber = uint64_t{1} << kSquareLimbBits;

// A square is below 2^48, so this many fit in 64 bits.
constexpr int64_t kSquaresPerFlush = int64_t{1} << 16;

// Neighbours tend to have the same exponent; with several sets of sums they need not wait for each
// other.
constexpr size_t kSets = 4;

using Sums = std::array<uint64_t, kSquareExponents>;

void add(Sums& sums, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t exponent = (bits >> kSignificandBits) & kSpecial;
  const uint32_t fraction = bits & (kImplicitOne - 1);
  const uint64_t significand = exponent == 0 ? fraction : fraction | kImplicitOne;
  if (exponent == kSpecial) [[unlikely]] {
    sums[exponent] += fraction == 0 ? kInfinite : kNoNumber;
  } else {
    sums[exponent] += significand * significand;
  }
}

void flush(Sums& sums, ExactSquares& total) {
  constexpr uint64_t kMask = (uint64_t{1} << kSquareLimbBits) - 1;
  for (size_t exponent = 0; exponent < sums.size(); ++exponent) {
    uint64_t carry = sums[exponent];
    if (carry == 0) continue;
    sums[exponent] = 0;
    for (size_t limb = 0; limb < kSquareLimbs; ++limb) {
      int64_t& slot = total[exponent * kSquareLimbs + limb];
      const uint64_t sum = static_cast<uint64_t>(slot) + (carry & kMask);
      slot = static_cast<int64_t>(sum & kMask);
      carry = (carry >> kSquareLimbBits) + (sum >> kSquareLimbBits);
    }
  }
}

}  // namespace

ExactSquares exact_squares(const float* values, int64_t numel) {
  ExactSquares total{};
  std::array<Sums, kSets> sets{};
  for (int64_t begin = 0; begin < numel; begin += kSquaresPerFlush) {
    const int64_t end = std::min(numel, begin + kSquaresPerFlush);
    int64_t i = begin;
    for (; i + static_cast<int64_t>(kSets) <= end; i += kSets) {
      for (size_t set = 0; set < kSets; ++set)
        add(sets[set], values[i + static_cast<int64_t>(set)]);
    }
    for (; i < end; ++i) add(sets[0], values[i]);
    for (Sums& sums : sets) flush(sums, total);
  }
  return total;
}

}  // namespace gemini
