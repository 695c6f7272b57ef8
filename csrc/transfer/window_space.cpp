#include "transfer/window_space.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "common/bytes.h"
#include "common/error.h"
#include "common/size_text.h"
#include "transfer/pages.h"

namespace gemini {
namespace {

// Poison this many bytes on a stray access: fewer faults than with single pages, little memory.
constexpr uintptr_t kPoisonBytes = 64 << 10;
constexpr int kPoison = 0xFF;

// Padding to a 2 MiB boundary is smaller than the window behind it, so twice the total is enough.
int64_t reservation(int64_t total_bytes) {
  constexpr int64_t kMaxBytes = std::numeric_limits<int64_t>::max() / 4;
  if (total_bytes <= 0 || total_bytes > kMaxBytes) {
    throw StateError("a window space needs a positive size, got " + std::to_string(total_bytes));
  }
  return round_up(2 * total_bytes, kHugePageBytes);
}

uintptr_t number(const char* address) { return reinterpret_cast<uintptr_t>(address); }

}  // namespace

WindowSpace::WindowSpace(int64_t total_bytes)
    : reserved_bytes_(reservation(total_bytes)),
      begin_(pages::reserve(reserved_bytes_, kHugePageBytes)) {
  try {
    guard_faults(*this, number(begin_), number(begin_) + static_cast<uintptr_t>(reserved_bytes_));
  } catch (...) {
    pages::release(begin_, reserved_bytes_);
    throw;
  }
}

WindowSpace::~WindowSpace() {
  unguard_faults(*this);
  if (!process_.is_owner()) return;
  for (const auto& window : windows_) {
    if (window->mapped()) window->ledger_->drop_mapped(window->span_bytes());
  }
  pages::discard(begin_, reserved_bytes_);
}

Window* WindowSpace::create(int64_t nbytes, Begin begin) {
  process_.require("this WindowSpace");
  if (nbytes <= 0) {
    throw StateError("a window needs a positive size, got " + std::to_string(nbytes));
  }
  const Lock lock(lock_);
  const bool huge = nbytes >= kHugePageBytes && begin == Begin::kAligned;
  const int64_t alignment = huge ? kHugePageBytes : kPageBytes;
  const int64_t start = round_up(used_bytes_, alignment);
  if (nbytes > reserved_bytes_ - start) {
    throw OutOfBudget("a window of " + format_bytes(nbytes) + " does not fit: " +
                      format_bytes(used_bytes_) + " of " + format_bytes(reserved_bytes_) +
                      " reserved addresses are used; make the window space larger");
  }
  const int64_t span_bytes = round_up(nbytes, kPageBytes);
  windows_.push_back(
      std::unique_ptr<Window>(new Window(begin_ + start, nbytes, span_bytes, lock_)));
  used_bytes_ = start + span_bytes;
  return windows_.back().get();
}

int64_t WindowSpace::find(uintptr_t address) const {
  const Lock lock(lock_);
  return locate(address);
}

int64_t WindowSpace::locate(uintptr_t address) const noexcept {
  const auto after = std::upper_bound(
      windows_.begin(), windows_.end(), address,
      [](uintptr_t value, const auto& window) { return value < number(window->address()); });
  if (after == windows_.begin()) return -1;
  const Window& window = **std::prev(after);
  const uintptr_t distance = address - number(window.address());
  if (distance >= static_cast<uintptr_t>(window.span_bytes())) return -1;
  return std::prev(after) - windows_.begin();
}

int64_t WindowSpace::num_windows() const {
  const Lock lock(lock_);
  return static_cast<int64_t>(windows_.size());
}

int64_t WindowSpace::heal() {
  const Lock lock(lock_);
  int64_t num_healed = 0;
  for (const auto& window : windows_) {
    window->lock_.is_held();
    if (!window->poisoned_) continue;
    pages::reserve_at(window->address(), window->span_bytes());
    window->poisoned_ = false;
    ++num_healed;
  }
  return num_healed;
}

FaultAnswer WindowSpace::absorb(uintptr_t address, bool bus_error) noexcept {
  const Lock lock(lock_);
  const int64_t index = locate(address);
  if (index < 0) return FaultAnswer::kForeign;  // padding: an access out of bounds
  Window& window = *windows_[static_cast<size_t>(index)];
  if (window.mapped()) return bus_error ? FaultAnswer::kForeign : FaultAnswer::kRetry;
  const uintptr_t begin = number(window.address());
  const uintptr_t end = begin + static_cast<uintptr_t>(window.span_bytes());
  const uintptr_t piece = address / kPoisonBytes * kPoisonBytes;
  const uintptr_t from = std::max(piece, begin);
  const size_t nbytes = std::min(piece + kPoisonBytes, end) - from;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  void* const poison =
      ::mmap(reinterpret_cast<void*>(from), nbytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (poison == MAP_FAILED) return FaultAnswer::kForeign;
  std::memset(poison, kPoison, nbytes);
  window.lock_.is_held();
  window.poisoned_ = true;
  return FaultAnswer::kPoisoned;
}

void WindowSpace::before_fork() noexcept { lock_.lock(); }

void WindowSpace::after_fork(ForkSide side) noexcept {
  if (side == ForkSide::kChild) {
    // The pages were not inherited, so there are holes. Unless they are filled, the child's own
    // allocations could get these addresses and be taken for windows.
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    (void)::mmap(begin_, static_cast<size_t>(reserved_bytes_), PROT_NONE, kFlags, -1, 0);
    for (const auto& window : windows_) {
      window->lock_.is_held();
      window->mapped_ = false;
      window->poisoned_ = false;
    }
  }
  lock_.unlock();
}

}  // namespace gemini
