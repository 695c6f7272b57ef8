// Tensors of every layout for the Adam tests, and what a 16-bit float is, written independently of
// the kernels.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "adam/adam.h"
#include "adam/dispatch.h"

namespace gemini {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr FloatType kFloatTypes[] = {FloatType::kFp32, FloatType::kBf16, FloatType::kFp16};
inline constexpr FloatType kHalfTypes[] = {FloatType::kBf16, FloatType::kFp16};
inline constexpr ParamForm kForms[] = {ParamForm::kFp32,         ParamForm::kFp32CopyBf16,
                                       ParamForm::kFp32CopyFp16, ParamForm::kBf16Remainder,
                                       ParamForm::kBf16,         ParamForm::kFp16};
inline constexpr MomentType kMomentTypes[] = {MomentType::kFp32, MomentType::kBf16,
                                              MomentType::kInt8};

// ---------------------------------------------------------------------------------- 16-bit floats

struct HalfFormat {
  int mantissa_bits;
  int min_exponent;  // of the smallest normal number
  uint16_t infinity;
  uint16_t nan;
};

inline HalfFormat format_of(FloatType type) {
  return type == FloatType::kBf16 ? HalfFormat{7, -126, 0x7f80, 0x7fc0}
                                  : HalfFormat{10, -14, 0x7c00, 0x7e00};
}

inline double half_value(FloatType type, uint16_t bits) {
  const HalfFormat format = format_of(type);
  const int magnitude = bits & 0x7fff;
  const int field = magnitude >> format.mantissa_bits;
  const int fraction = magnitude & ((1 << format.mantissa_bits) - 1);
  double value = std::ldexp(fraction, format.min_exponent - format.mantissa_bits);
  if (field > 0) {
    const int significand = fraction + (1 << format.mantissa_bits);
    value = std::ldexp(significand, field - 1 + format.min_exponent - format.mantissa_bits);
  }
  if (magnitude == format.infinity) value = kInf;
  if (magnitude > format.infinity) value = kNan;
  return bits & 0x8000 ? -value : value;
}

// Rounded to nearest, ties to even; a NaN becomes the positive quiet one.
inline uint16_t half_bits(FloatType type, double value) {
  const HalfFormat format = format_of(type);
  if (std::isnan(value)) return format.nan;
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const double size = std::fabs(value);
  int bits = format.infinity;
  if (size < 1e39) {
    const int exponent =
        size == 0 ? format.min_exponent : std::max(std::ilogb(size), format.min_exponent);
    const double units = std::nearbyint(std::ldexp(size, format.mantissa_bits - exponent));
    bits = ((exponent - format.min_exponent) << format.mantissa_bits) + static_cast<int>(units);
    if (bits > format.infinity) bits = format.infinity;
  }
  return static_cast<uint16_t>(sign | bits);
}

// ---------------------------------------------------------------------------------------- layouts

struct Layout {
  FloatType grad = FloatType::kFp32;
  ParamForm form = ParamForm::kFp32;
  MomentType moments = MomentType::kFp32;
};

inline FloatType param_type(ParamForm form) {
  if (form == ParamForm::kFp16) return FloatType::kFp16;
  const bool bf16 = form == ParamForm::kBf16 || form == ParamForm::kBf16Remainder;
  return bf16 ? FloatType::kBf16 : FloatType::kFp32;
}

inline bool has_copy(ParamForm form) {
  return form == ParamForm::kFp32CopyBf16 || form == ParamForm::kFp32CopyFp16;
}

inline FloatType copy_type(ParamForm form) {
  return form == ParamForm::kFp32CopyBf16 ? FloatType::kBf16 : FloatType::kFp16;
}

inline int64_t bytes_of(FloatType type) { return type == FloatType::kFp32 ? 4 : 2; }

inline int64_t bytes_of(MomentType type) {
  return type == MomentType::kFp32 ? 4 : type == MomentType::kBf16 ? 2 : 1;
}

inline int64_t num_blocks(int64_t numel) { return (numel + kBlockNumel - 1) / kBlockNumel; }

// Calls law(layout) for the chosen kinds, naming the layout where it fails.
template <class Law>
void for_each_layout(std::span<const FloatType> grads, std::span<const ParamForm> forms, Law law) {
  for (const FloatType grad : grads) {
    for (const ParamForm form : forms) {
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

template <class Law>
void for_each_layout(Law law) {
  for_each_layout(kFloatTypes, kForms, law);
}

// ---------------------------------------------------------------------------------------- values

enum class Values {
  kUsual,  // in (-2, 2)
  kTiny,   // finite, many of them zero, subnormal or close to it
  kWild,   // any bits: infinities and NaN too
};

class Source {
 public:
  Source(Values values, uint32_t seed) : values_(values), random_(seed) {}

  uint32_t bits() { return random_(); }
  float usual() {
    const float value = std::bit_cast<float>(0x40000000u | bits() >> 9) - 2.0f;
    return bits() & 1 ? value : -value;
  }
  float value() {
    const uint32_t kind = values_ == Values::kUsual ? 7 : bits() % 8;
    if (kind >= 4) return usual();
    if (values_ == Values::kTiny) {
      return std::ldexp(usual(), kind == 0 ? -999 : -static_cast<int>(bits() % 150));
    }
    constexpr float kSpecials[] = {0.0f,    -0.0f,    kInf,   -kInf,  kNan,   -kNan,
                                   3.4e38f, -3.4e38f, 1e-38f, 1e-40f, -1e-45f};
    return kind == 0 ? kSpecials[bits() % std::size(kSpecials)] : std::bit_cast<float>(bits());
  }

 private:
  Values values_;
  std::mt19937 random_;
};

// An array whose elements start `skew` elements behind an aligned address, also after being copied.
// What lies around it is part of its value.
class Array {
 public:
  Array(int64_t numel, int64_t element_bytes, int64_t skew)
      : offset_(skew * element_bytes),
        lines_(static_cast<size_t>((numel + skew) * element_bytes / 64 + 1)) {
    std::memset(lines_.data(), 0x5a, lines_.size() * sizeof(Line));
  }

  char* data() { return reinterpret_cast<char*>(lines_.data()) + offset_; }
  [[nodiscard]] const char* data() const {
    return reinterpret_cast<const char*>(lines_.data()) + offset_;
  }
  template <class T>
  T* of() {
    return reinterpret_cast<T*>(data());
  }
  template <class T>
  [[nodiscard]] T at(int64_t i) const {
    return reinterpret_cast<const T*>(data())[i];
  }
  [[nodiscard]] double value(FloatType type, int64_t i) const {
    return type == FloatType::kFp32 ? at<float>(i) : half_value(type, at<uint16_t>(i));
  }
  void set_value(FloatType type, int64_t i, float value) {
    if (type == FloatType::kFp32) {
      of<float>()[i] = value;
    } else {
      of<uint16_t>()[i] = half_bits(type, value);
    }
  }
  [[nodiscard]] bool starts_with(const Array& other, int64_t bytes) const {
    return std::memcmp(data(), other.data(), static_cast<size_t>(bytes)) == 0;
  }
  bool operator==(const Array& other) const {
    return lines_.size() == other.lines_.size() &&
           std::memcmp(lines_.data(), other.lines_.data(), lines_.size() * sizeof(Line)) == 0;
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  int64_t offset_;
  std::vector<Line> lines_;
};

// All arrays of one tensor. Those its layout lacks are there too, to see that nothing writes them.
struct Tensor {
  Tensor(const Layout& layout, int64_t numel, Values values, uint32_t seed, int64_t skew = 0)
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
    Source source(values, seed);
    for (int64_t i = 0; i < numel; ++i) fill(i, &source);
    for (int64_t block = 0; block < num_blocks(numel); ++block) {
      first_scale.set_value(FloatType::kFp32, block, std::fabs(source.value()) / 1000);
      second_scale.set_value(FloatType::kFp32, block, std::fabs(source.value()) / 200);
    }
  }

  AdamRange range() {
    const bool coded = layout.moments == MomentType::kInt8;
    const bool split = layout.form == ParamForm::kBf16Remainder;
    return {.param = param.data(),
            .grad = grad.data(),
            .exp_avg = first.data(),
            .exp_avg_sq = second.data(),
            .exp_avg_scale = coded ? first_scale.of<float>() : nullptr,
            .exp_avg_sq_scale = coded ? second_scale.of<float>() : nullptr,
            .half_out = has_copy(layout.form) ? half_out.of<uint16_t>() : nullptr,
            .remainder = split ? remainder.of<uint16_t>() : nullptr,
            .numel = numel,
            .first_block = 5,
            .grad_type = layout.grad,
            .form = layout.form,
            .moments = layout.moments,
            .streams_half_out = false};
  }

  // `count` elements from the start of a block on.
  AdamRange part(int64_t block, int64_t count) {
    const int64_t at = block * kBlockNumel;
    AdamRange sub = range();
    sub.param = param.data() + at * bytes_of(param_type(layout.form));
    sub.grad = grad.data() + at * bytes_of(layout.grad);
    sub.exp_avg = first.data() + at * bytes_of(layout.moments);
    sub.exp_avg_sq = second.data() + at * bytes_of(layout.moments);
    if (sub.exp_avg_scale != nullptr) sub.exp_avg_scale += block, sub.exp_avg_sq_scale += block;
    if (sub.half_out != nullptr) sub.half_out += at;
    if (sub.remainder != nullptr) sub.remainder += at;
    sub.first_block += block;
    sub.numel = count;
    return sub;
  }

  [[nodiscard]] float master(int64_t i) const {
    if (layout.form != ParamForm::kBf16Remainder) {
      return static_cast<float>(param.value(param_type(layout.form), i));
    }
    const uint32_t upper = static_cast<uint32_t>(param.at<uint16_t>(i)) << 16;
    return std::bit_cast<float>(upper + static_cast<uint32_t>(remainder.at<int16_t>(i)));
  }
  [[nodiscard]] double exp_avg(int64_t i) const {
    if (layout.moments == MomentType::kFp32) return first.at<float>(i);
    if (layout.moments == MomentType::kBf16) return first.value(FloatType::kBf16, i);
    return static_cast<double>(first_scale.at<float>(i / kBlockNumel)) * first.at<int8_t>(i);
  }
  [[nodiscard]] double root(int64_t i) const {
    return static_cast<double>(second_scale.at<float>(i / kBlockNumel)) * second.at<uint8_t>(i);
  }
  [[nodiscard]] double exp_avg_sq(int64_t i) const {
    if (layout.moments == MomentType::kFp32) return second.at<float>(i);
    if (layout.moments == MomentType::kBf16) return second.value(FloatType::kBf16, i);
    return root(i) * root(i);
  }

  bool operator==(const Tensor& other) const {
    return grad == other.grad && same_results(other) && half_out == other.half_out;
  }
  // All that is updated in place.
  [[nodiscard]] bool same_results(const Tensor& other) const {
    return param == other.param && first == other.first && second == other.second &&
           first_scale == other.first_scale && second_scale == other.second_scale &&
           remainder == other.remainder;
  }

  Layout layout;
  int64_t numel;
  Array grad, param, first, second, first_scale, second_scale, half_out, remainder;

 private:
  void fill(int64_t i, Source* source) {
    grad.set_value(layout.grad, i, source->value());
    param.set_value(param_type(layout.form), i, source->value());
    remainder.of<uint16_t>()[i] = static_cast<uint16_t>(source->bits());
    if (layout.moments == MomentType::kInt8) {
      first.of<int8_t>()[i] = static_cast<int8_t>(static_cast<int>(source->bits() % 255) - 127);
      second.of<uint8_t>()[i] = static_cast<uint8_t>(source->bits() >> 8);
      return;
    }
    const FloatType type =
        layout.moments == MomentType::kFp32 ? FloatType::kFp32 : FloatType::kBf16;
    first.set_value(type, i, 0.1f * source->value());
    second.set_value(type, i, std::fabs(source->value()));
  }
};

inline Tensor zeros(const Layout& layout, int64_t numel) {
  Tensor tensor(layout, numel, Values::kUsual, 1);
  for (int64_t i = 0; i < numel; ++i) {
    tensor.grad.set_value(layout.grad, i, 0.0f);
    tensor.param.set_value(param_type(layout.form), i, 0.0f);
    tensor.remainder.of<uint16_t>()[i] = 0;
  }
  const auto moment_bytes = static_cast<size_t>(numel * bytes_of(layout.moments));
  std::memset(tensor.first.data(), 0, moment_bytes);
  std::memset(tensor.second.data(), 0, moment_bytes);
  for (int64_t block = 0; block < num_blocks(numel); ++block) {
    tensor.first_scale.of<float>()[block] = tensor.second_scale.of<float>()[block] = 0.0f;
  }
  return tensor;
}

// ------------------------------------------------------------------------------------------ steps

inline bool step_range(const std::string& isa, const AdamRange& range, const AdamScalars& scalars) {
  const AdamJob job{range, &scalars};
  return adam_step_with(isa_kernels(isa).adam, {&job, 1}, 1);
}

inline bool step(Tensor* tensor, const AdamOptions& options, int threads = 1) {
  const AdamScalars scalars = adam_scalars(options);
  const AdamJob job{tensor->range(), &scalars};
  return adam_step({&job, 1}, threads);
}

// With these the moments become exactly the gradient and its square.
inline constexpr AdamOptions kOnlyGradient{.beta1 = 0.0, .beta2 = 0.0, .bias_correction = false};

// One step of each mode the kernels distinguish, and one with extreme numbers.
inline std::vector<AdamOptions> step_modes() {
  return {{.lr = 3e-3, .weight_decay = 0.1, .step = 7},
          {.lr = 3e-3,
           .weight_decay = 0.1,
           .step = 3,
           .adamw_mode = false,
           .pre_scale = 0.7,
           .clip_value = 1.1,
           .post_scale = 0.9},
          {.beta1 = 0.2, .step = 2},
          {.step = 5, .check_finite = true},
          {.lr = 1.0, .beta1 = 0.0, .beta2 = 0.0, .eps = 0.0, .bias_correction = false}};
}

inline AdamOptions everything_at_once() {
  AdamOptions options = step_modes()[1];
  options.beta1 = 0.3;
  options.check_finite = true;
  return options;
}

}  // namespace gemini
