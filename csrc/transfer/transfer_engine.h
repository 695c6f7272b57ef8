// TransferEngine: transfers between tiers in the background, first in, first out on each link.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "aio/async_file.h"
#include "aio/source_files.h"
#include "common/process_guard.h"

namespace gemini {

// A connection between two tiers, in one direction. HOST and DEVICE share the disk's two links.
enum class Link { kHostToDevice, kDeviceToHost, kDiskRead, kDiskWrite };
inline constexpr int kNumLinks = 4;

// "h2d", "d2h", "disk_read" or "disk_write".
[[nodiscard]] const char* link_name(Link link) noexcept;

// The outcome of one transfer.
struct TransferResult {
  uint64_t ticket;
  bool ok;
  int error_code;       // errno, 0 if ok or if no system call failed
  std::string path;     // of the file, empty for copies
  int64_t offset;       // in the file, where it failed
  std::string message;  // empty when ok
  // When the link began to work on it, and when its end was noticed: seconds of the steady clock,
  // which on Linux is that of Python's time.perf_counter(). Copies of one link never overlap;
  // transfers of a disk link do if the file executes several at once (see below).
  double begin_s = 0;
  double end_s = 0;
};

struct LinkStats {
  int64_t bytes = 0;   // of successful transfers
  double seconds = 0;  // time in which the link was busy, including failures
  // For a disk link: time in which the other disk link was busy too, so that each had a part of the
  // disk's bandwidth. 0 for copies.
  double shared_seconds = 0;
  int64_t transfers = 0;  // finished
};

// Transfers on one link are reported in the order of submission. Those of a disk link may run
// concurrently, so a transfer that overlaps another must wait for its report. Transfers on
// different links run concurrently.
//
// A worker copies for each link between HOST and DEVICE. Transfers of the disk links have no
// worker: the thread of the file that ends one reports it and starts the next, because every thread
// that must wake up for a transfer costs processor time.
//
// A buffer must stay mapped until `poll` has reported its transfer. Thread-safe. In a forked child
// every call except the destructor throws StateError.
class TransferEngine {
 public:
  using Ticket = uint64_t;  // unique per engine, never 0

  // `file` serves the disk links and must outlive the engine; without it they refuse transfers.
  explicit TransferEngine(AsyncFile* file);
  // Drops the transfers that have not started, and waits for the others.
  ~TransferEngine();
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // Start a transfer of `nbytes`. Throw StateError for a link of another kind, a negative size or a
  // closed engine. A range outside the file is reported as a failed completion.
  [[nodiscard]] Ticket copy(void* dst, const void* src, int64_t nbytes, Link link);
  [[nodiscard]] Ticket read(void* dst, int64_t nbytes, int64_t offset, Link link);
  [[nodiscard]] Ticket write(const void* src, int64_t nbytes, int64_t offset, Link link);
  // Starts to read parts of `source`, which must outlive the transfer, over the disk read link.
  [[nodiscard]] Ticket read_source(SourceFiles& source, std::vector<SourcePart> parts);

  // Returns the results since the last call, each once, in the order of completion.
  [[nodiscard]] std::vector<TransferResult> poll();
  // Blocks until `poll` would return something, nothing is in flight, or `timeout_s` seconds have
  // passed (a negative value waits without limit). Returns whether `poll` would return something.
  [[nodiscard]] bool wait_any(double timeout_s);
  // Blocks until nothing is in flight. Results remain to be polled.
  void drain();
  // Completes all transfers and joins the threads. Idempotent; `poll` still works.
  void close();

  [[nodiscard]] int64_t num_in_flight() const;
  [[nodiscard]] LinkStats stats(Link link) const;

 private:
  struct Job;
  struct Queue;
  struct Worker;
  struct State;

  [[nodiscard]] Ticket submit(Job job);
  void stop() noexcept;
  void work(Link link);
  void copy_bytes(const Job& job);
  void start(const Job& job);
  void end(Link link, Ticket ticket, const std::exception_ptr& error) noexcept;

  ProcessGuard process_;
  AsyncFile* const file_;         // not owned, may be null
  std::unique_ptr<State> state_;  // leaked in a forked child: its locks may be held there
                                  // indefinitely
};

}  // namespace gemini
