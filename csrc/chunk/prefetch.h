// Prefetch: brings chunks to DEVICE before their operator needs them, in the order of the schedule.
#pragma once

#include <cstdint>

#include "chunk/choices.h"
#include "chunk/device_limit.h"
#include "chunk/residency.h"
#include "chunk/schedule.h"
#include "chunk/state.h"

namespace gemini {

// The most incoming transfers in flight. A link works on one at a time and must find the next one
// waiting, even if an operator computes for as long as several transfers take.
inline constexpr int32_t kPrefetchesInFlight = 4;

// The position in the step: the next operator's moment, and the limit of the current period.
struct PrefetchWindow {
  int64_t moment = 0;
  int64_t limit_now = 0;
  int32_t max_in_flight = 0;  // of incoming transfers
};

// Returns the transfers to start now, and the drops and evictions that make room for them. A chunk
// is fetched only at the cost of chunks with a later next use. If its room is still being evicted,
// a later call starts it. The walk covers at most one whole step. The next use of members of a
// choice is unknown: only awaited ones are fetched, before all other chunks and as many as have
// room. Throws nothing.
[[nodiscard]] Actions prefetch(Residency& chunks, const Schedule& schedule, const Choices& choices,
                               const DeviceLimit& limit, const PrefetchWindow& window);

}  // namespace gemini
