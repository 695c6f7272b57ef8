#include "chunk/schedule.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/error.h"

namespace gemini {

Schedule::Schedule(const std::vector<std::vector<ChunkId>>& accesses,
                   std::vector<int64_t> reserve_bytes, int32_t num_chunks, Retention retention)
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
    if (!chunks.empty() && (chunks.front() < 0 || chunks.back() >= num_chunks)) {
      throw StateError("moment " + std::to_string(access_begin_.size() - 1) +
                       " of a schedule names a chunk outside [0, " + std::to_string(num_chunks) +
                       ")");
    }
    accesses_.insert(accesses_.end(), chunks.begin(), chunks.end());
    access_begin_.push_back(accesses_.size());
  }
  index_uses();
  if (!retention.planned_bytes.empty()) index_plan(accesses, std::move(retention));
}

void Schedule::index_plan(const std::vector<std::vector<ChunkId>>& accesses, Retention retention) {
  if (retention.planned_bytes.size() != accesses.size() ||
      retention.intervals.size() != accesses.size()) {
    throw StateError("a plan for " + std::to_string(retention.intervals.size()) +
                     " moments belongs to a schedule of " + std::to_string(accesses.size()));
  }
  flags_.assign(uses_.size(), 0);
  std::vector<size_t> use(use_begin_.begin(), use_begin_.end() - 1);
  for (size_t m = 0; m < accesses.size(); ++m) {
    if (!std::ranges::equal(accesses[m], access_at(static_cast<int64_t>(m))) ||
        retention.intervals[m].size() != accesses[m].size()) {
      throw StateError("moment " + std::to_string(m) +
                       " of a plan needs one flag per chunk, the chunks ascending and each once");
    }
    for (size_t i = 0; i < accesses[m].size(); ++i) {
      const auto chunk = static_cast<size_t>(accesses[m][i]);
      // The interval ends with the next use, the last one of the step with the first.
      const size_t next = ++use[chunk] < use_begin_[chunk + 1] ? use[chunk] : use_begin_[chunk];
      flags_[next] = retention.intervals[m][i];
    }
  }
  std::vector<size_t> ended(use_begin_.begin(), use_begin_.end() - 1);
  for (const ChunkId chunk : accesses_) {
    access_flags_.push_back(flags_[ended[static_cast<size_t>(chunk)]++]);
  }
  planned_bytes_ = std::move(retention.planned_bytes);
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
