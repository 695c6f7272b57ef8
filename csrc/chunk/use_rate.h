// UseRate: how often a member of a choice is used. Rates decay and are integers, so that ranks and
// runs agree. docs/notes/choices.md explains the constants.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace gemini {

// Uses per pass over a few, some and many past passes.
inline constexpr std::array<int64_t, 3> kHalfLives{1, 8, 128};  // in passes
inline constexpr size_t kNumRates = kHalfLives.size();
using Rates = std::array<int64_t, kNumRates>;  // each in units of 1 / 2^16

class UseRate {
 public:
  // `pass` must not be before the last one noted.
  void note_used(int64_t pass);
  [[nodiscard]] Rates at(int64_t pass) const;

 private:
  Rates rates_{};
  int64_t pass_ = 0;  // the pass of rates_
};

// Learns which mixture of the rates predicts the next pass best, recent or long-term use: the one
// that more often ranks used members above others. One judge for all choices, because they compete
// for memory.
class RateJudge {
 public:
  static constexpr int64_t kOne = int64_t{1} << 20;  // probability 1

  // The probability that a pass uses a member with these rates, by the best mixture; > 0.
  [[nodiscard]] int64_t probability(const Rates& rates) const;
  // A pass has used the members `used`, ascending; `all` has the rates before it. Compares each
  // with one other member; `cursor` is the next one to compare with.
  void note_pass(std::span<const int32_t> used, std::span<const UseRate> all, int64_t pass,
                 size_t& cursor);

 private:
  std::array<int64_t, 2> scores_{};  // of the mixtures
};

}  // namespace gemini
