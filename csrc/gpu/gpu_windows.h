// Windows in the address space of a GPU, and the blocks of memory that come under them.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common/mapping.h"
#include "common/process_guard.h"
#include "gpu/gpu_lanes.h"

namespace gemini {

class GpuPoison;
class GpuFrame;
class GpuSpace;

// Physical memory. `uses` are the last ones: nothing waits for them before there is a next one.
class GpuBlock {
 public:
  GpuBlock(std::shared_ptr<GpuLanes> lanes, int64_t nbytes);
  // Its memory is the GPU's again once no window shows it.
  ~GpuBlock();
  GpuBlock(const GpuBlock&) = delete;
  GpuBlock& operator=(const GpuBlock&) = delete;

  [[nodiscard]] int64_t nbytes() const noexcept { return nbytes_; }
  [[nodiscard]] GpuDriver::Block handle() const noexcept { return handle_; }

  // Whether addresses that are a window's for good show it: that window may come back.
  [[nodiscard]] bool is_home() const;

  Uses uses;  // while it is parked
  bool parked = false;
  std::vector<GpuFrame*> shown_by;  // they keep it alive

 private:
  const std::shared_ptr<GpuLanes> lanes_;
  const int64_t nbytes_;
  const GpuDriver::Block handle_;
};

using Blocks = std::vector<std::shared_ptr<GpuBlock>>;

// kFixed: a window's addresses never change, tensors may view it for good. kFloating: they are
// others each time it is given memory, those that show it already where there are such: mapping
// costs a millisecond of the host beside a copy from the GPU.
enum class Addresses { kFixed, kFloating };

// Addresses of a reservation, and the blocks that are mapped there side by side, all of one size.
//
// A mapping stays when the memory is taken from a window, since taking it away has to wait for the
// GPU: the blocks may be under other windows meanwhile. So what is stale must not be read; with
// GEMINI_DEBUG=3 it is poisoned at once: all of it reads 0xFF (NaN), and nothing written stays.
class GpuFrame {
 public:
  GpuFrame(GpuAddress address, int64_t nbytes, Addresses addresses,
           std::shared_ptr<GpuPoison> poison)
      : address_(address), nbytes_(nbytes), addresses_(addresses), poison_(std::move(poison)) {}
  GpuFrame(const GpuFrame&) = delete;
  GpuFrame& operator=(const GpuFrame&) = delete;

  [[nodiscard]] GpuAddress address() const noexcept { return address_; }
  [[nodiscard]] bool floats() const noexcept { return addresses_ == Addresses::kFloating; }
  // What is mapped, null: nothing, by place.
  [[nodiscard]] const Blocks& shown() const noexcept { return shown_; }
  // Whether all of it shows blocks that are parked.
  [[nodiscard]] bool shows_parked() const;

  // Shows `blocks` and no others; returns how many it did not show before. Waits for the GPU only
  // where it showed another one in the place of such.
  int64_t show(GpuLanes& lanes, const Blocks& blocks);
  // Takes the mappings away, after the last use through them; of poison the caller knows the last.
  void hide(GpuLanes& lanes);
  void hide(GpuLanes& lanes, const std::shared_ptr<GpuBlock>& block);
  // Shows poison, until it is given a block.
  void poison(GpuLanes& lanes);
  // The last uses through its addresses, when the blocks left.
  void leave(const Uses& uses) { left_ = uses; }

 private:
  // The same of places next to each other, none of which shows its block. Asks for access to those
  // alone: what the others show may be in use.
  void show(GpuLanes& lanes, const Blocks& blocks, size_t first, size_t behind);
  void hide(GpuLanes& lanes, size_t place);

  const GpuAddress address_;
  const int64_t nbytes_;
  const Addresses addresses_;
  const std::shared_ptr<GpuPoison> poison_;  // the space's
  bool poisoned_ = false;
  Blocks shown_;
  Uses left_;
};

// Where a chunk's memory is seen on the GPU. Made by GpuSpace, which owns it; given memory by
// GpuArena: blocks of one size, side by side.
class GpuWindow {
 public:
  GpuWindow(const GpuWindow&) = delete;
  GpuWindow& operator=(const GpuWindow&) = delete;

  [[nodiscard]] GpuAddress address() const noexcept { return frame_->address(); }
  [[nodiscard]] bool floats() const noexcept { return addresses_ == Addresses::kFloating; }
  [[nodiscard]] int64_t nbytes() const noexcept { return nbytes_; }          // as asked for
  [[nodiscard]] int64_t span_bytes() const noexcept { return span_bytes_; }  // what it costs
  [[nodiscard]] bool mapped() const noexcept { return !blocks_.empty(); }
  // The last ones of its memory, of any owner. Throws StateError when it is not mapped.
  [[nodiscard]] Uses& uses();

 private:
  friend class GpuSpace;
  friend class GpuArena;

  GpuWindow(GpuSpace& space, std::unique_ptr<GpuFrame> frame, int64_t nbytes, int64_t span_bytes,
            Addresses addresses)
      : space_(space),
        nbytes_(nbytes),
        span_bytes_(span_bytes),
        addresses_(addresses),
        frame_(std::move(frame)) {}

  GpuSpace& space_;
  const int64_t nbytes_;
  const int64_t span_bytes_;
  const Addresses addresses_;
  std::unique_ptr<GpuFrame> frame_;  // one of its space's
  Blocks blocks_;                    // none: not mapped
  Uses uses_;                        // while it is mapped
};

// A piece of memory that is under all of every poisoned window, made when it is needed first.
class GpuPoison {
 public:
  explicit GpuPoison(std::shared_ptr<GpuLanes> lanes) : lanes_(std::move(lanes)) {}

  void map(GpuAddress address, int64_t nbytes);
  void unmap(GpuAddress address, int64_t nbytes);

 private:
  const std::shared_ptr<GpuLanes> lanes_;
  std::unique_ptr<GpuBlock> block_;
  bool filled_ = false;
};

// One reservation of addresses, cut into windows. Not thread-safe, as all that belongs to one GPU's
// lanes. In a forked child every call throws StateError: CUDA does not survive fork.
class GpuSpace {
 public:
  // Room for windows of `total_bytes` together in up to `num_windows` pieces.
  GpuSpace(std::shared_ptr<GpuLanes> lanes, int64_t total_bytes, int64_t num_windows);
  // Waits for what uses the windows.
  ~GpuSpace();
  GpuSpace(const GpuSpace&) = delete;
  GpuSpace& operator=(const GpuSpace&) = delete;

  // Throws StateError when not positive, OutOfBudget when the reservation is used up.
  GpuWindow* create(int64_t nbytes, Addresses addresses = Addresses::kFixed);

  // Poisons one of its windows that has no block: tensors over it may be used once more, by
  // mistake. Throws StateError when it is mapped.
  void poison(GpuWindow& window);

  // The index, in order of creation, of the window that contains `address` for good; -1 if none
  // does.
  [[nodiscard]] int64_t find(GpuAddress address) const;

  [[nodiscard]] GpuAddress address() const noexcept { return begin_; }
  [[nodiscard]] int64_t reserved_bytes() const noexcept { return reserved_bytes_; }

 private:
  friend class GpuArena;

  ProcessGuard process_;
  const std::shared_ptr<GpuLanes> lanes_;
  const int64_t reserved_bytes_;
  const GpuAddress begin_;
  const std::shared_ptr<GpuPoison> poison_;
  int64_t used_bytes_ = 0;
  std::vector<GpuAddress> begins_;  // of the windows when they were made, ascending
  std::vector<std::unique_ptr<GpuWindow>> windows_;
  std::vector<GpuWindow*> idle_;  // floating ones that had memory, the longest idle first
};

// The GPU memory of one budget: blocks that are recycled between windows. A window gets as many of
// `unit_bytes` as it is long, so that any of them serves any window; where that does not come out
// even, or makes more than kMostBlocks, or without a unit, one of its own size, which serves
// windows of that size alone. mapped_bytes() + parked_bytes() <= capacity() at every moment. Not
// thread-safe.
class GpuArena {
 public:
  static constexpr int64_t kMostBlocks = 16;  // of a window: each costs calls of the driver

  GpuArena(std::shared_ptr<GpuLanes> lanes, int64_t capacity_bytes, int64_t unit_bytes = 0);
  GpuArena(const GpuArena&) = delete;
  GpuArena& operator=(const GpuArena&) = delete;

  // Puts memory under an unmapped window for operators, who find any content, or zeros. Throws
  // OutOfBudget when it does not fit beside what is mapped, or the GPU has no more; StateError when
  // it is mapped already. Then no window has changed.
  void map(GpuWindow& window, Content content);
  // The same for a transfer: operators do not wait for those who had the memory before.
  void map_incoming(GpuWindow& window);

  // Takes the memory from a window; its content is gone. Its next use comes after all work
  // that lanes were given so far and that uses it.
  void unmap(GpuWindow& window, Spare spare);

  // Returns parked blocks to the GPU, oldest first, until at most this much is left.
  void trim(int64_t parked_limit_bytes);

  [[nodiscard]] int64_t mapped_bytes() const noexcept { return mapped_bytes_; }
  [[nodiscard]] int64_t parked_bytes() const noexcept { return parked_bytes_; }
  [[nodiscard]] int64_t peak_bytes() const noexcept { return peak_bytes_; }
  [[nodiscard]] int64_t capacity() const noexcept { return capacity_bytes_; }
  // Blocks so far that were mapped where they did not show: each costs the host a call of the
  // driver that waits, a millisecond beside a copy from the GPU.
  [[nodiscard]] int64_t num_mappings() const noexcept { return num_mappings_; }

 private:
  [[nodiscard]] int64_t block_bytes(const GpuWindow& window) const;
  // Gives a floating window addresses that show parked blocks alone, where there are any: first
  // those of blocks that nobody waits for.
  void move_to_parked(GpuWindow& window);
  // Takes parked blocks for a window, by place: its own, else those that nobody waits for, else the
  // oldest; leaves null where there is none of the size.
  void take_parked(const GpuWindow& window, Blocks& taken);
  [[nodiscard]] std::shared_ptr<GpuBlock> take(Blocks::iterator parked);
  void park(const std::shared_ptr<GpuBlock>& block);
  void drop_oldest();

  ProcessGuard process_;
  const std::shared_ptr<GpuLanes> lanes_;
  const int64_t capacity_bytes_;
  const int64_t unit_bytes_;
  int64_t mapped_bytes_ = 0;
  int64_t parked_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t num_mappings_ = 0;
  Blocks parked_;  // oldest first
};

}  // namespace gemini
