#include "transfer/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "common/bytes.h"
#include "common/debug.h"
#include "common/error.h"

namespace gemini {
namespace {

constexpr int kPoisonLevel = 3;
constexpr int kPoison = 0xFF;

int64_t checked_capacity(int64_t capacity_bytes) {
  if (capacity_bytes >= 0) return capacity_bytes;
  throw StateError("an arena's capacity cannot be negative, got " + std::to_string(capacity_bytes));
}

}  // namespace

Arena::Arena(int64_t capacity_bytes, pages::Mover mover)
    : mover_(mover), ledger_(std::make_shared<ArenaLedger>(checked_capacity(capacity_bytes))) {}

Arena::~Arena() {
  if (!process_.is_owner()) return;  // the child did not inherit the pages: others may be there
  for (const Block& block : parked_) {
    // Cannot fail for a range that is ours; nothing could be done about it here.
    (void)::munmap(block.address, static_cast<size_t>(block.nbytes));
    ledger_->drop_parked(block.nbytes);
  }
}

void Arena::map(Window& window, bool zero) {
  process_.require("this Arena");
  const std::lock_guard lock(mutex_);
  if (window.mapped()) throw StateError("the window is mapped already");
  const int64_t nbytes = window.span_bytes();
  if (nbytes > capacity() - mapped_bytes()) {
    throw OutOfBudget("a window of " + std::to_string(nbytes) + " bytes does not fit: " +
                      std::to_string(mapped_bytes()) + " of " + std::to_string(capacity()) +
                      " bytes are mapped; unmap other windows or raise the budget");
  }
  if (map_parked(window, zero)) return;
  drop_parked_above(capacity() - mapped_bytes() - nbytes);
  ledger_->add_mapped(nbytes);
  try {
    window.map_fresh();
  } catch (...) {
    ledger_->drop_mapped(nbytes);
    throw;
  }
  window.ledger_ = ledger_;
}

// Moves the most recently parked block of the window's size under it, if there is one.
bool Arena::map_parked(Window& window, bool zero) {
  const int64_t nbytes = window.span_bytes();
  const auto found = std::find_if(parked_.rbegin(), parked_.rend(),
                                  [&](const Block& block) { return block.nbytes == nbytes; });
  if (found == parked_.rend()) return false;
  if (zero) std::memset(found->address, 0, static_cast<size_t>(nbytes));
  const auto position = std::prev(found.base());
  if (!window.map_block(position->address, mover_)) {
    drop_block(static_cast<size_t>(position - parked_.begin()));
    return false;
  }
  parked_.erase(position);
  ledger_->unpark(nbytes);
  window.ledger_ = ledger_;
  return true;
}

void Arena::unmap(Window& window, bool park) {
  process_.require("this Arena");
  const std::lock_guard lock(mutex_);
  if (!window.mapped()) throw StateError("the window is not mapped");
  if (window.ledger_ != ledger_) throw StateError("the window was mapped by another arena");
  if (park && try_park(window)) return;
  window.unmap();
  window.ledger_.reset();
  ledger_->drop_mapped(window.span_bytes());
}

bool Arena::try_park(Window& window) {
  const int64_t nbytes = window.span_bytes();
  if (debug_level() >= kPoisonLevel) {
    std::memset(window.address(), kPoison, static_cast<size_t>(nbytes));
  }
  // Moving whole huge pages needs the same alignment on both sides.
  const int64_t alignment = nbytes >= kHugePageBytes ? kHugePageBytes : kPageBytes;
  parked_.reserve(parked_.size() + 1);
  char* const slot = pages::reserve(nbytes, alignment);
  if (!window.unmap_to(slot, mover_)) {
    pages::release(slot, nbytes);
    return false;
  }
  parked_.push_back(Block{slot, nbytes});
  window.ledger_.reset();
  ledger_->park(nbytes);
  return true;
}

void Arena::trim(int64_t parked_limit_bytes) {
  process_.require("this Arena");
  const std::lock_guard lock(mutex_);
  drop_parked_above(std::max<int64_t>(parked_limit_bytes, 0));
}

void Arena::drop_parked_above(int64_t parked_limit_bytes) {
  while (parked_bytes() > parked_limit_bytes) drop_block(0);
}

void Arena::drop_block(size_t index) {
  const Block block = parked_[index];
  pages::release(block.address, block.nbytes);
  parked_.erase(parked_.begin() + static_cast<std::ptrdiff_t>(index));
  ledger_->drop_parked(block.nbytes);
}

}  // namespace gemini
