// What the operators of one step did to which chunks, moment by moment: what a trace is made from.
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
  kWritten = 'w',   // there was no content before: the chunk is allocated here
};

class StepRecord {
 public:
  void clear();
  // Opens a moment with these accesses, ascending; `mode_of(chunk)` says how each begins.
  // Beyond 2^22 entries nothing is recorded any more.
  template <typename ModeOf>
  void open_moment(std::span<const ChunkId> chunks, ModeOf mode_of);
  // Takes the latest moment back, as if it had not been opened.
  void undo_moment();
  // An operator wrote to the chunk: counts to its most recent recorded access, if it has one.
  void note_written(ChunkId chunk);
  // The content of the chunk is dead: counts to the period of the latest moment. The step repeats,
  // so before the first one that is the last.
  void note_freed(ChunkId chunk);

  [[nodiscard]] std::vector<std::vector<ChunkId>> accesses() const;
  [[nodiscard]] std::vector<std::string> modes() const;           // a letter per access
  [[nodiscard]] std::vector<std::vector<ChunkId>> frees() const;  // ascending, each once

 private:
  static constexpr size_t kMaxEntries = size_t{1} << 22;
  static constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

  struct Entry {
    ChunkId chunk = 0;
    uint32_t previous = kNone;  // what latest_ said before; of an earlier step, perhaps
    AccessMode mode = AccessMode::kRead;
  };
  struct Freed {
    size_t num_moments = 0;  // opened before
    ChunkId chunk = 0;
  };

  [[nodiscard]] size_t begin_of(size_t moment) const { return moment == 0 ? 0 : ends_[moment - 1]; }

  std::vector<Entry> entries_;  // of all moments, one after the other
  std::vector<size_t> ends_;    // per moment, offset into entries_
  std::vector<Freed> frees_;
  std::vector<uint32_t> latest_;  // per chunk: its latest entry, if that is an entry of this chunk
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
