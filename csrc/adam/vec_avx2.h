// The vector trait of AVX2 with FMA. For inclusion inside an anonymous namespace.

constexpr int kVectorBytes = 32;
#include "adam/vec.h"

struct V : Vec {
  static GEMINI_FN F fma(F a, F b, F c) { return f(_mm256_fmadd_ps(m(a), m(b), m(c))); }
  static GEMINI_FN F sqrt(F a) { return f(_mm256_sqrt_ps(m(a))); }
  static GEMINI_FN F larger(F a, F b) { return f(_mm256_max_ps(m(a), m(b))); }
  static GEMINI_FN I larger(I a, I b) { return i(_mm256_max_epu32(m(a), m(b))); }
  static GEMINI_FN uint32_t largest(I a) {
    const __m256i all = m(a);
    __m128i x = _mm_max_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(x));
  }
  static GEMINI_FN I load_u16(const uint16_t* from) {
    return i(_mm256_cvtepu16_epi32(load<__m128i>(from)));
  }
  static GEMINI_FN I load_s16(const uint16_t* from) {
    return i(_mm256_cvtepi16_epi32(load<__m128i>(from)));
  }
  static GEMINI_FN I load_u8(const uint8_t* from) {
    return i(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  static GEMINI_FN I load_s8(const uint8_t* from) {
    return i(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }

  static GEMINI_FN I pack_low16(I a, I b) { return pack16(a & 0xffff, b & 0xffff); }
  static GEMINI_FN I pack_high16(I a, I b) { return pack16(a >> 16, b >> 16); }
  // The low bytes. For codes the low 16 bits are the same number. (Packing orders bytes by 128-bit
  // lane; the permutation undoes that.)
  static GEMINI_FN I pack_codes(I a, I b, I c, I d, bool) {
    const __m256i ab = _mm256_packus_epi32(m(a & 0xff), m(b & 0xff));
    const __m256i cd = _mm256_packus_epi32(m(c & 0xff), m(d & 0xff));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return i(_mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order));
  }
  static GEMINI_FN void stream(void* to, I value) {
    _mm256_stream_si256(static_cast<__m256i*>(to), m(value));
  }
  static GEMINI_FN void finish_streams() { _mm_sfence(); }

  static GEMINI_FN void add_squares(D* two, F values) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(m(values)));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(m(values), 1));
    two[0] = reinterpret_cast<D>(_mm256_fmadd_pd(low, low, reinterpret_cast<__m256d>(two[0])));
    two[1] = reinterpret_cast<D>(_mm256_fmadd_pd(high, high, reinterpret_cast<__m256d>(two[1])));
  }

 private:
  static GEMINI_FN F f(__m256 value) { return reinterpret_cast<F>(value); }
  static GEMINI_FN I i(__m256i value) { return reinterpret_cast<I>(value); }
  static GEMINI_FN __m256 m(F value) { return reinterpret_cast<__m256>(value); }
  static GEMINI_FN __m256i m(I value) { return reinterpret_cast<__m256i>(value); }
  static GEMINI_FN I pack16(I a, I b) {
    return i(_mm256_permute4x64_epi64(_mm256_packus_epi32(m(a), m(b)), 0xd8));
  }
};
