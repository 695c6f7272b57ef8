// What the ISA files and the dispatcher agree on. Plain data: ISA files include no standard
// containers.
#pragma once

#include <cstdint>

namespace gemini {

enum class FloatType : int32_t { kFp32, kBf16, kFp16 };

// The scalars of one step, computed once in double and rounded to float as torch rounds Python
// scalars.
struct AdamScalars {
  float pre_scale;  // g = clamp(g * pre_scale, -clip_value, clip_value) * post_scale
  float clip_value;
  float post_scale;
  float decay;        // AdamW: param *= decay, 1 without weight decay
  float l2;           // Adam: g += l2 * param, unused unless has_l2
  float lerp_weight;  // exp_avg = lerp(exp_avg, g, lerp_weight)
  float beta2;        // exp_avg_sq = beta2 * exp_avg_sq + sq_weight * g * g
  float sq_weight;
  float bias2_sqrt;  // denom = sqrt(exp_avg_sq) / bias2_sqrt + eps
  float eps;
  float neg_step_size;  // param += neg_step_size * exp_avg / denom
  bool has_l2;
};

// A range of elements. The arrays do not overlap, except that half_out may be grad itself when both
// have 16-bit elements. Aligned to their own element size, nothing more.
struct AdamRange {
  float* param;
  const void* grad;
  float* exp_avg;
  float* exp_avg_sq;
  uint16_t* half_out;  // null: no 16-bit copy of the new parameter
  int64_t numel;
  FloatType grad_type;
  FloatType half_type;  // kBf16 or kFp16
};

using AdamKernel = void (*)(const AdamScalars& scalars, const AdamRange& range);

// Each returns null where its file was compiled without that instruction set.
AdamKernel adam_kernel_scalar();
AdamKernel adam_kernel_avx2();
AdamKernel adam_kernel_avx512();

}  // namespace gemini
