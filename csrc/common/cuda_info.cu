#include <cuda_runtime_api.h>

#include "common/cuda_info.h"

namespace gemini {

CudaInfo cuda_info() {
  CudaInfo info;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();  // clear it: it is reported here, not by the next call
    info.problem = cudaGetErrorString(status);
    return info;
  }
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties;
    const cudaError_t asked = cudaGetDeviceProperties(&properties, index);
    if (asked != cudaSuccess) {
      info.problem = cudaGetErrorString(asked);
      continue;
    }
    info.devices.push_back({index, properties.name, static_cast<int64_t>(properties.totalGlobalMem),
                            properties.major, properties.minor});
  }
  return info;
}

}  // namespace gemini
