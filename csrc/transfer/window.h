// Window: an address range that belongs to a chunk for the whole run, with or without memory behind
// it.
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

// Created and owned by WindowSpace; Arena gives it memory. An access while it is unmapped reads
// poison and is counted (fault_guard.h).
class Window {
 public:
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Never changes.
  [[nodiscard]] char* address() const noexcept { return address_; }
  // As requested.
  [[nodiscard]] int64_t nbytes() const noexcept { return nbytes_; }
  // Rounded up to whole pages: its cost in an arena.
  [[nodiscard]] int64_t span_bytes() const noexcept { return span_bytes_; }
  [[nodiscard]] bool mapped() const noexcept { return mapped_.load(); }

 private:
  friend class WindowSpace;
  friend class Arena;

  Window(char* address, int64_t nbytes, int64_t span_bytes, SpinLock& lock)
      : address_(address), nbytes_(nbytes), span_bytes_(span_bytes), lock_(lock) {}

  // Transitions. Each happens under the space's lock, so that a fault on another thread is answered
  // before or after it, never in between: poison cannot get into a mapped window.

  // Maps `pieces`, which cover the whole window: moves their pages, or uses fresh pages for a fresh
  // piece and if `mover` refuses. Sets the address of a moved piece to nullptr. Throws Error if the
  // system refuses fresh pages: then the window is not mapped, and moved pages are lost.
  void map(std::vector<Piece>& pieces, pages::Mover mover);
  // Moves its pages to `slot`. Returns false if `mover` refuses. Throws Error if the system
  // refuses: then the window is mapped, and its content is lost.
  [[nodiscard]] bool unmap_to(char* slot, pages::Mover mover);
  void unmap();
  // The same in two steps: its pages stay for the arena to move, then its addresses are reserved.
  void give_up();
  void reserve();

  char* const address_;
  const int64_t nbytes_;
  const int64_t span_bytes_;
  SpinLock& lock_;                                  // the space's
  std::atomic<bool> mapped_{false};                 // written under lock_
  bool poisoned_ GEMINI_GUARDED_BY(lock_) = false;  // the unmapped window contains poison pages
  std::vector<Piece> pieces_;                       // as mapped, in order; guarded by the arena
  std::shared_ptr<ArenaLedger> ledger_;  // of the arena with its memory; written by Arena
};

}  // namespace gemini
