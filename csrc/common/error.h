// Typed errors of the core. The bindings translate each to the corresponding Python class.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace gemini {

// Base of all errors that the core throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A request that does not fit a tier's budget. Nothing was changed.
class OutOfBudget : public Error {
 public:
  using Error::Error;
};

// An illegal state transition or a misused handle: a bug in the caller.
class StateError : public Error {
 public:
  using Error::Error;
};

// A failed system call on a file, with its path and offset.
class IoError : public Error {
 public:
  IoError(int code, std::string path, int64_t offset, const std::string& doing)
      : Error(doing + " " + path + " at offset " + std::to_string(offset) + ": " +
              std::strerror(code)),
        code_(code),
        path_(std::move(path)),
        offset_(offset) {}

  [[nodiscard]] int code() const noexcept { return code_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] int64_t offset() const noexcept { return offset_; }

 private:
  int code_;
  std::string path_;
  int64_t offset_;
};

// A failed system call that concerns no file.
class SystemError : public Error {
 public:
  SystemError(int code, const std::string& doing)
      : Error(doing + ": " + std::strerror(code)), code_(code) {}

  [[nodiscard]] int code() const noexcept { return code_; }

 private:
  int code_;
};

// The system did not start a thread: a limit on processes or memory.
class ThreadError : public SystemError {
 public:
  ThreadError(int code, const std::string& purpose)
      : SystemError(code, "cannot start a thread for " + purpose) {}
};

// The bytes read differ from those written. The code is EIO.
class ChecksumError : public IoError {
 public:
  using IoError::IoError;
};

}  // namespace gemini
