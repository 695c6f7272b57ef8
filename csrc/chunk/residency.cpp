#include "chunk/residency.h"

#include <algorithm>
#include <string>

#include "common/error.h"

namespace gemini {

namespace {

// Removes an element of an unordered list.
void remove(std::vector<ChunkId>& chunks, ChunkId chunk) {
  *std::ranges::find(chunks, chunk) = chunks.back();
  chunks.pop_back();
}

}  // namespace

class Residency::Tally {
 public:
  Tally(Residency& owner, ChunkId id)
      : owner_(owner), id_(id), chunk_(owner.mut(id)), was_resident_(chunk_.resident()) {
    owner_.num_absent_ -= chunk_.absent() ? 1 : 0;
  }
  Tally(const Tally&) = delete;
  Tally& operator=(const Tally&) = delete;
  ~Tally() {
    owner_.num_absent_ += chunk_.absent() ? 1 : 0;
    if (was_resident_ && !chunk_.resident()) remove(owner_.resident_, id_);
    if (!was_resident_ && chunk_.resident()) owner_.resident_.push_back(id_);
  }

 private:
  Residency& owner_;
  ChunkId id_;
  const Chunk& chunk_;
  bool was_resident_;
};

void Residency::pin(ChunkId id, Tier tier) {
  Chunk& chunk = mut(id);
  if (chunk.pins[index(tier)]++ > 0) return;
  Pinned& pinned = pinned_[index(tier)];
  pinned.chunks.push_back(id);
  pinned.nbytes += chunk.nbytes;
}

void Residency::unpin(ChunkId id, Tier tier) {
  Chunk& chunk = mut(id);
  if (--chunk.pins[index(tier)] > 0) return;
  Pinned& pinned = pinned_[index(tier)];
  remove(pinned.chunks, id);
  pinned.nbytes -= chunk.nbytes;
}

Residency::Residency(const Residency& other)
    : ledger_(other.ledger_),
      in_flight_(other.in_flight_),
      pinned_(other.pinned_),
      resident_(other.resident_),
      num_absent_(other.num_absent_),
      last_id_(other.last_id_),
      clock_(other.clock_) {
  chunks_.reserve(other.chunks_.size());
  for (const Chunk& chunk : other.chunks_) {
    Chunk& copy = chunks_.emplace_back();
    copy.nbytes = chunk.nbytes;
    copy.valid = chunk.valid;
    copy.flight = chunk.flight;
    copy.pins = chunk.pins;
    copy.num_in_use = chunk.num_in_use;
    copy.last_use = chunk.last_use;
    for (size_t t = 0; t < kNumTiers; ++t) copy.held[t] = chunk.held[t].in_copy(ledger_);
  }
}

ChunkId Residency::add(int64_t nbytes) {
  if (nbytes <= 0) {
    throw StateError("a chunk needs a positive size, not " + std::to_string(nbytes));
  }
  chunks_.emplace_back().nbytes = nbytes;
  // Changes of these lists must not fail: reserve now.
  resident_.reserve(chunks_.capacity());
  for (Pinned& pinned : pinned_) pinned.chunks.reserve(chunks_.capacity());
  return size() - 1;
}

Action Residency::allocate(ChunkId id, Tier tier) {
  Chunk& chunk = mut(id);
  const Tally tally(*this, id);
  held(chunk, tier) = ledger_.reserve(tier, chunk.nbytes);
  chunk.valid.insert(tier);
  return {0, ActionKind::kAllocate, id, tier, tier, chunk.nbytes};
}

Action Residency::start(ChunkId id, ActionKind kind, Tier from, Tier to) {
  Chunk& chunk = mut(id);
  const Tally tally(*this, id);
  const bool new_bytes = !chunk.holds(to);
  in_flight_.reserve(in_flight_.size() + 1);
  if (new_bytes) held(chunk, to) = ledger_.reserve(to, chunk.nbytes);
  chunk.flight = Flight{++last_id_, from, to, new_bytes && to == Tier::kDisk};
  in_flight_.push_back(id);
  return {last_id_, kind, id, from, to, chunk.nbytes};
}

Action Residency::flush(ChunkId id, Tier to) {
  const ActionKind kind = to == Tier::kHost ? ActionKind::kEvict : ActionKind::kSpill;
  const Action action = start(id, kind, Tier::kDevice, to);
  mut(id).flight->flush = true;
  return action;
}

Action Residency::drop(ChunkId id, Tier tier) {
  Chunk& chunk = mut(id);
  const Tally tally(*this, id);
  const bool had_content = chunk.valid.has(tier);
  held(chunk, tier).release();
  chunk.valid.erase(tier);
  return {0, ActionKind::kDrop, id, tier, tier, chunk.nbytes, had_content};
}

void Residency::undo(Actions& actions, size_t keep) {
  while (actions.size() > keep) {
    const Action action = actions.back();
    actions.pop_back();
    if (action.id != 0) {
      abort(action.id);
      continue;
    }
    Chunk& chunk = mut(action.chunk);
    const Tally tally(*this, action.chunk);
    held(chunk, action.from) = ledger_.reserve(action.from, chunk.nbytes);
    if (action.had_content) chunk.valid.insert(action.from);
  }
}

Completion Residency::complete(ActionId id) {
  const ChunkId owner = owner_of(id);
  Chunk& chunk = mut(owner);
  const Tally tally(*this, owner);
  const Flight flight = land(owner);
  if (flight.doomed) return bury(chunk, flight);
  if (!flight.outgoing()) {
    chunk.valid.insert(flight.to);
    return {};
  }
  if (flight.stale) {
    // A DISK extent stays with its chunk: the next spill writes to the same place.
    if (flight.to == Tier::kDisk) return {};
    held(chunk, flight.to).release();
    return {.destination_freed = true};
  }
  chunk.valid.insert(flight.to);
  const bool recalled = flight.from == Tier::kDevice && chunk.pinned_on(Tier::kDevice);
  if (recalled || flight.flush) return {};
  chunk.valid.erase(flight.from);
  held(chunk, flight.from).release();
  return {.source_freed = true};
}

Completion Residency::abort(ActionId id) {
  const ChunkId owner = owner_of(id);
  Chunk& chunk = mut(owner);
  const Tally tally(*this, owner);
  const Flight flight = land(owner);
  if (flight.doomed) return bury(chunk, flight);
  const bool keeps_extent = flight.to == Tier::kDisk && !flight.new_extent;
  if (keeps_extent) return {};
  held(chunk, flight.to).release();
  return {.destination_freed = true};
}

void Residency::mark_dirty(ChunkId id, Tier tier, Actions& actions) {
  const Tier other = tier == Tier::kDevice ? Tier::kHost : Tier::kDevice;
  if (mut(id).valid.has(other)) actions.push_back(drop(id, other));
  Chunk& chunk = mut(id);
  chunk.valid.erase(Tier::kDisk);
  if (chunk.flight.has_value()) chunk.flight->stale = true;
}

void Residency::discard(ChunkId id, Actions& actions) {
  Chunk& chunk = mut(id);
  const auto keeps = [&](Tier tier) { return chunk.flight && chunk.flight->touches(tier); };
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    if (chunk.valid.has(tier) && !keeps(tier)) actions.push_back(drop(id, tier));
  }
  const Tally tally(*this, id);
  if (!keeps(Tier::kDisk)) held(chunk, Tier::kDisk).release();
  chunk.valid.clear();
  if (chunk.flight.has_value()) chunk.flight->doomed = true;
}

int32_t Residency::num_incoming() const {
  return static_cast<int32_t>(std::ranges::count_if(
      in_flight_, [&](ChunkId id) { return (*this)[id].flight->to == Tier::kDevice; }));
}

int64_t Residency::coming_free() const {
  int64_t nbytes = 0;
  for (const ChunkId id : in_flight_) {
    const Chunk& chunk = (*this)[id];
    const Flight& flight = *chunk.flight;
    const bool leaves = flight.doomed
                            ? flight.touches(Tier::kDevice)
                            : flight.from == Tier::kDevice && !flight.stale && !flight.flush;
    if (leaves && (flight.doomed || !chunk.pinned_on(Tier::kDevice))) nbytes += chunk.nbytes;
  }
  return nbytes;
}

bool Residency::any_leaving() const {
  return std::ranges::any_of(in_flight_, [&](ChunkId id) {
    const Flight& flight = *(*this)[id].flight;
    return flight.doomed || flight.from == Tier::kDevice;
  });
}

ChunkId Residency::owner_of(ActionId id) const {
  const auto found = std::ranges::find_if(
      in_flight_, [&](ChunkId chunk) { return (*this)[chunk].flight->id == id; });
  if (found == in_flight_.end()) {
    throw StateError("no transfer with action id " + std::to_string(id) + " is in flight");
  }
  return *found;
}

Flight Residency::land(ChunkId id) {
  const Flight flight = *mut(id).flight;
  mut(id).flight.reset();
  std::erase(in_flight_, id);
  return flight;
}

Completion Residency::bury(Chunk& chunk, const Flight& flight) {
  held(chunk, flight.from).release();
  held(chunk, flight.to).release();
  return {true, true, true};
}

}  // namespace gemini
