#include "gpu/pinned_arena.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "common/bytes.h"
#include "common/error.h"
#include "common/processors.h"
#include "common/size_text.h"
#include "transfer/pages.h"

namespace gemini {

namespace {

// In huge pages if possible: these are allocated, locked and traversed faster.
char* host_memory(int64_t nbytes) {
  char* memory = nullptr;
  try {
    memory = pages::reserve(nbytes, nbytes >= kHugePageBytes ? kHugePageBytes : kPageBytes);
    pages::commit_at(memory, nbytes);
    return memory;
  } catch (const Error& error) {
    if (memory != nullptr) pages::discard(memory, nbytes);
    throw OutOfBudget("the system cannot give " + format_bytes(nbytes) + " for HOST (" +
                      error.what() + "); lower host_bytes, or end other programs");
  }
}

}  // namespace

PinnedBlock::PinnedBlock(std::shared_ptr<GpuLanes> lanes, int64_t nbytes, bool pin)
    : lanes_(std::move(lanes)), nbytes_(nbytes), address_(host_memory(nbytes)) {
  // Pages are allocated on first touch, from the memory near the touching processor.
  const KeepsTo near(lanes_->driver().processors());
  if (pin) {
    try {
      lanes_->driver().pin(address_, nbytes);
      pinned_ = true;
      return;
    } catch (const Error&) {
      // Ordinary memory works too.
    }
  }
  if (near.restricts()) std::memset(address_, 0, static_cast<size_t>(nbytes));
}

PinnedBlock::~PinnedBlock() {
  try {
    lanes_->await(uses);
  } catch (const Error&) {
    // A GPU that has failed uses nothing any longer.
  }
  if (pinned_) lanes_->driver().unpin(address_);
  pages::discard(address_, nbytes_);
}

HostPlace::HostPlace(int64_t nbytes) : nbytes_(nbytes), span_bytes_(round_up(nbytes, kPageBytes)) {
  if (nbytes <= 0) throw StateError("a place needs a positive size, got " + std::to_string(nbytes));
}

char* HostPlace::address() const {
  if (!mapped()) throw StateError("the place is not mapped");
  return block_->address();
}

Uses& HostPlace::uses() const {
  if (!mapped()) throw StateError("the place is not mapped");
  return block_->uses;
}

PinnedArena::PinnedArena(std::shared_ptr<GpuLanes> lanes, int64_t capacity_bytes, bool pin)
    : lanes_(std::move(lanes)), capacity_bytes_(capacity_bytes), pin_(pin) {
  if (capacity_bytes < 0) {
    throw StateError("an arena's capacity cannot be negative, got " +
                     std::to_string(capacity_bytes));
  }
}

PinnedArena::~PinnedArena() {
  // A forked child has neither the GPU nor its threads: it must not release anything.
  if (process_.is_owner()) return;
  for (auto& block : parked_) (void)block.release();
}

void PinnedArena::map(HostPlace& place, Content content) {
  process_.require("this PinnedArena");
  if (place.mapped()) throw StateError("the place is mapped already");
  const int64_t nbytes = place.span_bytes();
  if (nbytes > capacity() - mapped_bytes_) {
    throw OutOfBudget("a place of " + format_bytes(nbytes) + " does not fit HOST: " +
                      format_bytes(mapped_bytes_) + " of " + format_bytes(capacity()) +
                      " are mapped; unmap other places, or raise host_bytes");
  }
  const auto found = std::find_if(parked_.begin(), parked_.end(),
                                  [&](const auto& block) { return block->nbytes() == nbytes; });
  if (found != parked_.end()) {
    place.block_ = std::move(*found);
    parked_.erase(found);
    parked_bytes_ -= nbytes;
  } else {
    while (parked_bytes_ > capacity() - mapped_bytes_ - nbytes) drop_oldest();
    place.block_ = std::make_unique<PinnedBlock>(lanes_, nbytes, pin_);
    if (pin_ && !place.block_->pinned()) unpinned_bytes_ += nbytes;
  }
  mapped_bytes_ += nbytes;
  peak_bytes_ = std::max(peak_bytes_, mapped_bytes_ + parked_bytes_);
  if (content == Content::kAny) return;
  await(place);
  std::memset(place.address(), 0, static_cast<size_t>(nbytes));
}

void PinnedArena::await(const HostPlace& place) const {
  process_.require("this PinnedArena");
  lanes_->await(place.uses());
}

void PinnedArena::unmap(HostPlace& place, Spare spare) {
  process_.require("this PinnedArena");
  if (!place.mapped()) throw StateError("the place is not mapped");
  parked_.push_back(std::move(place.block_));
  mapped_bytes_ -= place.span_bytes();
  parked_bytes_ += place.span_bytes();
  if (spare == Spare::kReturned) {
    std::rotate(parked_.begin(), std::prev(parked_.end()), parked_.end());
    drop_oldest();
  }
}

void PinnedArena::trim(int64_t parked_limit_bytes) {
  process_.require("this PinnedArena");
  while (parked_bytes_ > std::max<int64_t>(parked_limit_bytes, 0)) drop_oldest();
}

void PinnedArena::drop_oldest() {
  parked_bytes_ -= parked_.front()->nbytes();
  parked_.erase(parked_.begin());
}

}  // namespace gemini
