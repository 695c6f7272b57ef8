// Residency::check_invariants: recomputes every total from the chunks alone.
#include <algorithm>
#include <array>
#include <string>

#include "chunk/residency.h"
#include "common/error.h"

namespace gemini {

namespace {

void require(bool holds, ChunkId chunk, const char* law) {
  if (!holds) throw StateError("chunk " + std::to_string(chunk) + ": " + law);
}

void check_chunk(ChunkId id, const Chunk& chunk) {
  const bool doomed = chunk.flight.has_value() && chunk.flight->doomed;
  for (const Tier tier : kTiers) {
    const bool in_use = chunk.flight.has_value() && chunk.flight->touches(tier);
    require(!chunk.valid.has(tier) || chunk.holds(tier), id, "a valid copy has no bytes");
    require(!in_use || chunk.holds(tier), id, "an end of a transfer has no bytes");
    const bool justified = chunk.valid.has(tier) || in_use || tier == Tier::kDisk;
    require(!chunk.holds(tier) || justified, id, "bytes are held for nothing");
  }
  for (const int32_t pins : chunk.pins) require(pins >= 0, id, "pins are negative");
  const auto num_pinned = std::ranges::count_if(chunk.pins, [](int32_t pins) { return pins > 0; });
  require(num_pinned <= 1, id, "it is pinned on two tiers");
  require(!chunk.pinned_on(Tier::kDisk), id, "it is pinned on DISK");
  require(chunk.num_in_use >= 0, id, "the number of tensors in use is negative");
  require(num_pinned == 0 || chunk.num_in_use > 0, id, "it is pinned but all tensors are FREE");
  require(!chunk.has_content() || chunk.num_in_use > 0, id, "content without a tensor in use");
  require(chunk.has_content() || doomed || !chunk.holds(Tier::kDisk), id,
          "no content but a DISK extent");
  if (!chunk.flight.has_value() || doomed) return;
  require(chunk.valid.has(chunk.flight->from), id, "the source of a transfer is not valid");
  require(!chunk.valid.has(chunk.flight->to), id, "the destination of a transfer is valid already");
  require(!chunk.flight->stale || chunk.flight->from == Tier::kDevice, id,
          "an incoming transfer is stale");
}

}  // namespace

void Residency::check_invariants() const {
  TierLedger::Bytes usage{};
  std::array<Pinned, kNumTiers> pinned;
  int32_t num_absent = 0;
  size_t num_resident = 0;
  size_t num_flights = 0;
  for (ChunkId id = 0; id < size(); ++id) {
    const Chunk& chunk = (*this)[id];
    check_chunk(id, chunk);
    for (const Tier tier : kTiers) {
      if (chunk.holds(tier)) usage[index(tier)] += chunk.nbytes;
      if (!chunk.pinned_on(tier)) continue;
      pinned[index(tier)].chunks.push_back(id);
      pinned[index(tier)].nbytes += chunk.nbytes;
    }
    num_absent += chunk.absent() ? 1 : 0;
    num_resident += chunk.resident() ? 1 : 0;
    num_flights += chunk.flight.has_value() ? 1 : 0;
  }
  for (const Tier tier : kTiers) {
    const int64_t counted = usage[index(tier)];
    if (counted != ledger_.usage(tier) || counted > ledger_.budget(tier) ||
        counted > ledger_.peak(tier)) {
      throw StateError(std::string(name(tier)) + " holds " + std::to_string(counted) +
                       " bytes, the ledger says " + std::to_string(ledger_.usage(tier)) + " of " +
                       std::to_string(ledger_.budget(tier)) + ", peak " +
                       std::to_string(ledger_.peak(tier)));
    }
    const Pinned& listed = pinned_[index(tier)];
    for (const ChunkId id : listed.chunks) {
      require((*this)[id].pinned_on(tier), id, "not pinned");
    }
    if (listed.chunks.size() != pinned[index(tier)].chunks.size() ||
        listed.nbytes != pinned[index(tier)].nbytes) {
      throw StateError(std::string("the list of chunks pinned on ") + name(tier) + " is wrong");
    }
  }
  for (const ChunkId id : in_flight_) require((*this)[id].flight.has_value(), id, "not in flight");
  for (const ChunkId id : resident_) require((*this)[id].resident(), id, "not on DEVICE");
  if (num_resident != resident_.size()) {
    throw StateError("the list of chunks on DEVICE is wrong");
  }
  if (num_absent != num_absent_ || num_flights != in_flight_.size()) {
    throw StateError("the totals of pinned bytes, absent chunks or transfers are wrong");
  }
}

}  // namespace gemini
