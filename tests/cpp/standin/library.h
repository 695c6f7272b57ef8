// What the stand-in for NVIDIA's driver (libcuda.cpp) knows of its one GPU.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "gpu/cuda_abi.h"
#include "gpu/simulated_gpu.h"

// Seen from outside the library.
#define EXPORTED __attribute__((visibility("default")))

namespace gemini::standin {

inline constexpr cuda_abi::Result kInvalidValue = 1;
inline constexpr cuda_abi::Result kInvalidContext = 201;

inline constexpr int64_t kGranularity = 2 << 20;
inline constexpr int64_t kTotalBytes = int64_t{8} << 30;  // taken when used

struct Mapping {
  size_t nbytes;
  cuda_abi::Handle handle;
  bool accessible;
};

// Physical memory is the GPU's again when its owner has released it and nothing shows it.
struct Memory {
  size_t nbytes;
  int num_mappings;
  bool released;
};

struct Library {
  std::mutex mutex;
  SimulatedGpu gpu{
      {.total_bytes = kTotalBytes, .granularity = kGranularity, .max_delay_us = 200, .seed = 1}};
  std::map<cuda_abi::DevicePtr, size_t> reservations;  // guarded by mutex
  std::map<cuda_abi::DevicePtr, Mapping> mappings;     // guarded by mutex
  std::map<cuda_abi::Handle, Memory> memories;         // guarded by mutex
  std::map<void*, size_t> host_memory;                 // guarded by mutex
  std::set<GpuDriver::Event> recorded;                 // guarded by mutex
  std::map<cuda_abi::DevicePtr, size_t> brought;       // guarded by mutex: see standin_bring
  int64_t taken_bytes = 0;                             // guarded by mutex: see standin_take
  bool initialized = false;                            // guarded by mutex
  int num_retained = 0;                                // guarded by mutex
};

Library& library();

// The null stream is one like any other: it is where torch's operators go.
GpuDriver::Stream number(cuda_abi::Stream stream);

// What every call of a context needs.
cuda_abi::Result in_context(const std::function<cuda_abi::Result(Library&)>& call);

// The caller holds the mutex.
int64_t free_bytes_of(Library& own);

}  // namespace gemini::standin
