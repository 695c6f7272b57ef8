// The Adam kernel for AVX2 with FMA (flags: sources.cmake).
#include "adam/kernel.h"

#if defined(__AVX2__) && defined(__FMA__)

namespace gemini {
namespace {
#include "adam/kernel.inc"
}  // namespace

AdamKernel adam_kernel_avx2() { return adam_range; }

}  // namespace gemini

#else

namespace gemini {
AdamKernel adam_kernel_avx2() { return nullptr; }
}  // namespace gemini

#endif
