// A window: an address range that is a chunk's for the whole run, with or without memory behind it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "transfer/arena_ledger.h"
#include "transfer/pages.h"
#include "transfer/parked_blocks.h"
#include "transfer/spin_lock.h"

namespace gemini {

// Made by WindowSpace, which owns it; given memory by Arena. An access while it is not mapped
// reads poison and is counted (fault_guard.h).
class Window {
 public:
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Never changes.
  [[nodiscard]] char* address() const noexcept { return address_; }
  // As asked for.
  [[nodiscard]] int64_t nbytes() const noexcept { return nbytes_; }
  // Rounded up to whole pages: what it costs an arena.
  [[nodiscard]] int64_t span_bytes() const noexcept { return span_bytes_; }
  [[nodiscard]] bool mapped() const noexcept { return mapped_.load(); }

 private:
  friend class WindowSpace;
  friend class Arena;

  Window(char* address, int64_t nbytes, int64_t span_bytes, SpinLock& lock)
      : address_(address), nbytes_(nbytes), span_bytes_(span_bytes), lock_(lock) {}

  // Transitions. Each happens under the space's lock, so that a fault on another thread is
  // answered before or after it, never in between: poison cannot land in a mapped window.

  // Moves `pieces`, which are all of it, under it; fresh pages where one is to be fresh or `mover`
  // refuses it. A piece that has moved gets no address. Throws Error when the system refuses fresh
  // pages: then the window is not mapped, and what had moved is gone.
  void map(std::vector<Piece>& pieces, pages::Mover mover);
  // Moves its pages to `slot`. False where `mover` refuses, Error when the system does: it is
  // mapped then, its content gone.
  [[nodiscard]] bool unmap_to(char* slot, pages::Mover mover);
  void unmap();

  char* const address_;
  const int64_t nbytes_;
  const int64_t span_bytes_;
  SpinLock& lock_;                                  // the space's
  std::atomic<bool> mapped_{false};                 // written under lock_
  bool poisoned_ GEMINI_GUARDED_BY(lock_) = false;  // poison pages lie in the unmapped window
  std::vector<Piece> pieces_;            // as they are mapped, in order; guarded by the arena
  std::shared_ptr<ArenaLedger> ledger_;  // whose memory it is; written by Arena
};

}  // namespace gemini
