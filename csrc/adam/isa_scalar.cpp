// The kernels over plain floats: the reference, and the fallback. If the baseline has no FMA
// instruction, each fused multiply-add is a library call: exact and slow.
#include "adam/kernel.h"

namespace gemini {
namespace {
#include "adam/vec_plain.h"
//
#include "adam/element.inc"
//
#include "adam/kernel.inc"
//
#include "adam/range.inc"
//
#include "adam/stream.inc"
}  // namespace

IsaKernels scalar_kernels() { return {adam_range, sum_squares, stream_adam_pattern, stream_read}; }

}  // namespace gemini
