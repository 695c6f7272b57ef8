// Arena: the physical memory of one tier, with a hard limit; blocks are recycled between windows.
#pragma once

#include <cstdint>
#include <memory>

#include "common/mapping.h"
#include "common/mutex.h"
#include "common/process_guard.h"
#include "transfer/arena_ledger.h"
#include "transfer/pages.h"
#include "transfer/parked_blocks.h"
#include "transfer/window.h"

namespace gemini {

// Gives memory to windows and takes it back. Memory taken back is either returned to the system at
// once or parked: kept, with its pages, for the next windows, which then need a few system calls
// and no page faults. Invariant: mapped_bytes() + parked_bytes() <= capacity().
//
// Thread-safe, but two threads must not map or unmap the same window at once. In a forked child
// map, unmap and trim throw StateError.
class Arena {
 public:
  // `mover` moves pages between ranges. If it refuses, fresh pages are used: slower, with the same
  // result.
  explicit Arena(int64_t capacity_bytes, pages::Mover mover = pages::move);
  // Returns the parked memory to the system. Windows that are still mapped keep their memory until
  // their space is destroyed.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Maps memory under an unmapped window, with any content or zeros. Throws OutOfBudget if it does
  // not fit beside the mapped windows (parked blocks are dropped to make room), StateError if it is
  // mapped already, Error if the system refuses. Then no window has changed.
  void map(Window& window, Content content);

  // Takes the memory from a window that this arena mapped; its content is lost. No transfer of it
  // may be in flight. Throws StateError if another arena mapped the window.
  void unmap(Window& window, Spare spare);

  // Unmaps a window and parks its pages where they are until `settle`. If another window needs them
  // before, they move once instead of twice; each move interrupts the other processors that run
  // this process. Until `settle`, which must come before the window's space is destroyed, the fault
  // guard notices no access to the window. Throws as `unmap`.
  void leave(Window& window);

  // Takes the pages from the windows that were left.
  void settle();

  // Returns parked blocks to the system, oldest first, until at most `parked_limit_bytes` are left.
  void trim(int64_t parked_limit_bytes);

  [[nodiscard]] int64_t mapped_bytes() const noexcept { return ledger_->mapped(); }
  [[nodiscard]] int64_t parked_bytes() const noexcept { return ledger_->parked(); }
  // The highest sum of mapped and parked bytes so far.
  [[nodiscard]] int64_t peak_bytes() const noexcept { return ledger_->peak(); }
  [[nodiscard]] int64_t capacity() const noexcept { return ledger_->capacity(); }

  // Mapped and parked bytes of all arenas of this process.
  [[nodiscard]] static int64_t process_bytes() noexcept { return ArenaLedger::process_bytes(); }

 private:
  void map_pieces(Window& window, std::vector<Piece>& pieces) GEMINI_REQUIRES(mutex_);
  [[nodiscard]] bool try_park(Window& window) GEMINI_REQUIRES(mutex_);
  void require_mapped_here(const Window& window) const;
  void settle_locked() GEMINI_REQUIRES(mutex_);

  ProcessGuard process_;
  const pages::Mover mover_;
  std::shared_ptr<ArenaLedger> ledger_;
  Mutex mutex_;
  ParkedBlocks parked_ GEMINI_GUARDED_BY(mutex_);
  std::vector<Window*> left_ GEMINI_GUARDED_BY(mutex_);  // their pages are parked in place
};

}  // namespace gemini
