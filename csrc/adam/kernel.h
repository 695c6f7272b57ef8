// The interface between the ISA files and the dispatcher. Plain data: ISA files include no standard
// containers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adam/quantize.h"

namespace gemini {

enum class FloatType : int32_t { kFp32, kBf16, kFp16 };

// How the parameter is stored (docs/notes/adam.md).
enum class ParamForm : int32_t {
  kFp32,           // fp32
  kFp32CopyBf16,   // fp32, and a bf16 copy is written to half_out
  kFp32CopyFp16,   // fp32, and an fp16 copy is written to half_out
  kBf16Remainder,  // bf16 and the low 16 bits of the exact fp32 master
  kBf16,           // bf16 only: the update is computed in fp32 and rounded to nearest even
  kFp16,           // fp16 only, updated likewise
};

// How the two moments are stored (docs/notes/adam.md).
enum class MomentType : int32_t {
  kFp32,
  kBf16,  // rounded up or down by a deterministic dither
  kInt8,  // 8-bit codes with one scale per kBlockNumel elements
};

// The scalars of one step, computed once in double and rounded to float as torch rounds Python
// scalars.
struct AdamScalars {
  float pre_scale;  // g = clamp(g * pre_scale, -clip_value, clip_value) * post_scale
  float clip_value;
  float post_scale;
  float decay;             // AdamW: param *= decay, 1 without weight decay
  float l2;                // Adam: g += l2 * param, unused unless has_l2
  float lerp_coefficient;  // exp_avg = lerp(exp_avg, g, weight) in ATen's formula for that weight
  float beta1;             // compact moments: exp_avg = beta1 * exp_avg + avg_weight * g
  float avg_weight;
  float beta2;  // exp_avg_sq = beta2 * exp_avg_sq + sq_weight * g * g
  float sq_weight;
  float bias2_sqrt;  // denom = sqrt(exp_avg_sq) / bias2_sqrt + eps
  float inverse_bias2_sqrt;
  float eps;
  float neg_step_size;  // param += neg_step_size * exp_avg / denom
  bool lerp_from_grad;  // lerp's weight is 0.5 or more: its formula starts from the gradient
  bool has_l2;
  bool scales_grad;   // false: pre_scale and post_scale are 1 and nothing is clamped
  bool check_finite;  // report gradients that are not finite
  uint64_t dither_seed;
};

// A range of elements. The arrays must not overlap, except that half_out may be grad itself if both
// have 16-bit elements. They are aligned to their own element size only.
struct AdamRange {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  float* exp_avg_scale;     // one per block; null unless kInt8
  float* exp_avg_sq_scale;  // one per block; null unless kInt8
  uint16_t* half_out;       // null unless the form has a copy
  uint16_t* remainder;      // null unless kBf16Remainder
  int64_t numel;
  int64_t first_block;  // the range's position in its tensor, in blocks; shifts the dither
  FloatType grad_type;
  ParamForm form;
  MomentType moments;
  bool streams_half_out;  // write half_out past the caches; it must be aligned to 64 bytes
};

// Updates the range in place. Returns whether all gradients were finite; true without check_finite.
using AdamKernel = bool (*)(const AdamScalars& scalars, const AdamRange& range);

// The kernels of one instruction set.
struct IsaKernels {
  AdamKernel adam = nullptr;
  // Adds the squares of numel elements, in an order that does not depend on the instruction set.
  double (*sum_squares)(const void* values, FloatType type, int64_t numel) = nullptr;
  // For benchmarks: the memory traffic of an fp32 step without its arithmetic, and reading once.
  void (*stream_adam_pattern)(float* p, const float* g, float* m, float* v,
                              int64_t numel) = nullptr;
  uint32_t (*stream_read)(const void* values, int64_t bytes) = nullptr;
};

// Each returns null kernels if its file was compiled without that instruction set.
IsaKernels scalar_kernels();
IsaKernels avx2_kernels();
IsaKernels avx512_kernels();
IsaKernels neon_kernels();

}  // namespace gemini
