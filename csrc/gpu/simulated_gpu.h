// SimulatedGpu: a GPU in host memory. Streams are threads, blocks are parts of one memory file. For
// machines without a GPU, and for tests of event orders that are rare on a real one.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "gpu/gpu_driver.h"

namespace gemini {

struct SimulatedGpuOptions {
  int64_t total_bytes = int64_t{1} << 30;
  int64_t granularity = 64 << 10;
  int64_t max_delay_us = 0;  // the work of a stream begins up to this much later, at random
  uint32_t seed = 0;         // for the delays
  Processors processors{};   // near the GPU
};

// A range that work in a stream reads or writes.
struct GpuRange {
  GpuAddress address = 0;
  int64_t nbytes = 0;
};

// Stream 0 is the calling thread: operators on host memory are complete when they return, so its
// work is executed at once, and it waits for an event by blocking.
//
// Checks for errors that a GPU would punish: unmapping a range that work in flight uses throws
// Error, and so do mapping a mapped range and granting access to an unmapped one. Using a range
// without access ends the process.
class SimulatedGpu : public GpuDriver {
 public:
  explicit SimulatedGpu(SimulatedGpuOptions options = {});
  // Waits for all work. Mapped memory is released.
  ~SimulatedGpu() override;

  // Makes the stream call `work`, which uses `ranges`, like a kernel.
  void launch(Stream stream, std::vector<GpuRange> ranges, std::function<void()> work);

  // Physical memory of blocks that are not destroyed; creating blocks beyond the capacity fails.
  [[nodiscard]] int64_t used_bytes() const;
  // The number of map calls, which are expensive on a GPU.
  [[nodiscard]] int64_t num_maps() const;

  [[nodiscard]] int64_t granularity() const override;
  [[nodiscard]] Memory memory() override;
  [[nodiscard]] const Processors& processors() const override { return options_.processors; }
  [[nodiscard]] GpuAddress reserve(int64_t nbytes) override;
  void release(GpuAddress address, int64_t nbytes) noexcept override;
  [[nodiscard]] Block create_block(int64_t nbytes) override;
  void destroy_block(Block block) noexcept override;
  void map(GpuAddress address, int64_t nbytes, Block block) override;
  void allow(GpuAddress address, int64_t nbytes) override;
  void unmap(GpuAddress address, int64_t nbytes) override;
  void pin(char* memory, int64_t nbytes) override;
  void unpin(char* memory) noexcept override;
  [[nodiscard]] Stream create_stream() override;
  void destroy_stream(Stream stream) noexcept override;
  [[nodiscard]] Event create_event(Waits waits) override;
  void destroy_event(Event event) noexcept override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  void await(Event event) override;
  [[nodiscard]] bool passed(Event event) override;
  [[nodiscard]] double seconds(Event from, Event to) override;
  void copy(GpuAddress dst, GpuAddress src, int64_t nbytes, Stream stream) override;
  void fill(GpuAddress address, uint8_t value, int64_t nbytes, Stream stream) override;

 private:
  struct State;
  class Worker;

  const SimulatedGpuOptions options_;
  std::unique_ptr<State> state_;
};

}  // namespace gemini
