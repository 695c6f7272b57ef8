// A private file without a name: it disappears with its descriptor, also after kill -9.
#pragma once

#include <cstdint>
#include <string>

#include "aio/io_hook.h"

namespace gemini {

// Owns the descriptor. With `reserve` the disk space is taken in the constructor, so a full disk is
// met before training starts. Not thread-safe; reads and writes on `fd()` may come from any thread.
class UnlinkedFile {
 public:
  // Makes a file of `nbytes`, rounded up to 4 KiB, in `dir`, readable by this user only. With
  // `direct` it bypasses the page cache where the file system can; without `reserve` it takes disk
  // space only where it is written. Throws IoError (ENOENT, EACCES, EROFS, ENOSPC, ...) and
  // StateError when `nbytes` is not positive; then nothing is left behind. `hook` may be null.
  UnlinkedFile(const std::string& dir, int64_t nbytes, bool direct, bool reserve, IoHook* hook);
  ~UnlinkedFile();
  UnlinkedFile(const UnlinkedFile&) = delete;
  UnlinkedFile& operator=(const UnlinkedFile&) = delete;

  // Gives the descriptor and the disk space back. Idempotent.
  void close() noexcept;

  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool direct() const noexcept { return direct_; }
  // Whether the file system is memory: no device works while a processor does something else.
  [[nodiscard]] bool in_memory() const noexcept;
  [[nodiscard]] int64_t size() const noexcept { return size_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  // Whether the file system can give the space of a range back: not every one can. Of a file made
  // without `reserve`, or that has grown; false of others, which keep theirs.
  [[nodiscard]] bool can_discard() const noexcept { return can_discard_; }

  // Makes the file longer, to `nbytes` rounded up to 4 KiB; what is added takes disk space where it
  // is written, and `can_discard` is then about all of the file. Nothing happens where it is that
  // long. Throws IoError, the file is as before; StateError when closed.
  void grow(int64_t nbytes);

  // Gives the disk space of a range back; it reads as zeros afterwards. Throws IoError, also where
  // the file system cannot.
  void discard(int64_t offset, int64_t nbytes);

  // Writes the range back when `wrote`, and lets the page cache forget it: buffered I/O must not
  // fill memory that belongs to no budget. Returns 0 or the errno of a failed write-back.
  [[nodiscard]] int forget_cached(int64_t offset, int64_t nbytes, bool wrote) noexcept;

 private:
  int fd_ = -1;
  bool direct_ = false;
  bool can_discard_ = false;
  int64_t size_;
  std::string path_;  // for messages: the directory and a placeholder
};

}  // namespace gemini
