// A lock that a signal handler may take.
#pragma once

#include <sched.h>

#include <atomic>

#include "common/mutex.h"

namespace gemini {

// Guards a few instructions or system calls. A mutex must not be locked in a signal handler; this
// may, because a holder never faults inside the memory the handler guards.
class GEMINI_LOCKABLE SpinLock {
 public:
  void lock() noexcept GEMINI_ACQUIRES() {
    while (held_.test_and_set(std::memory_order_acquire)) ::sched_yield();
  }
  void unlock() noexcept GEMINI_RELEASES() { held_.clear(std::memory_order_release); }
  // For a window, which knows the lock of its space by a name of its own.
  void is_held() const noexcept GEMINI_SAYS_HELD(this) {}

 private:
  std::atomic_flag held_;
};

}  // namespace gemini
