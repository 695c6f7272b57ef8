// GpuDriver: the interface of a GPU's driver. Implementations: CUDA's (cuda_driver.h) and one in
// host memory for machines without a GPU (simulated_gpu.h).
#pragma once

#include <cstdint>

#include "common/processors.h"

namespace gemini {

// An address in the address space that host and GPU memory share.
using GpuAddress = uint64_t;

// Each stream executes its work in order, concurrently with the other streams; an event is a point
// in the order of a stream. All sizes are bytes. Thread-safe. If the driver refuses, calls throw
// Error with the name of the call.
class GpuDriver {
 public:
  using Stream = uintptr_t;
  using Event = uintptr_t;  // 0: none
  using Block = uint64_t;   // physical memory; may be mapped at several addresses

  struct Memory {
    int64_t free_bytes = 0;
    int64_t total_bytes = 0;
  };

  GpuDriver() = default;
  virtual ~GpuDriver() = default;
  GpuDriver(const GpuDriver&) = delete;
  GpuDriver& operator=(const GpuDriver&) = delete;

  // Sizes and addresses of blocks and mappings are multiples of it.
  [[nodiscard]] virtual int64_t granularity() const = 0;
  [[nodiscard]] virtual Memory memory() = 0;
  // The processors near the GPU.
  [[nodiscard]] virtual const Processors& processors() const = 0;

  // Reserves addresses without memory behind them.
  [[nodiscard]] virtual GpuAddress reserve(int64_t nbytes) = 0;
  virtual void release(GpuAddress address, int64_t nbytes) noexcept = 0;

  // Throws OutOfBudget if the GPU has no memory left.
  [[nodiscard]] virtual Block create_block(int64_t nbytes) = 0;
  // The memory is free when it is no longer mapped anywhere.
  virtual void destroy_block(Block block) noexcept = 0;
  virtual void map(GpuAddress address, int64_t nbytes, Block block) = 0;
  // Grants the GPU read/write access to the newly mapped range, which it must cover completely. One
  // call for several mappings is cheaper than one for each.
  virtual void allow(GpuAddress address, int64_t nbytes) = 0;
  // No work in flight may use the addresses.
  virtual void unmap(GpuAddress address, int64_t nbytes) = 0;

  // Page-locks host memory, whole pages of 4 KiB, so that streams copy from and to it without
  // waiting. The calling thread allocates pages that were never touched.
  virtual void pin(char* memory, int64_t nbytes) = 0;
  // No work in flight may use the memory.
  virtual void unpin(char* memory) noexcept = 0;

  [[nodiscard]] virtual Stream create_stream() = 0;
  // Work that it was given is still executed.
  virtual void destroy_stream(Stream stream) noexcept = 0;
  // How `await` waits for an event: spinning, or sleeping.
  enum class Waits : bool { kSpinning, kAsleep };
  [[nodiscard]] virtual Event create_event(Waits waits) = 0;
  virtual void destroy_event(Event event) noexcept = 0;

  // Sets the event to the end of the stream's work so far. An earlier point is replaced, but waits
  // for it stay valid.
  virtual void record(Event event, Stream stream) = 0;
  // Later work of the stream begins after the event.
  virtual void wait(Stream stream, Event event) = 0;
  // Blocks the calling thread until the event has passed.
  virtual void await(Event event) = 0;
  [[nodiscard]] virtual bool passed(Event event) = 0;
  // The seconds between two events that have passed.
  [[nodiscard]] virtual double seconds(Event from, Event to) = 0;

  // Copies between host and GPU memory, in either direction.
  virtual void copy(GpuAddress dst, GpuAddress src, int64_t nbytes, Stream stream) = 0;
  virtual void fill(GpuAddress address, uint8_t value, int64_t nbytes, Stream stream) = 0;
};

}  // namespace gemini
