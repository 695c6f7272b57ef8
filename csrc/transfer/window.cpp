#include "transfer/window.h"

namespace gemini {

void Window::map(std::vector<Piece>& pieces, pages::Mover mover) {
  pieces_.clear();
  pieces_.reserve(pieces.size());
  const Lock lock(lock_);
  int64_t at = 0;
  try {
    for (Piece& piece : pieces) {
      char* const place = address_ + at;
      const bool kept = piece.home == Home::kWindow;
      const pages::Source source = kept ? pages::Source::kKept : pages::Source::kGivenUp;
      if (piece.address && mover(piece.address, place, piece.nbytes, source)) {
        piece.address = nullptr;
      } else {
        pages::commit_at(place, piece.nbytes);
      }
      pieces_.push_back(Piece{place, piece.nbytes, piece.pages});
      at += piece.nbytes;
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
  // Keep the source and replace it later: a momentary hole would let another thread's mmap take
  // these addresses.
  for (const Piece& piece : pieces_) {
    char* const place = slot + (piece.address - address_);
    if (!mover(piece.address, place, piece.nbytes, pages::Source::kKept)) return false;
  }
  pages::reserve_at(address_, span_bytes_);
  mapped_ = false;
  return true;
}

void Window::give_up() {
  const Lock lock(lock_);
  mapped_ = false;
}

void Window::reserve() {
  const Lock lock(lock_);
  pages::reserve_at(address_, span_bytes_);
}

void Window::unmap() {
  const Lock lock(lock_);
  pages::reserve_at(address_, span_bytes_);
  mapped_ = false;
}

}  // namespace gemini
