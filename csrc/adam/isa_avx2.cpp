// The kernels for AVX2 with FMA (flags: sources.cmake).
#include "adam/kernel.h"

#if defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>

namespace gemini {
namespace {
#include "adam/vec_avx2.h"
//
#include "adam/element.inc"
//
#include "adam/kernel.inc"
//
#include "adam/range.inc"
//
#include "adam/stream.inc"
}  // namespace

IsaKernels avx2_kernels() { return {adam_range, sum_squares, stream_adam_pattern, stream_read}; }

}  // namespace gemini

#else

namespace gemini {
IsaKernels avx2_kernels() { return {}; }
}  // namespace gemini

#endif
