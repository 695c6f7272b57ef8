#include "chunk/schedule.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/error.h"

namespace gemini {

Schedule::Schedule(const std::vector<std::vector<ChunkId>>& accesses,
                   std::vector<int64_t> reserve_bytes, int32_t num_chunks,
                   const std::vector<int64_t>& host_moments)
    : num_moments_(static_cast<int64_t>(accesses.size())),
      num_chunks_(num_chunks),
      reserve_bytes_(std::move(reserve_bytes)) {
  if (num_chunks < 0) throw StateError("a schedule needs num_chunks >= 0");
  if (reserve_bytes_.empty()) reserve_bytes_.assign(accesses.size(), 0);
  if (reserve_bytes_.size() != accesses.size()) {
    throw StateError("a schedule of " + std::to_string(accesses.size()) + " moments has " +
                     std::to_string(reserve_bytes_.size()) + " reservations");
  }
  for (const int64_t nbytes : reserve_bytes_) {
    if (nbytes < 0) throw StateError("a schedule's reservation is negative");
    max_reserve_ = std::max(max_reserve_, nbytes);
  }
  access_begin_.push_back(0);
  for (const std::vector<ChunkId>& access : accesses) {
    std::vector<ChunkId> chunks(access);
    std::ranges::sort(chunks);
    const auto repeated = std::ranges::unique(chunks);
    chunks.erase(repeated.begin(), repeated.end());
    ascending_ = ascending_ && std::ranges::equal(chunks, access);
    if (!chunks.empty() && (chunks.front() < 0 || chunks.back() >= num_chunks)) {
      throw StateError("moment " + std::to_string(access_begin_.size() - 1) +
                       " of a schedule names a chunk outside [0, " + std::to_string(num_chunks) +
                       ")");
    }
    accesses_.insert(accesses_.end(), chunks.begin(), chunks.end());
    access_begin_.push_back(accesses_.size());
  }
  index_uses();
  note_host_moments(host_moments);
}

void Schedule::note_host_moments(const std::vector<int64_t>& moments) {
  if (moments.empty()) return;
  on_host_.assign(static_cast<size_t>(num_moments_), false);
  for (const int64_t moment : moments) {
    if (moment < 0 || moment >= num_moments_) {
      throw StateError("a schedule of " + std::to_string(num_moments_) + " moments has no moment " +
                       std::to_string(moment) + " on HOST");
    }
    on_host_[static_cast<size_t>(moment)] = true;
  }
}

Schedule Schedule::with_plan(Retention retention) const {
  if (retention.planned_bytes.size() != static_cast<size_t>(num_moments_) ||
      retention.intervals.size() != accesses_.size()) {
    throw StateError("a plan of " + std::to_string(retention.planned_bytes.size()) +
                     " moments and " + std::to_string(retention.intervals.size()) +
                     " intervals belongs to a schedule of " + std::to_string(num_moments_) +
                     " moments and " + std::to_string(accesses_.size()) + " accesses");
  }
  if (!ascending_) {
    throw StateError("a plan needs a schedule with the chunks of each moment ascending, each once");
  }
  Schedule planned(*this);
  planned.flags_.assign(uses_.size(), 0);
  std::vector<size_t> use(use_begin_.begin(), use_begin_.end() - 1);
  for (size_t i = 0; i < accesses_.size(); ++i) {
    const auto chunk = static_cast<size_t>(accesses_[i]);
    // The interval ends with the next use; the last use of the step wraps to the first.
    const size_t next = ++use[chunk] < use_begin_[chunk + 1] ? use[chunk] : use_begin_[chunk];
    planned.flags_[next] = retention.intervals[i];
  }
  planned.access_flags_.clear();
  std::vector<size_t> ended(use_begin_.begin(), use_begin_.end() - 1);
  for (const ChunkId chunk : accesses_) {
    planned.access_flags_.push_back(planned.flags_[ended[static_cast<size_t>(chunk)]++]);
  }
  planned.planned_bytes_ = std::move(retention.planned_bytes);
  return planned;
}

void Schedule::index_uses() {
  use_begin_.assign(static_cast<size_t>(num_chunks_) + 1, 0);
  for (const ChunkId chunk : accesses_) ++use_begin_[static_cast<size_t>(chunk) + 1];
  for (size_t i = 1; i < use_begin_.size(); ++i) use_begin_[i] += use_begin_[i - 1];
  uses_.resize(accesses_.size());
  std::vector<size_t> end(use_begin_.begin(), use_begin_.end() - 1);
  for (int64_t moment = 0; moment < num_moments_; ++moment) {
    for (const ChunkId chunk : access_at(moment)) uses_[end[static_cast<size_t>(chunk)]++] = moment;
  }
}

}  // namespace gemini
