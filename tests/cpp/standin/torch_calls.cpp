// What tests/standin/cuda_standin.py calls, by ctypes. A result below 0 is a failure; handles are
// the driver's.
#include <c10/core/StorageImpl.h>

#include <cstdio>

#include "own_calls.h"
#include "torch_cuda.h"

namespace {

using standin::driver;

template <typename Handle>
Handle as(int64_t number) {
  return reinterpret_cast<Handle>(number);
}

auto event(int64_t number) { return as<gemini::cuda_abi::Event>(number); }
auto stream(int64_t number) { return as<gemini::cuda_abi::Stream>(number); }

int64_t done(gemini::cuda_abi::Result result) { return result == 0 ? 0 : -result; }

}  // namespace

extern "C" {

#define EXPORTED __attribute__((visibility("default")))

EXPORTED int64_t standin_num_devices() { return standin::kNumGpus; }
EXPORTED int64_t standin_current_device() { return standin::current_device().index(); }
EXPORTED int64_t standin_exchange_device(int64_t index) {
  if (index < 0 || index >= standin::kNumGpus) return -1;
  const auto device = c10::Device(standin::kGpu, static_cast<c10::DeviceIndex>(index));
  return standin::exchange_device(device).index();
}
EXPORTED int64_t standin_current_stream() { return standin::current_stream(); }
EXPORTED int64_t standin_exchange_stream(int64_t next) { return standin::exchange_stream(next); }
EXPORTED int64_t standin_make_stream() { return standin::make_stream(); }

EXPORTED int64_t standin_run_on_stream(int64_t own, int64_t work, int64_t data) {
  standin::enter_context();
  return done(standin_launch(stream(own), nullptr, 0, as<void (*)(void*)>(work), as<void*>(data)));
}

EXPORTED int64_t standin_synchronize() {
  try {
    standin::synchronize_all();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return -1;
  }
}

EXPORTED int64_t standin_make_event() {
  standin::enter_context();
  gemini::cuda_abi::Event made = nullptr;
  const int64_t result = done(driver().event_create(&made, gemini::cuda_abi::kEventDefault));
  return result < 0 ? result : reinterpret_cast<int64_t>(made);
}

EXPORTED int64_t standin_destroy_event(int64_t own) {
  standin::enter_context();
  return done(driver().event_destroy(event(own)));
}

EXPORTED int64_t standin_record(int64_t own, int64_t at) {
  standin::enter_context();
  return done(driver().event_record(event(own), stream(at)));
}

EXPORTED int64_t standin_wait(int64_t at, int64_t own) {
  standin::enter_context();
  return done(driver().stream_wait(stream(at), event(own), 0));
}

EXPORTED int64_t standin_use_on_stream(int64_t memory, int64_t own) {
  standin::use_on_stream(as<const void*>(memory), own);
  return 0;
}

EXPORTED int64_t standin_query(int64_t own) {
  standin::enter_context();
  return done(driver().event_query(event(own)));
}

EXPORTED int64_t standin_await(int64_t own) {
  standin::enter_context();
  return done(driver().event_synchronize(event(own)));
}

EXPORTED double standin_elapsed_ms(int64_t from, int64_t to) {
  standin::enter_context();
  float milliseconds = 0;
  return done(driver().event_elapsed(&milliseconds, event(from), event(to))) < 0 ? -1
                                                                                 : milliseconds;
}

// Into six places: free, total, allocated and its peak, reserved and its peak.
EXPORTED void standin_memory(int64_t* values) {
  standin::enter_context();
  size_t free_bytes = 0, total_bytes = 0;
  (void)driver().memory_info(&free_bytes, &total_bytes);
  const standin::MemoryUse use = standin::memory_use();
  values[0] = static_cast<int64_t>(free_bytes);
  values[1] = static_cast<int64_t>(total_bytes);
  values[2] = use.allocated;
  values[3] = use.peak_allocated;
  values[4] = use.reserved;
  values[5] = use.peak_reserved;
}

EXPORTED void standin_reset_peaks() { standin::reset_peaks(); }
EXPORTED void standin_release_cache() { standin::release_cache(); }

// Torch's own method for this is not in a build without CUDA.
EXPORTED void standin_resize_storage(c10::StorageImpl* storage, int64_t nbytes) {
  c10::DataPtr memory = standin::gpu_allocator().allocate(static_cast<size_t>(nbytes));
  if (const size_t kept = std::min(storage->nbytes(), static_cast<size_t>(nbytes)); kept > 0) {
    standin::gpu_allocator().copy_data(memory.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(static_cast<size_t>(nbytes));
}

}  // extern "C"
