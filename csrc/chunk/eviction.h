// Eviction policies: pure functions that score how early a candidate should be evicted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <variant>

#include "chunk/choices.h"
#include "chunk/schedule.h"
#include "chunk/state.h"

namespace gemini {

// The inputs of a policy.
struct Candidate {
  ChunkId chunk = 0;
  bool clean = false;     // evicting it needs no copy
  uint64_t last_use = 0;  // larger is more recent
};

// For a step with unknown order: the least recently used goes first.
struct Lru {
  [[nodiscard]] std::optional<int64_t> score(const Candidate& candidate) const {
    return -static_cast<int64_t>(candidate.last_use);
  }
};

// Furthest next use first (OPT). A candidate that needs no copy counts as twice as far: keeping it
// saves one fetch, keeping another saves a fetch and an evict. Chunks that a plan keeps go last,
// and never for a prefetch. The next use of a chunk in a choice is the expected one: the choice's
// next moment plus the moments that pass by its member. Schedule and choices must outlive this
// object; null: there are no choices.
struct Belady {
  const Schedule* schedule = nullptr;
  const Choices* choices = nullptr;
  int64_t moment = 0;  // of the next operator
  int64_t after = -1;  // consider only candidates with a next use after this moment

  [[nodiscard]] std::optional<int64_t> score(const Candidate& candidate) const {
    const NextUse next = next_use(candidate.chunk);
    const bool for_prefetch = after >= 0;
    if (next.moment <= after || (next.kept() && for_prefetch)) return std::nullopt;
    // The current operator is at moment - 1, so the distance is at least 1 and doubling it has an
    // effect.
    const int64_t distance =
        next.moment == kNever ? kInfinite : std::min(next.moment - moment + 1, kInfinite);
    return (candidate.clean ? 2 * distance : distance) + (next.kept() ? kKept : 0);
  }

 private:
  [[nodiscard]] NextUse next_use(ChunkId chunk) const {
    if (choices == nullptr || !choices->has(chunk)) return schedule->next(chunk, moment);
    if (choices->is_awaited(chunk)) return {.moment = moment};
    NextUse next = schedule->next(choices->known_as(chunk), moment);
    next.flags = 0;
    if (next.moment == kNever) return next;
    next.moment += choices->moments_passed_by(chunk, schedule->num_moments());
    return next;
  }

  static constexpr int64_t kInfinite = int64_t{1} << 60;  // doubled, it still fits
  static constexpr int64_t kKept = -(int64_t{1} << 62);   // below every distance
};

using Policy = std::variant<Lru, Belady>;

// The candidate with the highest score goes first, among equals the lower chunk id; nullopt: it
// must stay.
[[nodiscard]] std::optional<int64_t> score(const Policy& policy, const Candidate& candidate);

}  // namespace gemini
