// Remembers the process that made an object: threads, locks and moved pages do not survive fork.
#pragma once

#include <unistd.h>

#include <string>

#include "common/error.h"

namespace gemini {

// Member of everything that owns threads or pages. A destructor that runs in a forked child asks
// `is_owner()` and gives nothing back: joining threads that are not there would hang, and
// unmapping ranges the child never inherited would hit strangers.
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
