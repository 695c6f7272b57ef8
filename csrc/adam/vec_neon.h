// The vector trait of NEON on aarch64. For inclusion inside an anonymous namespace.

constexpr int kVectorBytes = 16;
#include "adam/vec.h"

struct V : Vec {
  static GEMINI_FN F fma(F a, F b, F c) { return f(vfmaq_f32(m(c), m(a), m(b))); }
  static GEMINI_FN F sqrt(F a) { return f(vsqrtq_f32(m(a))); }
  // Not vmaxq_f32, which gives NaN if either is: here NaN in `a` gives `b`, as on the other ISAs.
  static GEMINI_FN F larger(F a, F b) { return where(a > b, a, b); }
  static GEMINI_FN I larger(I a, I b) { return i(vmaxq_u32(m(a), m(b))); }
  static GEMINI_FN uint32_t largest(I a) { return vmaxvq_u32(m(a)); }
  static GEMINI_FN I load_u16(const uint16_t* from) { return i(vmovl_u16(load<uint16x4_t>(from))); }
  static GEMINI_FN I load_s16(const uint16_t* from) { return i(vmovl_s16(load<int16x4_t>(from))); }
  // Loads only four bytes: eight could reach beyond the array.
  static GEMINI_FN I load_u8(const uint8_t* from) {
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(load<uint32_t>(from)));
    return i(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
  }
  static GEMINI_FN I load_s8(const uint8_t* from) {
    const int8x8_t bytes = vreinterpret_s8_u32(vdup_n_u32(load<uint32_t>(from)));
    return i(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
  }

  static GEMINI_FN I pack_low16(I a, I b) { return i(vuzp1q_u16(words(a), words(b))); }
  static GEMINI_FN I pack_high16(I a, I b) { return i(vuzp2q_u16(words(a), words(b))); }
  // The low bytes, signed or not.
  static GEMINI_FN I pack_codes(I a, I b, I c, I d, bool) {
    const uint16x8_t ab = vuzp1q_u16(words(a), words(b));
    const uint16x8_t cd = vuzp1q_u16(words(c), words(d));
    return i(vuzp1q_u8(vreinterpretq_u8_u16(ab), vreinterpretq_u8_u16(cd)));
  }
  // There is no intrinsic for a store past the caches.
  static GEMINI_FN void stream(void* to, I value) { store(to, value); }

  static GEMINI_FN void add_squares(D* two, F values) {
    const float64x2_t low = vcvt_f64_f32(vget_low_f32(m(values)));
    const float64x2_t high = vcvt_high_f64_f32(m(values));
    two[0] = reinterpret_cast<D>(vfmaq_f64(reinterpret_cast<float64x2_t>(two[0]), low, low));
    two[1] = reinterpret_cast<D>(vfmaq_f64(reinterpret_cast<float64x2_t>(two[1]), high, high));
  }

 private:
  static GEMINI_FN F f(float32x4_t value) { return reinterpret_cast<F>(value); }
  template <class T>
  static GEMINI_FN I i(T value) {
    return reinterpret_cast<I>(value);
  }
  static GEMINI_FN float32x4_t m(F value) { return reinterpret_cast<float32x4_t>(value); }
  static GEMINI_FN uint32x4_t m(I value) { return reinterpret_cast<uint32x4_t>(value); }
  static GEMINI_FN uint16x8_t words(I value) { return reinterpret_cast<uint16x8_t>(value); }
};
