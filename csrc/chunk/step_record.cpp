#include "chunk/step_record.h"

#include <algorithm>

namespace gemini {

void StepRecord::clear() {
  entries_.clear();
  ends_.clear();
  frees_.clear();
  num_unrecorded_ = 0;
}

void StepRecord::undo_moment() {
  if (num_unrecorded_ > 0) {
    --num_unrecorded_;
    return;
  }
  ends_.pop_back();
  const size_t end = begin_of(ends_.size());
  while (entries_.size() > end) {
    const Entry& entry = entries_.back();
    latest_[static_cast<size_t>(entry.chunk)] = entry.previous;
    entries_.pop_back();
  }
}

void StepRecord::note_written(ChunkId chunk) {
  const auto c = static_cast<size_t>(chunk);
  if (c >= latest_.size() || latest_[c] >= entries_.size()) return;
  Entry& entry = entries_[latest_[c]];
  if (entry.chunk == chunk && entry.mode == AccessMode::kRead) entry.mode = AccessMode::kModified;
}

void StepRecord::note_freed(ChunkId chunk) { frees_.push_back({ends_.size(), chunk}); }

std::vector<std::vector<ChunkId>> StepRecord::accesses() const {
  std::vector<std::vector<ChunkId>> accesses(ends_.size());
  for (size_t moment = 0; moment < ends_.size(); ++moment) {
    for (size_t i = begin_of(moment); i < ends_[moment]; ++i) {
      accesses[moment].push_back(entries_[i].chunk);
    }
  }
  return accesses;
}

std::vector<std::string> StepRecord::modes() const {
  std::vector<std::string> modes(ends_.size());
  for (size_t moment = 0; moment < ends_.size(); ++moment) {
    for (size_t i = begin_of(moment); i < ends_[moment]; ++i) {
      modes[moment].push_back(static_cast<char>(entries_[i].mode));
    }
  }
  return modes;
}

std::vector<std::vector<ChunkId>> StepRecord::frees() const {
  std::vector<std::vector<ChunkId>> frees(ends_.size());
  if (frees.empty()) return frees;
  for (const Freed& freed : frees_) {
    frees[freed.num_moments == 0 ? frees.size() - 1 : freed.num_moments - 1].push_back(freed.chunk);
  }
  for (std::vector<ChunkId>& chunks : frees) {
    std::ranges::sort(chunks);
    const auto repeated = std::ranges::unique(chunks);
    chunks.erase(repeated.begin(), repeated.end());
  }
  return frees;
}

}  // namespace gemini
