// The clock that transfers are timed by.
#pragma once

#include <chrono>

namespace gemini {

using SteadyClock = std::chrono::steady_clock;

// Seconds of the clock, as Python makes them of nanoseconds in time.perf_counter(): equal times
// stay equal.
[[nodiscard]] inline double seconds(SteadyClock::time_point time) {
  return static_cast<double>(std::chrono::nanoseconds(time.time_since_epoch()).count()) / 1e9;
}

[[nodiscard]] inline double now_seconds() { return seconds(SteadyClock::now()); }

}  // namespace gemini
