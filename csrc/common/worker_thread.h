// Starts threads that leave asynchronous signals to the caller's threads.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <thread>
#include <utility>

#include "common/error.h"

namespace gemini {

// A worker must not be the thread that Ctrl-C interrupts. Signals of the thread's own faults stay
// unblocked: the kernel kills a process that faults while they are blocked. Throws ThreadError,
// with the purpose of the thread, if the system refuses.
template <class Function>
[[nodiscard]] std::thread start_worker(const char* purpose, Function&& function) {
  sigset_t blocked;
  sigset_t before;
  sigfillset(&blocked);
  for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) {
    sigdelset(&blocked, own);
  }
  const bool masked = pthread_sigmask(SIG_SETMASK, &blocked, &before) == 0;
  struct Restore {
    bool masked;
    const sigset_t& before;
    ~Restore() {
      if (masked) pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
  } restore{masked, before};
  try {
    return std::thread(std::forward<Function>(function));
  } catch (const std::system_error& error) {
    throw ThreadError(error.code().value(), purpose);
  }
}

}  // namespace gemini
