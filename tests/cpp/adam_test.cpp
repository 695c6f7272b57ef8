// Laws of the Adam kernel: what its bits may not depend on, and what its arithmetic is.
#include "adam/adam.h"

#include <gtest/gtest.h>

#include <bit>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "adam/dispatch.h"
#include "adam/parallel.h"
#include "common/error.h"

namespace gemini {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Arrays of one tensor, each starting `skew` elements into its buffer, so that addresses are
// uneven.
struct Arrays {
  Arrays(int64_t numel, uint32_t seed, int64_t skew_elements = 0)
      : numel(numel), skew(skew_elements) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto size = static_cast<size_t>(numel + skew);
    for (auto* array : {&param, &grad, &exp_avg, &exp_avg_sq}) array->resize(size);
    half_grad.resize(size);
    half_out.assign(size, 0);
    for (auto i = static_cast<size_t>(skew); i < size; ++i) {
      param[i] = normal(random);
      grad[i] = normal(random);
      exp_avg[i] = 0.1f * normal(random);
      exp_avg_sq[i] = std::fabs(normal(random));
      half_grad[i] = static_cast<uint16_t>(random());  // every class of 16-bit float, NaN too
    }
  }

  AdamRange range(FloatType grad_type = FloatType::kFp32, FloatType half_type = FloatType::kBf16) {
    const bool fp32 = grad_type == FloatType::kFp32;
    return {.param = param.data() + skew,
            .grad = fp32 ? static_cast<const void*>(grad.data() + skew) : half_grad.data() + skew,
            .exp_avg = exp_avg.data() + skew,
            .exp_avg_sq = exp_avg_sq.data() + skew,
            .half_out = half_out.data() + skew,
            .numel = numel,
            .grad_type = grad_type,
            .half_type = half_type};
  }

  [[nodiscard]] std::string bytes() const {
    std::string all;
    const auto append = [&](const auto& array) {
      all.append(reinterpret_cast<const char*>(array.data() + skew),
                 static_cast<size_t>(numel) * sizeof(array[0]));
    };
    append(param), append(exp_avg), append(exp_avg_sq), append(half_out);
    return all;
  }

  int64_t numel;
  int64_t skew;
  std::vector<float> param, grad, exp_avg, exp_avg_sq;
  std::vector<uint16_t> half_grad, half_out;
};

AdamOptions clipped_options() {
  return {.lr = 3e-3,
          .weight_decay = 0.1,
          .step = 3,
          .pre_scale = 0.7,
          .clip_value = 1.1,
          .post_scale = 0.9};
}

void sprinkle_specials(std::vector<float>* array) {
  const float specials[] = {0.0f,   -0.0f,   kInf,    -kInf, std::nanf("1"), -std::nanf("7"),
                            1e-40f, -1e-45f, 3.4e38f, 1e-38f};
  for (size_t i = 0; i < array->size(); i += 3)
    (*array)[i] = specials[(i / 3) % std::size(specials)];
}

TEST(Adam, EveryIsaGivesTheBitsOfTheReference) {
  for (const FloatType type : {FloatType::kFp32, FloatType::kBf16, FloatType::kFp16}) {
    for (const bool adamw : {true, false}) {
      for (int64_t numel = 0; numel <= 67; ++numel) {
        Arrays want(numel, 7);
        sprinkle_specials(&want.grad);
        AdamOptions options = clipped_options();
        options.adamw_mode = adamw;
        Arrays start = want;
        const FloatType half = type == FloatType::kFp32 ? FloatType::kBf16 : type;
        adam_step_with(adam_kernel("scalar"), want.range(type, half), options, 1);
        for (const std::string& isa : adam_isas()) {
          Arrays got = start;
          adam_step_with(adam_kernel(isa), got.range(type, half), options, 1);
          ASSERT_TRUE(got.bytes() == want.bytes()) << isa << " numel " << numel;
        }
      }
    }
  }
}

TEST(Adam, SpecialMomentsAndParametersAreTheSameOnEveryIsa) {
  Arrays start(3001, 11);
  sprinkle_specials(&start.param);
  std::rotate(start.param.begin(), start.param.begin() + 1, start.param.end());
  sprinkle_specials(&start.exp_avg);
  std::rotate(start.exp_avg.begin(), start.exp_avg.begin() + 5, start.exp_avg.end());
  sprinkle_specials(&start.exp_avg_sq);
  Arrays want = start;
  adam_step_with(adam_kernel("scalar"), want.range(), {}, 1);
  for (const std::string& isa : adam_isas()) {
    Arrays got = start;
    adam_step_with(adam_kernel(isa), got.range(), {}, 1);
    EXPECT_TRUE(got.bytes() == want.bytes()) << isa;
  }
}

TEST(Adam, AddressDoesNotChangeBits) {
  Arrays aligned(1500, 3);
  for (int64_t skew : {1, 3, 7, 15}) {
    Arrays skewed(1500, 3, skew);
    Arrays want = aligned;
    adam_step(want.range(FloatType::kBf16), clipped_options());
    adam_step(skewed.range(FloatType::kBf16), clipped_options());
    EXPECT_TRUE(skewed.bytes() == want.bytes()) << skew;
  }
}

TEST(Adam, CuttingAnArrayAnywhereDoesNotChangeBits) {
  for (int64_t cut : {1, 17, 1024, 2000}) {
    Arrays want(2048, 5);
    Arrays got = want;
    adam_step(want.range(), clipped_options());
    AdamRange first = got.range();
    AdamRange second = got.range();
    first.numel = cut;
    second.param += cut, second.exp_avg += cut, second.exp_avg_sq += cut, second.half_out += cut;
    second.grad = got.grad.data() + cut;
    second.numel -= cut;
    adam_step(second, clipped_options());
    adam_step(first, clipped_options());
    EXPECT_TRUE(got.bytes() == want.bytes()) << cut;
  }
}

TEST(Adam, NumberOfThreadsDoesNotChangeBits) {
  Arrays want(200'003, 9);
  Arrays start = want;
  adam_step(want.range(), clipped_options(), 1);
  for (int threads : {0, 2, 3, 64}) {
    Arrays got = start;
    adam_step(got.range(), clipped_options(), threads);
    EXPECT_TRUE(got.bytes() == want.bytes()) << threads;
  }
}

TEST(Adam, CallersRoundingModeIsSetAsideAndRestored) {
  Arrays want(512, 13);
  Arrays got = want;
  adam_step(want.range(), clipped_options());
  std::fesetround(FE_UPWARD);
  adam_step(got.range(), clipped_options());
  const int mode = std::fegetround();
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(mode, FE_UPWARD);
  EXPECT_TRUE(got.bytes() == want.bytes());
}

TEST(Adam, FirstStepFollowsTheFormula) {
  const AdamOptions o{.lr = 0.5, .weight_decay = 0.25, .step = 1};
  Arrays a(1, 1);
  a.param[0] = 2.0f, a.grad[0] = -3.0f, a.exp_avg[0] = 0.0f, a.exp_avg_sq[0] = 0.0f;
  adam_step(a.range(), o);
  EXPECT_FLOAT_EQ(a.exp_avg[0], -0.3f);
  EXPECT_FLOAT_EQ(a.exp_avg_sq[0], 0.009f);
  EXPECT_FLOAT_EQ(a.param[0], 2.0f * 0.875f + 0.5f);  // the first update is lr * sign(grad)
}

TEST(Adam, ScalesAndClipActBeforeTheMoments) {
  const AdamOptions o{.beta1 = 0.0, .pre_scale = 2.0, .clip_value = 3.0, .post_scale = 0.5};
  Arrays a(4, 1);
  a.grad = {1.0f, 10.0f, -kInf, std::nanf("")};
  adam_step(a.range(), o);
  EXPECT_EQ(a.exp_avg[0], 1.0f);
  EXPECT_EQ(a.exp_avg[1], 1.5f);
  EXPECT_EQ(a.exp_avg[2], -1.5f);
  EXPECT_TRUE(std::isnan(a.exp_avg[3]));
}

// With lr 0 the parameter stays and half_out is its plain conversion.
uint16_t converted(float value, FloatType type) {
  Arrays a(1, 1);
  a.param[0] = value, a.grad[0] = 0.0f, a.exp_avg[0] = 0.0f, a.exp_avg_sq[0] = 0.0f;
  adam_step(a.range(FloatType::kFp32, type), {.lr = 0.0});
  return a.half_out[0];
}

TEST(Adam, HalfCopyRoundsToNearestEven) {
  EXPECT_EQ(converted(1.0f, FloatType::kBf16), 0x3f80);
  EXPECT_EQ(converted(std::bit_cast<float>(0x3f808000u), FloatType::kBf16), 0x3f80);  // tie to even
  EXPECT_EQ(converted(std::bit_cast<float>(0x3f818000u), FloatType::kBf16), 0x3f82);  // tie to even
  EXPECT_EQ(converted(std::bit_cast<float>(0x3f808001u), FloatType::kBf16), 0x3f81);
  EXPECT_EQ(converted(3.4e38f, FloatType::kBf16), 0x7f80);  // overflows to infinity
  EXPECT_EQ(converted(65504.0f, FloatType::kFp16), 0x7bff);
  EXPECT_EQ(converted(65519.99f, FloatType::kFp16), 0x7bff);
  EXPECT_EQ(converted(65520.0f, FloatType::kFp16), 0x7c00);
  EXPECT_EQ(converted(std::ldexp(1.0f, -24), FloatType::kFp16), 0x0001);
  EXPECT_EQ(converted(std::ldexp(1.0f, -25), FloatType::kFp16), 0x0000);  // tie to even
  EXPECT_EQ(converted(std::ldexp(3.0f, -25), FloatType::kFp16), 0x0002);  // tie to even
  EXPECT_EQ(converted(-kInf, FloatType::kFp16), 0xfc00);
  EXPECT_EQ(converted(std::nanf(""), FloatType::kBf16), 0x7fc0);
  EXPECT_EQ(converted(std::nanf(""), FloatType::kFp16), 0x7e00);
}

TEST(Adam, HalfCopyUndoesWideningForEveryFiniteHalf) {
  // beta1 0 and decay 0 make exp_avg the widened gradient; feed it back as the parameter.
  for (const FloatType type : {FloatType::kBf16, FloatType::kFp16}) {
    const int exponent_mask = type == FloatType::kBf16 ? 0x7f80 : 0x7c00;
    Arrays a(65536, 1);
    for (int i = 0; i < 65536; ++i) a.half_grad[i] = static_cast<uint16_t>(i);
    adam_step(a.range(type, type), {.lr = 0.0, .beta1 = 0.0});
    a.param = a.exp_avg;
    adam_step(a.range(FloatType::kFp32, type), {.lr = 0.0, .beta1 = 0.0});
    for (int i = 0; i < 65536; ++i) {
      if ((i & exponent_mask) == exponent_mask) continue;  // infinity times lr 0 is NaN
      ASSERT_EQ(a.half_out[i] & 0x7fff, i & 0x7fff);
    }
  }
}

TEST(Adam, HalfCopyMayReplaceTheGradient) {
  Arrays want(5000, 17);
  Arrays got = want;
  adam_step(want.range(FloatType::kBf16), clipped_options());
  AdamRange range = got.range(FloatType::kBf16);
  range.half_out = got.half_grad.data();
  adam_step(range, clipped_options());
  EXPECT_TRUE(got.half_grad == want.half_out);
  EXPECT_EQ(0, std::memcmp(got.param.data(), want.param.data(), 4 * 5000));
}

TEST(Adam, MisuseIsRefusedAndChangesNothing) {
  Arrays a(8, 1);
  const std::string before = a.bytes();
  AdamRange null_grad = a.range();
  null_grad.grad = nullptr;
  EXPECT_THROW(adam_step(null_grad, {}), StateError);
  AdamRange uneven = a.range();
  uneven.grad = reinterpret_cast<const char*>(a.grad.data()) + 2;
  uneven.numel = 4;
  EXPECT_THROW(adam_step(uneven, {}), StateError);
  EXPECT_THROW(adam_step(a.range(), {.step = 0}), StateError);
  EXPECT_THROW(adam_step(a.range(), {.clip_value = std::nan("")}), StateError);
  EXPECT_THROW((void)adam_kernel("sse9"), Error);
  EXPECT_TRUE(a.bytes() == before);
}

TEST(ParallelRanges, CoverEveryElementOnce) {
  for (int64_t numel : {0, 1, 63, 64, 1000, 4097}) {
    for (int threads : {0, 1, 2, 5}) {
      std::vector<int> seen(static_cast<size_t>(numel), 0);  // ranges are disjoint: no lock
      parallel_ranges(numel, 64, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
      });
      EXPECT_EQ(seen, std::vector<int>(static_cast<size_t>(numel), 1));
    }
  }
}

}  // namespace
}  // namespace gemini
