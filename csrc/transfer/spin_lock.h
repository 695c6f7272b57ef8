// A lock that a signal handler may take.
#pragma once

#include <sched.h>

#include <atomic>

#include "common/mutex.h"

namespace gemini {

// Guards a few instructions or system calls. A signal handler must not lock a mutex, but may lock
// this: a holder never faults inside the memory that the handler guards.
class GEMINI_LOCKABLE SpinLock {
 public:
  void lock() noexcept GEMINI_ACQUIRES() {
    while (held_.test_and_set(std::memory_order_acquire)) ::sched_yield();
  }
  void unlock() noexcept GEMINI_RELEASES() { held_.clear(std::memory_order_release); }
  // For Window, which refers to the lock of its space by another name.
  void is_held() const noexcept GEMINI_SAYS_HELD(this) {}

 private:
  std::atomic_flag held_;
};

}  // namespace gemini
