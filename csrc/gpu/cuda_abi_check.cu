// Compares cuda_abi.h with CUDA's own header: a difference does not compile.
#include <cuda.h>

#include <type_traits>

#include "gpu/cuda_abi.h"

namespace gemini {
namespace {

namespace abi = cuda_abi;

// Object pointers, handles and enumerations are passed alike if their sizes are equal.
template <class Own, class Theirs>
constexpr bool kSame =
    sizeof(Own) == sizeof(Theirs) && std::is_pointer_v<Own> == std::is_pointer_v<Theirs>;

template <class Own, class Theirs>
struct SameCall : std::false_type {};
template <class... Own, class... Theirs>
struct SameCall<abi::Result (*)(Own...), CUresult(Theirs...)> {
  static constexpr bool all() {
    if constexpr (sizeof...(Own) == sizeof...(Theirs)) {
      return (kSame<Own, Theirs> && ...);
    } else {
      return false;
    }
  }
  static constexpr bool value = all();
};

#define SAME(member, function) \
  static_assert(SameCall<decltype(abi::Calls::member), decltype(function)>::value, #function)
SAME(init, cuInit);
SAME(device_get, cuDeviceGet);
SAME(bus_id, cuDeviceGetPCIBusId);
SAME(retain, cuDevicePrimaryCtxRetain);
SAME(release_context, cuDevicePrimaryCtxRelease);
SAME(push, cuCtxPushCurrent);
SAME(pop, cuCtxPopCurrent);
SAME(error_string, cuGetErrorString);
SAME(memory_info, cuMemGetInfo);
SAME(granularity, cuMemGetAllocationGranularity);
SAME(reserve, cuMemAddressReserve);
SAME(free_address, cuMemAddressFree);
SAME(create, cuMemCreate);
SAME(release, cuMemRelease);
SAME(map, cuMemMap);
SAME(unmap, cuMemUnmap);
SAME(set_access, cuMemSetAccess);
SAME(host_register, cuMemHostRegister);
SAME(host_unregister, cuMemHostUnregister);
SAME(stream_create, cuStreamCreate);
SAME(stream_destroy, cuStreamDestroy);
SAME(stream_wait, cuStreamWaitEvent);
SAME(event_create, cuEventCreate);
SAME(event_destroy, cuEventDestroy);
SAME(event_record, cuEventRecord);
SAME(event_query, cuEventQuery);
SAME(event_synchronize, cuEventSynchronize);
SAME(event_elapsed, cuEventElapsedTime);
SAME(copy, cuMemcpyAsync);
SAME(fill, cuMemsetD8Async);
#undef SAME

static_assert(abi::kSuccess == CUDA_SUCCESS && abi::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY &&
              abi::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(abi::kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE &&
              abi::kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED &&
              abi::kGranularityMinimum == CU_MEM_ALLOC_GRANULARITY_MINIMUM &&
              abi::kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(abi::kStreamNonBlocking == CU_STREAM_NON_BLOCKING &&
              abi::kEventDefault == CU_EVENT_DEFAULT &&
              abi::kEventBlockingSync == CU_EVENT_BLOCKING_SYNC &&
              abi::kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(sizeof(abi::AllocationProperties) == sizeof(CUmemAllocationProp) &&
              offsetof(abi::AllocationProperties, location) ==
                  offsetof(CUmemAllocationProp, location) &&
              offsetof(abi::AllocationProperties, flags) ==
                  offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(abi::Access) == sizeof(CUmemAccessDesc) &&
              offsetof(abi::Access, flags) == offsetof(CUmemAccessDesc, flags));

}  // namespace
}  // namespace gemini
