// The driver of an NVIDIA GPU.
#pragma once

#include <memory>

#include "gpu/gpu_driver.h"

namespace gemini {

// Of the GPU with this index, in its primary context, which torch uses as well. The driver's
// library is loaded when this is called: nothing of CUDA is needed to build or to load this one.
// Throws Error naming what is missing.
[[nodiscard]] std::shared_ptr<GpuDriver> make_cuda_driver(int device);

}  // namespace gemini
