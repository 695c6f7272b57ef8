// UnlinkedFile: a private file without a name. It disappears with its descriptor, even after kill
// -9.
#pragma once

#include <cstdint>
#include <string>

#include "aio/io_hook.h"

namespace gemini {

// Owns the descriptor. With `reserve` the constructor takes the disk space, so a full disk is
// detected before training starts. Not thread-safe; reads and writes on `fd()` may come from any
// thread.
class UnlinkedFile {
 public:
  // Creates a file of `nbytes`, rounded up to 4 KiB, in `dir`, readable by this user only. With
  // `direct` it bypasses the page cache if the file system can; without `reserve` it takes disk
  // space only when it is written. Throws IoError (ENOENT, EACCES, EROFS, ENOSPC, ...), and
  // StateError if `nbytes` is not positive; then no file is left behind. `hook` may be null.
  UnlinkedFile(const std::string& dir, int64_t nbytes, bool direct, bool reserve, IoHook* hook);
  ~UnlinkedFile();
  UnlinkedFile(const UnlinkedFile&) = delete;
  UnlinkedFile& operator=(const UnlinkedFile&) = delete;

  // Releases the descriptor and the disk space. Idempotent.
  void close() noexcept;

  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool direct() const noexcept { return direct_; }
  // Whether the file system is memory: then no device works while a processor does something else.
  [[nodiscard]] bool in_memory() const noexcept;
  [[nodiscard]] int64_t size() const noexcept { return size_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  // Whether the file system can discard ranges of this file. Determined for files made without
  // `reserve` and for files that have grown; false for others, which keep their space.
  [[nodiscard]] bool can_discard() const noexcept { return can_discard_; }

  // Makes the file longer, to `nbytes` rounded up to 4 KiB. The added part takes disk space when it
  // is written, and `can_discard` applies to the whole file afterwards. Does nothing if the file is
  // that long already. Throws IoError, with the file unchanged; StateError if closed.
  void grow(int64_t nbytes);

  // Returns the disk space of a range to the file system; the range reads as zeros afterwards.
  // Throws IoError, also if the file system does not support it.
  void discard(int64_t offset, int64_t nbytes);

  // Writes the range back if `wrote`, and drops it from the page cache: buffered I/O must not fill
  // memory that no budget covers. Returns 0 or the errno of a failed write-back.
  [[nodiscard]] int forget_cached(int64_t offset, int64_t nbytes, bool wrote) noexcept;

 private:
  int fd_ = -1;
  bool direct_ = false;
  bool can_discard_ = false;
  int64_t size_;
  std::string path_;  // for messages: the directory and a placeholder
};

}  // namespace gemini
