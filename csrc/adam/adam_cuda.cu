// The Adam kernel for GPUs (flags: sources.cmake). A warp takes a block of kBlockNumel elements;
// cuda_block.inc has its work, and element.inc the arithmetic.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "adam/adam_cuda.h"
#include "adam/cuda_rows.h"
#include "common/error.h"
#include "common/mutex.h"

namespace gemini {
namespace {
#include "adam/vec_plain.h"
//
#include "adam/element.inc"
//
#include "adam/cuda_block.inc"

// -------------------------------------------------------------------------------------------
// kernel

constexpr int kThreads = 128;
// Consecutive blocks of a warp, so that it searches for their row only once.
constexpr int64_t kWarpBlocks = 4;
constexpr int64_t kGridBlocks = kThreads / kWarpLanes * kWarpBlocks;

// All pointers are to memory of the GPU.
struct Table {
  const AdamScalars* scalars;
  const CudaRow* rows;
  uint32_t* not_finite;  // set to 1 if a gradient is not finite
};

__device__ uint32_t warp_largest(uint32_t value) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, value);
#else
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value = V::larger(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
#endif
}

template <FloatType kGrad, ParamForm kForm, MomentType kMoments>
__device__ void update_block(const Table& table, const CudaRow& row, int64_t number) {
  // Copies in registers: the compiler cannot know that no array overlaps the table.
  const AdamScalars s = table.scalars[row.scalars];
  const AdamRange range = row.range;
  const LaneShare share = share_of(row, number, threadIdx.x % kWarpLanes);
  LaneWork<kGrad, kForm, kMoments> work(s, range, number, share);
  Largest largest = work.largest();
  if (s.check_finite && largest.grad >= 0x7f800000u)
    *table.not_finite = 1;  // by any lane: they write the same
  if constexpr (kMoments == MomentType::kInt8) {
    largest.first = warp_largest(largest.first);
    largest.second = warp_largest(largest.second);
  }
  work.finish(s, range, largest);
}

template <FloatType kGrad, ParamForm kForm, MomentType kMoments>
__global__ void __launch_bounds__(kThreads) adam_blocks(Table table, CudaLaunch launch) {
  const CudaRow* const rows = table.rows + launch.first_row;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarpLanes;
  const int64_t begin = warp * kWarpBlocks;
  const int64_t end =
      begin + kWarpBlocks < launch.num_blocks ? begin + kWarpBlocks : launch.num_blocks;
  if (begin >= end) return;  // the whole warp
  int64_t row = find_row(rows, launch.num_rows, begin);
  for (int64_t block = begin; block < end; ++block) {
    while (row + 1 < launch.num_rows && rows[row + 1].begin <= block) ++row;
    update_block<kGrad, kForm, kMoments>(table, rows[row], block - rows[row].begin);
  }
}

using Kernel = void (*)(Table, CudaLaunch);

template <FloatType kGrad, ParamForm kForm>
Kernel choose_moments(MomentType moments) {
  if (moments == MomentType::kFp32) return adam_blocks<kGrad, kForm, MomentType::kFp32>;
  if (moments == MomentType::kBf16) return adam_blocks<kGrad, kForm, MomentType::kBf16>;
  return adam_blocks<kGrad, kForm, MomentType::kInt8>;
}

template <FloatType kGrad>
Kernel choose_form(ParamForm form, MomentType moments) {
  switch (form) {
    case ParamForm::kFp32:
      return choose_moments<kGrad, ParamForm::kFp32>(moments);
    case ParamForm::kFp32CopyBf16:
      return choose_moments<kGrad, ParamForm::kFp32CopyBf16>(moments);
    case ParamForm::kFp32CopyFp16:
      return choose_moments<kGrad, ParamForm::kFp32CopyFp16>(moments);
    case ParamForm::kBf16Remainder:
      return choose_moments<kGrad, ParamForm::kBf16Remainder>(moments);
    case ParamForm::kBf16:
      return choose_moments<kGrad, ParamForm::kBf16>(moments);
    default:
      return choose_moments<kGrad, ParamForm::kFp16>(moments);
  }
}

Kernel choose_kernel(const AdamRange& range) {
  if (range.grad_type == FloatType::kFp32)
    return choose_form<FloatType::kFp32>(range.form, range.moments);
  if (range.grad_type == FloatType::kBf16)
    return choose_form<FloatType::kBf16>(range.form, range.moments);
  return choose_form<FloatType::kFp16>(range.form, range.moments);
}

// ---------------------------------------------------------------------------------------------
// host

std::string advice(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
      return "the GPU has no memory left for the table of tensors; free some";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return "this build has no code for this GPU; build again with CUDAARCHS set to its compute "
             "capability (90 for 9.0)";
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
      return "no GPU, no NVIDIA driver, or one older than the CUDA toolkit of this build; "
             "`gemini check` shows what there is";
    case cudaErrorStreamCaptureUnsupported:
      return "the step cannot be captured into a CUDA graph; run it outside";
    default:
      return "an earlier operation on this GPU may be the cause; CUDA_LAUNCH_BLOCKING=1 and "
             "compute-sanitizer find it";
  }
}

void check(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clear it: it is reported here, not by the next call
  throw Error(std::string("cuda_adam_step: ") + doing + ": " + cudaGetErrorName(status) + " (" +
              cudaGetErrorString(status) + "); " + advice(status));
}

int device_of(const void* address) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, address), "looking up the GPU of param");
  if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) {
    throw StateError("cuda_adam_step: address " +
                     std::to_string(reinterpret_cast<uintptr_t>(address)) +
                     " of param is not memory of a GPU; use adam_step for CPU tensors");
  }
  return attributes.device;
}

// Makes a GPU current for its lifetime: torch has its own CUDA runtime, and the current GPU there
// may differ.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check(cudaGetDevice(&before_), "asking for the current GPU");
    if (device != before_) check(cudaSetDevice(device), "choosing the GPU");
  }
  ~CurrentDevice() { cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

// The memory pool for the tables of one GPU, kept for the life of the process: the default pool
// returns its memory at every synchronization, and would have to allocate it again in every step.
cudaMemPool_t table_pool(int device) {
  static Mutex mutex;
  static std::map<int, cudaMemPool_t> pools GEMINI_GUARDED_BY(mutex);
  const Lock lock(mutex);
  const auto found = pools.find(device);
  if (found != pools.end()) return found->second;
  cudaMemPoolProps wanted{};
  wanted.allocType = cudaMemAllocationTypePinned;
  wanted.location.type = cudaMemLocationTypeDevice;
  wanted.location.id = device;
  cudaMemPool_t pool = nullptr;
  check(cudaMemPoolCreate(&pool, &wanted), "creating a memory pool");
  uint64_t keep = UINT64_MAX;
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep),
        "setting up a memory pool");
  pools.emplace(device, pool);
  return pool;
}

// Bytes of GPU memory that stay valid for the work enqueued on the stream during its lifetime.
class StreamBytes {
 public:
  StreamBytes(int device, size_t nbytes, cudaStream_t stream) : stream_(stream) {
    void* address = nullptr;
    check(cudaMallocFromPoolAsync(&address, nbytes, table_pool(device), stream),
          "allocating the table of tensors");
    address_ = static_cast<std::byte*>(address);
  }
  ~StreamBytes() { cudaFreeAsync(address_, stream_); }
  StreamBytes(const StreamBytes&) = delete;
  StreamBytes& operator=(const StreamBytes&) = delete;

  [[nodiscard]] std::byte* address() const { return address_; }

 private:
  std::byte* address_ = nullptr;
  cudaStream_t stream_;
};

// The bytes of a plan's table, as copied to the GPU: scalars, rows, and the word of not_finite.
class TableBytes {
 public:
  explicit TableBytes(const CudaPlan& plan)
      : rows_at_(plan.scalars.size() * sizeof(AdamScalars)),
        not_finite_at_(rows_at_ + plan.rows.size() * sizeof(CudaRow)),
        bytes_(not_finite_at_ + sizeof(uint32_t)) {
    static_assert(sizeof(AdamScalars) % alignof(CudaRow) == 0);
    static_assert(std::is_trivially_copyable_v<AdamScalars>);
    static_assert(std::is_trivially_copyable_v<CudaRow>);
    std::memcpy(bytes_.data(), plan.scalars.data(), rows_at_);
    std::memcpy(bytes_.data() + rows_at_, plan.rows.data(), not_finite_at_ - rows_at_);
  }

  [[nodiscard]] const std::vector<std::byte>& bytes() const { return bytes_; }
  [[nodiscard]] std::vector<std::byte> take_bytes() { return std::move(bytes_); }
  [[nodiscard]] Table at(std::byte* address) const {
    return {reinterpret_cast<const AdamScalars*>(address),
            reinterpret_cast<const CudaRow*>(address + rows_at_),
            reinterpret_cast<uint32_t*>(address + not_finite_at_)};
  }

 private:
  size_t rows_at_;
  size_t not_finite_at_;
  std::vector<std::byte> bytes_;
};

// Buffers that streams may still be copying from. CUDA usually reads pageable memory before a copy
// returns, but does not guarantee it.
class BytesUnderWay {
 public:
  static BytesUnderWay& all() {
    static auto* const kept = new BytesUnderWay;  // never destroyed: CUDA may end before this does
    return *kept;
  }

  // Keeps them until `stream`, of the current device, has finished its work so far.
  void keep(std::vector<std::byte> bytes, cudaStream_t stream) {
    const Lock lock(mutex_);
    forget_copied();
    kept_.push_back({nullptr, std::move(bytes)});  // stays if one of these fails
    check(cudaEventCreateWithFlags(&kept_.back().copied, cudaEventDisableTiming),
          "making an event");
    check(cudaEventRecord(kept_.back().copied, stream), "recording an event");
  }

 private:
  struct Kept {
    cudaEvent_t copied;
    std::vector<std::byte> bytes;
  };

  void forget_copied() GEMINI_REQUIRES(mutex_) {
    while (!kept_.empty() && cudaEventQuery(kept_.front().copied) == cudaSuccess) {
      (void)cudaEventDestroy(kept_.front().copied);
      kept_.pop_front();
    }
    (void)cudaGetLastError();  // not having passed is no error
  }

  Mutex mutex_;
  std::deque<Kept> kept_ GEMINI_GUARDED_BY(mutex_);  // oldest first
};

// CUDA reads up to this much pageable memory before a copy returns; for more it may wait for the
// stream.
constexpr size_t kTakenAlong = 64 << 10;

void copy_table(std::byte* to, const std::vector<std::byte>& from, cudaStream_t stream) {
  for (size_t done = 0; done < from.size(); done += kTakenAlong) {
    const size_t nbytes = std::min(kTakenAlong, from.size() - done);
    check(cudaMemcpyAsync(to + done, from.data() + done, nbytes, cudaMemcpyHostToDevice, stream),
          "copying the table of tensors");
  }
}

void launch_kernel(const CudaPlan& plan, const CudaLaunch& launch, Table table,
                   cudaStream_t stream) {
  const Kernel kernel = choose_kernel(plan.rows[static_cast<size_t>(launch.first_row)].range);
  const int64_t grid = (launch.num_blocks + kGridBlocks - 1) / kGridBlocks;
  CudaLaunch rows = launch;
  void* arguments[] = {&table, &rows};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<uint32_t>(grid)),
                         dim3(kThreads), arguments, 0, stream),
        "launching the kernel");
}

}  // namespace

void cuda_adam_step(std::span<const AdamJob> jobs, uintptr_t stream_handle, bool* all_finite) {
  if (all_finite != nullptr) *all_finite = true;
  const CudaPlan plan = plan_launches(jobs);
  if (plan.rows.empty()) return;
  const int device = device_of(plan.rows.front().range.param);
  const CurrentDevice current(device);
  auto* const stream = reinterpret_cast<cudaStream_t>(stream_handle);
  TableBytes staged(plan);
  const StreamBytes memory(device, staged.bytes().size(), stream);
  const Table table = staged.at(memory.address());
  copy_table(memory.address(), staged.bytes(), stream);
  BytesUnderWay::all().keep(staged.take_bytes(), stream);
  for (const CudaLaunch& launch : plan.launches) launch_kernel(plan, launch, table, stream);
  if (all_finite == nullptr) return;
  uint32_t not_finite = 0;
  check(cudaMemcpyAsync(&not_finite, table.not_finite, sizeof(not_finite), cudaMemcpyDeviceToHost,
                        stream),
        "reading whether gradients were finite");
  check(cudaStreamSynchronize(stream), "waiting for the stream");
  *all_finite = not_finite == 0;
}

}  // namespace gemini
