// How often a member of a choice is used: rates that decay, in integers, so that ranks and runs
// agree. docs/notes/choices.md says where the constants come from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace gemini {

// Uses per pass over the last few, some and many passes.
inline constexpr std::array<int64_t, 3> kHalfLives{1, 8, 128};  // passes
inline constexpr size_t kNumRates = kHalfLives.size();
using Rates = std::array<int64_t, kNumRates>;  // each in 1 / 2^16

class UseRate {
 public:
  // In pass number `pass`, not before the last one that was noted.
  void note_used(int64_t pass);
  [[nodiscard]] Rates at(int64_t pass) const;

 private:
  Rates rates_{};
  int64_t pass_ = 0;  // that they are of
};

// Which mixture of the rates tells best what the next pass uses, what is recent or what lasts: the
// one that put used members before others more often. One for all choices: they compete for memory.
class RateJudge {
 public:
  static constexpr int64_t kOne = int64_t{1} << 20;  // of a probability

  // The probability that a pass uses a member with these rates, by the best mixture; > 0.
  [[nodiscard]] int64_t probability(const Rates& rates) const;
  // A pass has used the members `used`, ascending, of all whose rates were those before it. Each is
  // compared with one other; `cursor` says which comes next.
  void note_pass(std::span<const int32_t> used, std::span<const UseRate> all, int64_t pass,
                 size_t& cursor);

 private:
  std::array<int64_t, 2> scores_{};  // of the mixtures
};

}  // namespace gemini
