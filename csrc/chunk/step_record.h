// StepRecord: the accesses of the operators of one step, moment by moment. A trace is made from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "chunk/state.h"

namespace gemini {

enum class AccessMode : char {
  kRead = 'r',
  kModified = 'm',  // read and written
  kWritten = 'w',   // there was no content before: this access allocates the chunk
};

class StepRecord {
 public:
  void clear();
  // Opens a moment with these accesses, ascending; `mode_of(chunk)` returns the initial mode of
  // each. After 2^22 entries nothing more is recorded.
  template <typename ModeOf>
  void open_moment(std::span<const ChunkId> chunks, ModeOf mode_of);
  // Removes the latest moment, as if it had not been opened.
  void undo_moment();
  // An operator wrote to the chunk: changes its most recent recorded access, if it has one.
  void note_written(ChunkId chunk);
  // The content of the chunk was discarded: counts to the period of the latest moment. The step
  // repeats, so before the first moment this is the last period.
  void note_freed(ChunkId chunk);

  [[nodiscard]] std::vector<std::vector<ChunkId>> accesses() const;
  [[nodiscard]] std::vector<std::string> modes() const;           // one letter per access
  [[nodiscard]] std::vector<std::vector<ChunkId>> frees() const;  // ascending, without duplicates

 private:
  static constexpr size_t kMaxEntries = size_t{1} << 22;
  static constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

  struct Entry {
    ChunkId chunk = 0;
    uint32_t previous = kNone;  // the earlier value of latest_; possibly of an earlier step
    AccessMode mode = AccessMode::kRead;
  };
  struct Freed {
    size_t num_moments = 0;  // opened before
    ChunkId chunk = 0;
  };

  [[nodiscard]] size_t begin_of(size_t moment) const { return moment == 0 ? 0 : ends_[moment - 1]; }

  std::vector<Entry> entries_;  // of all moments, one after another
  std::vector<size_t> ends_;    // per moment, offset into entries_
  std::vector<Freed> frees_;
  std::vector<uint32_t> latest_;  // per chunk: its latest entry, valid if that entry is of this
                                  // chunk
  size_t num_unrecorded_ = 0;     // moments
};

template <typename ModeOf>
void StepRecord::open_moment(std::span<const ChunkId> chunks, ModeOf mode_of) {
  if (num_unrecorded_ > 0 || entries_.size() + ends_.size() >= kMaxEntries) {
    ++num_unrecorded_;
    return;
  }
  for (const ChunkId chunk : chunks) {
    const auto c = static_cast<size_t>(chunk);
    if (c >= latest_.size()) latest_.resize(c + 1, kNone);
    entries_.push_back({chunk, latest_[c], mode_of(chunk)});
    latest_[c] = static_cast<uint32_t>(entries_.size() - 1);
  }
  ends_.push_back(entries_.size());
}

}  // namespace gemini
