#include "aio/unlinked_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/statvfs.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/magic.h>
#include <sys/vfs.h>
#endif

#include <algorithm>
#include <cerrno>
#include <vector>

#include "common/bytes.h"
#include "common/error.h"
#include "common/size_text.h"

namespace gemini {
namespace {

constexpr int64_t kZerosBytes = 1 << 20;

// Opens a file that never had a name. Returns the descriptor or a negated errno.
int open_nameless(const std::string& dir) {
#ifdef O_TMPFILE
  const int fd = ::open(dir.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  return fd < 0 ? -errno : fd;
#else
  (void)dir;
  return -EOPNOTSUPP;
#endif
}

// For file systems without O_TMPFILE: a named file, unlinked at once.
int open_and_unlink(const std::string& dir) {
  std::string name = dir + "/.gemini-XXXXXX";
  const int fd = ::mkstemp(name.data());  // mode 0600
  if (fd < 0) return -errno;
  if (::unlink(name.c_str()) != 0 || ::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
    const int code = errno;
    ::close(fd);
    return -code;
  }
  return fd;
}

int open_private(const std::string& dir) {
  const int fd = open_nameless(dir);
  // Without O_TMPFILE support open() returns one of these; all other errors are about the
  // directory.
  const bool unsupported = fd == -EOPNOTSUPP || fd == -EISDIR || fd == -EINVAL;
  return unsupported ? open_and_unlink(dir) : fd;
}

// Disables the page cache, and verifies with one page that the file system supports it.
bool enable_direct(int fd) {
#ifdef O_DIRECT
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_DIRECT) != 0) return false;
  alignas(kPageBytes) char page[kPageBytes] = {};
  if (::pwrite(fd, page, sizeof page, 0) == kPageBytes &&
      ::pread(fd, page, sizeof page, 0) == kPageBytes) {
    return true;
  }
  if (::fcntl(fd, F_SETFL, flags) != 0) throw Error("cannot switch O_DIRECT off again");
#else
  (void)fd;
#endif
  return false;
}

// Whether the file system reports `nbytes` free, or reports nothing.
bool has_room(int fd, int64_t nbytes) {
  struct statvfs found;
  if (::fstatvfs(fd, &found) != 0 || found.f_blocks == 0) return true;  // it reports nothing
  return static_cast<uint64_t>(nbytes) / found.f_frsize <= found.f_bavail;
}

// Reserves disk space by writing zeros, if there is no other way. Returns 0 or an errno.
int fill_with_zeros(int fd, int64_t nbytes) {
  const std::vector<char> zeros(static_cast<size_t>(std::min(nbytes, kZerosBytes)));
  for (int64_t done = 0; done < nbytes;) {
    const auto part = static_cast<size_t>(std::min(nbytes - done, kZerosBytes));
    const ssize_t written = ::pwrite(fd, zeros.data(), part, done);
    if (written < 0 && errno != EINTR) return errno;
    if (written > 0) done += written;
  }
  return 0;
}

// Reserves disk space for the first `nbytes` of an empty file. Returns 0 or an errno.
int allocate(int fd, int64_t nbytes) {
#ifdef __linux__
  int code = 0;
  do {
    code = ::fallocate(fd, 0, 0, nbytes) == 0 ? 0 : errno;
  } while (code == EINTR);
  // glibc's posix_fallocate falls back to writing only for EOPNOTSUPP; a sandbox returns ENOSYS or,
  // for a writable file, EPERM.
  const bool unsupported = code == EOPNOTSUPP || code == ENOSYS || code == EPERM;
  return unsupported ? fill_with_zeros(fd, nbytes) : code;
#else
  return ::ftruncate(fd, nbytes) == 0 ? 0 : errno;
#endif
}

int set_size(int fd, int64_t nbytes, bool reserve, IoHook* hook) {
  if (!reserve) return ::ftruncate(fd, nbytes) == 0 ? 0 : errno;
  // Reserving more than is free takes all free space before it fails, also from other processes.
  if (!has_room(fd, nbytes)) return ENOSPC;
  const int refused = hook != nullptr ? hook->allocate(nbytes) : 0;
  return refused != 0 ? refused : allocate(fd, nbytes);
}

// Releases the space of a range of the file. Returns 0 or an errno.
int punch(int fd, int64_t offset, int64_t nbytes) {
#ifdef FALLOC_FL_PUNCH_HOLE
  int code = 0;
  do {
    const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    code = ::fallocate(fd, mode, offset, nbytes) == 0 ? 0 : errno;
  } while (code == EINTR);
  return code;
#else
  (void)fd, (void)offset, (void)nbytes;
  return EOPNOTSUPP;
#endif
}

int64_t checked_size(int64_t nbytes) {
  if (nbytes <= 0) throw StateError("a file needs a positive size, got " + std::to_string(nbytes));
  return round_up(nbytes, kPageBytes);
}

}  // namespace

UnlinkedFile::UnlinkedFile(const std::string& dir, int64_t nbytes, bool direct, bool reserve,
                           IoHook* hook)
    : size_(checked_size(nbytes)), path_(dir + "/<unlinked>") {
  const int fd = open_private(dir);
  if (fd < 0) throw IoError(-fd, dir, 0, "cannot make a private file in");
  fd_ = fd;
  try {
    // Before O_DIRECT is set: if space is reserved by writing, those writes are not aligned.
    const int code = set_size(fd_, size_, reserve, hook);
    if (code != 0) {
      throw IoError(code, path_, 0, "cannot reserve " + format_bytes(size_) + " of");
    }
    direct_ = direct && enable_direct(fd_);
    if (!reserve) can_discard_ = punch(fd_, 0, kPageBytes) == 0;  // enable_direct()'s page too
  } catch (...) {
    close();
    throw;
  }
}

UnlinkedFile::~UnlinkedFile() { close(); }

void UnlinkedFile::close() noexcept {
  if (fd_ < 0) return;
  ::close(fd_);  // an error concerns data that is being discarded
  fd_ = -1;
}

bool UnlinkedFile::in_memory() const noexcept {
#ifdef __linux__
  struct statfs found;
  if (::fstatfs(fd_, &found) != 0) return false;
  return found.f_type == TMPFS_MAGIC || found.f_type == RAMFS_MAGIC;
#else
  return false;
#endif
}

void UnlinkedFile::grow(int64_t nbytes) {
  if (fd_ < 0) throw StateError(path_ + " is closed");
  const int64_t before = size_, after = checked_size(nbytes);
  if (after <= before) return;
  if (::ftruncate(fd_, after) != 0) throw IoError(errno, path_, before, "cannot add to");
  size_ = after;
  can_discard_ = punch(fd_, before, kPageBytes) == 0;  // the new range is still empty
}

void UnlinkedFile::discard(int64_t offset, int64_t nbytes) {
  const int code = punch(fd_, offset, nbytes);
  if (code != 0) throw IoError(code, path_, offset, "cannot give back disk space of");
}

int UnlinkedFile::forget_cached(int64_t offset, int64_t nbytes, bool wrote) noexcept {
#ifdef __linux__
  if (wrote) {
    constexpr unsigned kWriteOut =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    const int code = ::sync_file_range(fd_, offset, nbytes, kWriteOut) == 0 ? 0 : errno;
    if (code == EIO || code == ENOSPC || code == EDQUOT) return code;
  }
  // Advice: a file system that ignores it only keeps the pages longer.
  (void)::posix_fadvise(fd_, offset, nbytes, POSIX_FADV_DONTNEED);
#else
  (void)offset, (void)nbytes, (void)wrote;
#endif
  return 0;
}

}  // namespace gemini
