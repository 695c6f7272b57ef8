#include "chunk/flush.h"

#include <algorithm>
#include <optional>

namespace gemini {

namespace {

constexpr int64_t kMaxOutgoing = 4;  // enough to keep a link busy between two operators

int64_t num_outgoing(const Residency& chunks) {
  return std::ranges::count_if(
      chunks.in_flight(), [&](ChunkId id) { return chunks[id].flight->from == Tier::kDevice; });
}

// The tier below with room for a copy, without releasing anything else.
std::optional<Tier> place_below(const Residency& chunks, const Chunk& chunk) {
  if (chunk.nbytes <= chunks.ledger().free_bytes(Tier::kHost)) return Tier::kHost;
  if (chunk.holds(Tier::kDisk) || chunk.nbytes <= chunks.ledger().free_bytes(Tier::kDisk)) {
    return Tier::kDisk;
  }
  return std::nullopt;
}

}  // namespace

void FlushQueue::add(ChunkId chunk) {
  const auto index = static_cast<size_t>(chunk);
  if (queued_.size() <= index) queued_.resize(index + 1, false);
  if (queued_[index]) return;
  queued_[index] = true;
  chunks_.push_back(chunk);
}

void FlushQueue::clear() {
  for (const ChunkId id : chunks_) queued_[static_cast<size_t>(id)] = false;
  chunks_.clear();
}

void FlushQueue::start(Residency& chunks, const Schedule& schedule, int64_t moment,
                       Actions& actions) {
  int64_t slots = kMaxOutgoing - num_outgoing(chunks);
  std::erase_if(chunks_, [&](ChunkId id) {
    const Chunk& chunk = chunks[id];
    const bool wanted = chunk.dirty() && (schedule.next(id, moment).flags & kFlush) != 0;
    if (wanted && (chunk.pinned_on(Tier::kDevice) || chunk.flight.has_value() || slots <= 0))
      return false;
    if (wanted) {
      const std::optional<Tier> below = place_below(chunks, chunk);
      if (!below.has_value()) return false;
      actions.push_back(chunks.flush(id, *below));
      --slots;
    }
    queued_[static_cast<size_t>(id)] = false;
    return true;
  });
}

}  // namespace gemini
