// A GPU in host memory: streams are threads, blocks are parts of one memory file. For machines
// without a GPU, and for orders of events that a real one takes rarely.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "gpu/gpu_driver.h"

namespace gemini {

struct SimulatedGpuOptions {
  int64_t total_bytes = int64_t{1} << 30;
  int64_t granularity = 64 << 10;
  int64_t max_delay_us = 0;  // what a stream is given begins up to this much later, at random
  uint32_t seed = 0;         // of the delays
  Processors processors{};   // near it
};

// A range that work on a stream reads or writes.
struct GpuRange {
  GpuAddress address = 0;
  int64_t nbytes = 0;
};

// Stream 0 is the thread that calls: operators on host memory are done when they return, so work
// given to it is carried out at once, and it waits for an event by blocking.
//
// Checks what a GPU would punish: unmapping a range that work under way uses throws Error, as does
// mapping what is mapped, and giving access to what is not. To use what no access was given to ends
// the process.
class SimulatedGpu : public GpuDriver {
 public:
  explicit SimulatedGpu(SimulatedGpuOptions options = {});
  // Waits for all work. Memory still mapped is given back.
  ~SimulatedGpu() override;

  // Has the stream call `work`, which uses `ranges`: what a kernel does.
  void launch(Stream stream, std::vector<GpuRange> ranges, std::function<void()> work);

  // Physical memory of blocks that are not destroyed; those left out of capacity fail.
  [[nodiscard]] int64_t used_bytes() const;
  // Calls of map: what costs time on a GPU.
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
