// Starts a thread that leaves asynchronous signals to the threads of the caller.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace gemini {

// A worker must not be the thread that Ctrl-C interrupts. Signals of the thread's own faults stay
// unblocked: the kernel kills a process that faults while they are blocked.
template <class Function>
[[nodiscard]] std::thread start_worker(Function&& function) {
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
  return std::thread(std::forward<Function>(function));
}

}  // namespace gemini
