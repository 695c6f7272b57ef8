// Reads and writes of one private file in the background, on a few threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "aio/io_backend.h"
#include "aio/process_guard.h"
#include "aio/unlinked_file.h"

namespace gemini {

struct AsyncFileOptions {
  int threads = 4;                // requests at the device at one time
  bool direct = true;             // bypass the page cache where the file system can
  bool reserve = true;            // take the disk space at once; else where it is written
  int64_t piece_bytes = 1 << 20;  // larger requests are split; a multiple of 4 KiB
};

// A preallocated scratch file without a name. A request is split into pieces which the worker
// threads execute in the order of submission, several at a time; requests that overlap in the file
// or in memory are ordered only by waiting. Short transfers are continued and EINTR and EAGAIN
// retried; every other failure is kept for `wait`.
//
// Thread-safe. A buffer must stay valid until its ticket is done, also when it fails. In a forked
// child every call but the destructor throws StateError.
class AsyncFile {
 public:
  using Ticket = uint64_t;  // unique per file, never 0

  // Reserves `nbytes` on disk (rounded up to 4 KiB). Throws IoError and StateError; then nothing is
  // left behind.
  AsyncFile(const std::string& dir, int64_t nbytes, AsyncFileOptions options = {});
  AsyncFile(const std::string& dir, int64_t nbytes, AsyncFileOptions options,
            std::unique_ptr<IoBackend> backend);
  // Drops the requests that have not started, waits for those that have.
  ~AsyncFile();
  AsyncFile(const AsyncFile&) = delete;
  AsyncFile& operator=(const AsyncFile&) = delete;

  // Start a transfer. When `direct()`, address, `nbytes` and `offset` must be multiples of 4096.
  // Throw StateError for a range outside the file, a violated alignment, or a closed file.
  [[nodiscard]] Ticket read(void* buffer, int64_t nbytes, int64_t offset);
  [[nodiscard]] Ticket write(const void* buffer, int64_t nbytes, int64_t offset);

  // Whether no thread will touch the ticket's buffer any more. Says nothing about success.
  [[nodiscard]] bool done(Ticket ticket) const;
  // Blocks until done and throws the ticket's first IoError, again on every call.
  void wait(Ticket ticket);
  // Blocks until every request is done and throws the first IoError that no wait has thrown yet.
  void wait_all();
  // Gives the disk space of a range back, for files that do not `reserve`; no request on it may be
  // under way. Throws IoError and StateError.
  void discard(int64_t offset, int64_t nbytes);
  // Completes all requests, joins the threads and frees the disk space. Idempotent. Failures
  // remain readable by `wait`.
  void close();

  [[nodiscard]] bool direct() const noexcept { return direct_; }
  [[nodiscard]] int64_t size() const noexcept { return size_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  struct Piece;
  struct State;

  [[nodiscard]] Ticket submit(bool is_write, char* buffer, int64_t nbytes, int64_t offset);
  void check_request(const char* buffer, int64_t nbytes, int64_t offset) const;
  void start_threads();
  void stop_threads() noexcept;
  void work();
  void transfer(const Piece& piece);
  [[nodiscard]] int64_t transfer_some(const Piece& piece, int64_t done_bytes);

  ProcessGuard process_;
  AsyncFileOptions options_;
  std::unique_ptr<IoBackend> backend_;
  UnlinkedFile file_;
  const bool direct_;
  const int64_t size_;
  const std::string path_;
  std::unique_ptr<State> state_;  // leaked in a forked child: its locks may be held there for ever
};

}  // namespace gemini
