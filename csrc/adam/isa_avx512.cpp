// The kernels for AVX-512 (F, BW, DQ, VL) (flags: sources.cmake).
#include "adam/kernel.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include <immintrin.h>

namespace gemini {
namespace {
#include "adam/vec_avx512.h"
//
#include "adam/element.inc"
//
#include "adam/kernel.inc"
//
#include "adam/range.inc"
//
#include "adam/stream.inc"
}  // namespace

IsaKernels avx512_kernels() { return {adam_range, sum_squares, stream_adam_pattern, stream_read}; }

}  // namespace gemini

#else

namespace gemini {
IsaKernels avx512_kernels() { return {}; }
}  // namespace gemini

#endif
