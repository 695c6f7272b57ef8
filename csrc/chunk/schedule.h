// Schedule: the chunks that a step uses at each moment, and the non-model memory of each period.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "chunk/state.h"

namespace gemini {

inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// Flags of a plan for an interval: the time from one use of a chunk to its next one.
inline constexpr uint8_t kKeep = 1;   // the chunk stays on DEVICE
inline constexpr uint8_t kFlush = 2;  // what the use has written is copied to a lower tier at once

// A plan for the step, in addition to its order.
struct Retention {
  // The flags of the interval that begins with each use, in the order of access_at(), for all
  // moments one after another.
  std::vector<uint8_t> intervals;
  // Per moment: bytes of the operands and of the kept chunks in the period that begins there.
  std::vector<int64_t> planned_bytes;
};

// The next use of a chunk, and the flags of the interval that ends with it.
struct NextUse {
  int64_t moment = kNever;
  uint8_t flags = 0;

  [[nodiscard]] bool kept() const { return (flags & kKeep) != 0; }
};

// Immutable. The step repeats: moment m + num_moments() is moment m of the next step, and all
// functions below accept such moments.
class Schedule {
 public:
  // accesses[m]: the chunks of the operator at moment m, in any order, possibly repeated.
  // reserve_bytes[m]: the non-model memory of the period that begins at moment m; empty means
  // zeros. host_moments: the moments with operators that use their chunks on HOST. Throws
  // StateError for a negative number, a chunk outside [0, num_chunks) or an unknown moment.
  Schedule(const std::vector<std::vector<ChunkId>>& accesses, std::vector<int64_t> reserve_bytes,
           int32_t num_chunks, const std::vector<int64_t>& host_moments = {});

  // The same order with this plan instead of the current one. Throws StateError for a plan of
  // another shape, or if the accesses were not ascending without duplicates: the flags would belong
  // to other uses.
  [[nodiscard]] Schedule with_plan(Retention retention) const;

  [[nodiscard]] int64_t num_moments() const { return num_moments_; }
  [[nodiscard]] int32_t num_chunks() const { return num_chunks_; }

  // The chunks used at a moment, ascending, without duplicates.
  [[nodiscard]] std::span<const ChunkId> access_at(int64_t moment) const;

  // Parallel to access_at(): the flags of the intervals that end with these uses; empty without a
  // plan.
  [[nodiscard]] std::span<const uint8_t> flags_at(int64_t moment) const;

  // Whether the operator at a moment uses its chunks on HOST, and whether any operator does.
  [[nodiscard]] bool on_host(int64_t moment) const {
    return uses_host() && on_host_[static_cast<size_t>(within(moment))];
  }
  [[nodiscard]] bool uses_host() const { return !on_host_.empty(); }

  // The first use of the copy on DEVICE at or after `moment`. kNever for an unknown chunk, and if
  // its next use is on HOST: that makes a copy on DEVICE void.
  [[nodiscard]] int64_t next_use(ChunkId chunk, int64_t moment) const {
    return next(chunk, moment).moment;
  }
  [[nodiscard]] NextUse next(ChunkId chunk, int64_t moment) const;

  // Whether there is a plan, and the bytes that it has on DEVICE in the period that begins at a
  // moment.
  [[nodiscard]] bool planned() const { return !planned_bytes_.empty(); }
  [[nodiscard]] int64_t planned_bytes(int64_t moment) const;

  [[nodiscard]] int64_t reserve_bytes(int64_t moment) const;
  [[nodiscard]] int64_t max_reserve() const { return max_reserve_; }

 private:
  // The moment within the step. A division would cost more than the rest of a look-up.
  [[nodiscard]] int64_t within(int64_t moment) const {
    return moment < num_moments_ ? moment : moment % num_moments_;
  }
  void index_uses();
  void note_host_moments(const std::vector<int64_t>& moments);

  int64_t num_moments_;
  int32_t num_chunks_;
  bool ascending_ = true;  // the given accesses were ascending without duplicates
  int64_t max_reserve_ = 0;
  std::vector<int64_t> reserve_bytes_;
  std::vector<bool> on_host_;          // per moment; empty: none is
  std::vector<ChunkId> accesses_;      // of all moments, one after another
  std::vector<size_t> access_begin_;   // num_moments + 1 offsets into accesses_
  std::vector<int64_t> uses_;          // moments of all chunks, one chunk after another
  std::vector<uint8_t> flags_;         // per use: flags of the interval that ends with it; empty:
                                       // no plan
  std::vector<uint8_t> access_flags_;  // the same per access
  std::vector<int64_t> planned_bytes_;
  std::vector<size_t> use_begin_;  // num_chunks + 1 offsets into uses_
};

// Inline: called for every chunk in a decision.
inline NextUse Schedule::next(ChunkId chunk, int64_t moment) const {
  if (chunk < 0 || chunk >= num_chunks_) return {};
  const auto c = static_cast<size_t>(chunk);
  const auto uses = std::span(uses_).subspan(use_begin_[c], use_begin_[c + 1] - use_begin_[c]);
  if (uses.empty()) return {};
  const int64_t in_step = within(moment);
  const int64_t step_begin = moment - in_step;
  const auto found = std::ranges::lower_bound(uses, in_step);
  const bool wraps = found == uses.end();
  const auto index = wraps ? 0 : static_cast<size_t>(found - uses.begin());
  if (on_host(uses[index])) return {};
  const int64_t at = step_begin + uses[index] + (wraps ? num_moments_ : 0);
  return {at, flags_.empty() ? uint8_t{0} : flags_[use_begin_[c] + index]};
}

inline std::span<const ChunkId> Schedule::access_at(int64_t moment) const {
  if (num_moments_ == 0) return {};
  const auto m = static_cast<size_t>(within(moment));
  return std::span(accesses_).subspan(access_begin_[m], access_begin_[m + 1] - access_begin_[m]);
}

inline std::span<const uint8_t> Schedule::flags_at(int64_t moment) const {
  if (access_flags_.empty()) return {};
  const auto m = static_cast<size_t>(within(moment));
  return std::span(access_flags_)
      .subspan(access_begin_[m], access_begin_[m + 1] - access_begin_[m]);
}

inline int64_t Schedule::planned_bytes(int64_t moment) const {
  return planned() ? planned_bytes_[static_cast<size_t>(within(moment))] : 0;
}

inline int64_t Schedule::reserve_bytes(int64_t moment) const {
  return num_moments_ == 0 ? 0 : reserve_bytes_[static_cast<size_t>(within(moment))];
}

}  // namespace gemini
