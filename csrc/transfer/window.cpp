#include "transfer/window.h"

#include <mutex>

namespace gemini {

void Window::map_fresh() {
  const std::lock_guard lock(lock_);
  pages::commit_at(address_, span_bytes_);
  mapped_ = true;
  poisoned_ = false;
}

bool Window::map_block(char* block, pages::Mover mover) {
  const std::lock_guard lock(lock_);
  if (!mover(block, address_, span_bytes_, false)) return false;
  mapped_ = true;
  poisoned_ = false;
  return true;
}

bool Window::unmap_to(char* slot, pages::Mover mover) {
  const std::lock_guard lock(lock_);
  // The source is kept, then replaced: leaving a hole for an instant would let another thread's
  // mmap take these addresses.
  if (!mover(address_, slot, span_bytes_, true)) return false;
  try {
    pages::reserve_at(address_, span_bytes_);
  } catch (...) {
    (void)mover(slot, address_, span_bytes_, false);
    throw;
  }
  mapped_ = false;
  return true;
}

void Window::unmap() {
  const std::lock_guard lock(lock_);
  pages::reserve_at(address_, span_bytes_);
  mapped_ = false;
}

}  // namespace gemini
