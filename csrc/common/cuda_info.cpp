#include "common/cuda_info.h"

namespace gemini {

#ifndef GEMINI_HAVE_CUDA
CudaInfo cuda_info() { return {}; }
#endif

}  // namespace gemini
