// The system calls of an asynchronous file, replaceable so that tests can make them fail.
#pragma once

#include <cstdint>

namespace gemini {

// Stateless or thread-safe: several worker threads call one backend at the same time.
class IoBackend {
 public:
  virtual ~IoBackend() = default;

  // Return the bytes transferred, which may be fewer than asked, or a negated errno.
  [[nodiscard]] virtual int64_t pread(int fd, void* buffer, int64_t nbytes, int64_t offset) = 0;
  [[nodiscard]] virtual int64_t pwrite(int fd, const void* buffer, int64_t nbytes,
                                       int64_t offset) = 0;

  // Reserves disk space for the first `nbytes` of the file. Returns 0 or a positive errno.
  [[nodiscard]] virtual int allocate(int fd, int64_t nbytes) = 0;
};

// Plain system calls.
class PosixBackend : public IoBackend {
 public:
  [[nodiscard]] int64_t pread(int fd, void* buffer, int64_t nbytes, int64_t offset) override;
  [[nodiscard]] int64_t pwrite(int fd, const void* buffer, int64_t nbytes, int64_t offset) override;
  [[nodiscard]] int allocate(int fd, int64_t nbytes) override;
};

}  // namespace gemini
