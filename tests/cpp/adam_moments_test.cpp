// Laws of the compact moments: how far a stored moment may be from the exact one, and that it does
// not drift.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "adam/adam.h"
#include "adam/quantize.h"
#include "adam_test_util.h"

namespace gemini {
namespace {

constexpr Layout kInt8{FloatType::kFp32, ParamForm::kFp32, MomentType::kInt8};
constexpr Layout kBf16{FloatType::kFp32, ParamForm::kFp32, MomentType::kBf16};

void set_grads(Tensor* tensor, Source* source, float size) {
  for (int64_t i = 0; i < tensor->numel; ++i) {
    tensor->grad.of<float>()[i] = size * source->value();
  }
}

// ------------------------------------------------------------------------------------- codes

// What the moments of a block were to become, in double.
struct Wanted {
  std::vector<double> first, root;
  double largest_first = 0, largest_root = 0;

  Wanted(const AdamOptions& o, const Tensor& t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double grad = t.grad.at<float>(i);
      first.push_back(o.beta1 * t.exp_avg(i) + (1 - o.beta1) * grad);
      root.push_back(std::sqrt(o.beta2 * t.exp_avg_sq(i) + (1 - o.beta2) * grad * grad));
      largest_first = std::max(largest_first, std::fabs(first.back()));
      largest_root = std::max(largest_root, root.back());
    }
  }
};

// A code is within 0.4995 of what the dither adds to, and rounds by 0.5: closer than one scale, by
// more than the roundings to fp32 of the exact value.
void expect_codes_near(const Tensor& got, int64_t begin, int64_t end, const Wanted& want) {
  const double scale = got.first_scale.at<float>(begin / kBlockNumel);
  const double root_scale = got.second_scale.at<float>(begin / kBlockNumel);
  ASSERT_NEAR(scale, want.largest_first / kMaxCode, 0x1p-20 * scale);
  ASSERT_NEAR(root_scale, want.largest_root / kMaxRootCode, 0x1p-20 * root_scale);
  for (int64_t i = begin; i < end; ++i) {
    const auto at = static_cast<size_t>(i - begin);
    ASSERT_LE(std::fabs(got.exp_avg(i) - want.first[at]), scale) << i;
    ASSERT_LE(std::fabs(got.root(i) - want.root[at]), root_scale) << i;
    ASSERT_GE(got.first.at<int8_t>(i), -kMaxCode) << i;
    ASSERT_GT(got.second.at<uint8_t>(i), 0) << i;
  }
}

TEST(AdamInt8Moments, EveryStepIsWithinOneScaleOfTheExactMoments) {
  constexpr int64_t kNumel = 600;
  Source source(Values::kTiny, 5);
  Tensor t = zeros(kInt8, kNumel);
  for (int64_t number = 1; number <= 300; ++number) {
    const AdamOptions options{.step = number};
    set_grads(&t, &source, number % 7 == 0 ? 100.0f : 0.01f);
    const Tensor before = t;
    step(&t, options);
    for (int64_t begin = 0; begin < kNumel; begin += kBlockNumel) {
      const int64_t end = std::min(begin + kBlockNumel, kNumel);
      expect_codes_near(t, begin, end, Wanted(options, before, begin, end));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(AdamInt8Moments, ScaleIsNanExactlyForBlocksWithAnElementThatIsNotFinite) {
  for (const float value : {kInf, -kInf, kNan, 1e30f}) {  // whose square overflows
    for (const int64_t at : {0, 255, 600, 1023, 1024, 1099}) {
      Tensor t(kInt8, 1100, Values::kUsual, 23);
      t.grad.of<float>()[at] = value;
      step(&t, {.step = 2});
      for (int64_t block = 0; block < num_blocks(1100); ++block) {
        const bool hit = block == at / kBlockNumel;
        ASSERT_EQ(std::isnan(t.first_scale.at<float>(block)), hit && !(value == 1e30f));
        ASSERT_EQ(std::isnan(t.second_scale.at<float>(block)), hit);
      }
      t.grad.of<float>()[at] = 0.0f;  // later steps do not hide it
      step(&t, {.step = 3});
      ASSERT_TRUE(std::isnan(t.second_scale.at<float>(at / kBlockNumel)));
      ASSERT_TRUE(std::isnan(t.param.at<float>(at)));
    }
  }
}

TEST(AdamInt8Moments, ABlockOfZerosStaysZeroAndItsParametersToo) {
  Tensor t = zeros(kInt8, 700);
  for (int64_t i = 0; i < 700; ++i) t.param.of<float>()[i] = static_cast<float>(i);
  const Tensor before = t;
  for (int64_t number = 1; number <= 5; ++number) step(&t, {.step = number});
  EXPECT_TRUE(t == before);
}

TEST(AdamInt8Moments, WhatIsTooSmallForAScaleIsStoredAsZero) {
  Tensor t(kInt8, 300, Values::kUsual, 29);
  for (int64_t i = 0; i < 300; ++i) t.grad.of<float>()[i] = i % 2 == 0 ? 1e-19f : -1e-19f;
  step(&t, kOnlyGradient);
  for (int64_t i = 0; i < 300; ++i) {
    ASSERT_EQ(t.first.at<int8_t>(i), 0);
    ASSERT_EQ(t.second.at<uint8_t>(i), 0);
  }
  EXPECT_EQ(t.first_scale.at<float>(1), 0.0f);
  EXPECT_EQ(t.second_scale.at<float>(1), 0.0f);
}

// ------------------------------------------------------------------------------------- no drift

// Half of the elements of each block get no gradient any more; their second moment decays, and the
// optimizer would leap were it zero.
TEST(AdamMoments, ASecondMomentWithoutGradientsNeverBecomesZero) {
  for (const Layout& layout : {kInt8, kBf16}) {
    Tensor t(layout, 600, Values::kUsual, 31);
    for (int64_t i = 0; i < 600; ++i) {
      if (i % 2 == 0) t.grad.of<float>()[i] = 0.0f;
      if (layout.moments == MomentType::kInt8) {
        t.second.of<uint8_t>()[i] = static_cast<uint8_t>(1 + i % 3);
      } else {
        t.second.set_value(FloatType::kBf16, i, 1e-20f);
      }
    }
    for (int64_t number = 1; number <= 2000; ++number) {
      step(&t, {.step = number});
      for (int64_t i = 0; i < 600; ++i) ASSERT_GT(t.exp_avg_sq(i), 0.0) << number << " " << i;
    }
  }
}

// Rounded to nearest, a bf16 moment could not decay by 0.1 % at all. The mean over elements follows
// the exact decay; the spread of 512 elements after 2000 roundings is well below the bound.
TEST(AdamMoments, SecondMomentsDecayAsTheyShould) {
  for (const Layout& layout : {kInt8, kBf16}) {
    Tensor t = zeros(layout, 512);
    for (int64_t i = 0; i < 512; ++i) t.grad.of<float>()[i] = i % 2 == 0 ? 1.0f : -1.0f;
    step(&t, kOnlyGradient);
    for (int64_t i = 0; i < 512; ++i) t.grad.of<float>()[i] = 0.0f;
    for (int64_t number = 2; number <= 2001; ++number) step(&t, {.step = number});
    double sum = 0;
    for (int64_t i = 0; i < 512; ++i) sum += t.exp_avg_sq(i);
    EXPECT_NEAR(sum / 512, std::pow(0.999, 2000), 0.03 * std::pow(0.999, 2000));
  }
}

// -------------------------------------------------------------------------------------- dither

// Stored values of moments that are a constant, over many steps.
class DitherMeans {
 public:
  DitherMeans(const Layout& layout, float constant, int64_t num_steps) : numel_(2 * kBlockNumel) {
    first_.resize(static_cast<size_t>(numel_));
    second_.resize(static_cast<size_t>(numel_));
    Tensor t = zeros(layout, numel_);
    AdamOptions options = kOnlyGradient;
    for (options.step = 1; options.step <= num_steps; ++options.step) {
      for (int64_t i = 0; i < numel_; ++i) t.grad.of<float>()[i] = constant;
      t.grad.of<float>()[0] = t.grad.of<float>()[kBlockNumel] = 127.0f;  // fixes the scales
      step(&t, options);
      for (int64_t i = 0; i < numel_; ++i) {
        const auto at = static_cast<size_t>(i);
        first_[at] += t.exp_avg(i) / static_cast<double>(num_steps);
        const bool coded = layout.moments == MomentType::kInt8;
        second_[at] += (coded ? t.root(i) : t.exp_avg_sq(i)) / static_cast<double>(num_steps);
      }
    }
  }

  void expect(double first, double first_bound, double second, double second_bound) const {
    for (int64_t i = 0; i < numel_; ++i) {
      if (i % kBlockNumel == 0) continue;
      ASSERT_NEAR(first_[static_cast<size_t>(i)], first, first_bound) << i;
      ASSERT_NEAR(second_[static_cast<size_t>(i)], second, second_bound) << i;
    }
  }

  void expect_mean(double first, double first_bound, double second, double second_bound) const {
    double first_mean = 0, second_mean = 0;
    for (int64_t i = 0; i < numel_; ++i) {
      if (i % kBlockNumel == 0) continue;
      first_mean += first_[static_cast<size_t>(i)] / static_cast<double>(numel_ - 2);
      second_mean += second_[static_cast<size_t>(i)] / static_cast<double>(numel_ - 2);
    }
    EXPECT_NEAR(first_mean, first, first_bound);
    EXPECT_NEAR(second_mean, second, second_bound);
  }

 private:
  int64_t numel_;
  std::vector<double> first_, second_;
};

// A block's dithers start at a hash of the step. So the mean over elements and 4096 steps is close,
// and that of one element is off by up to 0.5 / sqrt(steps): five times that is 4 % of a unit.
constexpr int64_t kDitherSteps = 4096;

TEST(AdamDither, CodesAreUnbiased) {
  for (const float constant : {0.3f, 1.5f, 17.9f, 126.4f}) {
    const DitherMeans means(kInt8, constant, kDitherSteps);
    const double unit = 1.0;
    const double root_unit = 127.0 / kMaxRootCode;
    means.expect(constant, 0.04 * unit, std::max<double>(constant, root_unit), 0.04 * root_unit);
    means.expect_mean(constant, 0.01 * unit, std::max<double>(constant, root_unit),
                      0.01 * root_unit);
  }
}

TEST(AdamDither, Bf16IsUnbiased) {
  for (const float constant : {1.0026f, -1.7701f, 3.9e-6f}) {
    const DitherMeans means(kBf16, constant, kDitherSteps);
    const double square = static_cast<double>(constant) * constant;
    const double unit = std::ldexp(1.0, std::ilogb(constant) - 7);
    const double square_unit = std::ldexp(1.0, std::ilogb(square) - 7);
    means.expect(constant, 0.04 * unit, square, 0.04 * square_unit);
    means.expect_mean(constant, 0.01 * unit, square, 0.01 * square_unit);
  }
}

// One element sees the whole table evenly, given the steps to see it.
TEST(AdamDither, IsUnbiasedForEachElementOverManySteps) {
  constexpr int64_t kManySteps = 1 << 16;
  DitherMeans(kInt8, 17.4f, kManySteps).expect(17.4f, 0.01, 17.4f, 0.01 * 127 / 255);
  DitherMeans(kBf16, 1.0026f, kManySteps)
      .expect(1.0026f, 0.01 / 128, 1.0026f * 1.0026f, 0.01 / 128);
}

// ------------------------------------------------------------------------------- partial blocks

TEST(AdamMoments, APartialBlockHasTheBitsOfAWholeOneThatEndsInZeros) {
  constexpr int64_t kNumel = 100;
  for_each_layout([](const Layout& layout) {
    Tensor part(layout, kNumel, Values::kTiny, 37);
    Tensor whole = zeros(layout, kBlockNumel);
    const auto put = [](Array* to, Array* from, int64_t bytes) {
      std::memcpy(to->data(), from->data(), static_cast<size_t>(bytes));
    };
    put(&whole.grad, &part.grad, kNumel * bytes_of(layout.grad));
    put(&whole.param, &part.param, kNumel * bytes_of(param_type(layout.form)));
    put(&whole.first, &part.first, kNumel * bytes_of(layout.moments));
    put(&whole.second, &part.second, kNumel * bytes_of(layout.moments));
    put(&whole.remainder, &part.remainder, kNumel * 2);
    whole.first_scale = part.first_scale, whole.second_scale = part.second_scale;
    step(&part, everything_at_once());
    step(&whole, everything_at_once());
    ASSERT_TRUE(whole.param.starts_with(part.param, kNumel * bytes_of(param_type(layout.form))));
    ASSERT_TRUE(whole.first.starts_with(part.first, kNumel * bytes_of(layout.moments)));
    ASSERT_TRUE(whole.second.starts_with(part.second, kNumel * bytes_of(layout.moments)));
    ASSERT_TRUE(whole.remainder.starts_with(part.remainder, kNumel * 2));
    ASSERT_TRUE(whole.first_scale == part.first_scale && whole.second_scale == part.second_scale);
    if (!has_copy(layout.form)) return;
    ASSERT_TRUE(whole.half_out.starts_with(part.half_out, kNumel * 2));
  });
}

}  // namespace
}  // namespace gemini
