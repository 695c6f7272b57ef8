// The number of DEVICE bytes that model data should stay within, now and at each later moment.
#pragma once

#include <algorithm>
#include <cstdint>

#include "chunk/schedule.h"

namespace gemini {

// A soft limit, and the part of the hard budget that the schedule leaves after non-model memory.
class DeviceLimit {
 public:
  explicit DeviceLimit(int64_t budget) : budget_(budget), soft_(budget) {}

  void set_soft(int64_t nbytes) { soft_ = std::min(nbytes, budget_); }
  [[nodiscard]] int64_t soft() const { return soft_; }

  // The limit during the period that begins at a moment of the schedule.
  [[nodiscard]] int64_t at(const Schedule& schedule, int64_t moment) const {
    return within(schedule.reserve_bytes(moment));
  }
  // The limit if the rest of the step is unknown: leaves room for the worst period.
  [[nodiscard]] int64_t at_worst(const Schedule& schedule) const {
    return within(schedule.max_reserve());
  }

 private:
  [[nodiscard]] int64_t within(int64_t reserve_bytes) const {
    return std::clamp(budget_ - reserve_bytes, int64_t{0}, soft_);
  }

  int64_t budget_;
  int64_t soft_;
};

}  // namespace gemini
