// Adam and AdamW steps over many tensors at once, and sums of squares.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "adam/kernel.h"
#include "adam/parallel.h"

namespace gemini {

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  int64_t step = 1;  // counts from 1
  bool bias_correction = true;
  bool adamw_mode = true;  // decoupled weight decay; false: added to the gradient
  double pre_scale = 1.0;  // g = clamp(g * pre_scale, -clip_value, clip_value) * post_scale
  double clip_value = std::numeric_limits<double>::infinity();
  double post_scale = 1.0;
  bool check_finite = false;  // report whether the gradients, before scaling, were finite
};

// Round a step's options to the floats the kernel uses. Throws StateError for a step below 1 or a
// negative clip_value.
[[nodiscard]] AdamScalars adam_scalars(const AdamOptions& options);

// One tensor, or a part of one that starts at a multiple of kBlockNumel, and the scalars of its
// update.
struct AdamJob {
  AdamRange range;
  const AdamScalars* scalars;
};

// Throws StateError for a null or misaligned address, or if an array does not belong to the form.
void check_job(const AdamJob& job);

// Updates every job in place with the kernel in use; returns whether all gradients were finite,
// true for jobs that do not check. The resulting bits do not depend on the instruction set, the
// workers, the addresses, or the division of tensors into jobs; the caller's floating-point mode
// (flush to zero, rounding) is replaced during the call. Throws as check_job, with nothing changed.
bool adam_step(std::span<const AdamJob> jobs, const Workers& workers = {});

// The same with a given kernel, for tests and benchmarks.
bool adam_step_with(AdamKernel kernel, std::span<const AdamJob> jobs, const Workers& workers);

// Returns the sum of the squares of `numel` elements, read once. It is NaN or infinite exactly if
// an element is not finite. The bits are the same for every instruction set and number of threads.
[[nodiscard]] double sum_squares(const void* values, FloatType type, int64_t numel,
                                 const Workers& workers = {});

}  // namespace gemini
