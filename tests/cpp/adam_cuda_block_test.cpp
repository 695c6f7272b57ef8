// Laws of the CUDA kernel that need no GPU: its lanes, run one after the other, give the bits of
// the scalar reference, and its rows cover every block once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include "adam/cuda_rows.h"
#include "adam_test_util.h"
#include "common/error.h"

namespace gemini {
namespace {
#include "adam/vec_plain.h"
//
#include "adam/element.inc"
//
#include "adam/cuda_block.inc"

// ---- the lanes on the CPU ----

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

AdamScalars plain_scalars() { return adam_scalars(step_modes()[0]); }

AdamScalars other_scalars() { return adam_scalars(everything_at_once()); }

bool reference_step(std::span<const AdamJob> jobs) {
  return adam_step_with(isa_kernels("scalar").adam, jobs, 1);
}

// ---- laws ----

TEST(AdamCudaBlock, LanesGiveTheBitsOfTheReference) {
  const AdamScalars scalars[] = {plain_scalars(), other_scalars()};
  for_each_layout([&](const Layout& layout) {
    for (const AdamScalars& s : scalars) {
      for (const int64_t numel : {1, 37, 256, 300, 1000, 2048}) {
        for (const int64_t skew : {0, 1}) {
          Tensor want(layout, numel, Values::kWild, 7, skew);
          Tensor got = want;
          const AdamJob want_job{want.range(), &s};
          const AdamJob got_job{got.range(), &s};
          const bool want_finite = reference_step({&want_job, 1});
          ASSERT_EQ(lanes_step({&got_job, 1}), want_finite) << numel;
          ASSERT_TRUE(got == want) << "numel " << numel << ", skew " << skew;
        }
      }
    }
  });
}

TEST(AdamCudaBlock, ManyStepsStayEqual) {
  for_each_layout([&](const Layout& layout) {
    Tensor want(layout, 700, Values::kTiny, 11);
    Tensor got = want;
    for (int64_t step = 1; step <= 20; ++step) {
      const AdamScalars s = adam_scalars({.step = step});
      const AdamJob want_job{want.range(), &s};
      const AdamJob got_job{got.range(), &s};
      reference_step({&want_job, 1});
      lanes_step({&got_job, 1});
    }
    ASSERT_TRUE(got == want);
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
  Tensor want(layout, 700, Values::kWild, 3);
  Tensor got = want;
  const AdamJob want_job{want.range(), &s};
  AdamJob got_job{got.range(), &s};
  got_job.range.half_out = got.grad.of<uint16_t>();
  reference_step({&want_job, 1});
  lanes_step({&got_job, 1});
  EXPECT_EQ(std::memcmp(got.grad.data(), want.half_out.data(), 1400), 0);
  EXPECT_TRUE(got.param == want.param);
}

TEST(AdamCudaBlock, AListOfAllLayoutsAndOptionsGivesTheBitsOfTheReference) {
  const AdamScalars scalars[] = {plain_scalars(), other_scalars()};
  std::vector<Tensor> want;
  for_each_layout([&](const Layout& layout) {
    for (const int64_t numel : {0, 1, 600, 256, 5}) {
      want.emplace_back(layout, numel, Values::kWild, static_cast<uint32_t>(want.size()),
                        numel % 2);
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
  for (size_t i = 0; i < want.size(); ++i) ASSERT_TRUE(got[i] == want[i]) << i;
}

TEST(AdamCudaBlock, OneLayoutIsOneLaunchWhateverTheOptions) {
  const AdamScalars scalars[] = {plain_scalars(), other_scalars()};
  Tensor tensor({FloatType::kBf16, ParamForm::kBf16Remainder, MomentType::kInt8}, 1000,
                Values::kUsual, 5);
  std::vector<AdamJob> jobs;
  for (size_t i = 0; i < 100; ++i) jobs.push_back({tensor.range(), &scalars[i % 2]});
  const CudaPlan plan = plan_launches(jobs);
  ASSERT_EQ(plan.launches.size(), 1u);
  EXPECT_EQ(plan.launches[0].num_rows, 100);
  EXPECT_EQ(plan.launches[0].num_blocks, 400);
}

TEST(AdamCudaBlock, MisalignedJobIsRefused) {
  const AdamScalars s = plain_scalars();
  Tensor tensor({FloatType::kFp32, ParamForm::kFp32, MomentType::kFp32}, 8, Values::kUsual, 5);
  AdamJob job{tensor.range(), &s};
  job.range.param = tensor.param.data() + 1;
  EXPECT_THROW((void)plan_launches({&job, 1}), StateError);
}

}  // namespace
}  // namespace gemini
