// Laws of the exact sum of squares.
#include "adam/exact_squares.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace gemini {
namespace {

// Exact while everything fits the 64 bits of an extended double: for values of like size.
long double value_of(const ExactSquares& squares) {
  long double sum = 0;
  for (int exponent = 0; exponent < kSquareExponents - 1; ++exponent) {
    long double bin = 0;
    for (int limb = kSquareLimbs - 1; limb >= 0; --limb) {
      bin = std::ldexp(bin, kSquareLimbBits) +
            static_cast<long double>(
                squares[static_cast<size_t>(exponent) * kSquareLimbs + static_cast<size_t>(limb)]);
    }
    sum += std::ldexp(bin, 2 * (std::max(exponent, 1) - 150));
  }
  return sum;
}

TEST(ExactSquares, OfSmallIntegersAreExact) {
  std::vector<float> values;
  long double want = 0;
  for (int i = -70000; i < 70000; ++i) {
    values.push_back(static_cast<float>(i));
    want += static_cast<long double>(i) * i;
  }
  EXPECT_EQ(value_of(exact_squares(values.data(), static_cast<int64_t>(values.size()))), want);
}

TEST(ExactSquares, AddUpTheSameInAnyPartsAndOrder) {
  std::mt19937 random(7);
  std::uniform_int_distribution<uint32_t> bits;
  std::vector<float> values(200'003);
  for (float& value : values) {
    do {
      value = std::bit_cast<float>(bits(random));  // every exponent, both signs
    } while (!std::isfinite(value));
  }
  const auto numel = static_cast<int64_t>(values.size());
  const ExactSquares want = exact_squares(values.data(), numel);
  std::shuffle(values.begin(), values.end(), random);
  EXPECT_EQ(exact_squares(values.data(), numel), want);
  ExactSquares parts{};
  for (int64_t begin = 0; begin < numel; begin += 70'001) {
    const ExactSquares part =
        exact_squares(values.data() + begin, std::min<int64_t>(70'001, numel - begin));
    for (size_t i = 0; i < parts.size(); ++i) parts[i] += part[i];
  }
  for (size_t exponent = 0; exponent < kSquareExponents; ++exponent) {
    int64_t carry = 0;
    for (size_t limb = 0; limb < kSquareLimbs; ++limb) {
      const int64_t sum = parts[exponent * kSquareLimbs + limb] + carry;
      EXPECT_EQ(sum & ((int64_t{1} << kSquareLimbBits) - 1), want[exponent * kSquareLimbs + limb]);
      carry = sum >> kSquareLimbBits;
    }
    EXPECT_EQ(carry, 0);
  }
}

TEST(ExactSquares, CountWhatIsNotFinite) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> values{1.0F, inf,  -inf, std::numeric_limits<float>::quiet_NaN(),
                                  0.0F, -0.0F};
  const ExactSquares squares = exact_squares(values.data(), static_cast<int64_t>(values.size()));
  EXPECT_EQ(squares[size_t{kSquareExponents - 1} * kSquareLimbs], 2);
  EXPECT_EQ(squares[size_t{kSquareExponents - 1} * kSquareLimbs + 1], 1);
  EXPECT_EQ(value_of(squares), 1.0L);
  EXPECT_EQ(exact_squares(values.data(), 0), ExactSquares{});
}

TEST(ExactSquares, KeepTheSmallestNumbersBesideTheLargest) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  const float huge = std::numeric_limits<float>::max();
  const std::vector<float> values{huge, tiny, -huge, tiny, tiny};
  const ExactSquares squares = exact_squares(values.data(), 5);
  EXPECT_EQ(squares[0], 3);  // three squares of one unit in the last place
  const auto significand = static_cast<int64_t>(huge / std::ldexp(1.0F, 104));
  const int64_t sum = 2 * significand * significand;
  EXPECT_EQ(squares[size_t{254} * kSquareLimbs], sum & ((int64_t{1} << kSquareLimbBits) - 1));
  EXPECT_EQ(squares[size_t{254} * kSquareLimbs + 1], sum >> kSquareLimbBits);
}

}  // namespace
}  // namespace gemini
