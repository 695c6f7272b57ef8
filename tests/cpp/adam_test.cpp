// Laws of the Adam step: what its bits may not depend on, and what it refuses.
#include "adam/adam.h"

#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "adam/dispatch.h"
#include "adam_test_util.h"
#include "common/error.h"

namespace gemini {
namespace {

// For laws that the type of the gradient has no part in.
FloatType some_grad(const Layout& layout) {
  return kFloatTypes[(static_cast<int>(layout.form) + static_cast<int>(layout.moments)) % 3];
}

template <class Law>
void for_each_form_and_moments(Law law) {
  for_each_layout({kFloatTypes, 1}, kForms, [&](Layout layout) {
    layout.grad = some_grad(layout);
    law(layout);
  });
}

std::vector<int64_t> sizes() {
  std::vector<int64_t> all;
  for (int64_t numel = 0; numel <= 67; ++numel) all.push_back(numel);
  for (const int64_t numel : {255, 256, 257, 1000, 7171}) all.push_back(numel);
  return all;
}

// ------------------------------------------------------------------------------ instruction sets

void expect_bits_of_the_reference(const Tensor& start, const AdamScalars& scalars) {
  Tensor want = start;
  const bool finite = step_range("scalar", want.range(), scalars);
  for (const std::string& isa : adam_isas()) {
    if (isa == "scalar") continue;
    Tensor got = start;
    EXPECT_EQ(step_range(isa, got.range(), scalars), finite) << isa << " numel " << start.numel;
    ASSERT_TRUE(got == want) << isa << " numel " << start.numel;
  }
}

TEST(Adam, EveryIsaGivesTheBitsOfTheReference) {
  std::vector<AdamScalars> modes;
  for (const AdamOptions& options : step_modes()) modes.push_back(adam_scalars(options));
  modes.push_back(adam_scalars(everything_at_once()));
  for_each_layout([&](const Layout& layout) {
    for (const Values values : {Values::kUsual, Values::kTiny, Values::kWild}) {
      for (const int64_t numel : sizes()) {
        const Tensor start(layout, numel, values, static_cast<uint32_t>(numel) + 1, numel % 4);
        for (const AdamScalars& scalars : modes) expect_bits_of_the_reference(start, scalars);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

TEST(Adam, ManyStepsStayEqualOnEveryIsa) {
  for_each_form_and_moments([](const Layout& layout) {
    const Tensor start(layout, 700, Values::kUsual, 3, 1);
    Tensor want = start;
    for (int64_t i = 1; i <= 30; ++i) {
      step_range("scalar", want.range(), adam_scalars({.step = i}));
    }
    for (const std::string& isa : adam_isas()) {
      Tensor got = start;
      for (int64_t i = 1; i <= 30; ++i) step_range(isa, got.range(), adam_scalars({.step = i}));
      ASSERT_TRUE(got == want) << isa;
    }
  });
}

// ------------------------------------------------------------------------- where the elements are

TEST(Adam, AddressDoesNotChangeBits) {
  for_each_layout([](const Layout& layout) {
    Tensor want(layout, 1500, Values::kTiny, 3);
    step(&want, everything_at_once());
    for (const int64_t skew : {1, 3, 7, 15}) {
      Tensor got(layout, 1500, Values::kTiny, 3, skew);
      step(&got, everything_at_once());
      ASSERT_TRUE(got.param.starts_with(want.param, 1500 * bytes_of(param_type(layout.form))));
      ASSERT_TRUE(got.first.starts_with(want.first, 1500 * bytes_of(layout.moments)));
      ASSERT_TRUE(got.second.starts_with(want.second, 1500 * bytes_of(layout.moments)));
      ASSERT_TRUE(got.first_scale.starts_with(want.first_scale, 6 * 4));
      ASSERT_TRUE(got.second_scale.starts_with(want.second_scale, 6 * 4));
      ASSERT_TRUE(got.half_out.starts_with(want.half_out, 1500 * 2));
      ASSERT_TRUE(got.remainder.starts_with(want.remainder, 1500 * 2));
    }
  });
}

TEST(Adam, CuttingATensorAtBlocksDoesNotChangeBits) {
  const AdamScalars scalars = adam_scalars(everything_at_once());
  for_each_layout([&](const Layout& layout) {
    const Tensor start(layout, 2000, Values::kWild, 5, 3);
    Tensor want = start;
    step(&want, everything_at_once());
    for (const int64_t cut : {1, 3, 7}) {
      Tensor got = start;
      const AdamJob jobs[] = {{got.part(cut, 2000 - cut * kBlockNumel), &scalars},
                              {got.part(0, cut * kBlockNumel), &scalars}};
      adam_step({&jobs[0], 1});
      adam_step({&jobs[1], 1});
      ASSERT_TRUE(got == want) << cut;
    }
  });
}

// Compared with the kernel itself, which takes the tensor in one piece.
TEST(Adam, NumberOfThreadsDoesNotChangeBits) {
  const AdamScalars scalars = adam_scalars(everything_at_once());
  for_each_form_and_moments([&](const Layout& layout) {
    const Tensor start(layout, 200'003, Values::kTiny, 9, 1);
    Tensor want = start;
    isa_kernels().adam(scalars, want.range());
    for (const int threads : {0, 1, 2, 3, 64}) {
      Tensor got = start;
      step(&got, everything_at_once(), threads);
      ASSERT_TRUE(got == want) << threads;
    }
  });
}

// Every form and kind of moments, sizes around a block and around what a thread takes at once.
std::vector<Tensor> model_of_all_layouts() {
  std::vector<Tensor> tensors;
  for_each_form_and_moments([&](const Layout& layout) {
    for (const int64_t numel : {0, 1, 255, 256, 257, 3000, 0}) {
      tensors.emplace_back(layout, numel, Values::kTiny, static_cast<uint32_t>(tensors.size()));
    }
  });
  tensors.emplace_back(Layout{}, 150'001, Values::kTiny, 99);
  return tensors;
}

TEST(Adam, TensorsInOneCallGetTheBitsOfCallsOfTheirOwn) {
  std::vector<Tensor> want = model_of_all_layouts();
  std::vector<AdamScalars> scalars;
  for (size_t i = 0; i < want.size(); ++i) {
    AdamOptions options = step_modes()[i % step_modes().size()];
    options.step = 1 + static_cast<int64_t>(i);
    scalars.push_back(adam_scalars(options));
    step(&want[i], options);
  }
  for (const int threads : {1, 2, 5}) {
    std::vector<Tensor> got = model_of_all_layouts();
    std::vector<AdamJob> jobs;
    for (size_t i = got.size(); i-- > 0;) jobs.push_back({got[i].range(), &scalars[i]});
    EXPECT_TRUE(adam_step(jobs, threads));
    for (size_t i = 0; i < got.size(); ++i) ASSERT_TRUE(got[i] == want[i]) << i;
  }
  EXPECT_TRUE(adam_step({}, 2));
}

// A call of this size writes its 16-bit copies past the caches where their address allows it.
TEST(Adam, SizeOfTheCallDoesNotChangeBits) {
  constexpr int64_t kNumel = 4 * 1024 * 1024 + 1000;
  constexpr int64_t kCut = 8000;  // blocks
  const AdamScalars scalars = adam_scalars({.step = 3});
  for (const int64_t skew : {0, 1}) {
    const ParamForm form = skew == 0 ? ParamForm::kFp32CopyBf16 : ParamForm::kFp32CopyFp16;
    const Tensor start({FloatType::kFp32, form, MomentType::kFp32}, kNumel, Values::kUsual, 21,
                       skew);
    Tensor want = start;
    step_range("scalar", want.part(0, kCut * kBlockNumel), scalars);
    step_range("scalar", want.part(kCut, kNumel - kCut * kBlockNumel), scalars);
    for (const std::string& isa : adam_isas()) {
      Tensor got = start;
      const AdamJob job{got.range(), &scalars};
      adam_step_with(isa_kernels(isa).adam, {&job, 1}, 2);
      ASSERT_TRUE(got == want) << isa;
    }
  }
}

TEST(Adam, HalfCopyMayReplaceTheGradient) {
  constexpr ParamForm kCopies[] = {ParamForm::kFp32CopyBf16, ParamForm::kFp32CopyFp16};
  const AdamScalars scalars = adam_scalars(everything_at_once());
  for_each_layout(kHalfTypes, kCopies, [&](const Layout& layout) {
    for (const std::string& isa : adam_isas()) {
      Tensor want(layout, 5003, Values::kTiny, 17);
      Tensor got = want;
      step_range(isa, want.range(), scalars);
      AdamRange range = got.range();
      range.half_out = got.grad.of<uint16_t>();
      step_range(isa, range, scalars);
      ASSERT_TRUE(got.grad.starts_with(want.half_out, 5003 * 2)) << isa;
      ASSERT_TRUE(got.same_results(want)) << isa;
    }
  });
}

TEST(Adam, CallersRoundingModeIsSetAsideAndRestored) {
  for_each_form_and_moments([](const Layout& layout) {
    const Tensor start(layout, 70'000, Values::kUsual, 13);
    Tensor want = start;
    Tensor got = start;
    step(&want, everything_at_once());
    std::fesetround(FE_UPWARD);
    step(&got, everything_at_once(), 2);
    const int mode = std::fegetround();
    std::fesetround(FE_TONEAREST);
    EXPECT_EQ(mode, FE_UPWARD);
    ASSERT_TRUE(got == want);
  });
}

#if defined(__SSE2__)
TEST(Adam, CallersFlushingOfSubnormalsIsSetAsideAndRestored) {
  static constexpr unsigned kFlush = 0x8040;  // to zero, of results and of operands
  for_each_form_and_moments([](const Layout& layout) {
    const Tensor start(layout, 70'000, Values::kTiny, 13);
    Tensor want = start;
    Tensor got = start;
    step(&want, everything_at_once());
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | kFlush);
    step(&got, everything_at_once(), 2);
    const unsigned mode = _mm_getcsr() & kFlush;
    _mm_setcsr(before);
    EXPECT_EQ(mode, kFlush);
    ASSERT_TRUE(got == want);
  });
}
#endif

// ------------------------------------------------------------------------------- what it refuses

TEST(Adam, MisalignedOrMissingArraysAreRefusedAndNothingChanges) {
  const AdamScalars scalars = adam_scalars({});
  for_each_layout([&](const Layout& layout) {
    Tensor good(layout, 700, Values::kUsual, 1);
    Tensor bad(layout, 700, Values::kUsual, 2);
    const Tensor good_before = good;
    const Tensor bad_before = bad;
    const auto refuses = [&](auto AdamRange::* array, int64_t element_bytes) {
      for (int64_t shift = 0; shift < element_bytes; ++shift) {  // 0: missing
        AdamRange range = bad.range();
        const auto address = shift == 0 ? 0 : reinterpret_cast<uintptr_t>(range.*array) + shift;
        range.*array = reinterpret_cast<std::remove_reference_t<decltype(range.*array)>>(address);
        const AdamJob jobs[] = {{good.range(), &scalars}, {range, &scalars}};
        ASSERT_THROW(adam_step(jobs), StateError) << shift;
        ASSERT_THROW(check_job(jobs[1]), StateError) << shift;
      }
    };
    refuses(&AdamRange::param, bytes_of(param_type(layout.form)));
    refuses(&AdamRange::grad, bytes_of(layout.grad));
    refuses(&AdamRange::exp_avg, bytes_of(layout.moments));
    refuses(&AdamRange::exp_avg_sq, bytes_of(layout.moments));
    if (layout.moments == MomentType::kInt8) {
      refuses(&AdamRange::exp_avg_scale, 4);
      refuses(&AdamRange::exp_avg_sq_scale, 4);
    }
    if (has_copy(layout.form)) refuses(&AdamRange::half_out, 2);
    if (layout.form == ParamForm::kBf16Remainder) refuses(&AdamRange::remainder, 2);
    ASSERT_TRUE(good == good_before && bad == bad_before);
  });
}

TEST(Adam, ANegativeSizeIsRefusedAndAnEmptyTensorNeedsNoArrays) {
  const AdamScalars scalars = adam_scalars({});
  AdamRange range{};
  const AdamJob empty{range, &scalars};
  range.numel = -1;
  EXPECT_THROW(check_job({range, &scalars}), StateError);
  EXPECT_TRUE(adam_step({&empty, 1}));
}

TEST(Adam, AnArrayThatTheFormHasNoUseForIsRefusedAndNotWritten) {
  const AdamScalars scalars = adam_scalars({});
  for_each_form_and_moments([&](const Layout& layout) {
    Tensor tensor(layout, 300, Values::kUsual, 4);
    const Tensor before = tensor;
    AdamRange copies = tensor.range();
    AdamRange splits = tensor.range();
    copies.half_out = tensor.half_out.of<uint16_t>();
    splits.remainder = tensor.remainder.of<uint16_t>();
    if (!has_copy(layout.form)) {
      EXPECT_THROW(step_range("scalar", copies, scalars), StateError);
    }
    if (layout.form != ParamForm::kBf16Remainder) {
      EXPECT_THROW(step_range("scalar", splits, scalars), StateError);
    }
    ASSERT_TRUE(tensor == before);
  });
}

TEST(Adam, OptionsOutsideTheirRangeAreRefused) {
  EXPECT_THROW((void)adam_scalars({.step = 0}), StateError);
  EXPECT_THROW((void)adam_scalars({.step = -7}), StateError);
  EXPECT_THROW((void)adam_scalars({.clip_value = -1.0}), StateError);
  EXPECT_THROW((void)adam_scalars({.clip_value = std::nan("")}), StateError);
  EXPECT_NO_THROW((void)adam_scalars({.clip_value = 0.0}));
  EXPECT_THROW((void)isa_kernels("sse9"), Error);
}

// --------------------------------------------------------------------------------- finite
// gradients

TEST(Adam, AGradientThatIsNotFiniteIsReportedWhereverItIs) {
  AdamOptions options = everything_at_once();
  options.pre_scale = 0.0;  // what matters is how the gradient came
  const AdamScalars scalars = adam_scalars(options);
  for_each_layout([&](const Layout& layout) {
    const Tensor start(layout, 600, Values::kUsual, 31, 1);
    for (const std::string& isa : adam_isas()) {
      Tensor finite = start;
      ASSERT_TRUE(step_range(isa, finite.range(), scalars)) << isa;
      for (const int64_t at : {0, 1, 63, 255, 256, 511, 512, 577, 599}) {
        for (const float value : {kInf, -kInf, kNan, -kNan}) {
          Tensor tensor = start;
          tensor.grad.set_value(layout.grad, at, value);
          ASSERT_FALSE(step_range(isa, tensor.range(), scalars)) << isa << " " << at << value;
        }
      }
    }
  });
}

TEST(Adam, AGradientThatOverflowsWhenScaledIsFinite) {
  Tensor tensor({}, 300, Values::kUsual, 1);
  tensor.grad.of<float>()[299] = 3e38f;
  EXPECT_TRUE(step(&tensor, {.pre_scale = 1e10, .check_finite = true}));
}

TEST(Adam, OnlyJobsThatCheckReportAndCheckingChangesNoBits) {
  const AdamScalars checks = adam_scalars({.check_finite = true});
  const AdamScalars silent = adam_scalars({});
  for_each_layout([&](const Layout& layout) {
    Tensor wild(layout, 3000, Values::kWild, 8);
    Tensor usual(layout, 3000, Values::kUsual, 8);
    Tensor wild_again = wild;
    const AdamJob one[] = {{wild.range(), &silent}, {usual.range(), &checks}};
    ASSERT_TRUE(adam_step(one));
    const AdamJob other[] = {{wild_again.range(), &checks}, {usual.range(), &silent}};
    ASSERT_FALSE(adam_step(other, 2));
    ASSERT_TRUE(wild == wild_again);
  });
}

}  // namespace
}  // namespace gemini
