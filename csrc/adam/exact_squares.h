// The exact sum of squares of fp32 elements: the same in whatever parts and order it is taken.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace gemini {

inline constexpr int kSquareExponents = 256;
inline constexpr int kSquareLimbs = 3;
inline constexpr int kSquareLimbBits = 40;

// For each biased exponent of fp32 the sum of the squared significands (integers below 2^24), as
// limbs of 40 bits, lowest first. Sums of up to 2^23 such arrays, limb by limb, do not overflow.
// Of the last exponent the lowest limb counts elements that are infinite, the next one those that
// are no number.
using ExactSquares = std::array<int64_t, size_t{kSquareExponents} * kSquareLimbs>;

// `numel` is below 2^40.
[[nodiscard]] ExactSquares exact_squares(const float* values, int64_t numel);

}  // namespace gemini
