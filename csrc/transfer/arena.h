// The physical memory of one tier: a hard limit, and blocks that are recycled between windows.
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

// Gives windows memory and takes it back. Memory taken back is either returned to the system at
// once or parked: kept, with its pages, for the next windows, which then cost a few system calls
// and no page faults. mapped_bytes() + parked_bytes() <= capacity() at every moment.
//
// Thread-safe, but one window must not be mapped or unmapped by two threads at once. In a forked
// child map, unmap and trim throw StateError.
class Arena {
 public:
  // `mover` moves pages between ranges. Where it refuses, fresh pages are used instead: slower,
  // with the same result.
  explicit Arena(int64_t capacity_bytes, pages::Mover mover = pages::move);
  // Returns the parked memory. Windows still mapped keep theirs until their space goes.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Puts memory under an unmapped window, with any content or zeros. Throws
  // OutOfBudget when it does not fit beside what is mapped (parked blocks make room), StateError
  // when it is mapped already, Error when the system refuses. Then no window has changed.
  void map(Window& window, Content content);

  // Takes the memory from a window this arena mapped; its content is gone. No transfer from or to
  // it may be under way. Throws StateError when the window is not this arena's.
  void unmap(Window& window, Spare spare);

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

  ProcessGuard process_;
  const pages::Mover mover_;
  std::shared_ptr<ArenaLedger> ledger_;
  Mutex mutex_;
  ParkedBlocks parked_ GEMINI_GUARDED_BY(mutex_);
};

}  // namespace gemini
