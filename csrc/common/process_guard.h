// Records the process that created an object: threads, locks and moved pages do not survive fork.
#pragma once

#include <unistd.h>

#include <string>

#include "common/error.h"

namespace gemini {

// Member of every class that owns threads or pages. A destructor in a forked child checks
// `is_owner()` and releases nothing: joining threads that do not exist would hang, and unmapping
// ranges that the child never inherited would hit other mappings.
class ProcessGuard {
 public:
  [[nodiscard]] bool is_owner() const noexcept { return ::getpid() == pid_; }

  // Throws StateError in a forked child. Call it before taking any lock: the lock may have been
  // held by a thread that the child does not have.
  void require(const char* what) const {
    if (is_owner()) return;
    throw StateError(std::string(what) + " belongs to process " + std::to_string(pid_) +
                     " and cannot be used in its forked child " + std::to_string(::getpid()) +
                     "; make a new one there");
  }

 private:
  pid_t pid_ = ::getpid();
};

}  // namespace gemini
