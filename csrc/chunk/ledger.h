// Byte accounting per tier. Bytes are taken only through a Reservation, which returns them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "chunk/state.h"
#include "common/error.h"
#include "common/size_text.h"

namespace gemini {

class TierLedger;

// Bytes taken from one tier; the destructor returns them. Must not outlive its ledger.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept { swap(other); }
  Reservation& operator=(Reservation&& other) noexcept {
    Reservation(std::move(other)).swap(*this);
    return *this;
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  ~Reservation();

  explicit operator bool() const { return ledger_ != nullptr; }
  // The same bytes in a copy of the ledger, which has counted them already.
  [[nodiscard]] Reservation in_copy(TierLedger& copy) const {
    return ledger_ == nullptr ? Reservation() : Reservation(copy, tier_, nbytes_);
  }
  void release() { *this = Reservation(); }

 private:
  friend class TierLedger;
  Reservation(TierLedger& ledger, Tier tier, int64_t nbytes)
      : ledger_(&ledger), nbytes_(nbytes), tier_(tier) {}
  void swap(Reservation& other) noexcept {
    std::swap(ledger_, other.ledger_);
    std::swap(nbytes_, other.nbytes_);
    std::swap(tier_, other.tier_);
  }

  TierLedger* ledger_ = nullptr;
  int64_t nbytes_ = 0;
  Tier tier_ = Tier::kDevice;
};

// Hard budgets: usage(tier) <= budget(tier) always. A budget of 0 means that the tier is absent.
// Budgets may grow.
class TierLedger {
 public:
  using Bytes = std::array<int64_t, kNumTiers>;

  explicit TierLedger(const Bytes& budgets) : budgets_(budgets) {}
  // A copy has the counts of the original, and needs copies of its reservations: see in_copy().
  TierLedger(const TierLedger&) = default;
  TierLedger& operator=(const TierLedger&) = delete;

  // Takes bytes; throws OutOfBudget, with nothing changed, if they do not fit.
  [[nodiscard]] Reservation reserve(Tier tier, int64_t nbytes) {
    if (nbytes > free_bytes(tier)) throw does_not_fit(tier, nbytes);
    int64_t& used = usage_[index(tier)];
    used += nbytes;
    peaks_[index(tier)] = std::max(peaks_[index(tier)], used);
    return {*this, tier, nbytes};
  }

  [[nodiscard]] OutOfBudget does_not_fit(Tier tier, int64_t nbytes) const {
    return OutOfBudget(format_bytes(nbytes) + " do not fit " + name(tier) + ": " +
                       format_bytes(usage(tier)) + " of " + format_bytes(budget(tier)) +
                       " are in use; raise " + budget_option(tier) + " to at least " +
                       format_enough(usage(tier) + nbytes));
  }

  void raise_budget(Tier tier, int64_t nbytes) { budgets_[index(tier)] += nbytes; }

  [[nodiscard]] int64_t budget(Tier tier) const { return budgets_[index(tier)]; }
  [[nodiscard]] int64_t usage(Tier tier) const { return usage_[index(tier)]; }
  [[nodiscard]] int64_t free_bytes(Tier tier) const { return budget(tier) - usage(tier); }
  [[nodiscard]] int64_t peak(Tier tier) const { return peaks_[index(tier)]; }
  [[nodiscard]] const Bytes& peaks() const { return peaks_; }
  void set_peaks(const Bytes& peaks) { peaks_ = peaks; }
  void reset_peak() { peaks_ = usage_; }

 private:
  friend class Reservation;

  Bytes budgets_;
  Bytes usage_{};
  Bytes peaks_{};
};

inline Reservation::~Reservation() {
  if (ledger_ != nullptr) ledger_->usage_[index(tier_)] -= nbytes_;
}

}  // namespace gemini
