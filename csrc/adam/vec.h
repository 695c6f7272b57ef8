// The common part of the vector traits of the kernel text, on the vector types of GCC and Clang.
// Arithmetic, comparisons and shifts are operators, so a trait adds the other functions. Included
// inside the anonymous namespace of an ISA file.

#define GEMINI_INLINE __attribute__((always_inline))
#define GEMINI_FN inline GEMINI_INLINE

// Vectors of kVectorBytes, which the including file defines. Integers are unsigned: they wrap.
struct Vec {
  static constexpr int kLanes = kVectorBytes / 4;
  typedef float F __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t I __attribute__((vector_size(kVectorBytes)));
  typedef int32_t S __attribute__((vector_size(kVectorBytes)));  // signed; the result of a
                                                                 // comparison

  static GEMINI_FN float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
  static GEMINI_FN F splat(float value) { return value - F{}; }  // adding would lose the sign of -0
  static GEMINI_FN I bits(F value) { return reinterpret_cast<I>(value); }
  static GEMINI_FN F floats(I bits) { return reinterpret_cast<F>(bits); }
  static GEMINI_FN F where(S mask, F yes, F no) { return mask ? yes : no; }
  static GEMINI_FN I where(S mask, I yes, I no) { return mask ? yes : no; }
  // Converts integers with the bits of signed ones.
  static GEMINI_FN F converted(I value) {
    return __builtin_convertvector(reinterpret_cast<S>(value), F);
  }

  // Makes stores of stream() visible to a thread that sees the next store of this one.
  static GEMINI_FN void finish_streams() {}
  static GEMINI_FN float scalar_sqrt(float value) { return __builtin_sqrtf(value); }

  template <class T>
  static GEMINI_FN T load(const void* from) {
    T value;
    __builtin_memcpy(&value, from, sizeof(T));
    return value;
  }
  template <class T>
  static GEMINI_FN void store(void* to, T value) {
    __builtin_memcpy(to, &value, sizeof(T));
  }
  static GEMINI_FN F load_floats(const float* from) { return load<F>(from); }
  static GEMINI_FN I load_ints(const uint32_t* from) { return load<I>(from); }

  // For sums: a vector of doubles of the same size. Squares of floats are exact in double, so a
  // trait may fuse the multiplication with the addition.
  static constexpr int kDoubles = kVectorBytes / 8;
  typedef double D __attribute__((vector_size(kVectorBytes)));
};
