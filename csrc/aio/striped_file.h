// StripedFile: one range of bytes striped over several private files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "aio/io_hook.h"
#include "aio/unlinked_file.h"

namespace gemini {

// With a stripe in each file in turn, several drives work at the same time. With one directory,
// positions and offsets are equal. Not thread-safe; reads and writes on the descriptors may come
// from any thread.
class StripedFile {
 public:
  struct Options {
    bool direct;
    bool reserve;
    int64_t stripe_bytes;  // a multiple of 4 KiB
  };
  // A range within one file.
  struct Stretch {
    int file;
    int64_t offset;  // in that file
    int64_t nbytes;
  };

  // Creates files in `dirs` with `nbytes` in total, rounded up to 4 KiB and, with several
  // directories, to whole stripes. Throws as UnlinkedFile; then no file is left behind.
  StripedFile(const std::vector<std::string>& dirs, int64_t nbytes, Options options, IoHook* hook);

  // The beginning of [position, position + nbytes) that one request can transfer: up to the end of
  // the stripe, at most `stripe_bytes`.
  [[nodiscard]] Stretch locate(int64_t position, int64_t nbytes) const;

  void close() noexcept;
  void discard(int64_t position, int64_t nbytes);
  // Makes the files longer, to `nbytes` in total, rounded up as in the constructor. Throws IoError;
  // some files may be longer then, which has no visible effect.
  void grow(int64_t nbytes);

  [[nodiscard]] UnlinkedFile& file(int index) { return *files_[static_cast<size_t>(index)]; }
  [[nodiscard]] std::vector<int> descriptors() const;
  // Whether at least one of the files bypasses the page cache and needs alignment.
  [[nodiscard]] bool direct() const noexcept;
  // Whether all of them can discard ranges.
  [[nodiscard]] bool can_discard() const noexcept;
  // Whether all of them are in memory.
  [[nodiscard]] bool in_memory() const noexcept;
  [[nodiscard]] int64_t size() const noexcept { return size_; }
  // For messages.
  [[nodiscard]] std::string path() const;

 private:
  // The bytes of each file for `nbytes` in total.
  [[nodiscard]] int64_t share(int64_t nbytes, int64_t files) const;

  int64_t stripe_bytes_;
  int64_t size_ = 0;
  std::vector<std::unique_ptr<UnlinkedFile>> files_;
};

}  // namespace gemini
