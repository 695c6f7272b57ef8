#include "adam/cuda_rows.h"

#include <algorithm>

namespace gemini {
namespace {

constexpr int64_t kQuadNumel = 4;

int layout(const AdamRange& range) {
  return static_cast<int>(range.grad_type) | static_cast<int>(range.form) << 4 |
         static_cast<int>(range.moments) << 8;
}

bool is_quad_aligned(const void* address, int64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(address) %
             static_cast<uintptr_t>(kQuadNumel * element_bytes) ==
         0;
}

// Null, for an array that the layout does not have, counts as aligned.
bool has_quads(const AdamRange& range) {
  const bool fp32_param = range.form == ParamForm::kFp32 ||
                          range.form == ParamForm::kFp32CopyBf16 ||
                          range.form == ParamForm::kFp32CopyFp16;
  const int64_t moment_bytes = range.moments == MomentType::kFp32   ? 4
                               : range.moments == MomentType::kBf16 ? 2
                                                                    : 1;
  return is_quad_aligned(range.param, fp32_param ? 4 : 2) &&
         is_quad_aligned(range.grad, range.grad_type == FloatType::kFp32 ? 4 : 2) &&
         is_quad_aligned(range.exp_avg, moment_bytes) &&
         is_quad_aligned(range.exp_avg_sq, moment_bytes) && is_quad_aligned(range.half_out, 2) &&
         is_quad_aligned(range.remainder, 2);
}

}  // namespace

CudaPlan plan_launches(std::span<const AdamJob> jobs) {
  std::vector<const AdamJob*> ordered;
  for (const AdamJob& job : jobs) {
    check_job(job);
    if (job.range.numel > 0) ordered.push_back(&job);
  }
  std::stable_sort(ordered.begin(), ordered.end(), [](const AdamJob* a, const AdamJob* b) {
    return layout(a->range) < layout(b->range);
  });
  CudaPlan plan;
  plan.rows.reserve(ordered.size());
  const AdamJob* before = nullptr;
  for (const AdamJob* job : ordered) {
    if (before == nullptr || before->scalars != job->scalars) plan.scalars.push_back(*job->scalars);
    if (before == nullptr || layout(before->range) != layout(job->range)) {
      plan.launches.push_back({static_cast<int64_t>(plan.rows.size()), 0, 0});
    }
    CudaLaunch& launch = plan.launches.back();
    plan.rows.push_back({.range = job->range,
                         .begin = launch.num_blocks,
                         .scalars = static_cast<int64_t>(plan.scalars.size()) - 1,
                         .quads = has_quads(job->range)});
    ++launch.num_rows;
    launch.num_blocks += (job->range.numel + kBlockNumel - 1) / kBlockNumel;
    before = job;
  }
  return plan;
}

}  // namespace gemini
