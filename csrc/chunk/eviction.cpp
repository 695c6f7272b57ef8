#include "chunk/eviction.h"

namespace gemini {

std::optional<int64_t> score(const Policy& policy, const Candidate& candidate) {
  return std::visit([&](const auto& chosen) { return chosen.score(candidate); }, policy);
}

}  // namespace gemini
