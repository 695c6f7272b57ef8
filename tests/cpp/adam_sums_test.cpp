// Laws of the sum of squares.
#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "adam/adam.h"
#include "adam_test_util.h"
#include "common/error.h"

namespace gemini {
namespace {

Array numbers(FloatType type, int64_t numel, Values values, int64_t skew = 0) {
  Source source(values, static_cast<uint32_t>(numel) + 1);
  Array array(numel, bytes_of(type), skew);
  for (int64_t i = 0; i < numel; ++i) array.set_value(type, i, source.value());
  return array;
}

TEST(SumSquares, EveryIsaGivesTheBitsOfTheReference) {
  for (const FloatType type : kFloatTypes) {
    for (const Values values : {Values::kUsual, Values::kTiny}) {
      for (int64_t numel = 0; numel < 1100; numel += numel < 70 ? 1 : 31) {
        Array array = numbers(type, numel, values, numel % 5);
        const double want = isa_kernels("scalar").sum_squares(array.data(), type, numel);
        for (const std::string& isa : adam_isas()) {
          EXPECT_EQ(isa_kernels(isa).sum_squares(array.data(), type, numel), want) << isa << numel;
        }
        EXPECT_EQ(sum_squares(array.data(), type, numel), want) << numel;
      }
    }
  }
}

TEST(SumSquares, NeitherThreadsNorAddressNorRoundingModeChangeBits) {
  constexpr int64_t kNumel = 300'007;
  for (const FloatType type : kFloatTypes) {
    Array array = numbers(type, kNumel, Values::kTiny);
    const double want = sum_squares(array.data(), type, kNumel, 1);
    for (const int64_t skew : {0, 1, 3, 7}) {
      Array skewed = numbers(type, kNumel, Values::kTiny, skew);
      for (const int threads : {0, 1, 2, 3, 64}) {
        EXPECT_EQ(sum_squares(skewed.data(), type, kNumel, threads), want) << threads;
      }
    }
    std::fesetround(FE_UPWARD);
    const double got = sum_squares(array.data(), type, kNumel, 2);
    const int mode = std::fegetround();
    std::fesetround(FE_TONEAREST);
    EXPECT_EQ(mode, FE_UPWARD);
    EXPECT_EQ(got, want);
  }
}

// Squares of floats are exact in double and are added in 32 places and then in pairs: an element
// goes through at most numel / 32 + 5 additions, and each is off by 2^-53 of a sum of positives.
TEST(SumSquares, EqualsALongDoubleSum) {
  for (const FloatType type : kFloatTypes) {
    for (const int64_t numel : {1, 2, 33, 1000, 70'001}) {
      Array array = numbers(type, numel, Values::kTiny);
      long double want = 0;
      for (int64_t i = 0; i < numel; ++i) {
        const long double value = array.value(type, i);
        want += value * value;
      }
      const auto got = static_cast<long double>(sum_squares(array.data(), type, numel));
      EXPECT_LE(std::fabs(got - want), 1e-12L * want) << numel;
    }
  }
}

TEST(SumSquares, NotFiniteExactlyWhenAnElementIs) {
  for (const FloatType type : kFloatTypes) {
    const Array finite = numbers(type, 700, Values::kUsual, 1);
    for (const std::string& isa : adam_isas()) {
      const auto sum = isa_kernels(isa).sum_squares;
      Array array = finite;
      EXPECT_TRUE(std::isfinite(sum(array.data(), type, 700))) << isa;
      for (const int64_t at : {0, 31, 255, 256, 512, 698, 699}) {
        array.set_value(type, at, -kInf);
        EXPECT_EQ(sum(array.data(), type, 700), kInf) << isa << " " << at;
        array.set_value(type, at, kNan);
        EXPECT_TRUE(std::isnan(sum(array.data(), type, 700))) << isa << " " << at;
        array = finite;
      }
    }
  }
}

TEST(SumSquares, NeitherOverflowsNorUnderflows) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  constexpr float kSmallest = std::numeric_limits<float>::denorm_min();
  const std::vector<float> large(100'000, kLargest);
  const double square = static_cast<double>(kLargest) * kLargest;
  EXPECT_NEAR(sum_squares(large.data(), FloatType::kFp32, 100'000) / square, 1e5, 1e-5);
  EXPECT_EQ(sum_squares(&kSmallest, FloatType::kFp32, 1), std::ldexp(1.0, -298));
}

TEST(SumSquares, NothingSumsToZeroAndMisuseIsRefused) {
  const float values[2] = {};
  EXPECT_EQ(sum_squares(nullptr, FloatType::kFp32, 0), 0.0);
  EXPECT_THROW((void)sum_squares(nullptr, FloatType::kBf16, 1), StateError);
  const void* uneven = reinterpret_cast<const char*>(values) + 2;
  EXPECT_THROW((void)sum_squares(uneven, FloatType::kFp32, 1), StateError);
  EXPECT_EQ(sum_squares(uneven, FloatType::kBf16, 1), 0.0);
}

}  // namespace
}  // namespace gemini
