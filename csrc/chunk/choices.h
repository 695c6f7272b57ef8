// Choices: a use takes some of their chunks and leaves the others, as a pass takes a few experts of
// a layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "chunk/state.h"
#include "chunk/use_rate.h"

namespace gemini {

// A choice has members, each one or more chunks that are used together: one expert's weights. To
// the schedule and the record of a step all chunks of a choice are one, the first: whichever
// members an operator uses, it is the same moment, and so are operators on one choice that follow
// each other. Which member is used next is not known, only how often each was.
class Choices {
 public:
  // `certain`: what a pass has used the next one uses too, as the keys and values of a text that
  // is being written. Throws StateError for a member without chunks, and for a chunk that is in a
  // choice already.
  void add(const std::vector<std::vector<ChunkId>>& members, bool certain = false);
  // Gives the choice that has `chunk` further members. Throws as add(), and where none has it.
  void widen(ChunkId chunk, const std::vector<std::vector<ChunkId>>& members);

  [[nodiscard]] bool empty() const { return choices_.empty(); }
  [[nodiscard]] bool has(ChunkId chunk) const {
    const auto c = static_cast<size_t>(chunk);
    return c < place_.size() && place_[c].choice != kNone;
  }
  // What the schedule and the record call this chunk.
  [[nodiscard]] ChunkId known_as(ChunkId chunk) const {
    return has(chunk) ? choice_of(chunk).first : chunk;
  }
  // Replaces chunks of choices by what they are known as; ascending and each once, as before.
  void name(std::vector<ChunkId>& chunks) const;
  // The choice that all of these belong to; kNone where there is no such one.
  [[nodiscard]] int32_t common(std::span<const ChunkId> chunks) const;

  // An operator has got these chunks; those of choices count as used, in the moment under way.
  void note_used(std::span<const ChunkId> chunks);
  // These chunks of choices are needed within the moment under way, after the operator that runs.
  void expect(std::span<const ChunkId> chunks);
  // An access beside the moment has got these chunks: nobody waits for them.
  void note_beside(std::span<const ChunkId> chunks);
  // The moment is over: what its choices used counts for their rates, and nothing is awaited.
  void end_moment();
  // The chunks that are expected, and those of members of which the last moment has used another
  // chunk, but not this one yet.
  [[nodiscard]] std::span<const ChunkId> awaited() const { return awaited_; }
  [[nodiscard]] bool is_awaited(ChunkId chunk) const {
    return has(chunk) && place_[static_cast<size_t>(chunk)].awaited;
  }

  // The chunks of members that the next pass is likely to use, of the choice that has this chunk:
  // those that nearly every pass uses; of a certain choice, those that the last one has used.
  [[nodiscard]] std::span<const ChunkId> likely(ChunkId chunk) const {
    return choice_of(chunk).likely;
  }

  // How many moments go by in expectation, of steps of `num_moments`, between the next moment of
  // the chunk's choice and one that uses the chunk; 0 for a chunk that is in none, or in a certain
  // one.
  [[nodiscard]] int64_t moments_passed_by(ChunkId chunk, int64_t num_moments) const;

  static constexpr int32_t kNone = -1;

 private:
  struct Place {
    int32_t choice = kNone;
    int32_t member = 0;
    bool used = false;  // in the moment under way
    bool awaited = false;
  };
  struct Choice {
    ChunkId first = 0;
    bool certain = false;
    std::vector<std::vector<ChunkId>> members;
    std::vector<UseRate> rates;  // by member
    std::vector<int32_t> used;   // members, in the moment under way
    std::vector<ChunkId> likely;
    size_t cursor = 0;  // of RateJudge
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
  std::vector<int32_t> under_way_;  // choices that the moment under way uses
  RateJudge judge_;
};

}  // namespace gemini
