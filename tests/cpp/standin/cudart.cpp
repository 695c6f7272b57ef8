// CUDA's runtime for machines without a GPU: the calls that adam_cuda.cu and cuda_info.cu make,
// over the stand-in for the driver. Kernels are run from PTX (ptx.h).
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "driver_use.h"
#include "gpu/cuda_abi.h"
#include "ptx.h"

namespace abi = gemini::cuda_abi;

namespace {

using gemini::standin::enter_context;
using gemini::standin::kDriver;
using gemini::standin::MemoryRange;
using gemini::standin::PtxKernel;

constexpr size_t kAlignBytes = 256;
constexpr int kUnwritten = 0xff;  // NaN in every float type

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t done(abi::Result result) {
  if (result != abi::kSuccess) last_error = static_cast<cudaError_t>(result);  // the same numbers
  return static_cast<cudaError_t>(result);
}

abi::Stream handle(cudaStream_t stream) { return reinterpret_cast<abi::Stream>(stream); }
abi::Event handle(cudaEvent_t event) { return reinterpret_cast<abi::Event>(event); }

cudaError_t launch(cudaStream_t stream, std::function<void()> work) {
  return done(gemini::standin::launch(handle(stream), std::move(work)));
}

MemoryRange find_memory(uint64_t address) {
  MemoryRange range;
  standin_find(address, &range.begin, &range.end);
  return range;
}

// -- kernels --

// The kernel of each function that stands for one on the host.
std::map<const void*, std::string>& kernel_names() {
  static std::map<const void*, std::string> names;
  return names;
}

// Those for GPUs from 8.0 on, or for the oldest that nvcc knows.
std::map<std::string, PtxKernel> read_kernels() {
  const char* const path = std::getenv("GEMINI_STANDIN_OLD_GPU") == nullptr
                               ? GEMINI_STANDIN_PTX
                               : GEMINI_STANDIN_OLD_PTX;
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  std::map<std::string, PtxKernel> kernels;
  for (PtxKernel& kernel : gemini::standin::parse_ptx(text.str())) {
    const std::string name = kernel.name;
    kernels.emplace(name, std::move(kernel));
  }
  return kernels;
}

// Null: none.
const PtxKernel* find_kernel(const void* function) {
  static const auto* const kernels = new auto(read_kernels());  // for good: streams run them
  const auto found = kernels->find(kernel_names()[function]);
  return found == kernels->end() ? nullptr : &found->second;
}

// What a launch has copied of its arguments.
struct Arguments {
  std::vector<std::vector<char>> values;

  Arguments(const PtxKernel& kernel, void* const* from) {
    for (const auto& parameter : kernel.parameters) {
      const auto* const bytes = static_cast<const char*>(*from++);
      values.emplace_back(bytes, bytes + parameter.nbytes);
    }
  }
  [[nodiscard]] std::vector<void*> addresses() {
    std::vector<void*> all;
    for (auto& value : values) all.push_back(value.data());
    return all;
  }
};

// -- memory --

// Keeps what it has been given, as a pool does whose threshold is never reached.
class Pool {
 public:
  // Null: the GPU has too little.
  void* allocate(size_t nbytes) {
    const size_t rounded = (nbytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    const std::lock_guard lock(mutex_);
    if (in_use_ + rounded > held_) {
      if (standin_take(static_cast<int64_t>(in_use_ + rounded - held_)) != 0) return nullptr;
      held_ = in_use_ + rounded;
    }
    in_use_ += rounded;
    void* const memory = std::aligned_alloc(kAlignBytes, rounded);
    std::memset(memory, kUnwritten, rounded);
    standin_bring(memory, rounded);
    sizes_[memory] = rounded;
    return memory;
  }

  void free(void* memory) {
    const std::lock_guard lock(mutex_);
    const auto found = sizes_.find(memory);
    standin_remove(memory);
    std::memset(memory, kUnwritten, found->second);
    in_use_ -= found->second;
    sizes_.erase(found);
    std::free(memory);
  }

 private:
  std::mutex mutex_;
  size_t in_use_ = 0;              // guarded by mutex_
  size_t held_ = 0;                // guarded by mutex_
  std::map<void*, size_t> sizes_;  // guarded by mutex_
};

Pool& the_pool() {
  static auto* const kept = new Pool;  // for good: streams may use it at the end
  return *kept;
}

}  // namespace

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

// -- what nvcc has a file with kernels call when it is loaded --

// NOLINTBEGIN(bugprone-reserved-identifier): the names are CUDA's
EXPORTED void** __cudaRegisterFatBinary(void*) { return nullptr; }
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int,
                                     uint3*, uint3*, dim3*, dim3*, int*) {
  kernel_names()[function] = name;
}

// Of launches with <<<>>>, which are not used.
EXPORTED unsigned __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  return cudaErrorNotSupported;
}
EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
// NOLINTEND(bugprone-reserved-identifier)

// -- errors and devices --

EXPORTED cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
EXPORTED const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "an error of CUDA";
}
EXPORTED const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "the stand-in refuses";
}

EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  enter_context();
  *properties = {};
  std::strcpy(properties->name, "stand-in for a GPU");
  properties->major = 9;
  size_t free_bytes = 0;
  return done(kDriver.memory_info(&free_bytes, &properties->totalGlobalMem));
}
EXPORTED cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaSetDevice(int device) { return done(device == 0 ? 0 : 101); }

EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                              const void* address) {
  const MemoryRange range = find_memory(reinterpret_cast<uint64_t>(address));
  *attributes = {};
  attributes->type = range.end > range.begin ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

// -- streams and events --

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  enter_context();
  return done(kDriver.event_create(reinterpret_cast<abi::Event*>(event), 0));
}
EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return done(kDriver.event_record(handle(event), handle(stream)));
}
EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
  return done(kDriver.event_query(handle(event)));
}
EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return done(kDriver.event_destroy(handle(event)));
}
EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return done(gemini::standin::await(handle(stream)));
}

// -- memory --

EXPORTED cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* wanted) {
  if (wanted->allocType != cudaMemAllocationTypePinned) return done(cudaErrorInvalidValue);
  *pool = reinterpret_cast<cudaMemPool_t>(&the_pool());
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMallocFromPoolAsync(void** memory, size_t nbytes, cudaMemPool_t,
                                             cudaStream_t) {
  enter_context();
  *memory = the_pool().allocate(nbytes);
  return done(*memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
EXPORTED cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  return launch(stream, [=] { the_pool().free(memory); });
}

// As late as CUDA may be, from pageable memory too.
EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind,
                                     cudaStream_t stream) {
  return launch(stream, [=] { std::memcpy(to, from, nbytes); });
}

// A kernel that does what a GPU would punish ends the process.
EXPORTED cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                      size_t shared_bytes, cudaStream_t stream) {
  const PtxKernel* const kernel = find_kernel(function);
  if (kernel == nullptr || shared_bytes != 0) return done(cudaErrorInvalidValue);
  return launch(stream, [=, own = Arguments(*kernel, arguments)]() mutable {
    try {
      gemini::standin::run_kernel(*kernel, own.addresses().data(), grid.x, block.x, find_memory);
    } catch (const gemini::standin::PtxError& error) {
      std::fprintf(stderr, "kernel %s: %s\n", kernel->name.c_str(), error.what());
      std::abort();
    }
  });
}

}  // extern "C"
