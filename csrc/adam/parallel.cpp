#include "adam/parallel.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

#include "common/bytes.h"

namespace gemini {
namespace {

constexpr int64_t kRangeUnit = 64;  // whole cache lines of every element type: no false sharing

int available_threads() {
  static const int count = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return count;
}

}  // namespace

void parallel_ranges(int64_t numel, int64_t grain, int threads,
                     const std::function<void(int64_t, int64_t)>& body) {
  if (numel <= 0) return;
  const int64_t limit = threads > 0 ? threads : available_threads();
  const int64_t parts = std::clamp<int64_t>(numel / grain, 1, limit);
  const int64_t step = round_up((numel + parts - 1) / parts, kRangeUnit);
  std::vector<std::jthread> others;
  others.reserve(static_cast<size_t>(parts - 1));
  int64_t begin = step;
  try {
    for (; begin < numel; begin += step) {
      others.emplace_back(
          [&body, begin, end = std::min(begin + step, numel)] { body(begin, end); });
    }
  } catch (const std::system_error&) {
    // No more threads to be had: the rest is the caller's.
  }
  body(0, std::min(step, numel));
  for (; begin < numel; begin += step) body(begin, std::min(begin + step, numel));
}

}  // namespace gemini
