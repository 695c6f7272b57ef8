// What tests of a simulated GPU share: one whose operators run late, and gates that hold streams.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <future>
#include <memory>

#include "gpu/gpu_engine.h"
#include "gpu/simulated_gpu.h"

namespace gemini {

inline constexpr int64_t kChunkBytes = 64 << 10;
inline constexpr int64_t kMib = 1 << 20;

inline SimulatedGpuOptions options(uint32_t seed, int64_t max_delay_us) {
  return {.total_bytes = 64 * kMib,
          .granularity = 16 << 10,
          .max_delay_us = max_delay_us,
          .seed = seed};
}

// A GPU whose operators run on a stream of their own.
struct Machine {
  explicit Machine(uint32_t seed = 0, int64_t max_delay_us = 0)
      : gpu(std::make_shared<SimulatedGpu>(options(seed, max_delay_us))),
        lanes(std::make_shared<GpuLanes>(gpu)),
        compute(gpu->create_stream()) {
    lanes->follow(compute);
  }
  ~Machine() { gpu->destroy_stream(compute); }

  // An operator that finds `expected` in every word of the window and leaves one more there.
  void increment(GpuWindow& window, int64_t expected) {
    auto* const words = reinterpret_cast<int64_t*>(window.address());
    const auto count = static_cast<size_t>(window.nbytes()) / sizeof(int64_t);
    gpu->launch(compute, {{window.address(), window.nbytes()}}, [this, words, count, expected] {
      for (size_t i = 0; i < count; ++i) wrong += words[i] != expected;
      for (size_t i = 0; i < count; ++i) words[i] = expected + 1;
    });
  }
  void finish() { lanes->await(lanes->mark(Lane::kCompute)); }

  std::shared_ptr<SimulatedGpu> gpu;
  std::shared_ptr<GpuLanes> lanes;
  GpuDriver::Stream compute;
  size_t wrong = 0;  // written on the compute stream
};

// Holds a stream until it is opened.
class Gate {
 public:
  Gate(SimulatedGpu& gpu, GpuDriver::Stream stream) {
    gpu.launch(stream, {}, [open = open_.get_future().share()] { open.wait(); });
  }
  void open() { open_.set_value(); }

 private:
  std::promise<void> open_;
};

inline void await_report(GpuEngine& engine, uint64_t ticket) {
  for (;;) {
    for (const TransferResult& done : engine.poll()) {
      EXPECT_TRUE(done.ok) << done.message;
      if (done.ticket == ticket) return;
    }
    ASSERT_TRUE(engine.wait_any(-1));
  }
}

}  // namespace gemini
