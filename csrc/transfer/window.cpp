#include "transfer/window.h"

namespace gemini {

void Window::map(std::vector<Piece>& pieces, pages::Mover mover) {
  sizes_.clear();
  sizes_.reserve(pieces.size() + 1);
  const Lock lock(lock_);
  int64_t at = 0;
  try {
    for (Piece& piece : pieces) {
      if (mover(piece.address, address_ + at, piece.nbytes, pages::Source::kGivenUp)) {
        piece.address = nullptr;
      } else {
        pages::commit_at(address_ + at, piece.nbytes);
      }
      sizes_.push_back(piece.nbytes);
      at += piece.nbytes;
    }
    if (at < span_bytes_) {
      pages::commit_at(address_ + at, span_bytes_ - at);
      sizes_.push_back(span_bytes_ - at);
    }
  } catch (...) {
    pages::reserve_at(address_, span_bytes_);
    throw;
  }
  mapped_ = true;
  poisoned_ = false;
}

bool Window::unmap_to(char* slot, pages::Mover mover) {
  const Lock lock(lock_);
  // The source is kept, then replaced: leaving a hole for an instant would let another thread's
  // mmap take these addresses.
  int64_t at = 0;
  for (const int64_t size : sizes_) {
    if (!mover(address_ + at, slot + at, size, pages::Source::kKept)) return false;
    at += size;
  }
  pages::reserve_at(address_, span_bytes_);
  mapped_ = false;
  return true;
}

void Window::unmap() {
  const Lock lock(lock_);
  pages::reserve_at(address_, span_bytes_);
  mapped_ = false;
}

}  // namespace gemini
