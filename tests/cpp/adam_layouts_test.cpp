// Laws of the Adam arithmetic and of how parameters and moments are kept.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <vector>

#include "adam/adam.h"
#include "adam/quantize.h"
#include "adam_test_util.h"

namespace gemini {
namespace {

// No step, no decay: the parameter stays as it is.
constexpr AdamOptions kNoStep{.lr = 0.0};

// ------------------------------------------------------------------------------------ the formula

struct Exact {
  double param, exp_avg, exp_avg_sq;
  double grad_size;  // of the gradient before anything could cancel
};

// Adam in double, as the paper has it.
Exact exact_step(const AdamOptions& o, const Tensor& t, int64_t i) {
  const double param = t.master(i);
  const double clip = o.clip_value;
  const double scaled = t.grad.value(t.layout.grad, i) * o.pre_scale;
  const double l2 = o.adamw_mode ? 0.0 : o.weight_decay * param;
  const double clipped = std::clamp(scaled, -clip, clip) * o.post_scale;
  const double grad = clipped + l2;
  const double exp_avg = o.beta1 * t.exp_avg(i) + (1 - o.beta1) * grad;
  const double exp_avg_sq = o.beta2 * t.exp_avg_sq(i) + (1 - o.beta2) * grad * grad;
  const auto step = static_cast<double>(o.step);
  const double first = o.bias_correction ? exp_avg / (1 - std::pow(o.beta1, step)) : exp_avg;
  const double second = o.bias_correction ? exp_avg_sq / (1 - std::pow(o.beta2, step)) : exp_avg_sq;
  const double kept = o.adamw_mode ? param * (1 - o.lr * o.weight_decay) : param;
  return {kept - o.lr * first / (std::sqrt(second) + o.eps), exp_avg, exp_avg_sq,
          std::fabs(clipped) + std::fabs(l2)};
}

// The distance of the numbers next to `value` that a format with these mantissa bits has.
double unit_of(double value, int mantissa_bits, int min_exponent) {
  const int exponent = value == 0 ? min_exponent : std::max(std::ilogb(value), min_exponent);
  return std::ldexp(1.0, exponent - mantissa_bits);
}

// Of a 16-bit parameter: half a unit for its own rounding and 2 units of fp32, at most 2^-12 of it.
double param_bound(ParamForm form, double param) {
  if (form == ParamForm::kBf16) return (0.5 + 0x1p-12) * unit_of(param, 7, -126);
  if (form == ParamForm::kFp16) return (0.5 + 0x1p-12) * unit_of(param, 10, -14);
  return 2 * unit_of(param, 23, -126);
}

void expect_moments_near(const Tensor& got, int64_t i, const Tensor& before, const Exact& want) {
  // Fewer than 16 roundings to fp32, each of 2^-24 of nothing larger than these sums.
  const double first_error = 0x1p-20 * (std::fabs(before.exp_avg(i)) + want.grad_size);
  const double second_error = 0x1p-20 * (before.exp_avg_sq(i) + want.grad_size * want.grad_size);
  const double first_off = std::fabs(got.exp_avg(i) - want.exp_avg);
  const double second_off = std::fabs(got.exp_avg_sq(i) - want.exp_avg_sq);
  if (got.layout.moments == MomentType::kFp32) {
    ASSERT_LE(first_off, first_error) << i;
    ASSERT_LE(second_off, second_error) << i;
  } else if (got.layout.moments == MomentType::kBf16) {  // either neighbour
    ASSERT_LE(first_off, unit_of(want.exp_avg, 7, -126) + first_error) << i;
    ASSERT_LE(second_off, unit_of(want.exp_avg_sq, 7, -126) + second_error) << i;
  } else {
    ASSERT_LE(first_off, got.first_scale.at<float>(i / kBlockNumel)) << i;
    const double root_off = std::fabs(got.root(i) - std::sqrt(want.exp_avg_sq));
    ASSERT_LE(root_off, got.second_scale.at<float>(i / kBlockNumel)) << i;
    ASSERT_GE(got.first.at<int8_t>(i), -kMaxCode) << i;
    ASSERT_GT(got.second.at<uint8_t>(i), 0) << i;
  }
}

// Parameters in [0.5, 2.5) whose update is below 1/32 of them: then weight decay, its product and
// the last sum are off by half a unit each and all that is in the update by less than another half.
Tensor well_conditioned(const Layout& layout, int64_t numel) {
  Tensor t(layout, numel, Values::kUsual, 77);
  Source source(Values::kUsual, 78);
  for (int64_t i = 0; i < numel; ++i) {
    const float size = 0.5f + std::fabs(source.usual());
    t.param.set_value(param_type(layout.form), i, i % 2 == 0 ? size : -size);
    if (layout.moments == MomentType::kInt8) {
      t.second.of<uint8_t>()[i] = static_cast<uint8_t>(128 + source.bits() % 128);
    } else {
      const bool fp32 = layout.moments == MomentType::kFp32;
      t.second.set_value(fp32 ? FloatType::kFp32 : FloatType::kBf16, i, size);
    }
  }
  for (int64_t block = 0; block < num_blocks(numel); ++block) {
    t.first_scale.of<float>()[block] = 1e-3f;
    t.second_scale.of<float>()[block] = 5e-3f;
  }
  return t;
}

TEST(AdamFormula, OneStepIsWithinItsRoundingOfTheFormulaInDouble) {
  for_each_layout([](const Layout& layout) {
    for (AdamOptions options : step_modes()) {
      if (options.beta2 == 0.0) continue;  // the update is not small
      options.lr = 0.05;  // of a size that a relative error of 2^-16 in the update shows
      options.eps = 0.02;
      options.step = 10;
      const Tensor before = well_conditioned(layout, 1000);
      Tensor got = before;
      step(&got, options);
      for (int64_t i = 0; i < before.numel; ++i) {
        const Exact want = exact_step(options, before, i);
        ASSERT_LE(std::fabs(want.param - before.master(i)), std::fabs(before.master(i)) / 32);
        ASSERT_LE(std::fabs(got.master(i) - want.param), param_bound(layout.form, want.param)) << i;
        expect_moments_near(got, i, before, want);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

TEST(AdamFormula, FirstStepMovesByTheLearningRate) {
  Tensor t = zeros({}, 1);
  t.param.of<float>()[0] = 2.0f, t.grad.of<float>()[0] = -3.0f;
  step(&t, {.lr = 0.5, .weight_decay = 0.25});
  EXPECT_FLOAT_EQ(t.first.at<float>(0), -0.3f);
  EXPECT_FLOAT_EQ(t.second.at<float>(0), 0.009f);
  EXPECT_FLOAT_EQ(t.param.at<float>(0), 2.0f * 0.875f + 0.5f);
}

TEST(AdamFormula, ScalesAndClipActBeforeTheMoments) {
  AdamOptions options = kOnlyGradient;
  options.pre_scale = 2.0, options.clip_value = 3.0, options.post_scale = 0.5;
  Tensor t = zeros({}, 4);
  const float grads[] = {1.0f, 10.0f, -kInf, kNan};
  for (int64_t i = 0; i < 4; ++i) t.grad.of<float>()[i] = grads[i];
  step(&t, options);
  EXPECT_EQ(t.first.at<float>(0), 1.0f);
  EXPECT_EQ(t.first.at<float>(1), 1.5f);
  EXPECT_EQ(t.first.at<float>(2), -1.5f);
  EXPECT_TRUE(std::isnan(t.first.at<float>(3)));
}

// ------------------------------------------------------------------------- layouts agree in bits

TEST(AdamForms, EveryGradientTypeGivesTheBitsOfItsFp32Value) {
  for_each_layout(kHalfTypes, kForms, [](const Layout& layout) {
    Tensor half(layout, 1000, Values::kWild, 41);
    Tensor wide(layout, 1000, Values::kWild, 41);
    wide.layout.grad = FloatType::kFp32;
    wide.grad = Array(1000, 4, 0);
    for (int64_t i = 0; i < 1000; ++i) {
      wide.grad.of<float>()[i] = static_cast<float>(half.grad.value(layout.grad, i));
    }
    step(&half, everything_at_once());
    step(&wide, everything_at_once());
    ASSERT_TRUE(half.same_results(wide));
    ASSERT_TRUE(half.half_out == wide.half_out);
  });
}

TEST(AdamForms, EveryFormGivesTheFp32ResultInItsOwnBits) {
  for_each_layout([](const Layout& layout) {
    Tensor got(layout, 1000, Values::kWild, 43);
    Tensor want({layout.grad, ParamForm::kFp32, layout.moments}, 1000, Values::kWild, 43);
    for (int64_t i = 0; i < 1000; ++i) want.param.of<float>()[i] = got.master(i);
    step(&want, everything_at_once());
    step(&got, everything_at_once());
    ASSERT_TRUE(got.first == want.first && got.second == want.second);
    for (int64_t i = 0; i < 1000; ++i) {
      const float master = want.master(i);
      const FloatType type = param_type(layout.form);
      if (layout.form == ParamForm::kBf16 || layout.form == ParamForm::kFp16) {
        ASSERT_EQ(got.param.at<uint16_t>(i), half_bits(type, master)) << i;
        continue;
      }
      ASSERT_EQ(std::bit_cast<uint32_t>(got.master(i)), std::bit_cast<uint32_t>(master)) << i;
      if (has_copy(layout.form)) {
        ASSERT_EQ(got.half_out.at<uint16_t>(i), half_bits(copy_type(layout.form), master)) << i;
      }
    }
  });
}

// ---------------------------------------------------------------------------------- 16-bit floats

// All 16-bit numbers and, between each two, the tie and the fp32 numbers next to it.
std::vector<float> numbers_around(FloatType type) {
  std::vector<float> numbers;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto value = static_cast<float>(half_value(type, static_cast<uint16_t>(bits)));
    numbers.push_back(value);
    if ((bits & 0x7fff) + 1 > format_of(type).infinity) continue;
    const HalfFormat format = format_of(type);
    const auto unit = unit_of(value, format.mantissa_bits, format.min_exponent);
    const auto tie = static_cast<float>(value + std::copysign(unit / 2, value));
    for (const float number : {std::nextafter(tie, 0.0f), tie, std::nextafter(tie, 2 * tie)}) {
      numbers.push_back(number);
    }
  }
  return numbers;
}

TEST(AdamForms, HalfCopyRoundsToNearestEvenForEveryHalfAndTie) {
  for (const ParamForm form : {ParamForm::kFp32CopyBf16, ParamForm::kFp32CopyFp16}) {
    const FloatType type = copy_type(form);
    const std::vector<float> numbers = numbers_around(type);
    const auto numel = static_cast<int64_t>(numbers.size());
    ASSERT_GT(numel, 4 * 63'000);
    Tensor start = zeros({FloatType::kFp32, form, MomentType::kFp32}, numel);
    std::copy(numbers.begin(), numbers.end(), start.param.of<float>());
    for (const std::string& isa : adam_isas()) {
      Tensor t = start;
      step_range(isa, t.range(), adam_scalars(kNoStep));
      for (int64_t i = 0; i < numel; ++i) {
        const float number = numbers[static_cast<size_t>(i)];
        ASSERT_EQ(t.half_out.at<uint16_t>(i), half_bits(type, number)) << number;
      }
    }
  }
}

TEST(AdamForms, AStepOfNothingKeepsEvery16BitParameter) {
  for (const ParamForm form : {ParamForm::kBf16, ParamForm::kFp16}) {
    for (const MomentType moments : kMomentTypes) {
      const FloatType type = param_type(form);
      Tensor start = zeros({FloatType::kFp32, form, moments}, 0x10000);
      for (int i = 0; i < 0x10000; ++i) start.param.of<uint16_t>()[i] = static_cast<uint16_t>(i);
      for (const std::string& isa : adam_isas()) {
        Tensor t = start;
        step_range(isa, t.range(), adam_scalars(kNoStep));
        for (int i = 0; i < 0x10000; ++i) {
          const bool is_nan = (i & 0x7fff) > format_of(type).infinity;
          ASSERT_EQ(t.param.at<uint16_t>(i), is_nan ? format_of(type).nan : i) << isa;
        }
      }
    }
  }
}

TEST(AdamForms, EveryFinite16BitGradientIsReadExactly) {
  for (const FloatType type : kHalfTypes) {
    Tensor start = zeros({type, ParamForm::kFp32, MomentType::kFp32}, 0x10000);
    for (int i = 0; i < 0x10000; ++i) start.grad.of<uint16_t>()[i] = static_cast<uint16_t>(i);
    for (const std::string& isa : adam_isas()) {
      Tensor t = start;
      step_range(isa, t.range(), adam_scalars(kOnlyGradient));
      for (int i = 0; i < 0x10000; ++i) {
        const double want = half_value(type, static_cast<uint16_t>(i));
        if (std::isfinite(want)) {
          ASSERT_EQ(t.first.at<float>(i), want) << isa;
        } else {
          ASSERT_TRUE(std::isnan(t.first.at<float>(i))) << isa;  // lerp: infinity times 0
        }
      }
    }
  }
}

// ----------------------------------------------------------------------------------- split master

// Every exponent and sign with the mantissas where rounding to bf16 changes.
std::vector<uint32_t> master_classes() {
  std::set<uint32_t> mantissas = {0, 0x7fffff, 0x7f7fff, 0x7f8000, 0x7f8001, 0x2aaaaa, 0x555555};
  for (uint32_t bit = 0; bit < 23; ++bit) {
    for (const uint32_t off : {0u, 1u, 0xffffffffu}) mantissas.insert((1u << bit) + off);
    mantissas.insert(0x8000u + (1u << bit));
  }
  std::vector<uint32_t> masters;
  for (uint32_t upper = 0; upper < 512; ++upper) {
    for (const uint32_t mantissa : mantissas)
      masters.push_back(upper << 23 | (mantissa & 0x7fffff));
  }
  return masters;
}

TEST(AdamSplitMaster, IsExactForEveryClassOfFp32AndItsHalfIsTheNearestBf16) {
  const std::vector<uint32_t> masters = master_classes();
  const auto numel = static_cast<int64_t>(masters.size());
  for (const MomentType moments : kMomentTypes) {
    Tensor start = zeros({FloatType::kFp32, ParamForm::kBf16Remainder, moments}, numel);
    for (int64_t i = 0; i < numel; ++i) {
      const uint32_t master = masters[static_cast<size_t>(i)];
      // Nearest, ties away from zero, by arithmetic on the pattern as a number.
      const auto upper = static_cast<uint16_t>((static_cast<uint64_t>(master) + 0x8000) >> 16);
      start.param.of<uint16_t>()[i] = upper;
      start.remainder.of<uint16_t>()[i] = static_cast<uint16_t>(master - (uint32_t{upper} << 16));
    }
    for (const std::string& isa : adam_isas()) {
      Tensor t = start;
      step_range(isa, t.range(), adam_scalars(kNoStep));
      for (int64_t i = 0; i < numel; ++i) {
        const uint32_t master = masters[static_cast<size_t>(i)];
        if ((master & 0x7fffffff) > 0x7f800000) {
          ASSERT_TRUE(std::isnan(t.master(i))) << isa << std::hex << master;
          ASSERT_EQ(t.param.at<uint16_t>(i), 0x7fc0) << isa;
          continue;
        }
        ASSERT_EQ(std::bit_cast<uint32_t>(t.master(i)), master) << isa << std::hex << master;
        ASSERT_EQ(t.param.at<uint16_t>(i), start.param.at<uint16_t>(i))
            << isa << std::hex << master;
      }
    }
  }
}

}  // namespace
}  // namespace gemini
