#include "adam/openmp_team.h"

#include <dlfcn.h>

#include <latch>
#include <thread>
#include <vector>

#include "common/error.h"
#include "common/process_guard.h"
#include "common/worker_thread.h"

namespace gemini {
namespace {

// The call that GCC generates for `#pragma omp parallel`. LLVM's and Intel's runtimes for Linux
// have it too.
using Parallel = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);
using MaxThreads = int (*)();

struct Runtime {
  Parallel parallel = nullptr;
  MaxThreads max_threads = nullptr;  // the size of the calling thread's team
};

// Created when the module is loaded: the process that this one was forked from may have used a team
// before.
const ProcessGuard loader;

// The runtime that torch computes with: its calls were bound to the global symbols if there are
// any, else to those that its library loaded.
Runtime find_runtime() {
  const auto found_in = [](void* handle) {
    return Runtime{reinterpret_cast<Parallel>(::dlsym(handle, "GOMP_parallel")),
                   reinterpret_cast<MaxThreads>(::dlsym(handle, "omp_get_max_threads"))};
  };
  const Runtime global = found_in(RTLD_DEFAULT);
  if (global.parallel != nullptr) return global;
  void* const torch = ::dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return torch == nullptr ? Runtime() : found_in(torch);
}

const Runtime& runtime() {
  static const Runtime found = find_runtime();
  return found;
}

// Whether the system allows a team of `threads`: a runtime that cannot start one ends the process.
// Tried once for each calling thread, which has its own team, and size.
bool grants(int threads) {
  thread_local int granted = 1;
  if (threads <= granted) return true;
  std::latch all_asked(1);
  std::vector<std::thread> tried;
  try {
    tried.reserve(static_cast<size_t>(threads) - 1);
    for (int i = 1; i < threads; ++i) {
      tried.push_back(start_worker("a team", [&all_asked] { all_asked.wait(); }));
    }
    granted = threads;
  } catch (const ThreadError&) {
    // The threads that were started must end nevertheless.
  }
  all_asked.count_down();
  for (std::thread& each : tried) each.join();
  return threads <= granted;
}

}  // namespace

bool run_on_openmp_team(int threads, void (*work)(void*), void* data) {
  const Runtime& team = runtime();
  if (team.parallel == nullptr || team.max_threads == nullptr || !loader.is_owner()) return false;
  const int size = team.max_threads();
  if (size < threads || !grants(size)) return false;
  // Use the team size of torch's operators: another size would end or start threads, and again for
  // the next operator.
  team.parallel(work, data, 0, 0);
  return true;
}

}  // namespace gemini
