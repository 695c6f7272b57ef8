// The driver of an NVIDIA GPU.
#pragma once

#include <memory>

#include "gpu/gpu_driver.h"

namespace gemini {

// The driver of the GPU with this index, in its primary context, which torch uses too. The CUDA
// library is loaded by this call: building and loading this module needs nothing of CUDA. Throws
// Error that names what is missing.
[[nodiscard]] std::shared_ptr<GpuDriver> make_cuda_driver(int device);

}  // namespace gemini
