#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>

#include "driver_use.h"
#include "torch_cuda.h"

namespace standin {
namespace {

using gemini::cuda_abi::Calls;
using gemini::cuda_abi::Result;

std::mutex mutex;
// NOLINTNEXTLINE(bugprone-throwing-static-initialization): nobody could go on without it
std::set<c10::StreamId> streams{0};  // guarded by mutex
std::string failure;                 // guarded by mutex: of work on a stream

thread_local c10::StreamId the_stream = 0;
thread_local c10::DeviceIndex the_device = 0;

gemini::cuda_abi::Stream handle(c10::StreamId stream) {
  return reinterpret_cast<gemini::cuda_abi::Stream>(stream);
}
gemini::cuda_abi::Event handle(void* event) { return static_cast<gemini::cuda_abi::Event>(event); }

void raise_failure() {
  std::string text;
  {
    const std::lock_guard lock(mutex);
    text.swap(failure);
  }
  TORCH_CHECK(text.empty(), "CUDA error: an operator given before failed: ", text);
}

}  // namespace

const Calls& driver() { return gemini::cuda_abi::kDriver; }

void check(Result result, const char* doing) {
  TORCH_CHECK(result == gemini::cuda_abi::kSuccess, "CUDA error ", result, " in ", doing);
}

void enter_context() { gemini::standin::enter_context(); }

c10::Device current_device() { return {kGpu, the_device}; }

c10::Device exchange_device(c10::Device device) {
  enter_context();
  TORCH_CHECK(device.index() < kNumGpus, "CUDA error: invalid device ordinal");
  return {kGpu, std::exchange(the_device, std::max<c10::DeviceIndex>(device.index(), 0))};
}

c10::StreamId current_stream() { return the_stream; }

c10::StreamId exchange_stream(c10::StreamId stream) { return std::exchange(the_stream, stream); }

c10::StreamId make_stream() {
  enter_context();
  gemini::cuda_abi::Stream made = nullptr;
  check(driver().stream_create(&made, gemini::cuda_abi::kStreamNonBlocking), "cuStreamCreate");
  const std::lock_guard lock(mutex);
  return *streams.insert(reinterpret_cast<c10::StreamId>(made)).first;
}

void launch(const Ranges& ranges, std::function<void()> work) {
  std::vector<uint64_t> flat;
  for (const auto& [address, nbytes] : ranges) {
    flat.push_back(reinterpret_cast<uint64_t>(address));
    flat.push_back(nbytes);
  }
  const auto noted = [own = std::move(work)] {
    try {
      own();
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex);
      if (failure.empty()) failure = error.what();
    }
  };
  check(gemini::standin::launch(handle(the_stream), noted, flat), "a launch");
}

void synchronize(c10::StreamId stream) {
  check(gemini::standin::await(handle(stream)), "a wait for a stream");
  raise_failure();
}

void come_after(c10::StreamId stream, c10::StreamId other) {
  enter_context();
  gemini::cuda_abi::Event event = nullptr;
  check(driver().event_create(&event, gemini::cuda_abi::kEventDefault), "cuEventCreate");
  check(driver().event_record(event, handle(other)), "cuEventRecord");
  check(driver().stream_wait(handle(stream), handle(event), 0), "cuStreamWaitEvent");
  check(driver().event_destroy(event), "cuEventDestroy");
}

void synchronize_all() {
  std::set<c10::StreamId> all;
  {
    const std::lock_guard lock(mutex);
    all = streams;
  }
  for (const c10::StreamId each : all) synchronize(each);
}

bool take(int64_t nbytes) {
  enter_context();
  return standin_take(nbytes) == gemini::cuda_abi::kSuccess;
}

// The GPUs, to c10: which is current, its streams and events.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kGpu; }
  c10::Device exchangeDevice(c10::Device device) const override { return exchange_device(device); }
  c10::Device getDevice() const override { return current_device(); }
  void setDevice(c10::Device device) const override { (void)exchange_device(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    (void)exchange_device(device);
  }
  c10::Stream getStream(c10::Device) const override { return stream(the_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(exchange_stream(next.id()));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    enter_context();
    (void)driver().event_destroy(handle(event));
  }
  void record(void** event, const c10::Stream& own, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    enter_context();
    if (*event == nullptr) {
      gemini::cuda_abi::Event made = nullptr;
      check(driver().event_create(&made, gemini::cuda_abi::kEventDefault), "cuEventCreate");
      *event = made;
    }
    check(driver().event_record(handle(*event), handle(own.id())), "cuEventRecord");
  }
  void block(void* event, const c10::Stream& own) const override {
    if (event == nullptr) return;
    enter_context();
    check(driver().stream_wait(handle(own.id()), handle(event), 0), "cuStreamWaitEvent");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& own) const override {
    use_on_stream(data.get(), own.id());
  }
  bool queryEvent(void* event) const override {
    enter_context();
    return event == nullptr || driver().event_query(handle(event)) == gemini::cuda_abi::kSuccess;
  }
  void synchronizeEvent(void* event) const override {
    enter_context();
    if (event != nullptr) check(driver().event_synchronize(handle(event)), "cuEventSynchronize");
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumGpus; }
  void synchronizeStream(const c10::Stream& own) const override { synchronize(own.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_all(); }

 private:
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, current_device(), id);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace standin

namespace at {

// The name is what torch looks for. It does so once, so this library is loaded before torch is
// used.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return standin::kNumGpus; }
  int getNumGPUs() const override { return standin::kNumGpus; }
  DeviceIndex current_device() const override { return standin::current_device().index(); }
  DeviceIndex getCurrentDevice() const override { return standin::current_device().index(); }
  void setCurrentDevice(DeviceIndex index) const override { (void)exchangeDevice(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return standin::exchange_device({standin::kGpu, index}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return standin::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &standin::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return &standin::gpu_allocator(); }
  Generator getNewGenerator(DeviceIndex) const override { return standin::make_generator(); }
  Device getDeviceFromPtr(void*) const override { return standin::current_device(); }
  void deviceSynchronize(DeviceIndex) const override { standin::synchronize_all(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
