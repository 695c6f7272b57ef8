// The vector trait of AVX-512 (F, BW, DQ, VL). For inclusion inside an anonymous namespace.

constexpr int kVectorBytes = 64;
#include "adam/vec.h"

struct V : Vec {
  static GEMINI_FN F fma(F a, F b, F c) { return f(_mm512_fmadd_ps(m(a), m(b), m(c))); }
  static GEMINI_FN F sqrt(F a) { return f(_mm512_sqrt_ps(m(a))); }
  static GEMINI_FN F larger(F a, F b) { return f(_mm512_max_ps(m(a), m(b))); }
  static GEMINI_FN I larger(I a, I b) { return i(_mm512_max_epu32(m(a), m(b))); }
  static GEMINI_FN uint32_t largest(I a) { return _mm512_reduce_max_epu32(m(a)); }
  static GEMINI_FN I load_u16(const uint16_t* from) {
    return i(_mm512_cvtepu16_epi32(load<__m256i>(from)));
  }
  static GEMINI_FN I load_s16(const uint16_t* from) {
    return i(_mm512_cvtepi16_epi32(load<__m256i>(from)));
  }
  static GEMINI_FN I load_u8(const uint8_t* from) {
    return i(_mm512_cvtepu8_epi32(load<__m128i>(from)));
  }
  static GEMINI_FN I load_s8(const uint8_t* from) {
    return i(_mm512_cvtepi8_epi32(load<__m128i>(from)));
  }

  static GEMINI_FN I pack_low16(I a, I b) {
    return i(_mm512_permutex2var_epi16(m(a), every_second_word(0), m(b)));
  }
  static GEMINI_FN I pack_high16(I a, I b) {
    return i(_mm512_permutex2var_epi16(m(a), every_second_word(1), m(b)));
  }
  // The low bytes. For codes the low 16 bits are the same number. (Packing words orders bytes by
  // 128-bit lane; the permutation undoes that.)
  static GEMINI_FN I pack_codes(I a, I b, I c, I d, bool is_signed) {
    const __m512i ab = m(pack_low16(a, b));
    const __m512i cd = m(pack_low16(c, d));
    const __m512i bytes = is_signed ? _mm512_packs_epi16(ab, cd) : _mm512_packus_epi16(ab, cd);
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    return i(_mm512_permutexvar_epi64(order, bytes));
  }
  static GEMINI_FN void stream(void* to, I value) {
    _mm512_stream_si512(static_cast<__m512i*>(to), m(value));
  }
  static GEMINI_FN void finish_streams() { _mm_sfence(); }

  static GEMINI_FN void add_squares(D* two, F values) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(m(values)));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(m(values), 1));
    two[0] = reinterpret_cast<D>(_mm512_fmadd_pd(low, low, reinterpret_cast<__m512d>(two[0])));
    two[1] = reinterpret_cast<D>(_mm512_fmadd_pd(high, high, reinterpret_cast<__m512d>(two[1])));
  }

 private:
  static GEMINI_FN F f(__m512 value) { return reinterpret_cast<F>(value); }
  static GEMINI_FN I i(__m512i value) { return reinterpret_cast<I>(value); }
  static GEMINI_FN __m512 m(F value) { return reinterpret_cast<__m512>(value); }
  static GEMINI_FN __m512i m(I value) { return reinterpret_cast<__m512i>(value); }
  static GEMINI_FN __m512i every_second_word(int first) {
    const __m512i lanes = _mm512_setr_epi32(0x20000, 0x60004, 0xa0008, 0xe000c, 0x120010, 0x160014,
                                            0x1a0018, 0x1e001c, 0x220020, 0x260024, 0x2a0028,
                                            0x2e002c, 0x320030, 0x360034, 0x3a0038, 0x3e003c);
    return _mm512_add_epi16(lanes, _mm512_set1_epi16(static_cast<int16_t>(first)));
  }
};
