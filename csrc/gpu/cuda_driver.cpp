#include "gpu/cuda_driver.h"

#include <dlfcn.h>

#include <array>
#include <string>

#include "common/error.h"
#include "common/size_text.h"
#include "gpu/cuda_abi.h"

namespace gemini {
namespace {

using namespace cuda_abi;

constexpr const char* kLibrary = "libcuda.so.1";

// The library stays loaded: torch uses it too.
Calls load_calls() {
  void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(std::string("no NVIDIA driver here: ") + ::dlerror());
  }
  Calls calls;
// NOLINTBEGIN(bugprone-macro-parentheses): a list of parameters brings its own
#define GEMINI_CUDA_LOAD(member, symbol, parameters)                                             \
  calls.member = reinterpret_cast<Result(*) parameters>(::dlsym(library, symbol));               \
  if (calls.member == nullptr) {                                                                 \
    throw Error(std::string("the NVIDIA driver is too old: ") + kLibrary + " has no " + symbol); \
  }
  // NOLINTEND(bugprone-macro-parentheses)
  GEMINI_CUDA_CALLS(GEMINI_CUDA_LOAD)
#undef GEMINI_CUDA_LOAD
  return calls;
}

const Calls& calls() {
  static const Calls loaded = load_calls();
  return loaded;
}

void check(Result result, const char* doing) {
  if (result == kSuccess) return;
  const char* text = nullptr;
  if (calls().error_string(result, &text) != kSuccess || text == nullptr) text = "unknown";
  throw Error(std::string("CUDA cannot ") + doing + ": " + text + " (CUresult " +
              std::to_string(result) + ")");
}

Stream stream_of(GpuDriver::Stream stream) { return reinterpret_cast<Stream>(stream); }
Event event_of(GpuDriver::Event event) { return reinterpret_cast<Event>(event); }

class CudaDriver : public GpuDriver {
 public:
  explicit CudaDriver(int device) {
    check(calls().init(0), "start");
    check(calls().device_get(&device_, device), "find the device");
    std::array<char, 32> bus_id{};
    check(calls().bus_id(bus_id.data(), static_cast<int>(bus_id.size()), device_),
          "find the device's bus");
    processors_ = processors_near_pci(bus_id.data());
    check(calls().retain(&context_, device_), "use the device");
    properties_.type = kAllocationPinned;
    properties_.location = {kLocationDevice, device_};
    try {
      const Entered entered(*this);
      size_t nbytes = 0;
      check(calls().granularity(&nbytes, &properties_, kGranularityMinimum),
            "map memory on this device");
      granularity_ = static_cast<int64_t>(nbytes);
    } catch (...) {
      calls().release_context(device_);
      throw;
    }
  }
  // NOLINTNEXTLINE(bugprone-exception-escape): calls() throws in the constructor, or never
  ~CudaDriver() override { calls().release_context(device_); }

  [[nodiscard]] int64_t granularity() const override { return granularity_; }

  [[nodiscard]] Memory memory() override {
    const Entered entered(*this);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    check(calls().memory_info(&free_bytes, &total_bytes), "ask for the free memory");
    return {static_cast<int64_t>(free_bytes), static_cast<int64_t>(total_bytes)};
  }

  [[nodiscard]] const Processors& processors() const override { return processors_; }

  [[nodiscard]] GpuAddress reserve(int64_t nbytes) override {
    const Entered entered(*this);
    DevicePtr address = 0;
    check(calls().reserve(&address, static_cast<size_t>(nbytes), 0, 0, 0), "reserve addresses");
    return address;
  }
  void release(GpuAddress address, int64_t nbytes) noexcept override {
    quietly([&] { calls().free_address(address, static_cast<size_t>(nbytes)); });
  }

  [[nodiscard]] Block create_block(int64_t nbytes) override {
    const Entered entered(*this);
    Handle handle = 0;
    const Result result = calls().create(&handle, static_cast<size_t>(nbytes), &properties_, 0);
    if (result == kOutOfMemory) {
      throw OutOfBudget("the GPU has no " + format_enough(nbytes) +
                        " left; lower device_bytes, or end other programs on this GPU");
    }
    check(result, "allocate memory");
    return handle;
  }
  void destroy_block(Block block) noexcept override {
    quietly([&] { calls().release(block); });
  }
  void map(GpuAddress address, int64_t nbytes, Block block) override {
    const Entered entered(*this);
    check(calls().map(address, static_cast<size_t>(nbytes), 0, block, 0), "map memory");
  }
  void allow(GpuAddress address, int64_t nbytes) override {
    const Entered entered(*this);
    const Access access{{kLocationDevice, device_}, kAccessReadWrite};
    check(calls().set_access(address, static_cast<size_t>(nbytes), &access, 1),
          "give access to memory");
  }
  void unmap(GpuAddress address, int64_t nbytes) override {
    const Entered entered(*this);
    check(calls().unmap(address, static_cast<size_t>(nbytes)), "unmap memory");
  }

  void pin(char* memory, int64_t nbytes) override {
    const Entered entered(*this);
    check(calls().host_register(memory, static_cast<size_t>(nbytes), kHostRegisterPortable),
          "pin host memory");
  }
  void unpin(char* memory) noexcept override {
    quietly([&] { calls().host_unregister(memory); });
  }

  [[nodiscard]] GpuDriver::Stream create_stream() override {
    const Entered entered(*this);
    cuda_abi::Stream stream = nullptr;
    check(calls().stream_create(&stream, kStreamNonBlocking), "make a stream");
    return reinterpret_cast<GpuDriver::Stream>(stream);
  }
  void destroy_stream(GpuDriver::Stream stream) noexcept override {
    quietly([&] { calls().stream_destroy(stream_of(stream)); });
  }
  [[nodiscard]] GpuDriver::Event create_event(Waits waits) override {
    const Entered entered(*this);
    cuda_abi::Event event = nullptr;
    check(
        calls().event_create(&event, waits == Waits::kAsleep ? kEventBlockingSync : kEventDefault),
        "make an event");
    return reinterpret_cast<GpuDriver::Event>(event);
  }
  void destroy_event(GpuDriver::Event event) noexcept override {
    quietly([&] { calls().event_destroy(event_of(event)); });
  }

  void record(GpuDriver::Event event, GpuDriver::Stream stream) override {
    const Entered entered(*this);
    check(calls().event_record(event_of(event), stream_of(stream)), "record an event");
  }
  void wait(GpuDriver::Stream stream, GpuDriver::Event event) override {
    const Entered entered(*this);
    check(calls().stream_wait(stream_of(stream), event_of(event), 0), "order two streams");
  }
  void await(GpuDriver::Event event) override {
    const Entered entered(*this);
    check(calls().event_synchronize(event_of(event)), "wait for an event");
  }
  [[nodiscard]] bool passed(GpuDriver::Event event) override {
    const Entered entered(*this);
    const Result result = calls().event_query(event_of(event));
    if (result == kNotReady) return false;
    check(result, "ask for an event");
    return true;
  }
  [[nodiscard]] double seconds(GpuDriver::Event from, GpuDriver::Event to) override {
    const Entered entered(*this);
    float milliseconds = 0;
    check(calls().event_elapsed(&milliseconds, event_of(from), event_of(to)), "time two events");
    return milliseconds / 1e3;
  }

  void copy(GpuAddress dst, GpuAddress src, int64_t nbytes, GpuDriver::Stream stream) override {
    const Entered entered(*this);
    check(calls().copy(dst, src, static_cast<size_t>(nbytes), stream_of(stream)), "copy");
  }
  void fill(GpuAddress address, uint8_t value, int64_t nbytes, GpuDriver::Stream stream) override {
    const Entered entered(*this);
    check(calls().fill(address, value, static_cast<size_t>(nbytes), stream_of(stream)),
          "fill memory");
  }

 private:
  // Makes the device's context current on this thread, and restores the previous one at the end.
  class Entered {
   public:
    explicit Entered(const CudaDriver& driver) {
      check(calls().push(driver.context_), "enter the device's context");
    }
    ~Entered() {  // NOLINT(bugprone-exception-escape): calls() is made
      Context left = nullptr;
      calls().pop(&left);
    }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;
  };

  // For releases, where a failure could not be handled.
  template <class Call>
  void quietly(const Call& call) noexcept {  // NOLINT(bugprone-exception-escape): calls() is made
    if (calls().push(context_) != kSuccess) return;
    call();
    Context left = nullptr;
    calls().pop(&left);
  }

  Device device_ = 0;
  Context context_ = nullptr;
  AllocationProperties properties_{};
  int64_t granularity_ = 0;
  Processors processors_;
};

}  // namespace

std::shared_ptr<GpuDriver> make_cuda_driver(int device) {
  return std::make_shared<CudaDriver>(device);
}

}  // namespace gemini
