// Residency: the copies of every chunk and the transfers in flight. Contains the facts and their
// legal changes only; room.cpp and prefetch.cpp decide what to change.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "chunk/ledger.h"
#include "chunk/state.h"

namespace gemini {

// A transfer in flight. It keeps its source's bytes and has reserved its destination's.
struct Flight {
  ActionId id = 0;
  Tier from = Tier::kDevice;
  Tier to = Tier::kDevice;
  bool new_extent = false;  // the DISK extent was reserved for this transfer
  bool stale = false;       // the source was written meanwhile: the copy is void
  bool flush = false;       // the source stays valid: the chunk becomes clean
  bool doomed = false;      // the chunk was freed meanwhile: both ends are released at the end

  [[nodiscard]] bool outgoing() const { return from < to; }
  [[nodiscard]] bool touches(Tier tier) const { return from == tier || to == tier; }
};

struct Chunk {
  int64_t nbytes = 0;
  TierSet valid;                            // empty: no content
  std::array<Reservation, kNumTiers> held;  // bytes of valid copies, destinations, DISK extents
  std::optional<Flight> flight;
  std::array<int32_t, kNumTiers> pins{};  // on DEVICE or on HOST, never on both
  int32_t num_in_use = 0;                 // tensors that are not FREE
  uint64_t last_use = 0;

  [[nodiscard]] bool resident() const { return valid.has(Tier::kDevice); }
  [[nodiscard]] bool dirty() const { return valid.is_only(Tier::kDevice); }
  [[nodiscard]] bool has_content() const { return !valid.empty(); }
  [[nodiscard]] bool holds(Tier tier) const { return bool{held[index(tier)]}; }
  [[nodiscard]] bool pinned_on(Tier tier) const { return pins[index(tier)] > 0; }
  [[nodiscard]] bool arriving() const {
    return flight.has_value() && !flight->doomed && flight->to == Tier::kDevice;
  }
  // Is being copied to a lower tier, to be clean afterwards.
  [[nodiscard]] bool flushing() const { return flight.has_value() && flight->flush; }
  // Has content that no transfer is bringing to DEVICE.
  [[nodiscard]] bool absent() const { return has_content() && !resident() && !flight.has_value(); }
  // Has a HOST copy that may be dropped, because another tier has the same bytes.
  [[nodiscard]] bool has_host_duplicate() const {
    return valid.has(Tier::kHost) && !valid.is_only(Tier::kHost) && !flight.has_value() &&
           !pinned_on(Tier::kHost);
  }
  // Has a DISK extent that may be released: its content is void, or another tier has it too, and no
  // transfer uses it.
  [[nodiscard]] bool has_spare_extent() const {
    const bool in_use = flight.has_value() && (flight->doomed || flight->touches(Tier::kDisk));
    return holds(Tier::kDisk) && !valid.is_only(Tier::kDisk) && !in_use;
  }
  // May be read and written by an operator that has pinned it there; on HOST not during a copy.
  [[nodiscard]] bool usable_on(Tier tier) const {
    return valid.has(tier) && (tier == Tier::kDevice || !flight.has_value());
  }
};

class Residency {
 public:
  explicit Residency(const TierLedger::Bytes& budgets) : ledger_(budgets) {}
  Residency(const Residency& other);
  Residency& operator=(const Residency&) = delete;
  ~Residency() = default;

  ChunkId add(int64_t nbytes);
  [[nodiscard]] int32_t size() const { return static_cast<int32_t>(chunks_.size()); }
  [[nodiscard]] const Chunk& operator[](ChunkId chunk) const {
    return chunks_[static_cast<size_t>(chunk)];
  }

  // For use on `tier`.
  void pin(ChunkId chunk, Tier tier);
  void unpin(ChunkId chunk, Tier tier);
  void touch(ChunkId chunk) { mut(chunk).last_use = ++clock_; }
  void count_in_use(ChunkId chunk, int32_t change) { mut(chunk).num_in_use += change; }

  // Each returns the action for the executor. They throw OutOfBudget if the bytes are not free. The
  // caller must know that the change is legal.
  Action allocate(ChunkId chunk, Tier tier = Tier::kDevice);
  Action start(ChunkId chunk, ActionKind kind, Tier from, Tier to);
  Action drop(ChunkId chunk, Tier tier);
  // Copies a dirty chunk from DEVICE to HOST or DISK and keeps the copy on DEVICE.
  Action flush(ChunkId chunk, Tier to);
  // Turns a flush in flight into an evict or a spill: the copy on DEVICE is released at its end.
  void give_up_after_flush(ChunkId chunk) { mut(chunk).flight->flush = false; }
  // Undoes the drops and starts from index `keep` on, newest first, and removes them.
  void undo(Actions& actions, size_t keep);

  // Ends a transfer. Both throw StateError for an id that is not in flight.
  Completion complete(ActionId id);
  Completion abort(ActionId id);

  // `tier`, DEVICE or HOST, was written: it becomes the only valid copy. Appends the DROPs. For
  // HOST there must be no transfer in flight.
  void mark_dirty(ChunkId chunk, Tier tier, Actions& actions);
  // Discards the content; a transfer in flight becomes doomed. Appends the DROPs.
  void discard(ChunkId chunk, Actions& actions);

  [[nodiscard]] TierLedger& ledger() { return ledger_; }
  [[nodiscard]] const TierLedger& ledger() const { return ledger_; }
  [[nodiscard]] int64_t pinned_bytes(Tier tier) const { return pinned_[index(tier)].nbytes; }
  [[nodiscard]] int32_t num_absent() const { return num_absent_; }
  // Unordered.
  [[nodiscard]] std::span<const ChunkId> pinned(Tier tier) const {
    return pinned_[index(tier)].chunks;
  }
  [[nodiscard]] std::span<const ChunkId> resident() const { return resident_; }
  [[nodiscard]] std::span<const ChunkId> in_flight() const { return in_flight_; }
  [[nodiscard]] int32_t num_incoming() const;
  // DEVICE bytes that transfers in flight will release.
  [[nodiscard]] int64_t coming_free() const;
  [[nodiscard]] bool any_leaving() const;

  // Recomputes every total from the chunks; throws StateError for the first one that differs.
  void check_invariants() const;

 private:
  class Tally;  // keeps num_absent_ and resident_ consistent during one change
  struct Pinned {
    std::vector<ChunkId> chunks;
    int64_t nbytes = 0;
  };

  Chunk& mut(ChunkId chunk) { return chunks_[static_cast<size_t>(chunk)]; }
  static Reservation& held(Chunk& chunk, Tier tier) { return chunk.held[index(tier)]; }
  [[nodiscard]] ChunkId owner_of(ActionId id) const;
  Flight land(ChunkId chunk);
  static Completion bury(Chunk& chunk, const Flight& flight);

  TierLedger ledger_;
  std::vector<Chunk> chunks_;  // destroyed before ledger_: reservations point to it
  std::vector<ChunkId> in_flight_;
  std::array<Pinned, kNumTiers> pinned_;
  std::vector<ChunkId> resident_;
  int32_t num_absent_ = 0;
  ActionId last_id_ = 0;
  uint64_t clock_ = 0;
};

}  // namespace gemini
