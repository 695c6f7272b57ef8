// Windows in the address space of a GPU, and the memory blocks mapped under them.
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

// Physical memory. `uses` are its last uses; nothing waits for them before the next use.
class GpuBlock {
 public:
  GpuBlock(std::shared_ptr<GpuLanes> lanes, int64_t nbytes);
  // The GPU gets the memory back when no window maps the block any longer.
  ~GpuBlock();
  GpuBlock(const GpuBlock&) = delete;
  GpuBlock& operator=(const GpuBlock&) = delete;

  [[nodiscard]] int64_t nbytes() const noexcept { return nbytes_; }
  [[nodiscard]] GpuDriver::Block handle() const noexcept { return handle_; }

  // Whether a window with fixed addresses maps it: that window may be given the block again.
  [[nodiscard]] bool is_home() const;

  Uses uses;  // while it is parked
  bool parked = false;
  std::vector<GpuFrame*> shown_by;  // the frames that map it; they keep it alive

 private:
  const std::shared_ptr<GpuLanes> lanes_;
  const int64_t nbytes_;
  const GpuDriver::Block handle_;
};

using Blocks = std::vector<std::shared_ptr<GpuBlock>>;

// kFixed: a window's addresses never change, so tensors may view it permanently. kFloating: they
// change each time it is given memory, to addresses that map the blocks already if possible:
// mapping costs a millisecond of host time during a copy from the GPU.
enum class Addresses { kFixed, kFloating };

// Addresses of a reservation with blocks mapped side by side, all of one size.
//
// A mapping stays when a window loses its memory, because unmapping has to wait for the GPU. The
// blocks may be under other windows meanwhile, so a stale mapping must not be read. With
// GEMINI_DEBUG=3 it is poisoned at once: it reads 0xFF (NaN), and writes are lost.
class GpuFrame {
 public:
  GpuFrame(GpuAddress address, int64_t nbytes, Addresses addresses,
           std::shared_ptr<GpuPoison> poison)
      : address_(address), nbytes_(nbytes), addresses_(addresses), poison_(std::move(poison)) {}
  GpuFrame(const GpuFrame&) = delete;
  GpuFrame& operator=(const GpuFrame&) = delete;

  [[nodiscard]] GpuAddress address() const noexcept { return address_; }
  [[nodiscard]] bool floats() const noexcept { return addresses_ == Addresses::kFloating; }
  // The mapped blocks by place; null: nothing is mapped.
  [[nodiscard]] const Blocks& shown() const noexcept { return shown_; }
  // Whether all mapped blocks are parked.
  [[nodiscard]] bool shows_parked() const;

  // Maps exactly `blocks`; returns the number of new mappings. Waits for the GPU only if it must
  // replace a mapped block by another.
  int64_t show(GpuLanes& lanes, const Blocks& blocks);
  // Removes the mappings, after the last use through them; of poison the caller knows the last use.
  void hide(GpuLanes& lanes);
  void hide(GpuLanes& lanes, const std::shared_ptr<GpuBlock>& block);
  // Maps poison, until it is given a block.
  void poison(GpuLanes& lanes);
  // Records the last uses through its addresses, when the blocks are taken away.
  void leave(const Uses& uses) { left_ = uses; }

 private:
  // The same for adjacent places that do not map their blocks yet. Requests access only for these:
  // the other places may be in use.
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

// The addresses of a chunk's memory on the GPU. Created and owned by GpuSpace; GpuArena gives it
// memory: blocks of one size, side by side.
class GpuWindow {
 public:
  GpuWindow(const GpuWindow&) = delete;
  GpuWindow& operator=(const GpuWindow&) = delete;

  [[nodiscard]] GpuAddress address() const noexcept { return frame_->address(); }
  [[nodiscard]] bool floats() const noexcept { return addresses_ == Addresses::kFloating; }
  [[nodiscard]] int64_t nbytes() const noexcept { return nbytes_; }          // as requested
  [[nodiscard]] int64_t span_bytes() const noexcept { return span_bytes_; }  // its cost in an arena
  [[nodiscard]] bool mapped() const noexcept { return !blocks_.empty(); }
  // The last uses of its memory, by any owner. Throws StateError if it is not mapped.
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
  std::unique_ptr<GpuFrame> frame_;  // one of its space's frames
  Blocks blocks_;                    // empty: not mapped
  Uses uses_;                        // while it is mapped
};

// One block that is mapped under the whole of every poisoned window; created on first use.
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

// One reservation of addresses, divided into windows. Not thread-safe, like everything that belongs
// to one GPU's lanes. In a forked child every call throws StateError: CUDA does not survive fork.
class GpuSpace {
 public:
  // Reserves room for windows of `total_bytes` in total, in up to `num_windows` pieces.
  GpuSpace(std::shared_ptr<GpuLanes> lanes, int64_t total_bytes, int64_t num_windows);
  // Waits for work that uses the windows.
  ~GpuSpace();
  GpuSpace(const GpuSpace&) = delete;
  GpuSpace& operator=(const GpuSpace&) = delete;

  // Throws StateError if not positive, OutOfBudget if the reservation is used up.
  GpuWindow* create(int64_t nbytes, Addresses addresses = Addresses::kFixed);

  // Poisons a window without memory, because tensors over it could be used again by mistake. Throws
  // StateError if it is mapped.
  void poison(GpuWindow& window);

  // The index, in order of creation, of the window with fixed addresses that contains `address`; -1
  // if none does.
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
  std::vector<GpuAddress> begins_;  // the first addresses of the windows when they were created,
                                    // ascending
  std::vector<std::unique_ptr<GpuWindow>> windows_;
  std::vector<GpuWindow*> idle_;  // floating ones that had memory, longest idle first
};

// The GPU memory of one budget: blocks that are recycled between windows. A window gets as many
// blocks of `unit_bytes` as it is long, so that any block serves any window. If its length is no
// multiple, or needs more than kMostBlocks, or there is no unit, it gets one block of its own size,
// which serves only windows of that size. Invariant: mapped_bytes() + parked_bytes() <= capacity().
// Not thread-safe.
class GpuArena {
 public:
  static constexpr int64_t kMostBlocks = 16;  // of a window: each costs driver calls

  GpuArena(std::shared_ptr<GpuLanes> lanes, int64_t capacity_bytes, int64_t unit_bytes = 0);
  GpuArena(const GpuArena&) = delete;
  GpuArena& operator=(const GpuArena&) = delete;

  // Maps memory under an unmapped window for operators, with any content or zeros. Throws
  // OutOfBudget if it does not fit beside the mapped windows or the GPU has no memory left;
  // StateError if it is mapped already. Then no window has changed.
  void map(GpuWindow& window, Content content);
  // The same for a transfer: operators do not wait for the previous users of the memory.
  void map_incoming(GpuWindow& window);

  // Takes the memory from a window; its content is lost. The next use of the memory comes after all
  // work given to the lanes so far that uses it.
  void unmap(GpuWindow& window, Spare spare);

  // Returns parked blocks to the GPU, oldest first, until at most `parked_limit_bytes` are left.
  void trim(int64_t parked_limit_bytes);

  [[nodiscard]] int64_t mapped_bytes() const noexcept { return mapped_bytes_; }
  [[nodiscard]] int64_t parked_bytes() const noexcept { return parked_bytes_; }
  [[nodiscard]] int64_t peak_bytes() const noexcept { return peak_bytes_; }
  [[nodiscard]] int64_t capacity() const noexcept { return capacity_bytes_; }
  // The number of block mappings so far that did not exist already. Each costs the host a driver
  // call that waits, a millisecond during a copy from the GPU.
  [[nodiscard]] int64_t num_mappings() const noexcept { return num_mappings_; }

 private:
  [[nodiscard]] int64_t block_bytes(const GpuWindow& window) const;
  // Gives a floating window addresses that map parked blocks only, if there are any: preferably
  // blocks without pending uses.
  void move_to_parked(GpuWindow& window);
  // Takes parked blocks for a window, by place: its own, else those without pending uses, else the
  // oldest; leaves null if there is none of the size.
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
