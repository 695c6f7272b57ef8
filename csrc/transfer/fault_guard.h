// Answers a stray access to evicted memory with poison and a count, instead of ending the
// interpreter.
#pragma once

#include <cstdint>
#include <optional>

namespace gemini {

enum class FaultAnswer {
  kPoisoned,  // the page now reads 0xFF (NaN in every float type); repeat the access
  kRetry,     // the page was mapped meanwhile; repeat the access
  kForeign,   // not our address: pass the signal on
};

enum class ForkSide : bool { kParent, kChild };

// A range of addresses with its fault handler. All calls must be async-signal-safe.
class FaultTarget {
 public:
  virtual ~FaultTarget() = default;

  // Answers a fault inside the range, on the faulting thread, inside the signal handler.
  virtual FaultAnswer absorb(uintptr_t address, bool bus_error) noexcept = 0;

  // Called around fork: the state must be consistent in the child, which inherits none of the
  // pages.
  virtual void before_fork() noexcept = 0;
  virtual void after_fork(ForkSide side) noexcept = 0;
};

// Starts answering faults in [begin, end). The first call installs the process-wide SIGSEGV and
// SIGBUS handlers, and a later one installs them again if they were replaced. Faults outside go to
// the handlers that were installed before.
void guard_faults(FaultTarget& target, uintptr_t begin, uintptr_t end);

// Returns when `target` is not answering any fault; then it may be destroyed.
void unguard_faults(FaultTarget& target) noexcept;

// The number of poisoned faults since the process started. One stray access to a large tensor
// faults many times.
[[nodiscard]] uint64_t stray_count() noexcept;

// The address of the first stray access since the last call, if there was one.
[[nodiscard]] std::optional<uintptr_t> take_stray() noexcept;

}  // namespace gemini
