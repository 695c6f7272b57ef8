// The Adam kernel for AVX-512 (F, BW, DQ, VL) (flags: sources.cmake).
#include "adam/kernel.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

namespace gemini {
namespace {
#include "adam/kernel.inc"
}  // namespace

AdamKernel adam_kernel_avx512() { return adam_range; }

}  // namespace gemini

#else

namespace gemini {
AdamKernel adam_kernel_avx512() { return nullptr; }
}  // namespace gemini

#endif
