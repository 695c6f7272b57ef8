// Transfers between tiers in the background: one first-in-first-out worker per link.
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
  int error_code;       // errno, 0 when ok or when no system call failed
  std::string path;     // of the file, empty for copies
  int64_t offset;       // in the file, where it failed
  std::string message;  // empty when ok
  // When the link began to work on it and when it was seen to have ended: seconds of the steady
  // clock, which on Linux is that of Python's time.perf_counter(). Copies of one link never
  // overlap; transfers of a disk link do where the file works on several (see below).
  double begin_s = 0;
  double end_s = 0;
};

struct LinkStats {
  int64_t bytes = 0;   // of successful transfers
  double seconds = 0;  // the link was busy, failures included
  // Of a disk link: while the other one had something at the file too, so that each had a part of
  // the disk. 0 of copies.
  double shared_seconds = 0;
  int64_t transfers = 0;  // finished
};

// Transfers on one link are reported in the order of submission; those of a disk link may be at the
// file together, so what overlaps must wait for the report. Transfers on different links overlap.
//
// A buffer must stay mapped until its transfer was reported by `poll`. Thread-safe. In a forked
// child every call but the destructor throws StateError.
class TransferEngine {
 public:
  using Ticket = uint64_t;  // unique per engine, never 0

  // `file` serves the disk links and must outlive the engine; without one they refuse transfers.
  explicit TransferEngine(AsyncFile* file);
  // Drops the transfers that have not started, waits for those that have.
  ~TransferEngine();
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // Start a transfer of `nbytes`. Throw StateError for a link of another kind, a negative size or
  // a closed engine. A range outside the file is reported as a failed completion.
  [[nodiscard]] Ticket copy(void* dst, const void* src, int64_t nbytes, Link link);
  [[nodiscard]] Ticket read(void* dst, int64_t nbytes, int64_t offset, Link link);
  [[nodiscard]] Ticket write(const void* src, int64_t nbytes, int64_t offset, Link link);
  // Starts to read parts of `source`, which must outlive the transfer, over the disk's link.
  [[nodiscard]] Ticket read_source(SourceFiles& source, std::vector<SourcePart> parts);

  // Returns what finished since the last call, each once, in the order of completion.
  [[nodiscard]] std::vector<TransferResult> poll();
  // Blocks until `poll` would return something, nothing is in flight, or `timeout_s` seconds have
  // passed (for ever when negative). Returns whether `poll` would return something.
  [[nodiscard]] bool wait_any(double timeout_s);
  // Blocks until nothing is in flight. What finished remains to be polled.
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
  void stop_threads() noexcept;
  void work(Link link);
  void work_disk(Link link);
  [[nodiscard]] TransferResult execute(const Job& job);
  [[nodiscard]] TransferResult outcome(const Job& job);
  void transfer(const Job& job);

  ProcessGuard process_;
  AsyncFile* const file_;         // not owned, may be null
  std::unique_ptr<State> state_;  // leaked in a forked child: its locks may be held there for ever
};

}  // namespace gemini
