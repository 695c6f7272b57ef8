// The GPUs the CUDA runtime sees. Safe to call on a machine without a GPU or driver.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gemini {

struct CudaDevice {
  int index = 0;
  std::string name;
  int64_t total_bytes = 0;
  int major = 0;  // compute capability
  int minor = 0;
};

struct CudaInfo {
  std::vector<CudaDevice> devices;
  std::string problem;  // why there are none; empty when there are, or when built without CUDA
};

// Ask the CUDA runtime. Creates no context, so it costs no GPU memory.
[[nodiscard]] CudaInfo cuda_info();

}  // namespace gemini
