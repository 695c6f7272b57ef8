// ThreadBackend: blocking system calls on a few threads. Works on every file system and in every
// container.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "aio/io_backend.h"
#include "aio/io_piece.h"
#include "common/mutex.h"

namespace gemini {

class ThreadBackend final : public IoBackend {
 public:
  // Starts `depth` threads. `one_writer`: only one thread writes at a time, for file systems that
  // lock the file during a write: a second thread would spin on that lock.
  ThreadBackend(RequestQueue& queue, std::vector<int> descriptors, int depth, bool one_writer);
  ~ThreadBackend() override { join(); }

  [[nodiscard]] BackendKind kind() const noexcept override { return BackendKind::kThreads; }
  void wake() noexcept override {}  // the threads wait in the queue
  void join() noexcept override;
  bool pin(void*, int64_t) override { return false; }
  void forget(void*) override {}
  [[nodiscard]] BackendStats stats() const override;

 private:
  void work();
  [[nodiscard]] int64_t execute(const IoPiece& piece);

  RequestQueue& queue_;
  const std::vector<int> descriptors_;
  const bool one_writer_;
  Mutex write_turn_;
  std::atomic<int64_t> system_calls_{0};
  std::atomic<int64_t> executing_{0};
  DepthMeter depth_;
  std::atomic<double> ended_cpu_seconds_{0};
  mutable Mutex mutex_;
  mutable std::vector<std::thread> threads_ GEMINI_GUARDED_BY(mutex_);
};

}  // namespace gemini
