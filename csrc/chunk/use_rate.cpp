#include "chunk/use_rate.h"

#include <algorithm>

namespace gemini {

namespace {

constexpr int64_t kOneRate = int64_t{1} << 16;
constexpr int64_t kLargest = kOneRate - 1;

// 2^(-1 / kHalfLives[i]), in units of 1 / 2^16.
constexpr std::array<int64_t, kNumRates> kDecays{32768, 60097, 65182};

// 2^(-i / kHalfLife) for i < kHalfLife, by repeated products of doubles, which are the same on all
// machines.
template <int64_t kHalfLife>
constexpr std::array<int64_t, kHalfLife> powers() {
  // 2^(-1/128) to 17 digits; every half-life divides 128.
  constexpr double kRoot = 0.99459942348363317;
  std::array<int64_t, kHalfLife> found{};
  double power = 1;
  for (int64_t& entry : found) {
    const double exact = power * kOneRate;
    const auto below = static_cast<int64_t>(exact);
    entry = exact - static_cast<double>(below) < 0.5 ? below : below + 1;
    for (int64_t i = 0; i < 128 / kHalfLife; ++i) power *= kRoot;
  }
  return found;
}

constexpr auto kPowersOfFew = powers<kHalfLives[0]>();
constexpr auto kPowersOfSome = powers<kHalfLives[1]>();
constexpr auto kPowersOfMany = powers<kHalfLives[2]>();
constexpr std::array<const int64_t*, kNumRates> kPowers{kPowersOfFew.data(), kPowersOfSome.data(),
                                                        kPowersOfMany.data()};

// Mixtures of the rates, in sixteenths: recent use, long-term use.
constexpr std::array<Rates, 2> kMixtures{{{8, 6, 2}, {0, 0, 16}}};

int64_t mixed(const Rates& mixture, const Rates& rates) {
  int64_t sum = 0;
  for (size_t i = 0; i < kNumRates; ++i) sum += mixture[i] * rates[i];
  return sum;
}

}  // namespace

Rates UseRate::at(int64_t pass) const {
  Rates found{};
  const int64_t passed = pass - pass_;
  for (size_t i = 0; i < kNumRates; ++i) {
    const int64_t halvings = std::min<int64_t>(passed / kHalfLives[i], 31);
    found[i] = (rates_[i] * kPowers[i][passed % kHalfLives[i]] >> 16) >> halvings;
  }
  return found;
}

void UseRate::note_used(int64_t pass) {
  rates_ = at(pass);
  for (size_t i = 0; i < kNumRates; ++i) {
    rates_[i] = std::min(kLargest, rates_[i] + kOneRate - kDecays[i]);
  }
  pass_ = pass;
}

int64_t RateJudge::probability(const Rates& rates) const {
  const size_t best = scores_[1] > scores_[0] ? 1 : 0;
  return std::max<int64_t>(mixed(kMixtures[best], rates), 1);
}

void RateJudge::note_pass(std::span<const int32_t> used, std::span<const UseRate> all, int64_t pass,
                          size_t& cursor) {
  for (const int32_t member : used) {
    const size_t other = cursor;
    cursor = (cursor + 1) % all.size();
    if (std::ranges::binary_search(used, static_cast<int32_t>(other))) continue;
    const Rates its = all[static_cast<size_t>(member)].at(pass);
    const Rates others = all[other].at(pass);
    for (size_t i = 0; i < kMixtures.size(); ++i) {
      const int64_t ahead = mixed(kMixtures[i], its) - mixed(kMixtures[i], others);
      scores_[i] += ahead > 0 ? 256 : ahead < 0 ? -256 : 0;
    }
  }
  for (int64_t& score : scores_) score -= score >> 8;
}

}  // namespace gemini
