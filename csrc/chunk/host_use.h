// Using chunks where they lie on HOST, by the CPU: what has to happen first, and what can happen
// ahead.
#pragma once

#include <cstdint>
#include <span>

#include "chunk/eviction.h"
#include "chunk/residency.h"
#include "chunk/schedule.h"
#include "chunk/state.h"

namespace gemini {

// Returns what can start now so that `wanted` (pinned on HOST, each chunk once) becomes usable
// there: what has no content is allocated, what is on DEVICE alone evicted, clean HOST duplicates
// of others dropped for it. Throws OutOfBudget, with nothing changed, where waiting cannot help:
// HOST has no room, or a chunk lies on DISK alone.
[[nodiscard]] Actions admit_on_host(Residency& chunks, const Policy& policy,
                                    std::span<const ChunkId> wanted);

// Whether admit_on_host() would find a place for `wanted` (ascending), none of which DEVICE uses.
[[nodiscard]] bool fits_on_host(const Residency& chunks, std::span<const ChunkId> wanted);

// Evicts ahead, as far as HOST has room and a few copies are under way, what the schedule uses next
// on HOST. Appends the actions.
void evict_ahead(Residency& chunks, const Schedule& schedule, int64_t moment, Actions& actions);

}  // namespace gemini
