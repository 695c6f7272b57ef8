// A lock that a signal handler may take.
#pragma once

#include <sched.h>

#include <atomic>

namespace gemini {

// Guards a few instructions or system calls. A mutex must not be locked in a signal handler; this
// may, because a holder never faults inside the memory the handler guards.
class SpinLock {
 public:
  void lock() noexcept {
    while (held_.test_and_set(std::memory_order_acquire)) ::sched_yield();
  }
  void unlock() noexcept { held_.clear(std::memory_order_release); }

 private:
  std::atomic_flag held_;
};

}  // namespace gemini
