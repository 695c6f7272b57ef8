// Laws of the CUDA kernel that need no GPU: its lanes, run one after the other, give the bits of
// the scalar reference, and its rows cover every block once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "adam/adam.h"
#include "adam/cuda_rows.h"
#include "adam/dispatch.h"
#include "common/error.h"

namespace gemini {
namespace {
#include "adam/vec_plain.h"
//
#include "adam/element.inc"
//
#include "adam/cuda_block.inc"

constexpr FloatType kGradTypes[] = {FloatType::kFp32, FloatType::kBf16, FloatType::kFp16};
constexpr ParamForm kForms[] = {ParamForm::kFp32,         ParamForm::kFp32CopyBf16,
                                ParamForm::kFp32CopyFp16, ParamForm::kBf16Remainder,
                                ParamForm::kBf16,         ParamForm::kFp16};
constexpr MomentType kMomentTypes[] = {MomentType::kFp32, MomentType::kBf16, MomentType::kInt8};

// ------------------------------------------------------------------------------- the lanes on the
// CPU

template <FloatType kGrad, ParamForm kForm, MomentType kMoments>
bool run_block(const CudaRow& row, const AdamScalars& s, int64_t number) {
  std::vector<LaneWork<kGrad, kForm, kMoments>> lanes;
  Largest largest{};
  for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    lanes.emplace_back(s, row.range, number, share_of(row, number, lane));
    largest.grad = V::larger(largest.grad, lanes.back().largest().grad);
    largest.first = V::larger(largest.first, lanes.back().largest().first);
    largest.second = V::larger(largest.second, lanes.back().largest().second);
  }
  for (auto& lane : lanes) lane.finish(s, row.range, largest);
  return !s.check_finite || largest.grad < 0x7f800000u;
}

using RunBlock = bool (*)(const CudaRow&, const AdamScalars&, int64_t);

template <FloatType kGrad, ParamForm kForm>
RunBlock choose_moments(MomentType moments) {
  if (moments == MomentType::kFp32) return run_block<kGrad, kForm, MomentType::kFp32>;
  if (moments == MomentType::kBf16) return run_block<kGrad, kForm, MomentType::kBf16>;
  return run_block<kGrad, kForm, MomentType::kInt8>;
}

template <FloatType kGrad>
RunBlock choose_form(const AdamRange& range) {
  const RunBlock by_form[] = {choose_moments<kGrad, ParamForm::kFp32>(range.moments),
                              choose_moments<kGrad, ParamForm::kFp32CopyBf16>(range.moments),
                              choose_moments<kGrad, ParamForm::kFp32CopyFp16>(range.moments),
                              choose_moments<kGrad, ParamForm::kBf16Remainder>(range.moments),
                              choose_moments<kGrad, ParamForm::kBf16>(range.moments),
                              choose_moments<kGrad, ParamForm::kFp16>(range.moments)};
  return by_form[static_cast<int>(range.form)];
}

RunBlock choose_block(const AdamRange& range) {
  if (range.grad_type == FloatType::kFp32) return choose_form<FloatType::kFp32>(range);
  if (range.grad_type == FloatType::kBf16) return choose_form<FloatType::kBf16>(range);
  return choose_form<FloatType::kFp16>(range);
}

bool lanes_step(std::span<const AdamJob> jobs) {
  const CudaPlan plan = plan_launches(jobs);
  bool finite = true;
  for (const CudaLaunch& launch : plan.launches) {
    const CudaRow* rows = plan.rows.data() + launch.first_row;
    const RunBlock run = choose_block(rows->range);
    for (int64_t block = 0; block < launch.num_blocks; ++block) {
      const CudaRow& row = rows[find_row(rows, launch.num_rows, block)];
      finite &= run(row, plan.scalars[static_cast<size_t>(row.scalars)], block - row.begin);
    }
  }
  return finite;
}

// -------------------------------------------------------------------------------------------
// tensors

struct Layout {
  FloatType grad;
  ParamForm form;
  MomentType moments;
};

template <class Law>
void for_each_layout(Law law) {
  for (const FloatType grad : kGradTypes) {
    for (const ParamForm form : kForms) {
      for (const MomentType moments : kMomentTypes) {
        SCOPED_TRACE("grad " + std::to_string(static_cast<int>(grad)) + ", form " +
                     std::to_string(static_cast<int>(form)) + ", moments " +
                     std::to_string(static_cast<int>(moments)));
        law(Layout{grad, form, moments});
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

struct alignas(64) Line {
  char bytes[64];
};

// An array whose elements start `skew` elements behind an aligned address, also after being copied.
class Array {
 public:
  Array(int64_t numel, int64_t element_bytes, int64_t skew)
      : element_bytes_(element_bytes),
        skew_(skew),
        lines_(static_cast<size_t>((numel + skew) * element_bytes / 64 + 1)) {}

  char* data() { return lines_.data()->bytes + skew_ * element_bytes_; }
  template <class T>
  T* of() {
    return reinterpret_cast<T*>(data());
  }
  template <class T>
  void set(int64_t i, T value) {
    std::memcpy(data() + i * element_bytes_, &value, sizeof(T));
  }
  void set_as(int64_t i, FloatType type, float value) {
    if (type == FloatType::kFp32) return set(i, value);
    if (type == FloatType::kFp16) return set(i, static_cast<uint16_t>(to_fp16<V>(value)));
    set(i, static_cast<uint16_t>(bf16_above<V>(value) >> 16));
  }
  [[nodiscard]] std::string bytes() const {
    return {lines_.data()->bytes, lines_.size() * sizeof(Line)};  // what lies around it, too
  }

 private:
  int64_t element_bytes_;
  int64_t skew_;
  std::vector<Line> lines_;
};

FloatType param_type(ParamForm form) {
  if (form == ParamForm::kFp16) return FloatType::kFp16;
  const bool bf16 = form == ParamForm::kBf16 || form == ParamForm::kBf16Remainder;
  return bf16 ? FloatType::kBf16 : FloatType::kFp32;
}

int64_t bytes_of(FloatType type) { return type == FloatType::kFp32 ? 4 : 2; }

int64_t bytes_of(MomentType type) {
  return type == MomentType::kFp32 ? 4 : type == MomentType::kBf16 ? 2 : 1;
}

int64_t num_blocks(int64_t numel) { return (numel + kBlockNumel - 1) / kBlockNumel; }

// Every 97th value is a special one; 1, 3 or 5 says which comes first.
float sometimes_special(int64_t i, int64_t first, float value) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kSpecials[] = {0.0f,  -0.0f,   kInf,   std::numeric_limits<float>::quiet_NaN(),
                                 -kInf, 3.4e38f, 1e-40f, -1e-45f,
                                 1e-20f};
  return (i + first) % 97 == 0 ? kSpecials[(i / 97 + first) % 9] : value;
}

// All arrays of one tensor.
struct Tensor {
  Tensor(const Layout& layout, int64_t numel, uint32_t seed, int64_t skew = 0)
      : layout(layout),
        numel(numel),
        grad(numel, bytes_of(layout.grad), skew),
        param(numel, bytes_of(param_type(layout.form)), skew),
        first(numel, bytes_of(layout.moments), skew),
        second(numel, bytes_of(layout.moments), skew),
        first_scale(num_blocks(numel), 4, skew),
        second_scale(num_blocks(numel), 4, skew),
        half_out(numel, 2, skew),
        remainder(numel, 2, skew) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < numel; ++i) {
      grad.set_as(i, layout.grad, sometimes_special(i, 1, normal(random)));
      param.set_as(i, param_type(layout.form), sometimes_special(i, 5, normal(random)));
      remainder.set(i, static_cast<uint16_t>(random()));
      if (layout.moments == MomentType::kInt8) {
        first.set(i, static_cast<int8_t>(static_cast<int>(random() % 255) - 127));
        second.set(i, static_cast<uint8_t>(random()));
      } else {
        const FloatType type =
            layout.moments == MomentType::kFp32 ? FloatType::kFp32 : FloatType::kBf16;
        first.set_as(i, type, sometimes_special(i, 3, 0.1f * normal(random)));
        second.set_as(i, type, std::fabs(sometimes_special(i, 2, normal(random))));
      }
    }
    for (int64_t block = 0; block < num_blocks(numel); ++block) {
      first_scale.set(block, block % 4 == 2 ? 0.0f : 1e-3f * static_cast<float>(random() % 9));
      second_scale.set(block, block % 4 == 3 ? std::nanf("") : std::fabs(normal(random)));
    }
  }

  AdamRange range() {
    const bool coded = layout.moments == MomentType::kInt8;
    const bool copies =
        layout.form == ParamForm::kFp32CopyBf16 || layout.form == ParamForm::kFp32CopyFp16;
    const bool split = layout.form == ParamForm::kBf16Remainder;
    return {.param = param.data(),
            .grad = grad.data(),
            .exp_avg = first.data(),
            .exp_avg_sq = second.data(),
            .exp_avg_scale = coded ? first_scale.of<float>() : nullptr,
            .exp_avg_sq_scale = coded ? second_scale.of<float>() : nullptr,
            .half_out = copies ? half_out.of<uint16_t>() : nullptr,
            .remainder = split ? remainder.of<uint16_t>() : nullptr,
            .numel = numel,
            .first_block = 5,
            .grad_type = layout.grad,
            .form = layout.form,
            .moments = layout.moments,
            .streams_half_out = false};
  }

  [[nodiscard]] std::string bytes() const {
    return param.bytes() + first.bytes() + second.bytes() + first_scale.bytes() +
           second_scale.bytes() + half_out.bytes() + remainder.bytes() + grad.bytes();
  }

  Layout layout;
  int64_t numel;
  Array grad, param, first, second, first_scale, second_scale, half_out, remainder;
};

AdamScalars plain_scalars() { return adam_scalars({.lr = 3e-3, .weight_decay = 0.1, .step = 7}); }

// Everything that the plain ones leave out.
AdamScalars other_scalars() {
  return adam_scalars({.lr = 3e-3,
                       .beta1 = 0.3,
                       .weight_decay = 0.1,
                       .step = 3,
                       .adamw_mode = false,
                       .pre_scale = 0.7,
                       .clip_value = 1.1,
                       .post_scale = 0.9,
                       .check_finite = true});
}

bool reference_step(std::span<const AdamJob> jobs) {
  return adam_step_with(isa_kernels("scalar").adam, jobs, 1);
}

// ----------------------------------------------------------------------------------------------
// laws

TEST(AdamCudaBlock, LanesGiveTheBitsOfTheReference) {
  const AdamScalars scalars[] = {plain_scalars(), other_scalars()};
  for_each_layout([&](const Layout& layout) {
    for (const AdamScalars& s : scalars) {
      for (const int64_t numel : {1, 37, 256, 300, 1000, 2048}) {
        for (const int64_t skew : {0, 1}) {
          Tensor want(layout, numel, 7, skew);
          Tensor got = want;
          const AdamJob want_job{want.range(), &s};
          const AdamJob got_job{got.range(), &s};
          const bool want_finite = reference_step({&want_job, 1});
          ASSERT_EQ(lanes_step({&got_job, 1}), want_finite) << numel;
          ASSERT_TRUE(got.bytes() == want.bytes()) << "numel " << numel << ", skew " << skew;
        }
      }
    }
  });
}

TEST(AdamCudaBlock, ManyStepsStayEqual) {
  for_each_layout([&](const Layout& layout) {
    Tensor want(layout, 700, 11);
    Tensor got = want;
    for (int64_t step = 1; step <= 20; ++step) {
      const AdamScalars s = adam_scalars({.step = step});
      const AdamJob want_job{want.range(), &s};
      const AdamJob got_job{got.range(), &s};
      reference_step({&want_job, 1});
      lanes_step({&got_job, 1});
    }
    ASSERT_TRUE(got.bytes() == want.bytes());
  });
}

TEST(AdamCudaBlock, ComputedDithersAreThoseOfTheTable) {
  constexpr DitherTable kTable = make_dither_table();
  for (uint32_t place = 0; place < kDitherLevels + kBlockNumel; ++place) {
    ASSERT_EQ(dither_bits(place), static_cast<uint32_t>(kTable.bits[place]));
    ASSERT_EQ(dither_code(place), kTable.codes[place]);
  }
}

TEST(AdamCudaBlock, HalfCopyMayOverwriteItsGradient) {
  const AdamScalars s = plain_scalars();
  const Layout layout{FloatType::kBf16, ParamForm::kFp32CopyBf16, MomentType::kInt8};
  Tensor want(layout, 700, 3);
  Tensor got = want;
  const AdamJob want_job{want.range(), &s};
  AdamJob got_job{got.range(), &s};
  got_job.range.half_out = got.grad.of<uint16_t>();
  reference_step({&want_job, 1});
  lanes_step({&got_job, 1});
  EXPECT_EQ(std::memcmp(got.grad.data(), want.half_out.data(), 1400), 0);
  EXPECT_EQ(got.param.bytes(), want.param.bytes());
}

TEST(AdamCudaBlock, AListOfAllLayoutsAndOptionsGivesTheBitsOfTheReference) {
  const AdamScalars scalars[] = {plain_scalars(), other_scalars()};
  std::vector<Tensor> want;
  for_each_layout([&](const Layout& layout) {
    for (const int64_t numel : {0, 1, 600, 256, 5}) {
      want.emplace_back(layout, numel, static_cast<uint32_t>(want.size()), numel % 2);
    }
  });
  std::shuffle(want.begin(), want.end(), std::mt19937(1));
  std::vector<Tensor> got = want;
  std::vector<AdamJob> want_jobs, got_jobs;
  for (size_t i = 0; i < want.size(); ++i) {
    want_jobs.push_back({want[i].range(), &scalars[i % 2]});
    got_jobs.push_back({got[i].range(), &scalars[i % 2]});
  }
  EXPECT_EQ(lanes_step(got_jobs), reference_step(want_jobs));
  EXPECT_EQ(plan_launches(got_jobs).launches.size(), 54u);
  for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(got[i].bytes(), want[i].bytes()) << i;
}

TEST(AdamCudaBlock, OneLayoutIsOneLaunchWhateverTheOptions) {
  const AdamScalars scalars[] = {plain_scalars(), other_scalars()};
  Tensor tensor({FloatType::kBf16, ParamForm::kBf16Remainder, MomentType::kInt8}, 1000, 5);
  std::vector<AdamJob> jobs;
  for (size_t i = 0; i < 100; ++i) jobs.push_back({tensor.range(), &scalars[i % 2]});
  const CudaPlan plan = plan_launches(jobs);
  ASSERT_EQ(plan.launches.size(), 1u);
  EXPECT_EQ(plan.launches[0].num_rows, 100);
  EXPECT_EQ(plan.launches[0].num_blocks, 400);
}

TEST(AdamCudaBlock, MisalignedJobIsRefused) {
  const AdamScalars s = plain_scalars();
  Tensor tensor({FloatType::kFp32, ParamForm::kFp32, MomentType::kFp32}, 8, 5);
  AdamJob job{tensor.range(), &s};
  job.range.param = tensor.param.data() + 1;
  EXPECT_THROW((void)plan_launches({&job, 1}), StateError);
}

}  // namespace
}  // namespace gemini
