// Processor time of worker threads, readable from outside.
#pragma once

#include <pthread.h>
#include <time.h>

#include <thread>

namespace gemini {

[[nodiscard]] inline double seconds_of_clock(clockid_t clock) {
  timespec used;
  if (clock_gettime(clock, &used) != 0) return 0.0;
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

// Seconds that a running thread has computed, in user and kernel mode; 0 after it has ended.
[[nodiscard]] inline double cpu_seconds_of(std::thread& thread) {
  clockid_t clock;
  if (!thread.joinable() || pthread_getcpuclockid(thread.native_handle(), &clock) != 0) return 0.0;
  return seconds_of_clock(clock);
}

// The same for the calling thread, to be saved when it ends.
[[nodiscard]] inline double own_cpu_seconds() { return seconds_of_clock(CLOCK_THREAD_CPUTIME_ID); }

}  // namespace gemini
