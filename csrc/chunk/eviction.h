// Eviction policies: pure functions from a candidate to how much one would like it gone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <variant>

#include "chunk/choices.h"
#include "chunk/schedule.h"
#include "chunk/state.h"

namespace gemini {

// What a policy may look at.
struct Candidate {
  ChunkId chunk = 0;
  bool clean = false;     // giving it up costs no copy
  uint64_t last_use = 0;  // larger is more recent
};

// For a step that is not, or no longer, known ahead: the one unused for longest goes first.
struct Lru {
  [[nodiscard]] std::optional<int64_t> score(const Candidate& candidate) const {
    return -static_cast<int64_t>(candidate.last_use);
  }
};

// Furthest next use first (OPT), where a candidate that needs no copy counts as twice as far:
// keeping it would cost one fetch, keeping the other one a fetch and an evict. What a plan keeps
// goes last, and never for a prefetch. Of a choice the next use is the expected one: the choice's
// next moment, and as many steps later as pass by its member. Both must outlive it; null: there are
// no choices.
struct Belady {
  const Schedule* schedule = nullptr;
  const Choices* choices = nullptr;
  int64_t moment = 0;  // of the next operator
  int64_t after = -1;  // only candidates whose next use is later than this moment

  [[nodiscard]] std::optional<int64_t> score(const Candidate& candidate) const {
    const NextUse next = next_use(candidate.chunk);
    const bool for_prefetch = after >= 0;
    if (next.moment <= after || (next.kept() && for_prefetch)) return std::nullopt;
    // The operator under way is at moment - 1, so the distance is at least 1 and doubling it
    // counts.
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

// The highest score goes first, the lower chunk id among equals; nullopt: must stay.
[[nodiscard]] std::optional<int64_t> score(const Policy& policy, const Candidate& candidate);

}  // namespace gemini
