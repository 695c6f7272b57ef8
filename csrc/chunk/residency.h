// Where the copies of every chunk are, and which transfers are under way. Facts and their legal
// changes only: what to change is decided in room.cpp and prefetch.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "chunk/ledger.h"
#include "chunk/state.h"

namespace gemini {

// A transfer under way. It keeps its source's bytes and has reserved its destination's.
struct Flight {
  ActionId id = 0;
  Tier from = Tier::kDevice;
  Tier to = Tier::kDevice;
  bool new_extent = false;  // the DISK extent was reserved for this transfer
  bool stale = false;       // the source was written meanwhile: what arrives is void
  bool flush = false;       // the source stays valid: the chunk becomes clean
  bool doomed = false;      // the chunk was freed meanwhile: both ends are given back at the end

  [[nodiscard]] bool outgoing() const { return from < to; }
  [[nodiscard]] bool touches(Tier tier) const { return from == tier || to == tier; }
};

struct Chunk {
  int64_t nbytes = 0;
  TierSet valid;                            // empty: no content
  std::array<Reservation, kNumTiers> held;  // bytes of valid copies, destinations, DISK extents
  std::optional<Flight> flight;
  std::array<int32_t, kNumTiers> pins{};  // on DEVICE or on HOST, never both
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
  // Is being copied below, to be clean afterwards.
  [[nodiscard]] bool flushing() const { return flight.has_value() && flight->flush; }
  // Has content that no transfer is bringing to DEVICE.
  [[nodiscard]] bool absent() const { return has_content() && !resident() && !flight.has_value(); }
  // A HOST copy that may be dropped, because another tier has the same bytes.
  [[nodiscard]] bool has_host_duplicate() const {
    return valid.has(Tier::kHost) && !valid.is_only(Tier::kHost) && !flight.has_value() &&
           !pinned_on(Tier::kHost);
  }
  // A place on DISK that may be given up: what it holds is void, or another tier has it too, and no
  // transfer reads or writes it.
  [[nodiscard]] bool has_spare_extent() const {
    const bool in_use = flight.has_value() && (flight->doomed || flight->touches(Tier::kDisk));
    return holds(Tier::kDisk) && !valid.is_only(Tier::kDisk) && !in_use;
  }
  // May be read and written by those that have pinned it there; on HOST not while it is copied.
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

  // Each returns the action the executor has to perform. They throw OutOfBudget where the bytes are
  // not free; whether the change makes sense is the caller's to know.
  Action allocate(ChunkId chunk, Tier tier = Tier::kDevice);
  Action start(ChunkId chunk, ActionKind kind, Tier from, Tier to);
  Action drop(ChunkId chunk, Tier tier);
  // Copies a dirty chunk from DEVICE to HOST or DISK without giving up the copy on DEVICE.
  Action flush(ChunkId chunk, Tier to);
  // Lets a flush under way give up the copy on DEVICE in the end: it has become an evict or a
  // spill.
  void give_up_after_flush(ChunkId chunk) { mut(chunk).flight->flush = false; }
  // Takes back, newest first, the drops and starts from index `keep` on, and removes them.
  void undo(Actions& actions, size_t keep);

  // The end of a transfer. Both throw StateError for an id that is not in flight.
  Completion complete(ActionId id);
  Completion abort(ActionId id);

  // `tier`, DEVICE or HOST, was written: it becomes the only valid copy. Appends the DROPs. Of HOST
  // with no transfer under way.
  void mark_dirty(ChunkId chunk, Tier tier, Actions& actions);
  // The content is gone; a transfer under way becomes doomed. Appends the DROPs.
  void discard(ChunkId chunk, Actions& actions);

  [[nodiscard]] TierLedger& ledger() { return ledger_; }
  [[nodiscard]] const TierLedger& ledger() const { return ledger_; }
  [[nodiscard]] int64_t pinned_bytes(Tier tier) const { return pinned_[index(tier)].nbytes; }
  [[nodiscard]] int32_t num_absent() const { return num_absent_; }
  // In no order.
  [[nodiscard]] std::span<const ChunkId> pinned(Tier tier) const {
    return pinned_[index(tier)].chunks;
  }
  [[nodiscard]] std::span<const ChunkId> resident() const { return resident_; }
  [[nodiscard]] std::span<const ChunkId> in_flight() const { return in_flight_; }
  [[nodiscard]] int32_t num_incoming() const;
  // DEVICE bytes that transfers under way will give back.
  [[nodiscard]] int64_t coming_free() const;
  [[nodiscard]] bool any_leaving() const;

  // Recomputes every total from the chunks; throws StateError for the first one that differs.
  void check_invariants() const;

 private:
  class Tally;  // keeps num_absent_ and resident_ true across one change
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
