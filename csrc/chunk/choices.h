// Choices: groups of chunks. Each use takes some members of a group and leaves the others, such as
// the experts of a layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "chunk/state.h"
#include "chunk/use_rate.h"

namespace gemini {

// A choice has members, each of one or more chunks that are used together: one expert's weights.
// The schedule and the record of a step see only the first chunk of a choice, whichever members an
// operator uses. Consecutive operators on one choice form one moment. Which member is used next is
// unknown; only the rate of its uses is known.
class Choices {
 public:
  // `certain`: the next pass uses the members that the last pass used, as for keys and values
  // during generation. Throws StateError for a member without chunks, and for a chunk that is in a
  // choice already.
  void add(const std::vector<std::vector<ChunkId>>& members, bool certain = false);
  // Adds members to the choice that has `chunk`. Throws as add(), and if no choice has it.
  void widen(ChunkId chunk, const std::vector<std::vector<ChunkId>>& members);

  [[nodiscard]] bool empty() const { return choices_.empty(); }
  [[nodiscard]] bool has(ChunkId chunk) const {
    const auto c = static_cast<size_t>(chunk);
    return c < place_.size() && place_[c].choice != kNone;
  }
  // The id of this chunk in the schedule and the record.
  [[nodiscard]] ChunkId known_as(ChunkId chunk) const {
    return has(chunk) ? choice_of(chunk).first : chunk;
  }
  // Replaces chunks of choices by their ids in the schedule; the result is ascending without
  // duplicates, as before.
  void name(std::vector<ChunkId>& chunks) const;
  // The choice that all of these belong to; kNone if there is none.
  [[nodiscard]] int32_t common(std::span<const ChunkId> chunks) const;

  // An operator has got these chunks; those in choices count as used in the current moment.
  void note_used(std::span<const ChunkId> chunks);
  // The current moment needs these chunks of choices after the running operator.
  void expect(std::span<const ChunkId> chunks);
  // An access outside the moments has got these chunks: they are no longer awaited.
  void note_beside(std::span<const ChunkId> chunks);
  // Ends the moment: its uses are counted in the rates, and nothing is awaited.
  void end_moment();
  // The expected chunks, and the chunks not used yet of members with another chunk used in the last
  // moment.
  [[nodiscard]] std::span<const ChunkId> awaited() const { return awaited_; }
  [[nodiscard]] bool is_awaited(ChunkId chunk) const {
    return has(chunk) && place_[static_cast<size_t>(chunk)].awaited;
  }

  // The chunks that the next pass is likely to use, in the choice that has this chunk: those that
  // nearly every pass uses or, in a certain choice, those that the last pass used.
  [[nodiscard]] std::span<const ChunkId> likely(ChunkId chunk) const {
    return choice_of(chunk).likely;
  }

  // The expected number of moments, in steps of `num_moments`, from the next moment of the chunk's
  // choice to one that uses the chunk; 0 for a chunk in no choice or in a certain one.
  [[nodiscard]] int64_t moments_passed_by(ChunkId chunk, int64_t num_moments) const;

  static constexpr int32_t kNone = -1;

 private:
  struct Place {
    int32_t choice = kNone;
    int32_t member = 0;
    bool used = false;  // in the current moment
    bool awaited = false;
  };
  struct Choice {
    ChunkId first = 0;
    bool certain = false;
    std::vector<std::vector<ChunkId>> members;
    std::vector<UseRate> rates;  // by member
    std::vector<int32_t> used;   // members, in the current moment
    std::vector<ChunkId> likely;
    size_t cursor = 0;  // for RateJudge
    int64_t passes = 0;
  };

  // Throws as add(); returns all chunks of the members, ascending.
  [[nodiscard]] std::vector<ChunkId> checked(
      const std::vector<std::vector<ChunkId>>& members) const;
  void place_members(int32_t index, size_t first);
  static void find_likely(Choice& choice);
  void count_uses(Choice& choice);
  void forget_arrived();
  [[nodiscard]] const Choice& choice_of(ChunkId chunk) const {
    return choices_[static_cast<size_t>(place_[static_cast<size_t>(chunk)].choice)];
  }

  std::vector<Choice> choices_;
  std::vector<Place> place_;  // by chunk
  std::vector<ChunkId> awaited_;
  std::vector<int32_t> under_way_;  // choices used in the current moment
  RateJudge judge_;
};

}  // namespace gemini
