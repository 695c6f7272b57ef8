// Typed errors of the core. The bindings turn each into the Python class of the same meaning.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace gemini {

// Base of everything the core throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A request that does not fit a tier's budget. Nothing has changed when it is thrown.
class OutOfBudget : public Error {
 public:
  using Error::Error;
};

// An illegal state transition or a misused handle: a bug in the caller.
class StateError : public Error {
 public:
  using Error::Error;
};

// A failed system call on a file, with what is needed to find it again.
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

// A system call that failed and concerns no file.
class SystemError : public Error {
 public:
  SystemError(int code, const std::string& doing)
      : Error(doing + ": " + std::strerror(code)), code_(code) {}

  [[nodiscard]] int code() const noexcept { return code_; }

 private:
  int code_;
};

// A thread that the system did not start: a limit on processes or on memory.
class ThreadError : public SystemError {
 public:
  ThreadError(int code, const std::string& purpose)
      : SystemError(code, "cannot start a thread for " + purpose) {}
};

// Bytes that were read are not those that were written. The code is EIO.
class ChecksumError : public IoError {
 public:
  using IoError::IoError;
};

}  // namespace gemini
