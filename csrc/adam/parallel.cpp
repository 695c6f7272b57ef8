#include "adam/parallel.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "adam/openmp_team.h"
#include "common/error.h"
#include "common/worker_thread.h"

namespace gemini {
namespace {

// Fewer do not pay for waking or starting a thread.
constexpr int64_t kRangesPerThread = 2;

int available_threads() {
  static const int count = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return count;
}

// The state of one call, shared by the threads that work on it.
class Ranges {
 public:
  Ranges(int64_t count, int64_t grain, const Workers& workers,
         const std::function<void(int64_t, int64_t)>& body)
      : count_(count), grain_(grain), processors_(workers.processors), body_(body) {
    const int64_t limit = workers.threads > 0 ? workers.threads : available_threads();
    threads_ = static_cast<int>(std::clamp(num_ranges() / kRangesPerThread, int64_t{1}, limit));
  }

  // The number of threads worth using.
  [[nodiscard]] int threads() const noexcept { return threads_; }

  // Works until nothing is left, unless enough other threads do.
  void work() {
    if (joined_.fetch_add(1, std::memory_order_relaxed) >= threads_) return;
    const KeepsTo near(processors_);
    for (int64_t i = take(); i < num_ranges(); i = take()) {
      body_(i * grain_, std::min(count_, (i + 1) * grain_));
    }
  }

 private:
  [[nodiscard]] int64_t num_ranges() const noexcept { return (count_ + grain_ - 1) / grain_; }
  int64_t take() noexcept { return next_.fetch_add(1, std::memory_order_relaxed); }

  const int64_t count_;
  const int64_t grain_;
  const Processors& processors_;
  const std::function<void(int64_t, int64_t)>& body_;
  int threads_;
  std::atomic<int> joined_ = 0;
  std::atomic<int64_t> next_ = 0;
};

// Shares the work with threads that are started for this call.
void work_with_new_threads(Ranges& ranges) {
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(ranges.threads()) - 1);
  try {
    while (static_cast<int>(others.size()) + 1 < ranges.threads()) {
      others.push_back(start_worker("an update", [&ranges] { ranges.work(); }));
    }
  } catch (const ThreadError&) {
    // Continue with fewer threads.
  }
  ranges.work();
  for (std::thread& other : others) other.join();
}

}  // namespace

void parallel_ranges(int64_t count, int64_t grain, const Workers& workers,
                     const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  Ranges ranges(count, grain, workers, body);
  if (ranges.threads() == 1) {
    ranges.work();
    return;
  }
  const auto work = [](void* shared) { static_cast<Ranges*>(shared)->work(); };
  if (!run_on_openmp_team(ranges.threads(), work, &ranges)) work_with_new_threads(ranges);
}

}  // namespace gemini
