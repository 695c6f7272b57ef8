// Use of chunks on HOST by the CPU: the actions necessary before, and those possible ahead.
#pragma once

#include <cstdint>
#include <span>

#include "chunk/eviction.h"
#include "chunk/residency.h"
#include "chunk/schedule.h"
#include "chunk/state.h"

namespace gemini {

// Returns the actions that can start now to make `wanted` (pinned on HOST, each chunk once) usable
// there: allocates chunks without content, evicts chunks that are only on DEVICE, and drops clean
// HOST duplicates of other chunks to make room. Throws OutOfBudget, with nothing changed, if
// waiting cannot help: HOST has no room, or a chunk is only on DISK.
[[nodiscard]] Actions admit_on_host(Residency& chunks, const Policy& policy,
                                    std::span<const ChunkId> wanted);

// Whether admit_on_host() would find room for `wanted` (ascending; DEVICE uses none of them).
[[nodiscard]] bool fits_on_host(const Residency& chunks, std::span<const ChunkId> wanted);

// Evicts ahead the chunks that the schedule uses next on HOST, as far as HOST has room and few
// copies are in flight. Appends the actions.
void evict_ahead(Residency& chunks, const Schedule& schedule, int64_t moment, Actions& actions);

}  // namespace gemini
