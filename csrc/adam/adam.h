// One Adam or AdamW step over flat arrays.
#pragma once

#include <cstdint>
#include <limits>

#include "adam/kernel.h"

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
};

// Round a step's options to the floats the kernel uses.
[[nodiscard]] AdamScalars adam_scalars(const AdamOptions& options);

// Update `range` in place with the kernel in use. The bits do not depend on the instruction set,
// the number of threads (0: one per core), the addresses, or how a longer array was cut into
// ranges; the caller's floating-point mode (flush to zero, rounding) is set aside for the call.
// Throws StateError for a null or misaligned address or a step below 1; nothing has changed then.
void adam_step(const AdamRange& range, const AdamOptions& options, int threads = 0);

// The same with a given kernel: for tests and benchmarks.
void adam_step_with(AdamKernel kernel, const AdamRange& range, const AdamOptions& options,
                    int threads);

}  // namespace gemini
