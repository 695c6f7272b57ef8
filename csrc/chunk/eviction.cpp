#include "chunk/eviction.h"

#include <algorithm>

namespace gemini {

namespace {
constexpr int64_t kInfiniteDistance = int64_t{1} << 60;  // doubled, it still fits
}  // namespace

std::optional<int64_t> Lru::score(const Candidate& candidate) const {
  return -static_cast<int64_t>(candidate.last_use);
}

std::optional<int64_t> Belady::score(const Candidate& candidate) const {
  const int64_t next_use = schedule->next_use(candidate.chunk, moment);
  if (next_use <= after) return std::nullopt;
  // The operator under way is at moment - 1, so the distance is at least 1 and doubling it counts.
  const int64_t distance =
      next_use == kNever ? kInfiniteDistance : std::min(next_use - moment + 1, kInfiniteDistance);
  return candidate.clean ? 2 * distance : distance;
}

std::optional<int64_t> score(const Policy& policy, const Candidate& candidate) {
  return std::visit([&](const auto& chosen) { return chosen.score(candidate); }, policy);
}

}  // namespace gemini
