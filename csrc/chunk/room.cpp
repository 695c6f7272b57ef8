#include "chunk/room.h"

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>
#include <variant>

#include "common/error.h"
#include "common/size_text.h"

namespace gemini {

namespace {

// Keeps the chunk with the highest score, among equals the lowest id.
class Best {
 public:
  void offer(ChunkId chunk, std::optional<int64_t> score) {
    if (!score.has_value()) return;
    const bool wins = *score > score_ || (*score == score_ && chunk < chunk_);
    if (chunk_.has_value() && !wins) return;
    chunk_ = chunk;
    score_ = *score;
  }
  [[nodiscard]] std::optional<ChunkId> chunk() const { return chunk_; }

 private:
  std::optional<ChunkId> chunk_;
  int64_t score_ = 0;
};

std::optional<int64_t> score_duplicate(const Residency& chunks, const Policy& policy, ChunkId id) {
  return score(policy, {.chunk = id, .clean = true, .last_use = chunks[id].last_use});
}

// HOST bytes that are free or could be, by dropping duplicates that the policy allows to drop.
int64_t host_room(const Residency& chunks, const Policy& policy) {
  int64_t room = chunks.ledger().free_bytes(Tier::kHost);
  for (ChunkId id = 0; id < chunks.size(); ++id) {
    if (!chunks[id].has_host_duplicate()) continue;
    if (score_duplicate(chunks, policy, id).has_value()) room += chunks[id].nbytes;
  }
  return room;
}

bool fits_on_disk(const Residency& chunks, const Chunk& chunk) {
  return chunk.holds(Tier::kDisk) || chunk.nbytes <= chunks.ledger().free_bytes(Tier::kDisk);
}

// DISK bytes that are free or could be.
int64_t disk_room(const Residency& chunks) {
  int64_t room = chunks.ledger().free_bytes(Tier::kDisk);
  for (ChunkId id = 0; id < chunks.size(); ++id) {
    if (chunks[id].has_spare_extent()) room += chunks[id].nbytes;
  }
  return room;
}

// The DISK extent to release first: one with void content; then that of a chunk that stays below
// DEVICE; then that of the chunk that leaves DEVICE last, which is likely written by then.
std::optional<ChunkId> next_spare_extent(const Residency& chunks, const Policy& policy) {
  constexpr int64_t kNeededFirst = std::numeric_limits<int64_t>::min();
  std::optional<std::tuple<int, int64_t, ChunkId>> best;
  for (ChunkId id = 0; id < chunks.size(); ++id) {
    const Chunk& chunk = chunks[id];
    if (!chunk.has_spare_extent()) continue;
    const int cost = !chunk.valid.has(Tier::kDisk) ? 0 : chunk.resident() ? 2 : 1;
    const std::tuple offered(cost, score_duplicate(chunks, policy, id).value_or(kNeededFirst), id);
    if (!best.has_value() || offered < *best) best = offered;
  }
  return best.has_value() ? std::optional(std::get<2>(*best)) : std::nullopt;
}

template <typename Chosen>
std::optional<ChunkId> next_victim_of(const Residency& chunks, const Policy& policy,
                                      const Chosen& chosen) {
  Best best;
  const int64_t free_on_host = chunks.ledger().free_bytes(Tier::kHost);
  std::optional<int64_t> on_host;  // computed for the first candidate that needs more than
                                   // free_on_host
  std::optional<int64_t> on_disk;  // computed for the first candidate that needs it
  for (const ChunkId id : chunks.resident()) {
    const Chunk& chunk = chunks[id];
    const bool flushing = chunk.flushing() && !chunk.flight->stale && !chunk.flight->doomed;
    const bool used = chunk.pinned_on(Tier::kDevice) || chunk.pinned_on(Tier::kHost);
    if (used || (chunk.flight.has_value() && !flushing)) continue;
    const bool has_place = !chunk.dirty() || flushing || chunk.nbytes <= free_on_host;
    if (!has_place && !fits_on_disk(chunks, chunk)) {
      if (!on_host.has_value()) on_host = host_room(chunks, policy);
      if (!on_disk.has_value()) on_disk = disk_room(chunks);
      if (chunk.nbytes > *on_host && chunk.nbytes > *on_disk) continue;
    }
    best.offer(id, chosen.score({id, flushing || !chunk.dirty(), chunk.last_use}));
  }
  return best.chunk();
}

OutOfBudget operator_too_large(const Residency& chunks, std::span<const ChunkId> wanted) {
  int64_t largest = 0;
  for (const ChunkId id : wanted) largest = std::max(largest, chunks[id].nbytes);
  const TierLedger& ledger = chunks.ledger();
  const int64_t need = chunks.pinned_bytes(Tier::kDevice);
  return OutOfBudget("this operator needs " + format_bytes(need) +
                     " on DEVICE at once but the budget is " +
                     format_bytes(ledger.budget(Tier::kDevice)) +
                     "; raise device_bytes to at least " + format_enough(need) +
                     ", or use smaller chunks (largest chunk here: " + format_bytes(largest) +
                     "; " + usage_text(ledger) + ")");
}

OutOfBudget nowhere_to_go(const Residency& chunks, int64_t need) {
  const TierLedger& ledger = chunks.ledger();
  const auto how_full = [&](Tier tier) {
    return std::string(name(tier)) + (ledger.budget(tier) == 0 ? " is absent" : " is full");
  };
  return OutOfBudget("this operator needs " + format_bytes(need) + " more on DEVICE (" +
                     format_bytes(chunks.pinned_bytes(Tier::kDevice)) +
                     " at once) but other chunks cannot leave it: " + how_full(Tier::kHost) + ", " +
                     how_full(Tier::kDisk) +
                     "; raise device_bytes or host_bytes, or set disk_dir and disk_bytes (" +
                     usage_text(ledger) + ")");
}

// Starts every wanted chunk that fits now. The soft limit may be exceeded only if nothing else can
// make room; the budget never.
void start_wanted(Residency& chunks, const Policy& policy, std::span<const ChunkId> wanted,
                  int64_t limit, Actions& actions) {
  const TierLedger& ledger = chunks.ledger();
  const bool last_resort = !chunks.any_leaving() && !next_victim(chunks, policy).has_value();
  const int64_t bound = last_resort ? ledger.budget(Tier::kDevice) : limit;
  for (const ChunkId id : wanted) {
    const Chunk& chunk = chunks[id];
    if (chunk.resident() || chunk.flight.has_value()) continue;
    if (ledger.usage(Tier::kDevice) + chunk.nbytes > bound) continue;
    actions.push_back(chunk.has_content() ? start_incoming(chunks, id) : chunks.allocate(id));
  }
}

}  // namespace

std::optional<ChunkId> next_host_duplicate(const Residency& chunks, const Policy& policy) {
  Best best;
  for (ChunkId id = 0; id < chunks.size(); ++id) {
    if (chunks[id].has_host_duplicate()) best.offer(id, score_duplicate(chunks, policy, id));
  }
  return best.chunk();
}

std::string usage_text(const TierLedger& ledger) {
  std::string text = "in use:";
  for (const Tier tier : kTiers) {
    text += std::string(" ") + name(tier) + " " + format_bytes(ledger.usage(tier)) + " of " +
            format_bytes(ledger.budget(tier)) + (tier == kTiers.back() ? "" : ",");
  }
  return text;
}

std::optional<ChunkId> next_victim(const Residency& chunks, const Policy& policy) {
  // Runs at every decision for every resident chunk: dispatch on the policy only once.
  return std::visit([&](const auto& chosen) { return next_victim_of(chunks, policy, chosen); },
                    policy);
}

void remove_from_device(Residency& chunks, const Policy& policy, ChunkId victim, Actions& actions) {
  const Chunk& chunk = chunks[victim];
  if (chunk.flushing()) return chunks.give_up_after_flush(victim);
  if (!chunk.dirty()) {
    actions.push_back(chunks.drop(victim, Tier::kDevice));
    return;
  }
  const bool fits_on_host = chunk.nbytes <= chunks.ledger().free_bytes(Tier::kHost) ||
                            chunk.nbytes <= host_room(chunks, policy);
  if (!fits_on_host) {
    while (!fits_on_disk(chunks, chunk)) {
      actions.push_back(chunks.drop(next_spare_extent(chunks, policy).value(), Tier::kDisk));
    }
    actions.push_back(chunks.start(victim, ActionKind::kSpill, Tier::kDevice, Tier::kDisk));
    return;
  }
  while (chunk.nbytes > chunks.ledger().free_bytes(Tier::kHost)) {
    actions.push_back(chunks.drop(next_host_duplicate(chunks, policy).value(), Tier::kHost));
  }
  actions.push_back(chunks.start(victim, ActionKind::kEvict, Tier::kDevice, Tier::kHost));
}

void remove_ahead(Residency& chunks, const Policy& policy, std::span<const ChunkId> done,
                  int64_t bound, Actions& actions) {
  const TierLedger& ledger = chunks.ledger();
  for (const ChunkId id : done) {
    const Chunk& chunk = chunks[id];
    const bool used = chunk.pinned_on(Tier::kDevice) || chunk.pinned_on(Tier::kHost);
    if (used || !chunk.resident() || chunk.flight.has_value()) continue;
    const bool has_place = !chunk.dirty() || chunk.nbytes <= ledger.free_bytes(Tier::kHost) ||
                           fits_on_disk(chunks, chunk);
    if (!has_place || ledger.usage(Tier::kDevice) - chunks.coming_free() <= bound) continue;
    remove_from_device(chunks, policy, id, actions);
  }
}

Action start_incoming(Residency& chunks, ChunkId chunk) {
  if (chunks[chunk].valid.has(Tier::kHost)) {
    return chunks.start(chunk, ActionKind::kFetch, Tier::kHost, Tier::kDevice);
  }
  return chunks.start(chunk, ActionKind::kLoad, Tier::kDisk, Tier::kDevice);
}

int64_t missing_bytes(const Residency& chunks, std::span<const ChunkId> wanted) {
  int64_t nbytes = 0;
  for (const ChunkId id : wanted) {
    const Chunk& chunk = chunks[id];
    if (!chunk.resident() && !chunk.arriving()) nbytes += chunk.nbytes;
  }
  return nbytes;
}

Actions admit(Residency& chunks, const Policy& policy, std::span<const ChunkId> wanted,
              int64_t limit) {
  const int64_t need = missing_bytes(chunks, wanted);
  TierLedger& ledger = chunks.ledger();
  const int64_t budget = ledger.budget(Tier::kDevice);
  if (need > 0 && chunks.pinned_bytes(Tier::kDevice) > budget)
    throw operator_too_large(chunks, wanted);
  const bool may_wait = !chunks.in_flight().empty();
  const TierLedger::Bytes peaks = ledger.peaks();
  const auto expected = [&] { return ledger.usage(Tier::kDevice) + need - chunks.coming_free(); };
  Actions actions;
  while (expected() > limit) {
    const std::optional<ChunkId> victim = next_victim(chunks, policy);
    if (!victim.has_value()) break;
    remove_from_device(chunks, policy, *victim, actions);
  }
  if (expected() > budget && !may_wait) {
    chunks.undo(actions, 0);
    ledger.set_peaks(peaks);
    throw nowhere_to_go(chunks, need);
  }
  start_wanted(chunks, policy, wanted, limit, actions);
  return actions;
}

}  // namespace gemini
