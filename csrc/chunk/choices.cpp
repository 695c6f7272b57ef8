#include "chunk/choices.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/error.h"

namespace gemini {

void Choices::add(const std::vector<std::vector<ChunkId>>& members) {
  const auto index = static_cast<int32_t>(choices_.size());
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
  if (all.empty()) throw StateError("a choice needs a member");
  if (place_.size() <= static_cast<size_t>(all.back())) {
    place_.resize(static_cast<size_t>(all.back()) + 1);
  }
  Choice choice;
  choice.first = all.front();
  choice.members = members;
  choice.rates.resize(members.size());
  for (size_t i = 0; i < members.size(); ++i) {
    for (const ChunkId id : members[i]) {
      place_[static_cast<size_t>(id)] = {.choice = index, .member = static_cast<int32_t>(i)};
    }
  }
  choices_.push_back(std::move(choice));
}

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
    place.used = true;
    place.awaited = false;
    Choice& choice = choices_[static_cast<size_t>(place.choice)];
    if (choice.used.empty()) under_way_.push_back(place.choice);
    if (std::ranges::find(choice.used, place.member) != choice.used.end()) continue;
    choice.used.push_back(place.member);
    for (const ChunkId other : choice.members[static_cast<size_t>(place.member)]) {
      Place& its = place_[static_cast<size_t>(other)];
      if (its.used || its.awaited) continue;
      its.awaited = true;
      awaited_.push_back(other);
    }
  }
  std::erase_if(awaited_, [&](ChunkId id) { return !place_[static_cast<size_t>(id)].awaited; });
}

void Choices::end_moment() {
  for (const ChunkId id : awaited_) place_[static_cast<size_t>(id)].awaited = false;
  awaited_.clear();
  for (const int32_t index : under_way_) {
    Choice& choice = choices_[static_cast<size_t>(index)];
    std::ranges::sort(choice.used);
    judge_.note_pass(choice.used, choice.rates, choice.passes, choice.cursor);
    ++choice.passes;
    for (const int32_t member : choice.used) {
      const auto m = static_cast<size_t>(member);
      choice.rates[m].note_used(choice.passes);
      for (const ChunkId id : choice.members[m]) place_[static_cast<size_t>(id)].used = false;
    }
    choice.used.clear();
  }
  under_way_.clear();
}

int64_t Choices::moments_passed_by(ChunkId chunk, int64_t num_moments) const {
  if (!has(chunk)) return 0;
  const Choice& choice = choice_of(chunk);
  const UseRate& rate =
      choice.rates[static_cast<size_t>(place_[static_cast<size_t>(chunk)].member)];
  const int64_t probability = judge_.probability(rate.at(choice.passes));
  return num_moments * RateJudge::kOne / probability - num_moments;
}

}  // namespace gemini
