// The HOST tier of a GPU: page-locked memory for copies by streams.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/mapping.h"
#include "common/process_guard.h"
#include "gpu/gpu_lanes.h"

namespace gemini {

// Host memory in the memory node of the GPU, page-locked, or ordinary if that is requested or the
// system refuses to lock it.
class PinnedBlock {
 public:
  PinnedBlock(std::shared_ptr<GpuLanes> lanes, int64_t nbytes, bool pin = true);
  // Waits for its last uses.
  ~PinnedBlock();
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;

  [[nodiscard]] char* address() const noexcept { return address_; }
  [[nodiscard]] int64_t nbytes() const noexcept { return nbytes_; }
  [[nodiscard]] bool pinned() const noexcept { return pinned_; }

  Uses uses;  // the last uses, by any owner

 private:
  const std::shared_ptr<GpuLanes> lanes_;
  const int64_t nbytes_;
  char* const address_;
  bool pinned_ = false;
};

// The memory of a chunk on HOST. No tensor views it, so its address may differ each time.
class HostPlace {
 public:
  explicit HostPlace(int64_t nbytes);
  HostPlace(const HostPlace&) = delete;
  HostPlace& operator=(const HostPlace&) = delete;

  [[nodiscard]] int64_t nbytes() const noexcept { return nbytes_; }
  [[nodiscard]] int64_t span_bytes() const noexcept { return span_bytes_; }  // its cost in an arena
  [[nodiscard]] bool mapped() const noexcept { return block_ != nullptr; }
  // Throw StateError if it is not mapped.
  [[nodiscard]] char* address() const;
  [[nodiscard]] Uses& uses() const;

 private:
  friend class PinnedArena;

  const int64_t nbytes_;
  const int64_t span_bytes_;
  std::unique_ptr<PinnedBlock> block_;
};

// Invariant: mapped_bytes() + parked_bytes() <= capacity(). Not thread-safe.
class PinnedArena {
 public:
  // `pin`: whether to page-lock; copies of ordinary memory are slower and make the host wait.
  PinnedArena(std::shared_ptr<GpuLanes> lanes, int64_t capacity_bytes, bool pin = true);
  // Waits for work that uses the parked blocks.
  ~PinnedArena();
  PinnedArena(const PinnedArena&) = delete;
  PinnedArena& operator=(const PinnedArena&) = delete;

  // Throw as GpuArena's. The first use of the place comes after all earlier uses of its memory;
  // with zeros this call waits for them.
  void map(HostPlace& place, Content content);
  // Blocks until the CPU may read and write the place: no work of the GPU uses it any longer.
  void await(const HostPlace& place) const;
  void unmap(HostPlace& place, Spare spare);
  void trim(int64_t parked_limit_bytes);

  [[nodiscard]] int64_t mapped_bytes() const noexcept { return mapped_bytes_; }
  [[nodiscard]] int64_t parked_bytes() const noexcept { return parked_bytes_; }
  [[nodiscard]] int64_t peak_bytes() const noexcept { return peak_bytes_; }
  [[nodiscard]] int64_t capacity() const noexcept { return capacity_bytes_; }
  // Total bytes of the blocks so far that the system refused to lock.
  [[nodiscard]] int64_t unpinned_bytes() const noexcept { return unpinned_bytes_; }

 private:
  void drop_oldest();

  ProcessGuard process_;
  const std::shared_ptr<GpuLanes> lanes_;
  const int64_t capacity_bytes_;
  const bool pin_;
  int64_t mapped_bytes_ = 0;
  int64_t parked_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t unpinned_bytes_ = 0;
  std::vector<std::unique_ptr<PinnedBlock>> parked_;  // oldest first
};

}  // namespace gemini
