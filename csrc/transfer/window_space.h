// WindowSpace: one reservation of virtual addresses, divided into windows.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/process_guard.h"
#include "transfer/fault_guard.h"
#include "transfer/spin_lock.h"
#include "transfer/window.h"

namespace gemini {

// Where a window begins.
enum class Begin : bool { kAligned, kBehindLast };

// Takes addresses only; memory comes from an Arena. Owns its windows, which must not be used after
// it is destroyed. Thread-safe. In a forked child all windows are unmapped and read poison.
class WindowSpace : private FaultTarget {
 public:
  // Reserves room for windows of `total_bytes` in total, each counted in whole 4 KiB pages. Throws
  // StateError if not positive, Error if the system refuses.
  explicit WindowSpace(int64_t total_bytes);
  // Unmaps all windows; the bytes of mapped ones are returned to their arenas.
  ~WindowSpace() override;
  WindowSpace(const WindowSpace&) = delete;
  WindowSpace& operator=(const WindowSpace&) = delete;

  // Creates the next window: at a 2 MiB boundary if it is that large (huge pages), else at a page;
  // kBehindLast: at the page behind the last window. Throws StateError if not positive, OutOfBudget
  // if the reservation is used up.
  Window* create(int64_t nbytes, Begin begin = Begin::kAligned);

  // The index, in order of creation, of the window that contains `address`; -1 if none does.
  [[nodiscard]] int64_t find(uintptr_t address) const;

  // Removes the poison from unmapped windows that were accessed, with its memory (up to the size of
  // the window). Returns their number.
  int64_t heal();

  [[nodiscard]] char* address() const noexcept { return begin_; }
  [[nodiscard]] int64_t reserved_bytes() const noexcept { return reserved_bytes_; }
  [[nodiscard]] int64_t num_windows() const;

 private:
  FaultAnswer absorb(uintptr_t address, bool bus_error) noexcept override;
  void before_fork() noexcept override GEMINI_ACQUIRES(lock_);
  void after_fork(ForkSide side) noexcept override GEMINI_RELEASES(lock_);
  [[nodiscard]] int64_t locate(uintptr_t address) const noexcept GEMINI_REQUIRES(lock_);

  ProcessGuard process_;
  int64_t reserved_bytes_;
  char* begin_;
  mutable SpinLock lock_;
  int64_t used_bytes_ GEMINI_GUARDED_BY(lock_) = 0;
  std::vector<std::unique_ptr<Window>> windows_ GEMINI_GUARDED_BY(lock_);  // by ascending address
};

}  // namespace gemini
