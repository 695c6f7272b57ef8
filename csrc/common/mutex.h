// Mutexes that clang checks: members name the mutex that guards them, functions the mutex that
// their caller must hold.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "common/portable_libstdcxx.h"

// Read by clang's -Wthread-safety, which scripts/check.sh lint runs; ignored by other compilers.
#ifdef __clang__
#define GEMINI_CHECKED_BY_CLANG(attribute) __attribute__((attribute))
#else
#define GEMINI_CHECKED_BY_CLANG(attribute)
#endif
// For classes: can be held; holds a mutex for its lifetime.
#define GEMINI_LOCKABLE GEMINI_CHECKED_BY_CLANG(capability("mutex"))
#define GEMINI_SCOPED_LOCK GEMINI_CHECKED_BY_CLANG(scoped_lockable)
// For members: may be accessed only with `mutex` held.
#define GEMINI_GUARDED_BY(mutex) GEMINI_CHECKED_BY_CLANG(guarded_by(mutex))
// For functions: the caller must hold the mutex; acquires it and returns with it held; releases it.
#define GEMINI_REQUIRES(...) GEMINI_CHECKED_BY_CLANG(requires_capability(__VA_ARGS__))
#define GEMINI_ACQUIRES(...) GEMINI_CHECKED_BY_CLANG(acquire_capability(__VA_ARGS__))
#define GEMINI_RELEASES(...) GEMINI_CHECKED_BY_CLANG(release_capability(__VA_ARGS__))
// For a function without effect: tells clang that the mutex is held from here on.
#define GEMINI_SAYS_HELD(...) GEMINI_CHECKED_BY_CLANG(assert_capability(__VA_ARGS__))

namespace gemini {

class GEMINI_LOCKABLE Mutex {
 public:
  void lock() GEMINI_ACQUIRES() { mutex_.lock(); }
  void unlock() GEMINI_RELEASES() { mutex_.unlock(); }
  // For an object that refers to its owner's mutex by another name than the owner.
  void is_held() const noexcept GEMINI_SAYS_HELD(this) {}

 private:
  friend class Condition;
  std::mutex mutex_;
};

// Holds a Mutex or a SpinLock.
template <class Lockable>
class GEMINI_SCOPED_LOCK Lock {
 public:
  explicit Lock(Lockable& mutex) GEMINI_ACQUIRES(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~Lock() GEMINI_RELEASES() { mutex_.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  Lockable& mutex_;
};

// May wake up spuriously: wait in a loop that checks the condition.
class Condition {
 public:
  using Clock = std::chrono::steady_clock;

  // The time `timeout_s` seconds from now; for a negative value a lifetime from now. Limited to
  // that, because more would overflow the clock.
  [[nodiscard]] static Clock::time_point end_of(double timeout_s) {
    constexpr double kLifetime = 3e9;
    const std::chrono::duration<double> wait(timeout_s < 0 ? kLifetime
                                                           : std::min(timeout_s, kLifetime));
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(wait);
  }

  void notify_one() noexcept { condition_.notify_one(); }
  void notify_all() noexcept { condition_.notify_all(); }

  // Releases `mutex` during the wait.
  void wait(Mutex& mutex) GEMINI_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    (void)lock.release();
  }
  // Returns false if the time is past `end`.
  [[nodiscard]] bool wait_until(Mutex& mutex, Clock::time_point end) GEMINI_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const bool in_time = condition_.wait_until(lock, end) == std::cv_status::no_timeout;
    (void)lock.release();
    return in_time;
  }

 private:
  std::condition_variable condition_;
};

}  // namespace gemini
