#include "adam/adam_cuda.h"

#include "common/error.h"

namespace gemini {

#ifndef GEMINI_HAVE_CUDA
void cuda_adam_step(std::span<const AdamJob> /*jobs*/, uintptr_t /*stream*/, bool* /*all_finite*/) {
  throw Error(
      "cuda_adam_step: this build has no CUDA part; install the CUDA toolkit (nvcc on PATH) and "
      "build again with GEMINI_CUDA=ON");
}
#endif

}  // namespace gemini
