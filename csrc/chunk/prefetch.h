// Bringing chunks to DEVICE before their operator asks, in the order of the schedule.
#pragma once

#include <cstdint>

#include "chunk/choices.h"
#include "chunk/device_limit.h"
#include "chunk/residency.h"
#include "chunk/schedule.h"
#include "chunk/state.h"

namespace gemini {

// Incoming transfers under way at most: a link works on one at a time and must find the next one
// waiting, also while an operator computes for as long as several take.
inline constexpr int32_t kPrefetchesInFlight = 4;

// Where the step is: the next operator's moment and the limit of the period under way.
struct PrefetchWindow {
  int64_t moment = 0;
  int64_t limit_now = 0;
  int32_t max_in_flight = 0;  // incoming transfers at most
};

// Returns the transfers to start now, and the drops and evictions that make room for them. A chunk
// is brought only at the cost of chunks whose next use is later than its own; one whose room is
// still being evicted is started by a later call. At most one whole step is looked at. Of a choice
// nobody knows what is used next: of its chunks only those come that are awaited, before all others
// and as many as have room. Throws nothing.
[[nodiscard]] Actions prefetch(Residency& chunks, const Schedule& schedule, const Choices& choices,
                               const DeviceLimit& limit, const PrefetchWindow& window);

}  // namespace gemini
