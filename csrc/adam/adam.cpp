#include "adam/adam.h"

#include <cfenv>
#include <cmath>
#include <string>

#include "adam/dispatch.h"
#include "adam/parallel.h"
#include "common/error.h"

namespace gemini {
namespace {

constexpr int64_t kNumelPerThread = 32 * 1024;  // fewer elements do not pay for starting a thread

// Default rounding and no flushing of subnormals while it lives: these are per-thread settings, and
// a result must not depend on which thread computed it.
class DefaultFloatMode {
 public:
  DefaultFloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&saved_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  std::fenv_t saved_;
};

int64_t element_bytes(FloatType type) { return type == FloatType::kFp32 ? 4 : 2; }

void check_address(const char* name, const void* address, int64_t alignment) {
  const auto value = reinterpret_cast<uintptr_t>(address);
  if (address == nullptr || value % static_cast<uintptr_t>(alignment) != 0) {
    throw StateError("adam_step: address " + std::to_string(value) + " of " + name +
                     " is null or not aligned to its element of " + std::to_string(alignment) +
                     " bytes");
  }
}

void check(const AdamRange& range, const AdamOptions& options) {
  if (range.numel < 0) throw StateError("adam_step: numel is " + std::to_string(range.numel));
  if (options.step < 1) {
    throw StateError("adam_step: step is " + std::to_string(options.step) + ", it counts from 1");
  }
  if (!(options.clip_value >= 0)) throw StateError("adam_step: clip_value must be 0 or more");
  if (range.numel == 0) return;
  check_address("param", range.param, 4);
  check_address("grad", range.grad, element_bytes(range.grad_type));
  check_address("exp_avg", range.exp_avg, 4);
  check_address("exp_avg_sq", range.exp_avg_sq, 4);
  if (range.half_out != nullptr) check_address("half_out", range.half_out, 2);
}

AdamRange part(const AdamRange& range, int64_t begin, int64_t end) {
  AdamRange sub = range;
  sub.param += begin;
  sub.grad = static_cast<const char*>(range.grad) + begin * element_bytes(range.grad_type);
  sub.exp_avg += begin;
  sub.exp_avg_sq += begin;
  if (range.half_out != nullptr) sub.half_out += begin;
  sub.numel = end - begin;
  return sub;
}

}  // namespace

AdamScalars adam_scalars(const AdamOptions& o) {
  const auto step = static_cast<double>(o.step);
  const double bias1 = o.bias_correction ? 1.0 - std::pow(o.beta1, step) : 1.0;
  const double bias2 = o.bias_correction ? 1.0 - std::pow(o.beta2, step) : 1.0;
  AdamScalars s{};
  s.pre_scale = static_cast<float>(o.pre_scale);
  s.clip_value = static_cast<float>(o.clip_value);
  s.post_scale = static_cast<float>(o.post_scale);
  s.decay = o.adamw_mode ? static_cast<float>(1.0 - o.lr * o.weight_decay) : 1.0f;
  s.l2 = static_cast<float>(o.weight_decay);
  s.has_l2 = !o.adamw_mode && o.weight_decay != 0.0;
  s.lerp_weight = static_cast<float>(1.0 - o.beta1);
  s.beta2 = static_cast<float>(o.beta2);
  s.sq_weight = static_cast<float>(1.0 - o.beta2);
  s.bias2_sqrt = static_cast<float>(std::pow(bias2, 0.5));  // as torch: pow, not sqrt
  s.eps = static_cast<float>(o.eps);
  s.neg_step_size = static_cast<float>(-(o.lr / bias1));
  return s;
}

void adam_step(const AdamRange& range, const AdamOptions& options, int threads) {
  static const AdamKernel kernel = adam_kernel(adam_isa());
  adam_step_with(kernel, range, options, threads);
}

void adam_step_with(AdamKernel kernel, const AdamRange& range, const AdamOptions& options,
                    int threads) {
  check(range, options);
  const DefaultFloatMode callers_mode;
  const AdamScalars scalars = adam_scalars(options);
  parallel_ranges(range.numel, kNumelPerThread, threads, [&](int64_t begin, int64_t end) {
    const DefaultFloatMode threads_mode;
    kernel(scalars, part(range, begin, end));
  });
}

}  // namespace gemini
