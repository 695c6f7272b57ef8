#include "adam/adam.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <string>
#include <vector>

#include "adam/dispatch.h"
#include "common/error.h"

namespace gemini {
namespace {

constexpr int64_t kBlocksPerTask = 64;  // 16 Ki elements: the longest that one thread may wait for
                                        // another
constexpr int64_t kSumNumel = 64 * 1024;
// Above this many elements in one call a 16-bit copy should bypass the caches.
constexpr int64_t kStreamNumel = 4 * 1024 * 1024;
constexpr uintptr_t kStreamAlignment = 64;

// Sets default rounding and no flushing of subnormals for its lifetime: these are per-thread
// settings, and a result must not depend on the thread that computed it.
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

int64_t size_of(FloatType type) { return type == FloatType::kFp32 ? 4 : 2; }

int64_t size_of(MomentType type) {
  return type == MomentType::kFp32 ? 4 : type == MomentType::kBf16 ? 2 : 1;
}

bool has_fp32_param(ParamForm form) {
  return form == ParamForm::kFp32 || form == ParamForm::kFp32CopyBf16 ||
         form == ParamForm::kFp32CopyFp16;
}

bool has_copy(ParamForm form) {
  return form == ParamForm::kFp32CopyBf16 || form == ParamForm::kFp32CopyFp16;
}

int64_t num_blocks(int64_t numel) { return (numel + kBlockNumel - 1) / kBlockNumel; }

void check_address(const char* name, const void* address, int64_t alignment) {
  const auto value = reinterpret_cast<uintptr_t>(address);
  if (address == nullptr || value % static_cast<uintptr_t>(alignment) != 0) {
    throw StateError("address " + std::to_string(value) + " of " + name +
                     " is null or not aligned to its element of " + std::to_string(alignment) +
                     " bytes");
  }
}

void check_part(const char* name, const uint16_t* address, bool wanted) {
  if (wanted) return check_address(name, address, 2);
  if (address == nullptr) return;
  throw StateError(std::string("adam_step: ") + name + " is given, but the form has none");
}

template <class T>
T* advanced(T* address, int64_t count) {
  return address == nullptr ? nullptr : address + count;
}

void* advanced(void* address, int64_t bytes) { return static_cast<char*>(address) + bytes; }

// Returns `count` blocks of `range`, from block `begin` on.
AdamRange part(const AdamRange& range, int64_t begin, int64_t count) {
  const int64_t at = begin * kBlockNumel;
  AdamRange sub = range;
  sub.param = advanced(range.param, at * (has_fp32_param(range.form) ? 4 : 2));
  sub.grad = static_cast<const char*>(range.grad) + at * size_of(range.grad_type);
  sub.exp_avg = advanced(range.exp_avg, at * size_of(range.moments));
  sub.exp_avg_sq = advanced(range.exp_avg_sq, at * size_of(range.moments));
  sub.exp_avg_scale = advanced(range.exp_avg_scale, begin);
  sub.exp_avg_sq_scale = advanced(range.exp_avg_sq_scale, begin);
  sub.half_out = advanced(range.half_out, at);
  sub.remainder = advanced(range.remainder, at);
  sub.numel = std::min(count * kBlockNumel, range.numel - at);
  sub.first_block += begin;
  return sub;
}

bool may_stream(const AdamRange& range) {
  return has_copy(range.form) && range.half_out != range.grad &&
         reinterpret_cast<uintptr_t>(range.half_out) % kStreamAlignment == 0;
}

// The blocks of all jobs as one list, so that they can be divided evenly whatever the sizes of the
// tensors.
class BlockList {
 public:
  explicit BlockList(std::span<const AdamJob> jobs) : jobs_(jobs) {
    ends_.reserve(jobs.size());
    for (const AdamJob& job : jobs) {
      count_ += num_blocks(job.range.numel);
      numel_ += job.range.numel;
      ends_.push_back(count_);
    }
  }
  [[nodiscard]] int64_t count() const { return count_; }

  bool update(AdamKernel kernel, int64_t begin, int64_t end) const {
    const bool streams = numel_ >= kStreamNumel;
    bool finite = true;
    auto job =
        static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
    for (int64_t at = begin; at < end; ++job) {
      const int64_t blocks = num_blocks(jobs_[job].range.numel);
      const int64_t skipped = at - (ends_[job] - blocks);
      const int64_t taken = std::min(blocks - skipped, end - at);
      if (taken == 0) continue;
      AdamRange range = part(jobs_[job].range, skipped, taken);
      range.streams_half_out = streams && may_stream(range);
      finite &= kernel(*jobs_[job].scalars, range);
      at += taken;
    }
    return finite;
  }

 private:
  std::span<const AdamJob> jobs_;
  std::vector<int64_t> ends_;
  int64_t count_ = 0;
  int64_t numel_ = 0;
};

}  // namespace

AdamScalars adam_scalars(const AdamOptions& o) {
  if (o.step < 1) {
    throw StateError("adam_step: step is " + std::to_string(o.step) + ", it counts from 1");
  }
  if (!(o.clip_value >= 0)) throw StateError("adam_step: clip_value must be 0 or more");
  const DefaultFloatMode callers_mode;
  const auto step = static_cast<double>(o.step);
  const double bias1 = o.bias_correction ? 1.0 - std::pow(o.beta1, step) : 1.0;
  const double bias2 = o.bias_correction ? 1.0 - std::pow(o.beta2, step) : 1.0;
  const double bias2_sqrt = std::pow(bias2, 0.5);  // as torch: pow, not sqrt
  const auto lerp_weight = static_cast<float>(1.0 - o.beta1);
  AdamScalars s{};
  s.pre_scale = static_cast<float>(o.pre_scale);
  s.clip_value = static_cast<float>(o.clip_value);
  s.post_scale = static_cast<float>(o.post_scale);
  s.decay = o.adamw_mode ? static_cast<float>(1.0 - o.lr * o.weight_decay) : 1.0f;
  s.l2 = static_cast<float>(o.weight_decay);
  // ATen's lerp has two formulas and chooses by |weight| < 0.5.
  s.lerp_from_grad = !(lerp_weight < 0.5f && lerp_weight > -0.5f);
  s.lerp_coefficient = s.lerp_from_grad ? lerp_weight - 1.0f : lerp_weight;
  s.beta1 = static_cast<float>(o.beta1);
  s.avg_weight = lerp_weight;
  s.beta2 = static_cast<float>(o.beta2);
  s.sq_weight = static_cast<float>(1.0 - o.beta2);
  s.bias2_sqrt = static_cast<float>(bias2_sqrt);
  s.inverse_bias2_sqrt = static_cast<float>(1.0 / bias2_sqrt);
  s.eps = static_cast<float>(o.eps);
  s.neg_step_size = static_cast<float>(-(o.lr / bias1));
  s.has_l2 = !o.adamw_mode && o.weight_decay != 0.0;
  s.scales_grad = s.pre_scale != 1.0f || s.post_scale != 1.0f || std::isfinite(s.clip_value);
  s.check_finite = o.check_finite;
  s.dither_seed = static_cast<uint64_t>(o.step) * 0xd6e8feb86659fd93u;
  return s;
}

void check_job(const AdamJob& job) {
  const AdamRange& range = job.range;
  if (range.numel < 0) throw StateError("adam_step: numel is " + std::to_string(range.numel));
  if (range.numel == 0) return;
  check_address("param", range.param, has_fp32_param(range.form) ? 4 : 2);
  check_address("grad", range.grad, size_of(range.grad_type));
  check_address("exp_avg", range.exp_avg, size_of(range.moments));
  check_address("exp_avg_sq", range.exp_avg_sq, size_of(range.moments));
  if (range.moments == MomentType::kInt8) {
    check_address("exp_avg_scale", range.exp_avg_scale, 4);
    check_address("exp_avg_sq_scale", range.exp_avg_sq_scale, 4);
  }
  check_part("half_out", range.half_out, has_copy(range.form));
  check_part("remainder", range.remainder, range.form == ParamForm::kBf16Remainder);
}

bool adam_step(std::span<const AdamJob> jobs, const Workers& workers) {
  return adam_step_with(isa_kernels().adam, jobs, workers);
}

bool adam_step_with(AdamKernel kernel, std::span<const AdamJob> jobs, const Workers& workers) {
  for (const AdamJob& job : jobs) check_job(job);
  const BlockList blocks(jobs);
  const DefaultFloatMode callers_mode;
  std::atomic<bool> finite = true;
  parallel_ranges(blocks.count(), kBlocksPerTask, workers, [&](int64_t begin, int64_t end) {
    const DefaultFloatMode threads_mode;
    if (!blocks.update(kernel, begin, end)) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

double sum_squares(const void* values, FloatType type, int64_t numel, const Workers& workers) {
  if (numel < 0) throw StateError("sum_squares: numel is " + std::to_string(numel));
  if (numel == 0) return 0.0;
  check_address("values", values, size_of(type));
  const auto sum = isa_kernels().sum_squares;
  const DefaultFloatMode callers_mode;
  std::vector<double> parts(static_cast<size_t>((numel + kSumNumel - 1) / kSumNumel));
  parallel_ranges(numel, kSumNumel, workers, [&](int64_t begin, int64_t end) {
    const DefaultFloatMode threads_mode;
    const char* from = static_cast<const char*>(values) + begin * size_of(type);
    parts[static_cast<size_t>(begin / kSumNumel)] = sum(from, type, end - begin);
  });
  double total = 0.0;
  for (const double part : parts) total += part;
  return total;
}

}  // namespace gemini
