// Making room on DEVICE: which copies to give up, and what can start now.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "chunk/eviction.h"
#include "chunk/residency.h"
#include "chunk/state.h"

namespace gemini {

// The chunk the policy gives up first among those that can leave DEVICE: resident, not pinned (nor
// on HOST), not in flight, and with another valid copy or a place to go, or being flushed. nullopt:
// nothing can.
[[nodiscard]] std::optional<ChunkId> next_victim(const Residency& chunks, const Policy& policy);

// Takes a chunk that next_victim() named off DEVICE: by a DROP where another copy is valid, else by
// an EVICT (dropping clean HOST duplicates where HOST is full), else by a SPILL (dropping places on
// DISK whose content is void or elsewhere too, where DISK is full). Appends the actions; a flush
// under way needs none.
void remove_from_device(Residency& chunks, const Policy& policy, ChunkId victim, Actions& actions);

// Takes those of `done`, which nothing will use soon, off DEVICE that can leave it at once, as long
// as more than `bound` bytes stay there. Appends the actions.
void remove_ahead(Residency& chunks, const Policy& policy, std::span<const ChunkId> done,
                  int64_t bound, Actions& actions);

// The HOST copy the policy gives up first among those whose bytes another tier has too. nullopt:
// there is none, or none that may go.
[[nodiscard]] std::optional<ChunkId> next_host_duplicate(const Residency& chunks,
                                                         const Policy& policy);

// Which tiers are how full, for a message.
[[nodiscard]] std::string usage_text(const TierLedger& ledger);

// Brings a chunk with content, on no flight, to DEVICE: from HOST where possible, else from DISK.
[[nodiscard]] Action start_incoming(Residency& chunks, ChunkId chunk);

// Bytes that `wanted` (each chunk once) still needs on DEVICE and that no transfer has reserved.
[[nodiscard]] int64_t missing_bytes(const Residency& chunks, std::span<const ChunkId> wanted);

// Returns what can start now so that `wanted` (pinned, each chunk once) becomes resident and DEVICE
// usage falls to `limit` or as near to it as possible. Throws OutOfBudget, with nothing changed,
// where waiting cannot help: the pinned chunks exceed the budget, or the others have nowhere to go.
[[nodiscard]] Actions admit(Residency& chunks, const Policy& policy,
                            std::span<const ChunkId> wanted, int64_t limit);

}  // namespace gemini
