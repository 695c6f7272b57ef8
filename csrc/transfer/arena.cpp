#include "transfer/arena.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "common/bytes.h"
#include "common/debug.h"
#include "common/error.h"
#include "common/size_text.h"

namespace gemini {
namespace {

constexpr int kPoisonLevel = 3;
constexpr int kPoison = 0xFF;

int64_t checked_capacity(int64_t capacity_bytes) {
  if (capacity_bytes >= 0) return capacity_bytes;
  throw StateError("an arena's capacity cannot be negative, got " + std::to_string(capacity_bytes));
}

void poison(const Window& window) {
  if (debug_level() < kPoisonLevel) return;
  std::memset(window.address(), kPoison, static_cast<size_t>(window.span_bytes()));
}

void discard_unmoved(const std::vector<Piece>& pieces) noexcept {
  for (const Piece& piece : pieces) {
    if (!piece.address) continue;
    if (piece.home == Home::kSlot) {
      pages::discard(piece.address, piece.nbytes);
      continue;
    }
    try {
      pages::reserve_at(piece.address, piece.nbytes);
    } catch (const Error&) {
      // settle() reserves all of the window, and reports what the system refuses.
    }
  }
}

}  // namespace

Arena::Arena(int64_t capacity_bytes, pages::Mover mover)
    : mover_(mover),
      ledger_(std::make_shared<ArenaLedger>(checked_capacity(capacity_bytes))),
      parked_(*ledger_) {}

Arena::~Arena() {
  if (!process_.is_owner()) return;  // the child has no such pages: addresses may be reused
  parked_.drop_all();
}

void Arena::map(Window& window, Content content) {
  process_.require("this Arena");
  const Lock lock(mutex_);
  if (window.mapped()) throw StateError("the window is mapped already");
  if (std::ranges::find(left_, &window) != left_.end()) settle_locked();
  const int64_t nbytes = window.span_bytes();
  if (nbytes > capacity() - mapped_bytes()) {
    throw OutOfBudget("a window of " + format_bytes(nbytes) + " does not fit: " +
                      format_bytes(mapped_bytes()) + " of " + format_bytes(capacity()) +
                      " are mapped; unmap other windows, or raise the budget");
  }
  std::vector<Piece> pieces = parked_.take(nbytes);
  if (content == Content::kZeros) {
    for (const Piece& piece : pieces) {
      if (piece.address) std::memset(piece.address, 0, static_cast<size_t>(piece.nbytes));
    }
  }
  map_pieces(window, pieces);
}

// Maps the taken parked pieces under the window, and fresh pages for the others.
void Arena::map_pieces(Window& window, std::vector<Piece>& pieces) {
  int64_t taken_bytes = 0;
  for (const Piece& piece : pieces) {
    if (piece.address) taken_bytes += piece.nbytes;
  }
  const int64_t fresh_bytes = window.span_bytes() - taken_bytes;
  // Taken pieces count as parked until they are mapped.
  const int64_t limit_bytes = capacity() - mapped_bytes() - fresh_bytes;
  int64_t counted_bytes = 0;
  try {
    parked_.drop(parked_bytes() - limit_bytes);
    ledger_->add_mapped(fresh_bytes);
    counted_bytes = fresh_bytes;
    window.map(pieces, mover_);
  } catch (...) {
    discard_unmoved(pieces);
    ledger_->drop_parked(taken_bytes);
    ledger_->drop_mapped(counted_bytes);
    throw;
  }
  discard_unmoved(pieces);
  ledger_->unpark(taken_bytes);
  window.ledger_ = ledger_;
}

void Arena::unmap(Window& window, Spare spare) {
  process_.require("this Arena");
  const Lock lock(mutex_);
  require_mapped_here(window);
  if (spare == Spare::kParked && try_park(window)) return;
  window.unmap();
  window.ledger_.reset();
  ledger_->drop_mapped(window.span_bytes());
}

void Arena::require_mapped_here(const Window& window) const {
  if (!window.mapped()) throw StateError("the window is not mapped");
  if (window.ledger_ != ledger_) throw StateError("the window was mapped by another arena");
}

void Arena::leave(Window& window) {
  process_.require("this Arena");
  const Lock lock(mutex_);
  require_mapped_here(window);
  poison(window);
  parked_.reserve(window.pieces_.size());
  left_.push_back(&window);
  window.give_up();
  window.ledger_.reset();
  ledger_->park(window.span_bytes());
  parked_.add(window.address(), window.pieces_, Home::kWindow);
}

void Arena::settle() {
  process_.require("this Arena");
  const Lock lock(mutex_);
  settle_locked();
}

void Arena::settle_locked() {
  if (left_.empty()) return;
  parked_.move_to_slots(mover_);
  while (!left_.empty()) {
    left_.back()->reserve();
    left_.pop_back();
  }
}

bool Arena::try_park(Window& window) {
  const int64_t nbytes = window.span_bytes();
  poison(window);
  // Moving whole huge pages requires the same alignment on both sides.
  const int64_t alignment = nbytes >= kHugePageBytes ? kHugePageBytes : kPageBytes;
  parked_.reserve(window.pieces_.size());
  char* const slot = pages::reserve(nbytes, alignment);
  bool parked = false;
  try {
    parked = window.unmap_to(slot, mover_);
  } catch (...) {
    pages::discard(slot, nbytes);
    throw;
  }
  if (!parked) {
    pages::release(slot, nbytes);
    return false;
  }
  window.ledger_.reset();
  ledger_->park(nbytes);
  parked_.add(slot, window.pieces_, Home::kSlot);
  return true;
}

void Arena::trim(int64_t parked_limit_bytes) {
  process_.require("this Arena");
  const Lock lock(mutex_);
  settle_locked();
  parked_.drop(parked_bytes() - std::max<int64_t>(parked_limit_bytes, 0));
}

}  // namespace gemini
