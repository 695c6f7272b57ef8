// The part of the CUDA driver's binary interface that cuda_driver.cpp calls, so that it builds
// without CUDA's headers. If they are available, cuda_abi_check.cu compares it with them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gemini::cuda_abi {

using Result = int;
using Device = int;
using DevicePtr = unsigned long long;
using Context = struct ContextOf*;
using Stream = struct StreamOf*;
using Event = struct EventOf*;
using Handle = unsigned long long;

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotReady = 600;

struct Location {
  int type;
  int id;
};
inline constexpr int kLocationDevice = 1;

// CUmemAllocationProp
struct AllocationProperties {
  int type;
  int requested_handle_types;
  Location location;
  void* win32_metadata;
  struct {
    unsigned char compression, gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
inline constexpr int kAllocationPinned = 1;
inline constexpr int kGranularityMinimum = 0;

// CUmemAccessDesc
struct Access {
  Location location;
  int flags;
};
inline constexpr int kAccessReadWrite = 3;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDefault = 0;
inline constexpr unsigned kEventBlockingSync = 1;
inline constexpr unsigned kHostRegisterPortable = 1;

// X(member, symbol, parameters): every call is `Result symbol(parameters)`.
#define GEMINI_CUDA_CALLS(X)                                                                     \
  X(init, "cuInit", (unsigned))                                                                  \
  X(device_get, "cuDeviceGet", (Device*, int))                                                   \
  X(bus_id, "cuDeviceGetPCIBusId", (char*, int, Device))                                         \
  X(retain, "cuDevicePrimaryCtxRetain", (Context*, Device))                                      \
  X(release_context, "cuDevicePrimaryCtxRelease_v2", (Device))                                   \
  X(push, "cuCtxPushCurrent_v2", (Context))                                                      \
  X(pop, "cuCtxPopCurrent_v2", (Context*))                                                       \
  X(error_string, "cuGetErrorString", (Result, const char**))                                    \
  X(memory_info, "cuMemGetInfo_v2", (size_t*, size_t*))                                          \
  X(granularity, "cuMemGetAllocationGranularity", (size_t*, const AllocationProperties*, int))   \
  X(reserve, "cuMemAddressReserve", (DevicePtr*, size_t, size_t, DevicePtr, unsigned long long)) \
  X(free_address, "cuMemAddressFree", (DevicePtr, size_t))                                       \
  X(create, "cuMemCreate", (Handle*, size_t, const AllocationProperties*, unsigned long long))   \
  X(release, "cuMemRelease", (Handle))                                                           \
  X(map, "cuMemMap", (DevicePtr, size_t, size_t, Handle, unsigned long long))                    \
  X(unmap, "cuMemUnmap", (DevicePtr, size_t))                                                    \
  X(set_access, "cuMemSetAccess", (DevicePtr, size_t, const Access*, size_t))                    \
  X(host_register, "cuMemHostRegister_v2", (void*, size_t, unsigned))                            \
  X(host_unregister, "cuMemHostUnregister", (void*))                                             \
  X(stream_create, "cuStreamCreate", (Stream*, unsigned))                                        \
  X(stream_destroy, "cuStreamDestroy_v2", (Stream))                                              \
  X(stream_wait, "cuStreamWaitEvent", (Stream, Event, unsigned))                                 \
  X(event_create, "cuEventCreate", (Event*, unsigned))                                           \
  X(event_destroy, "cuEventDestroy_v2", (Event))                                                 \
  X(event_record, "cuEventRecord", (Event, Stream))                                              \
  X(event_query, "cuEventQuery", (Event))                                                        \
  X(event_synchronize, "cuEventSynchronize", (Event))                                            \
  X(event_elapsed, "cuEventElapsedTime", (float*, Event, Event))                                 \
  X(copy, "cuMemcpyAsync", (DevicePtr, DevicePtr, size_t, Stream))                               \
  X(fill, "cuMemsetD8Async", (DevicePtr, unsigned char, size_t, Stream))

struct Calls {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a list of parameters brings its own
#define GEMINI_CUDA_MEMBER(member, symbol, parameters) Result(*member) parameters = nullptr;
  GEMINI_CUDA_CALLS(GEMINI_CUDA_MEMBER)
#undef GEMINI_CUDA_MEMBER
};

}  // namespace gemini::cuda_abi
