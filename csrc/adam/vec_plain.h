// The trait over one float: the scalar reference, and the CUDA kernel. For inclusion inside an
// anonymous namespace.

#if defined(__CUDACC__)
#define GEMINI_INLINE
#define GEMINI_FN __host__ __device__ __forceinline__
#else
#define GEMINI_INLINE __attribute__((always_inline))
#define GEMINI_FN inline GEMINI_INLINE
#endif

struct V {
  static constexpr int kLanes = 1;
  using F = float;
  using I = uint32_t;

  static GEMINI_FN float as_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    return __builtin_bit_cast(float, bits);
#endif
  }
  static GEMINI_FN I bits(F value) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    return __builtin_bit_cast(uint32_t, value);
#endif
  }
  static GEMINI_FN F fma(F a, F b, F c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
  }
  static GEMINI_FN F sqrt(F a) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(a);
#else
    return __builtin_sqrtf(a);
#endif
  }
  static GEMINI_FN F splat(float value) { return value; }
  static GEMINI_FN F floats(I bits) { return as_float(bits); }
  static GEMINI_FN F where(bool mask, F yes, F no) { return mask ? yes : no; }
  static GEMINI_FN I where(bool mask, I yes, I no) { return mask ? yes : no; }
  static GEMINI_FN F larger(F a, F b) { return a > b ? a : b; }
  static GEMINI_FN I larger(I a, I b) { return a > b ? a : b; }
  static GEMINI_FN uint32_t largest(I a) { return a; }
  static GEMINI_FN F converted(I value) { return static_cast<float>(static_cast<int32_t>(value)); }
  static GEMINI_FN float scalar_sqrt(float value) { return sqrt(value); }

  template <class T>
  static GEMINI_FN void store(void* to, T value) {
    __builtin_memcpy(to, &value, sizeof(T));
  }
  static GEMINI_FN void stream(void* to, I value) { store(to, value); }
  static GEMINI_FN void finish_streams() {}
  static GEMINI_FN F load_floats(const float* from) { return *from; }
  static GEMINI_FN I load_ints(const uint32_t* from) { return *from; }
  static GEMINI_FN I load_u16(const uint16_t* from) { return *from; }
  static GEMINI_FN I load_s16(const uint16_t* from) {
    return static_cast<I>(static_cast<int16_t>(*from));
  }
  static GEMINI_FN I load_u8(const uint8_t* from) { return *from; }
  static GEMINI_FN I load_s8(const uint8_t* from) {
    return static_cast<I>(static_cast<int8_t>(*from));
  }
  static GEMINI_FN I pack_low16(I a, I b) { return (a & 0xffff) | (b << 16); }
  static GEMINI_FN I pack_high16(I a, I b) { return pack_low16(a >> 16, b >> 16); }
  static GEMINI_FN I pack_codes(I a, I b, I c, I d, bool) {
    return (a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16 | d << 24;
  }

  static constexpr int kDoubles = 1;
  using D = double;
  static GEMINI_FN void add_squares(D* one, F value) {
    const D wide = value;
    *one += wide * wide;
  }
};
