#include "transfer/fault_guard.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>

#include "common/error.h"
#include "common/mutex.h"

namespace gemini {
namespace {

// Written under `registry_mutex`, read by the handler without a lock: `begin` is set last and
// cleared first, zero means empty.
struct Slot {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<FaultTarget*> target{nullptr};
  std::atomic<int> answering{0};  // number of handlers that may be using `target`
  Slot* next = nullptr;           // set before the handler can see the slot

  [[nodiscard]] bool holds(uintptr_t address) const {
    const uintptr_t from = begin.load();
    return from != 0 && address >= from && address < end.load();
  }
};

// A slot is reused but never freed: a handler on another thread may be reading it.
constinit std::atomic<Slot*> first_slot{nullptr};
constinit Mutex registry_mutex;
constinit std::atomic<uint64_t> num_strays{0};
constinit std::atomic<uintptr_t> first_stray{0};
constinit std::atomic<bool> chaining{false};
// Written under `registry_mutex`, stable before the handler, which reads it, is installed.
struct sigaction previous_segv;
struct sigaction previous_bus;

// Repeated faults at one mapped address mean that other code has changed its protection. A window
// that other threads map and unmap all the time is retried too, but rarely this often in a row
// without a poisoned page in between.
constexpr int kMaxRetries = 100000;
constinit std::atomic<uintptr_t> retried_address{0};
constinit std::atomic<int> num_retries{0};

bool may_retry(uintptr_t address) {
  if (retried_address.exchange(address) != address) num_retries = 0;
  return ++num_retries <= kMaxRetries;
}

FaultAnswer answer(uintptr_t address, bool bus_error) {
  for (Slot* slot = first_slot.load(); slot != nullptr; slot = slot->next) {
    if (!slot->holds(address)) continue;
    // Count before checking again: code that clears the slot afterwards waits for the answer.
    ++slot->answering;
    const bool held = slot->holds(address);
    FaultAnswer result = FaultAnswer::kForeign;
    if (held) result = slot->target.load()->absorb(address, bus_error);
    --slot->answering;
    if (held) return result;
  }
  return FaultAnswer::kForeign;
}

// Passes a signal to the handler installed before ours. Default and ignored dispositions are
// restored: a real fault then happens again and ends the process as it would without us.
void chain(int signal, siginfo_t* info, void* context) {
  const struct sigaction& previous = signal == SIGSEGV ? previous_segv : previous_bus;
  const bool has_info = (previous.sa_flags & SA_SIGINFO) != 0;
  const bool is_default = !has_info && previous.sa_handler == SIG_DFL;
  const bool is_ignored = !has_info && previous.sa_handler == SIG_IGN;
  const bool raised = info->si_code <= 0;
  if (raised && is_ignored) return;
  // Handlers such as Python's faulthandler raise the signal again for their predecessor. If that is
  // us, we were here before.
  if (is_default || is_ignored || (raised && chaining.load())) {
    ::signal(signal, SIG_DFL);
    if (raised) ::raise(signal);
    return;
  }
  chaining = true;
  if (has_info) {
    previous.sa_sigaction(signal, info, context);
  } else {
    previous.sa_handler(signal);
  }
  chaining = false;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  const bool is_fault = info->si_code > 0;  // not sent by kill() or raise()
  FaultAnswer result = is_fault ? answer(address, signal == SIGBUS) : FaultAnswer::kForeign;
  if (result == FaultAnswer::kRetry && !may_retry(address)) result = FaultAnswer::kForeign;
  if (result == FaultAnswer::kPoisoned) {
    num_retries = 0;
    ++num_strays;
    uintptr_t none = 0;
    first_stray.compare_exchange_strong(none, address);
  }
  if (result == FaultAnswer::kForeign) chain(signal, info, context);
  errno = saved_errno;
}

void install(int signal, struct sigaction& previous) GEMINI_REQUIRES(registry_mutex) {
  struct sigaction current;
  if (::sigaction(signal, nullptr, &current) != 0) {
    throw Error(std::string("cannot read a signal handler: ") + std::strerror(errno));
  }
  if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == on_fault) return;
  previous = current;  // before ours can be called
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  // Not on the alternate stack: Python's faulthandler sets up one that is smaller than a signal
  // frame with AVX-512 state, and our faults never come from an exhausted stack.
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  if (::sigaction(signal, &ours, nullptr) != 0) {
    throw Error(std::string("cannot install a signal handler: ") + std::strerror(errno));
  }
}

Slot& empty_slot() GEMINI_REQUIRES(registry_mutex) {
  for (Slot* slot = first_slot.load(); slot != nullptr; slot = slot->next) {
    if (slot->begin.load() == 0) return *slot;
  }
  auto* added = new Slot;
  added->next = first_slot.load();
  first_slot = added;
  return *added;
}

void before_fork() GEMINI_ACQUIRES(registry_mutex) {
  registry_mutex.lock();
  for (Slot* slot = first_slot.load(); slot != nullptr; slot = slot->next) {
    if (slot->begin.load() != 0) slot->target.load()->before_fork();
  }
}

void after_fork(ForkSide side) GEMINI_RELEASES(registry_mutex) {
  for (Slot* slot = first_slot.load(); slot != nullptr; slot = slot->next) {
    if (side == ForkSide::kChild) slot->answering = 0;  // of threads that do not exist in the child
    if (slot->begin.load() != 0) slot->target.load()->after_fork(side);
  }
  registry_mutex.unlock();
}

}  // namespace

void guard_faults(FaultTarget& target, uintptr_t begin, uintptr_t end) {
  static const int fork_handlers = ::pthread_atfork(
      before_fork, []() GEMINI_RELEASES(registry_mutex) { after_fork(ForkSide::kParent); },
      []() GEMINI_RELEASES(registry_mutex) { after_fork(ForkSide::kChild); });
  if (fork_handlers != 0) throw Error("cannot register fork handlers");
  const Lock lock(registry_mutex);
  install(SIGSEGV, previous_segv);
  install(SIGBUS, previous_bus);
  Slot& slot = empty_slot();
  slot.end = end;
  slot.target = &target;
  slot.begin = begin;
}

void unguard_faults(FaultTarget& target) noexcept {
  const Lock lock(registry_mutex);
  for (Slot* slot = first_slot.load(); slot != nullptr; slot = slot->next) {
    if (slot->target.load() != &target) continue;
    slot->begin = 0;
    while (slot->answering.load() != 0) std::this_thread::yield();
    slot->target = nullptr;
  }
}

uint64_t stray_count() noexcept { return num_strays.load(); }

std::optional<uintptr_t> take_stray() noexcept {
  const uintptr_t address = first_stray.exchange(0);
  if (address == 0) return std::nullopt;
  return address;
}

}  // namespace gemini
