// The exact sum of squares of fp32 elements: independent of the division into parts and their
// order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace gemini {

inline constexpr int kSquareExponents = 256;
inline constexpr int kSquareLimbs = 3;
inline constexpr int kSquareLimbBits = 40;

// For each biased exponent of fp32 the sum of the squared significands (integers below 2^24), as
// limbs of 40 bits, lowest first. Sums of up to 2^23 such arrays, limb by limb, do not overflow. In
// the last exponent the lowest limb counts infinite elements, and the next one NaNs.
using ExactSquares = std::array<int64_t, size_t{kSquareExponents} * kSquareLimbs>;

// `numel` must be below 2^40.
[[nodiscard]] ExactSquares exact_squares(const float* values, int64_t numel);

}  // namespace gemini
