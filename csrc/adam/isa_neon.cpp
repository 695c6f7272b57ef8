// The kernels for NEON, which every aarch64 machine has (flags: sources.cmake).
#include "adam/kernel.h"

#if defined(__aarch64__)

#include <arm_neon.h>

namespace gemini {
namespace {
#include "adam/vec_neon.h"
//
#include "adam/element.inc"
//
#include "adam/kernel.inc"
//
#include "adam/range.inc"
//
#include "adam/stream.inc"
}  // namespace

IsaKernels neon_kernels() { return {adam_range, sum_squares, stream_adam_pattern, stream_read}; }

}  // namespace gemini

#else

namespace gemini {
IsaKernels neon_kernels() { return {}; }
}  // namespace gemini

#endif
