// The clock that transfers are timed by.
#pragma once

#include <chrono>

namespace gemini {

using SteadyClock = std::chrono::steady_clock;

// Seconds of the clock, computed from nanoseconds as in Python's time.perf_counter(), so that equal
// times stay equal.
[[nodiscard]] inline double seconds(SteadyClock::time_point time) {
  return static_cast<double>(std::chrono::nanoseconds(time.time_since_epoch()).count()) / 1e9;
}

[[nodiscard]] inline double now_seconds() { return seconds(SteadyClock::now()); }

}  // namespace gemini
