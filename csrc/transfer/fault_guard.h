// Turns a stray access to evicted memory into poison and a count, instead of a dead interpreter.
#pragma once

#include <cstdint>
#include <optional>

namespace gemini {

enum class FaultAnswer {
  kPoisoned,  // the page now reads 0xFF (NaN in every float type); repeat the access
  kRetry,     // the page was mapped meanwhile; repeat the access
  kForeign,   // not ours: hand the signal on
};

enum class ForkSide : bool { kParent, kChild };

// A range of addresses whose faults are answered. All calls must be async-signal-safe.
class FaultTarget {
 public:
  virtual ~FaultTarget() = default;

  // Answers a fault inside the range, on the faulting thread, in the signal handler.
  virtual FaultAnswer absorb(uintptr_t address, bool bus_error) noexcept = 0;

  // Around fork: the state must be consistent in the child, which inherits none of the pages.
  virtual void before_fork() noexcept = 0;
  virtual void after_fork(ForkSide side) noexcept = 0;
};

// Starts answering faults in [begin, end); the process-wide SIGSEGV and SIGBUS handlers are
// installed by the first call, and again by a later one if something replaced them. Faults
// elsewhere go to the handlers that were there before.
void guard_faults(FaultTarget& target, uintptr_t begin, uintptr_t end);

// Returns when no fault is being answered by `target` any more: then it may go.
void unguard_faults(FaultTarget& target) noexcept;

// How many faults were poisoned since the process started. One stray access to a large tensor
// faults many times.
[[nodiscard]] uint64_t stray_count() noexcept;

// The address of the first stray access since the last call, if there was one.
[[nodiscard]] std::optional<uintptr_t> take_stray() noexcept;

}  // namespace gemini
