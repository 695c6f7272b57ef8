// The NVIDIA driver's library for machines without one: the calls of cuda_abi.h over a simulated
// GPU. It refuses what the driver refuses, so that cuda_driver.cpp is tried as it will be used.
#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "common/error.h"
#include "gpu/cuda_abi.h"
#include "gpu/simulated_gpu.h"
#include "library.h"

namespace {

using gemini::GpuDriver;
using namespace gemini::cuda_abi;
using namespace gemini::standin;

constexpr Result kNotInitialized = 3;
constexpr Result kInvalidHandle = 400;
constexpr Result kAlreadyRegistered = 712;
constexpr Result kNotRegistered = 713;
constexpr int kNumDevices = 2;  // two names of the one GPU there is: a process uses one

thread_local std::vector<Context> contexts;

Context the_context() { return reinterpret_cast<Context>(&library()); }

bool is_whole(size_t nbytes) { return nbytes > 0 && nbytes % kGranularity == 0; }

GpuDriver::Event number(Event event) { return reinterpret_cast<GpuDriver::Event>(event); }

// Whether all of a range is memory of the host, or is mapped and may be accessed.
bool is_accessible(Library& own, DevicePtr begin, size_t nbytes) {
  for (const auto& [memory, size] : own.host_memory) {
    const auto first = reinterpret_cast<DevicePtr>(memory);
    if (begin >= first && begin + nbytes <= first + size) return true;
  }
  const DevicePtr end = begin + nbytes;
  while (begin < end) {
    auto after = own.mappings.upper_bound(begin);
    if (after == own.mappings.begin()) return false;
    const auto& [first, mapping] = *std::prev(after);
    if (!mapping.accessible || begin >= first + mapping.nbytes) return false;
    begin = first + mapping.nbytes;
  }
  return true;
}

void give_back(Library& own, std::map<Handle, Memory>::iterator memory) {
  if (!memory->second.released || memory->second.num_mappings > 0) return;
  own.gpu.destroy_block(memory->first);
  own.memories.erase(memory);
}

}  // namespace

namespace gemini::standin {

Library& library() {
  static Library* const one = new Library;  // for good: threads may use it at the end
  return *one;
}

Result in_context(const std::function<Result(Library&)>& call) {
  if (contexts.empty() || contexts.back() != the_context()) return kInvalidContext;
  try {
    return call(library());
  } catch (const gemini::OutOfBudget&) {
    return kOutOfMemory;
  } catch (const gemini::Error&) {
    return kInvalidValue;
  }
}

GpuDriver::Stream number(Stream stream) {
  static const GpuDriver::Stream null_stream = library().gpu.create_stream();
  return stream == nullptr ? null_stream : reinterpret_cast<GpuDriver::Stream>(stream);
}

int64_t free_bytes_of(Library& own) { return own.gpu.memory().free_bytes - own.taken_bytes; }

}  // namespace gemini::standin

extern "C" {

EXPORTED Result cuInit(unsigned flags) {
  const std::lock_guard lock(library().mutex);
  library().initialized = true;
  return flags == 0 ? kSuccess : kInvalidValue;
}

EXPORTED Result cuDeviceGet(Device* device, int ordinal) {
  if (!library().initialized) return kNotInitialized;
  *device = ordinal;
  return ordinal < kNumDevices ? kSuccess : kInvalidValue;
}

EXPORTED Result cuDeviceGetPCIBusId(char* text, int size, Device) {
  constexpr char kBus[] = "0000:00:00.0";
  if (size < static_cast<int>(sizeof kBus)) return kInvalidValue;
  std::memcpy(text, kBus, sizeof kBus);
  return kSuccess;
}

EXPORTED Result cuDevicePrimaryCtxRetain(Context* context, Device) {
  const std::lock_guard lock(library().mutex);
  ++library().num_retained;
  *context = the_context();
  return kSuccess;
}

EXPORTED Result cuDevicePrimaryCtxRelease_v2(Device) {
  const std::lock_guard lock(library().mutex);
  return library().num_retained-- > 0 ? kSuccess : kInvalidContext;
}

EXPORTED Result cuCtxPushCurrent_v2(Context context) {
  const std::lock_guard lock(library().mutex);
  if (library().num_retained == 0) return kInvalidContext;
  contexts.push_back(context);
  return kSuccess;
}

EXPORTED Result cuCtxPopCurrent_v2(Context* context) {
  if (contexts.empty()) return kInvalidContext;
  *context = contexts.back();
  contexts.pop_back();
  return kSuccess;
}

EXPORTED Result cuGetErrorString(Result, const char** text) {
  *text = "the stand-in refuses";
  return kSuccess;
}

EXPORTED Result cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  return in_context([&](Library& own) {
    const std::lock_guard lock(own.mutex);
    *free_bytes = static_cast<size_t>(free_bytes_of(own));
    *total_bytes = static_cast<size_t>(own.gpu.memory().total_bytes);
    return kSuccess;
  });
}

EXPORTED Result cuMemGetAllocationGranularity(size_t* nbytes, const AllocationProperties* wanted,
                                              int) {
  if (wanted->type != kAllocationPinned || wanted->location.type != kLocationDevice) {
    return kInvalidValue;
  }
  *nbytes = kGranularity;
  return kSuccess;
}

EXPORTED Result cuMemAddressReserve(DevicePtr* address, size_t nbytes, size_t, DevicePtr,
                                    unsigned long long) {
  return in_context([&](Library& own) -> Result {
    if (!is_whole(nbytes)) return kInvalidValue;
    const std::lock_guard lock(own.mutex);
    *address = own.gpu.reserve(static_cast<int64_t>(nbytes));
    own.reservations[*address] = nbytes;
    return kSuccess;
  });
}

EXPORTED Result cuMemAddressFree(DevicePtr address, size_t nbytes) {
  return in_context([&](Library& own) -> Result {
    const std::lock_guard lock(own.mutex);
    const auto found = own.reservations.find(address);
    if (found == own.reservations.end() || found->second != nbytes) return kInvalidValue;
    const auto mapped = own.mappings.lower_bound(address);
    if (mapped != own.mappings.end() && mapped->first < address + nbytes) return kInvalidValue;
    own.gpu.release(address, static_cast<int64_t>(nbytes));
    own.reservations.erase(found);
    return kSuccess;
  });
}

EXPORTED Result cuMemCreate(Handle* handle, size_t nbytes, const AllocationProperties* wanted,
                            unsigned long long) {
  return in_context([&](Library& own) -> Result {
    if (!is_whole(nbytes) || wanted->location.id >= kNumDevices) return kInvalidValue;
    const std::lock_guard lock(own.mutex);
    if (free_bytes_of(own) < static_cast<int64_t>(nbytes)) return kOutOfMemory;
    *handle = own.gpu.create_block(static_cast<int64_t>(nbytes));
    own.memories[*handle] = {nbytes, 0, false};
    return kSuccess;
  });
}

EXPORTED Result cuMemRelease(Handle handle) {
  return in_context([&](Library& own) -> Result {
    const std::lock_guard lock(own.mutex);
    const auto memory = own.memories.find(handle);
    if (memory == own.memories.end() || memory->second.released) return kInvalidValue;
    memory->second.released = true;
    give_back(own, memory);
    return kSuccess;
  });
}

EXPORTED Result cuMemMap(DevicePtr address, size_t nbytes, size_t offset, Handle handle,
                         unsigned long long) {
  return in_context([&](Library& own) -> Result {
    const std::lock_guard lock(own.mutex);
    const auto memory = own.memories.find(handle);
    const bool fits = memory != own.memories.end() && memory->second.nbytes == nbytes;
    auto reserved = own.reservations.upper_bound(address);
    if (!fits || offset != 0 || reserved == own.reservations.begin()) return kInvalidValue;
    --reserved;
    if (address + nbytes > reserved->first + reserved->second) return kInvalidValue;
    own.gpu.map(address, static_cast<int64_t>(nbytes), handle);
    own.mappings[address] = {nbytes, handle, false};
    ++memory->second.num_mappings;
    return kSuccess;
  });
}

EXPORTED Result cuMemSetAccess(DevicePtr address, size_t nbytes, const Access* access,
                               size_t count) {
  return in_context([&](Library& own) -> Result {
    const std::lock_guard lock(own.mutex);
    if (count != 1 || access->flags != kAccessReadWrite) return kInvalidValue;
    if (access->location.id >= kNumDevices) return kInvalidValue;
    own.gpu.allow(address, static_cast<int64_t>(nbytes));
    for (auto& [first, mapping] : own.mappings) {
      if (first >= address && first < address + nbytes) mapping.accessible = true;
    }
    return kSuccess;
  });
}

EXPORTED Result cuMemUnmap(DevicePtr address, size_t nbytes) {
  return in_context([&](Library& own) -> Result {
    const std::lock_guard lock(own.mutex);
    const auto mapping = own.mappings.find(address);
    if (mapping == own.mappings.end() || mapping->second.nbytes != nbytes) return kInvalidValue;
    own.gpu.unmap(address, static_cast<int64_t>(nbytes));
    const auto memory = own.memories.find(mapping->second.handle);
    own.mappings.erase(mapping);
    --memory->second.num_mappings;
    give_back(own, memory);
    return kSuccess;
  });
}

EXPORTED Result cuMemHostRegister_v2(void* memory, size_t nbytes, unsigned flags) {
  return in_context([&](Library& own) -> Result {
    if (nbytes == 0 || flags != kHostRegisterPortable) return kInvalidValue;
    const std::lock_guard lock(own.mutex);
    const auto after = own.host_memory.upper_bound(memory);
    if (after != own.host_memory.begin()) {
      const auto& [first, size] = *std::prev(after);
      if (static_cast<char*>(first) + size > memory) return kAlreadyRegistered;
    }
    own.host_memory[memory] = nbytes;
    return kSuccess;
  });
}

EXPORTED Result cuMemHostUnregister(void* memory) {
  return in_context([&](Library& own) -> Result {
    const std::lock_guard lock(own.mutex);
    return own.host_memory.erase(memory) == 1 ? kSuccess : kNotRegistered;
  });
}

EXPORTED Result cuStreamCreate(Stream* stream, unsigned flags) {
  return in_context([&](Library& own) -> Result {
    if (flags != kStreamNonBlocking) return kInvalidValue;
    *stream = reinterpret_cast<Stream>(own.gpu.create_stream());
    return kSuccess;
  });
}

EXPORTED Result cuStreamDestroy_v2(Stream stream) {
  return in_context([&](Library& own) -> Result {
    if (stream == nullptr) return kInvalidHandle;
    own.gpu.destroy_stream(number(stream));
    return kSuccess;
  });
}

EXPORTED Result cuStreamWaitEvent(Stream stream, Event event, unsigned flags) {
  return in_context([&](Library& own) -> Result {
    if (flags != 0) return kInvalidValue;
    own.gpu.wait(number(stream), number(event));
    return kSuccess;
  });
}

EXPORTED Result cuEventCreate(Event* event, unsigned flags) {
  return in_context([&](Library& own) -> Result {
    if (flags != kEventDefault && flags != kEventBlockingSync) return kInvalidValue;
    *event = reinterpret_cast<Event>(own.gpu.create_event(
        flags == kEventBlockingSync ? GpuDriver::Waits::kAsleep : GpuDriver::Waits::kSpinning));
    return kSuccess;
  });
}

EXPORTED Result cuEventDestroy_v2(Event event) {
  return in_context([&](Library& own) -> Result {
    const std::lock_guard lock(own.mutex);
    own.recorded.erase(number(event));
    own.gpu.destroy_event(number(event));
    return kSuccess;
  });
}

EXPORTED Result cuEventRecord(Event event, Stream stream) {
  return in_context([&](Library& own) -> Result {
    const std::lock_guard lock(own.mutex);
    own.gpu.record(number(event), number(stream));
    own.recorded.insert(number(event));
    return kSuccess;
  });
}

EXPORTED Result cuEventQuery(Event event) {
  return in_context(
      [&](Library& own) { return own.gpu.passed(number(event)) ? kSuccess : kNotReady; });
}

EXPORTED Result cuEventSynchronize(Event event) {
  return in_context([&](Library& own) -> Result {
    own.gpu.await(number(event));
    return kSuccess;
  });
}

EXPORTED Result cuEventElapsedTime(float* milliseconds, Event from, Event to) {
  return in_context([&](Library& own) -> Result {
    const std::lock_guard lock(own.mutex);
    if (!own.recorded.contains(number(from)) || !own.recorded.contains(number(to))) {
      return kInvalidHandle;
    }
    if (!own.gpu.passed(number(from)) || !own.gpu.passed(number(to))) return kNotReady;
    *milliseconds = static_cast<float>(own.gpu.seconds(number(from), number(to)) * 1e3);
    return kSuccess;
  });
}

EXPORTED Result cuMemcpyAsync(DevicePtr dst, DevicePtr src, size_t nbytes, Stream stream) {
  return in_context([&](Library& own) -> Result {
    const std::lock_guard lock(own.mutex);
    if (!is_accessible(own, dst, nbytes) || !is_accessible(own, src, nbytes)) return kInvalidValue;
    own.gpu.copy(dst, src, static_cast<int64_t>(nbytes), number(stream));
    return kSuccess;
  });
}

EXPORTED Result cuMemsetD8Async(DevicePtr address, unsigned char value, size_t nbytes,
                                Stream stream) {
  return in_context([&](Library& own) -> Result {
    const std::lock_guard lock(own.mutex);
    if (!is_accessible(own, address, nbytes)) return kInvalidValue;
    own.gpu.fill(address, value, static_cast<int64_t>(nbytes), number(stream));
    return kSuccess;
  });
}

}  // extern "C"
