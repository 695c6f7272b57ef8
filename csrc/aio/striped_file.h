// One range of bytes over several private files, a stripe in each by turns.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "aio/io_hook.h"
#include "aio/unlinked_file.h"

namespace gemini {

// Drives work at the same time when each holds every n-th stripe. With one directory positions and
// offsets are the same. Not thread-safe; reads and writes on the descriptors may come from any
// thread.
class StripedFile {
 public:
  struct Options {
    bool direct;
    bool reserve;
    int64_t stripe_bytes;  // a multiple of 4 KiB
  };
  // A stretch that lies in one file.
  struct Stretch {
    int file;
    int64_t offset;  // in that file
    int64_t nbytes;
  };

  // Makes files in `dirs`, of `nbytes` together, rounded up to 4 KiB and, over several directories,
  // to whole stripes. Throws as UnlinkedFile; then nothing is left behind.
  StripedFile(const std::vector<std::string>& dirs, int64_t nbytes, Options options, IoHook* hook);

  // The beginning of [position, position + nbytes) that one request can move: what is left of the
  // stripe, at most `stripe_bytes`.
  [[nodiscard]] Stretch locate(int64_t position, int64_t nbytes) const;

  void close() noexcept;
  void discard(int64_t position, int64_t nbytes);
  // Makes the files longer, to `nbytes` together, rounded up as in the constructor. Throws IoError;
  // some of them may be longer then, which shows nowhere.
  void grow(int64_t nbytes);

  [[nodiscard]] UnlinkedFile& file(int index) { return *files_[static_cast<size_t>(index)]; }
  [[nodiscard]] std::vector<int> descriptors() const;
  // Whether one of the files, at least, bypasses the page cache and needs alignment.
  [[nodiscard]] bool direct() const noexcept;
  // Whether all of them can give space back.
  [[nodiscard]] bool can_discard() const noexcept;
  // Whether all of it is memory.
  [[nodiscard]] bool in_memory() const noexcept;
  [[nodiscard]] int64_t size() const noexcept { return size_; }
  // For messages.
  [[nodiscard]] std::string path() const;

 private:
  // What each file holds of `nbytes`.
  [[nodiscard]] int64_t share(int64_t nbytes, int64_t files) const;

  int64_t stripe_bytes_;
  int64_t size_ = 0;
  std::vector<std::unique_ptr<UnlinkedFile>> files_;
};

}  // namespace gemini
