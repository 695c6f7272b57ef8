// IoBackend: executes requests, by io_uring or by threads with blocking system calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace gemini {

class RequestQueue;

enum class BackendKind { kAuto, kUring, kThreads };

// "auto", "uring" or "threads".
[[nodiscard]] const char* backend_name(BackendKind kind) noexcept;

// Why io_uring cannot be used in this process, "" if it can. Containers often forbid it. Computed
// once.
[[nodiscard]] const std::string& uring_refusal();

struct BackendStats {
  int64_t system_calls = 0;
  int64_t batches = 0;     // groups of requests submitted together
  double mean_depth = 0;   // requests at the device after each batch, while more were waiting
  double cpu_seconds = 0;  // of the backend's threads
};

// Averages the number of requests at the device. Thread-safe.
class DepthMeter {
 public:
  void sample(int64_t depth) noexcept {
    sum_ += depth;
    ++count_;
  }
  [[nodiscard]] double mean() const noexcept {
    const auto count = static_cast<double>(count_.load());
    return count > 0 ? static_cast<double>(sum_.load()) / count : 0.0;
  }

 private:
  std::atomic<int64_t> sum_{0};
  std::atomic<int64_t> count_{0};
};

// Executes the pieces of one queue, at most `depth` at a time, until the queue stops. All calls are
// thread-safe except `join`.
class IoBackend {
 public:
  virtual ~IoBackend() = default;

  [[nodiscard]] virtual BackendKind kind() const noexcept = 0;
  // Tells the backend that pieces were pushed.
  virtual void wake() noexcept = 0;
  // Waits for the threads and releases system resources; the queue must have been stopped.
  // Afterwards only `stats` has an effect. Idempotent.
  virtual void join() noexcept = 0;
  // Keeps memory pinned for cheaper requests until `forget`. Returns false if the system refuses,
  // which changes only the cost. The memory must stay mapped until then.
  virtual bool pin(void* address, int64_t nbytes) = 0;
  // No request on the memory may be in flight.
  virtual void forget(void* address) = 0;
  [[nodiscard]] virtual BackendStats stats() const = 0;
};

// Starts the threads; `queue` and the open files behind `descriptors` must outlive them.
// `in_memory`: the file system is memory, and every request is a copy by a processor. Then kAuto
// means threads, because several copy faster than one; else it means io_uring if that can be used.
// Throws StateError if kUring is requested and cannot be used.
[[nodiscard]] std::unique_ptr<IoBackend> start_backend(BackendKind kind, RequestQueue& queue,
                                                       std::vector<int> descriptors, int depth,
                                                       bool in_memory);

}  // namespace gemini
