// Make room on DEVICE: which copies to release, and which transfers can start now.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "chunk/eviction.h"
#include "chunk/residency.h"
#include "chunk/state.h"

namespace gemini {

// The chunk that the policy evicts first among those that can leave DEVICE: resident, pinned on no
// tier, not in flight, and with another valid copy or a place to go; or being flushed. nullopt:
// none can leave.
[[nodiscard]] std::optional<ChunkId> next_victim(const Residency& chunks, const Policy& policy);

// Takes a chunk that next_victim() returned off DEVICE: by a DROP if another copy is valid, else by
// an EVICT (dropping clean HOST duplicates if HOST is full), else by a SPILL (dropping spare DISK
// extents if DISK is full). Appends the actions; a flush in flight needs none.
void remove_from_device(Residency& chunks, const Policy& policy, ChunkId victim, Actions& actions);

// Takes those chunks of `done`, which will not be used soon, off DEVICE that can leave at once, as
// long as more than `bound` bytes stay there. Appends the actions.
void remove_ahead(Residency& chunks, const Policy& policy, std::span<const ChunkId> done,
                  int64_t bound, Actions& actions);

// The HOST copy that the policy drops first among those with the same bytes on another tier.
// nullopt: there is none, or none that may go.
[[nodiscard]] std::optional<ChunkId> next_host_duplicate(const Residency& chunks,
                                                         const Policy& policy);

// The fill of the tiers, for messages.
[[nodiscard]] std::string usage_text(const TierLedger& ledger);

// Brings a chunk with content, not in flight, to DEVICE: from HOST if possible, else from DISK.
[[nodiscard]] Action start_incoming(Residency& chunks, ChunkId chunk);

// Bytes that `wanted` (each chunk once) still needs on DEVICE and that no transfer has reserved.
[[nodiscard]] int64_t missing_bytes(const Residency& chunks, std::span<const ChunkId> wanted);

// Returns the actions that can start now to make `wanted` (pinned, each chunk once) resident and to
// bring DEVICE usage to `limit`, or as near as possible. Throws OutOfBudget, with nothing changed,
// if waiting cannot help: the pinned chunks exceed the budget, or the others have nowhere to go.
[[nodiscard]] Actions admit(Residency& chunks, const Policy& policy,
                            std::span<const ChunkId> wanted, int64_t limit);

}  // namespace gemini
