// What the runtime asks of a GPU's driver. Two implementations: CUDA's (cuda_driver.h) and one in
// host memory for machines without a GPU (simulated_gpu.h).
#pragma once

#include <cstdint>

#include "common/processors.h"

namespace gemini {

// In the one address space that host and GPU memory share.
using GpuAddress = uint64_t;

// Streams do what they are given in order, each beside the others; an event is a point in the order
// of one. All sizes are bytes. Thread-safe. Calls throw Error where the driver refuses, naming the
// call.
class GpuDriver {
 public:
  using Stream = uintptr_t;
  using Event = uintptr_t;  // 0: none
  using Block = uint64_t;   // physical memory, mapped anywhere, also at several addresses

  struct Memory {
    int64_t free_bytes = 0;
    int64_t total_bytes = 0;
  };

  GpuDriver() = default;
  virtual ~GpuDriver() = default;
  GpuDriver(const GpuDriver&) = delete;
  GpuDriver& operator=(const GpuDriver&) = delete;

  // Sizes of blocks and mappings, and their addresses, are multiples of it.
  [[nodiscard]] virtual int64_t granularity() const = 0;
  [[nodiscard]] virtual Memory memory() = 0;
  // Those near it.
  [[nodiscard]] virtual const Processors& processors() const = 0;

  // Addresses without memory behind them.
  [[nodiscard]] virtual GpuAddress reserve(int64_t nbytes) = 0;
  virtual void release(GpuAddress address, int64_t nbytes) noexcept = 0;

  // Throws OutOfBudget when the GPU has no memory left.
  [[nodiscard]] virtual Block create_block(int64_t nbytes) = 0;
  // The memory is free once it is mapped nowhere.
  virtual void destroy_block(Block block) noexcept = 0;
  virtual void map(GpuAddress address, int64_t nbytes, Block block) = 0;
  // Has the GPU read and write what was mapped since: all of the range. Once for several mappings
  // costs less than once for each.
  virtual void allow(GpuAddress address, int64_t nbytes) = 0;
  // Nothing that uses the addresses may be under way.
  virtual void unmap(GpuAddress address, int64_t nbytes) = 0;

  // Has streams copy from and to host memory, whole pages of 4 KiB, without waiting. Pages that
  // were never touched are taken by this thread.
  virtual void pin(char* memory, int64_t nbytes) = 0;
  // Nothing that uses it may be under way.
  virtual void unpin(char* memory) noexcept = 0;

  [[nodiscard]] virtual Stream create_stream() = 0;
  // What it was given is still carried out.
  virtual void destroy_stream(Stream stream) noexcept = 0;
  // How `await` of an event waits: spinning, or leaving the processor to others.
  enum class Waits : bool { kSpinning, kAsleep };
  [[nodiscard]] virtual Event create_event(Waits waits) = 0;
  virtual void destroy_event(Event event) noexcept = 0;

  // The event is the end of what the stream was given so far; a point it was before is forgotten,
  // but not by those told to wait for it.
  virtual void record(Event event, Stream stream) = 0;
  // What the stream is given from now on begins after the event.
  virtual void wait(Stream stream, Event event) = 0;
  // Blocks the calling thread until the event has passed.
  virtual void await(Event event) = 0;
  [[nodiscard]] virtual bool passed(Event event) = 0;
  // Between two events that have passed.
  [[nodiscard]] virtual double seconds(Event from, Event to) = 0;

  // Between host and GPU memory, in either direction.
  virtual void copy(GpuAddress dst, GpuAddress src, int64_t nbytes, Stream stream) = 0;
  virtual void fill(GpuAddress address, uint8_t value, int64_t nbytes, Stream stream) = 0;
};

}  // namespace gemini
