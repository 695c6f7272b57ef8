// Hooks that make the requests of an AsyncFile fail, end early, or wait.
#pragma once

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>

#include "aio/io_hook.h"

namespace gemini {

// Asks `fault` before each request: 0 lets it through, a negative errno fails it unexecuted, a
// positive number shortens it to that many bytes.
class FaultyHook : public IoHook {
 public:
  using Fault = std::function<int64_t(IoKind kind, int64_t nbytes, int64_t position)>;
  explicit FaultyHook(Fault fault) : fault_(std::move(fault)) {}
  int64_t before(IoKind kind, int64_t nbytes, int64_t position) override {
    const int64_t answer = fault_(kind, nbytes, position);
    return answer == 0 ? nbytes : std::min(answer, nbytes);
  }

 private:
  Fault fault_;
};

// Changes what was moved, after it was.
class ResultHook : public IoHook {
 public:
  using Change = std::function<int64_t(IoKind kind, int64_t result, int64_t position)>;
  explicit ResultHook(Change change) : change_(std::move(change)) {}
  int64_t after(IoKind kind, int64_t result, int64_t position) override {
    return change_(kind, result, position);
  }

 private:
  Change change_;
};

// A disk without room; counts how often it was asked for some.
class FullHook : public IoHook {
 public:
  int allocate(int64_t) override {
    ++asked;
    return ENOSPC;
  }

  int asked = 0;
};

// Holds every request back until it is opened.
class GateHook : public IoHook {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }
  int64_t before(IoKind, int64_t nbytes, int64_t) override {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [&] { return open_; });
    return nbytes;
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

}  // namespace gemini
