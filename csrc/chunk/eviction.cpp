#include "chunk/eviction.h"

#include <algorithm>

namespace gemini {

namespace {
constexpr int64_t kInfiniteDistance = int64_t{1} << 60;  // doubled, it still fits
constexpr int64_t kKept = -(int64_t{1} << 62);           // below every distance
}  // namespace

std::optional<int64_t> Lru::score(const Candidate& candidate) const {
  return -static_cast<int64_t>(candidate.last_use);
}

std::optional<int64_t> Belady::score(const Candidate& candidate) const {
  const NextUse next = schedule->next(candidate.chunk, moment);
  const bool for_prefetch = after >= 0;
  if (next.moment <= after || (next.kept() && for_prefetch)) return std::nullopt;
  // The operator under way is at moment - 1, so the distance is at least 1 and doubling it counts.
  const int64_t distance = next.moment == kNever
                               ? kInfiniteDistance
                               : std::min(next.moment - moment + 1, kInfiniteDistance);
  return (candidate.clean ? 2 * distance : distance) + (next.kept() ? kKept : 0);
}

std::optional<int64_t> score(const Policy& policy, const Candidate& candidate) {
  return std::visit([&](const auto& chosen) { return chosen.score(candidate); }, policy);
}

}  // namespace gemini
