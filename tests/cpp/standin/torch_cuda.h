// CUDA as torch sees it, for a torch that was built without: tensors of device type "cuda" are in
// host memory, and their operators are the CPU's, called in the order of the streams of the
// driver's stand-in (libcuda.cpp).
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "gpu/cuda_abi.h"

namespace standin {

inline constexpr c10::DeviceType kGpu = c10::DeviceType::CUDA;
inline constexpr c10::DeviceIndex kNumGpus = 2;  // for two processes: their memory is one

// Memory that work uses: where it begins and its bytes.
using Ranges = std::vector<std::pair<const void*, size_t>>;

// -- torch_streams.cpp --

// The driver's calls. Throws where one refuses, naming it.
const gemini::cuda_abi::Calls& driver();
void check(gemini::cuda_abi::Result result, const char* doing);

// Makes the context of the one GPU this thread's, as CUDA's runtime does at its first use.
void enter_context();

// The current GPU of this thread.
c10::Device current_device();
c10::Device exchange_device(c10::Device device);

// That of this thread's operators, as the driver knows it; 0 is the null stream.
c10::StreamId current_stream();
c10::StreamId exchange_stream(c10::StreamId stream);
c10::StreamId make_stream();

// Has the current stream call `work`, which uses `ranges`. What it throws is thrown by the next
// wait for a stream.
void launch(const Ranges& ranges, std::function<void()> work);
void synchronize(c10::StreamId stream);
void come_after(c10::StreamId stream, c10::StreamId other);
void synchronize_all();

// Counts memory of the GPU as taken, or given back where it is negative. False: there is too
// little.
bool take(int64_t nbytes);

// -- torch_memory.cpp --

// Gives memory back in the order of the stream that it was taken on, and keeps it for the next who
// asks, as torch's allocator does.
c10::Allocator& gpu_allocator();
c10::Allocator& pinned_allocator();
bool is_pinned(const void* data);

// Has what begins at `memory` given back after what `stream` was given by then, too.
void use_on_stream(const void* memory, c10::StreamId stream);

struct MemoryUse {
  int64_t allocated = 0, peak_allocated = 0;  // by tensors
  int64_t reserved = 0, peak_reserved = 0;    // and what is kept
};
MemoryUse memory_use();
void reset_peaks();
void release_cache();

// -- torch_generator.cpp --

at::Generator make_generator();

// Makes a generator of the GPU one of the CPU while it lives.
class OnCpu {
 public:
  explicit OnCpu(const at::Generator& generator);
  ~OnCpu();
  OnCpu(const OnCpu&) = delete;
  OnCpu& operator=(const OnCpu&) = delete;

 private:
  at::Generator generator_;
};

}  // namespace standin
