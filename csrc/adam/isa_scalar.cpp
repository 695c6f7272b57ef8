// The Adam kernel for the compiler's baseline: the reference, and what runs where nothing better
// does. Without an FMA instruction each fused multiply-add is a library call: exact and slow.
#include "adam/kernel.h"

namespace gemini {
namespace {
#include "adam/kernel.inc"
}  // namespace

AdamKernel adam_kernel_scalar() { return adam_range; }

}  // namespace gemini
