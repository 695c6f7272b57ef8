#include "aio/io_backend.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace gemini {

int64_t PosixBackend::pread(int fd, void* buffer, int64_t nbytes, int64_t offset) {
  const ssize_t result = ::pread(fd, buffer, static_cast<size_t>(nbytes), offset);
  return result < 0 ? -errno : result;
}

int64_t PosixBackend::pwrite(int fd, const void* buffer, int64_t nbytes, int64_t offset) {
  const ssize_t result = ::pwrite(fd, buffer, static_cast<size_t>(nbytes), offset);
  return result < 0 ? -errno : result;
}

int PosixBackend::allocate(int fd, int64_t nbytes) {
#ifdef __linux__
  int code = 0;
  do {
    code = ::fallocate(fd, 0, 0, nbytes) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code != EOPNOTSUPP && code != ENOSYS) return code;
  // The file system cannot reserve extents: glibc writes into every block instead.
  do {
    code = ::posix_fallocate(fd, 0, nbytes);
  } while (code == EINTR);
  return code;
#else
  return ::ftruncate(fd, nbytes) == 0 ? 0 : errno;
#endif
}

}  // namespace gemini
