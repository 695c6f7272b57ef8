#include "chunk/choices.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/error.h"

namespace gemini {

std::vector<ChunkId> Choices::checked(const std::vector<std::vector<ChunkId>>& members) const {
  std::vector<ChunkId> all;
  for (const std::vector<ChunkId>& chunks : members) {
    if (chunks.empty()) throw StateError("a member of a choice needs a chunk");
    all.insert(all.end(), chunks.begin(), chunks.end());
  }
  std::ranges::sort(all);
  for (size_t i = 0; i < all.size(); ++i) {
    if (has(all[i]) || (i > 0 && all[i] == all[i - 1])) {
      throw StateError("chunk " + std::to_string(all[i]) + " is in a choice already");
    }
  }
  return all;
}

// Records the places of the chunks of the members from `first` on.
void Choices::place_members(int32_t index, size_t first) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  choice.rates.resize(choice.members.size());
  for (size_t i = first; i < choice.members.size(); ++i) {
    for (const ChunkId id : choice.members[i]) {
      const auto c = static_cast<size_t>(id);
      if (place_.size() <= c) place_.resize(c + 1);
      place_[c] = {.choice = index, .member = static_cast<int32_t>(i)};
    }
  }
}

void Choices::add(const std::vector<std::vector<ChunkId>>& members, bool certain) {
  const std::vector<ChunkId> all = checked(members);
  if (all.empty()) throw StateError("a choice needs a member");
  Choice choice;
  choice.first = all.front();
  choice.certain = certain;
  choice.members = members;
  choices_.push_back(std::move(choice));
  place_members(static_cast<int32_t>(choices_.size()) - 1, 0);
}

void Choices::widen(ChunkId chunk, const std::vector<std::vector<ChunkId>>& members) {
  if (!has(chunk)) throw StateError("chunk " + std::to_string(chunk) + " is in no choice");
  static_cast<void>(checked(members));
  const int32_t index = place_[static_cast<size_t>(chunk)].choice;
  std::vector<std::vector<ChunkId>>& all = choices_[static_cast<size_t>(index)].members;
  const size_t first = all.size();
  all.insert(all.end(), members.begin(), members.end());
  place_members(index, first);
}

namespace {
// Threshold for a rate: a member used in each of the last 32 passes is expected in the next.
// Fetching it too often costs less than waiting for it.
constexpr int64_t kLikely = (int64_t{1} << 16) / 16 * 15;
}  // namespace

void Choices::name(std::vector<ChunkId>& chunks) const {
  if (choices_.empty()) return;
  for (ChunkId& id : chunks) id = known_as(id);
  std::ranges::sort(chunks);
  const auto repeated = std::ranges::unique(chunks);
  chunks.erase(repeated.begin(), repeated.end());
}

int32_t Choices::common(std::span<const ChunkId> chunks) const {
  if (choices_.empty() || chunks.empty() || !has(chunks.front())) return kNone;
  const int32_t choice = place_[static_cast<size_t>(chunks.front())].choice;
  const bool all = std::ranges::all_of(chunks, [&](ChunkId id) {
    return has(id) && place_[static_cast<size_t>(id)].choice == choice;
  });
  return all ? choice : kNone;
}

void Choices::note_used(std::span<const ChunkId> chunks) {
  if (choices_.empty()) return;
  for (const ChunkId id : chunks) {
    if (!has(id)) continue;
    Place& place = place_[static_cast<size_t>(id)];
    place.awaited = false;
    if (std::exchange(place.used, true)) continue;
    Choice& choice = choices_[static_cast<size_t>(place.choice)];
    const std::vector<ChunkId>& member = choice.members[static_cast<size_t>(place.member)];
    if (choice.used.empty()) under_way_.push_back(place.choice);
    const bool is_noted =
        member.size() > 1 && std::ranges::find(choice.used, place.member) != choice.used.end();
    if (is_noted) continue;
    choice.used.push_back(place.member);
    for (const ChunkId other : member) {
      Place& its = place_[static_cast<size_t>(other)];
      if (its.used || its.awaited) continue;
      its.awaited = true;
      awaited_.push_back(other);
    }
  }
  forget_arrived();
}

void Choices::forget_arrived() {
  std::erase_if(awaited_, [&](ChunkId id) { return !place_[static_cast<size_t>(id)].awaited; });
}

void Choices::expect(std::span<const ChunkId> chunks) {
  for (const ChunkId id : chunks) {
    if (!has(id) || place_[static_cast<size_t>(id)].awaited) continue;
    place_[static_cast<size_t>(id)].awaited = true;
    awaited_.push_back(id);
  }
}

void Choices::note_beside(std::span<const ChunkId> chunks) {
  if (awaited_.empty()) return;
  for (const ChunkId id : chunks) {
    if (has(id)) place_[static_cast<size_t>(id)].awaited = false;
  }
  forget_arrived();
}

void Choices::find_likely(Choice& choice) {
  choice.likely.clear();
  const auto take = [&](size_t member) {
    const std::vector<ChunkId>& chunks = choice.members[member];
    choice.likely.insert(choice.likely.end(), chunks.begin(), chunks.end());
  };
  if (choice.certain) {
    for (const int32_t member : choice.used) take(static_cast<size_t>(member));
    return;
  }
  for (size_t m = 0; m < choice.members.size(); ++m) {
    if (choice.rates[m].at(choice.passes)[1] >= kLikely) take(m);
  }
}

void Choices::count_uses(Choice& choice) {
  judge_.note_pass(choice.used, choice.rates, choice.passes, choice.cursor);
  ++choice.passes;
  for (const int32_t member : choice.used) {
    choice.rates[static_cast<size_t>(member)].note_used(choice.passes);
  }
}

void Choices::end_moment() {
  for (const ChunkId id : awaited_) place_[static_cast<size_t>(id)].awaited = false;
  awaited_.clear();
  for (const int32_t index : under_way_) {
    Choice& choice = choices_[static_cast<size_t>(index)];
    std::ranges::sort(choice.used);
    if (!choice.certain) count_uses(choice);
    for (const int32_t member : choice.used) {
      for (const ChunkId id : choice.members[static_cast<size_t>(member)]) {
        place_[static_cast<size_t>(id)].used = false;
      }
    }
    find_likely(choice);
    choice.used.clear();
  }
  under_way_.clear();
}

int64_t Choices::moments_passed_by(ChunkId chunk, int64_t num_moments) const {
  if (!has(chunk)) return 0;
  const Choice& choice = choice_of(chunk);
  if (choice.certain) return 0;
  const UseRate& rate =
      choice.rates[static_cast<size_t>(place_[static_cast<size_t>(chunk)].member)];
  const int64_t probability = judge_.probability(rate.at(choice.passes));
  return num_moments * RateJudge::kOne / probability - num_moments;
}

}  // namespace gemini
