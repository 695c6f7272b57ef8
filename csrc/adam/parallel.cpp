#include "adam/parallel.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace gemini {
namespace {

int available_threads() {
  static const int count = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return count;
}

}  // namespace

void parallel_ranges(int64_t count, int64_t grain, int threads,
                     const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  const int64_t ranges = (count + grain - 1) / grain;
  const int64_t limit = threads > 0 ? threads : available_threads();
  std::atomic<int64_t> next = 0;
  const auto work = [&] {
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < ranges;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      body(i * grain, std::min(count, (i + 1) * grain));
    }
  };
  std::vector<std::jthread> others;
  others.reserve(static_cast<size_t>(std::min(limit, ranges) - 1));
  try {
    while (static_cast<int64_t>(others.size()) + 1 < std::min(limit, ranges)) {
      others.emplace_back(work);
    }
  } catch (const std::system_error&) {
    // No more threads to be had: there are fewer to share the work.
  }
  work();
}

}  // namespace gemini
