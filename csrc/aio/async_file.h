// AsyncFile: reads and writes one private file in the background.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "aio/io_backend.h"
#include "aio/io_hook.h"
#include "aio/request_queue.h"
#include "common/process_guard.h"

namespace gemini {

struct AsyncFileOptions {
  BackendKind backend = BackendKind::kAuto;
  int depth = 8;  // requests at the device at one time; for a file system in memory at most one per
                  // processor
  int64_t request_bytes = 1 << 20;  // larger transfers are split; a multiple of 4 KiB, at most 1
                                    // GiB
  bool direct = true;               // bypass the page cache if the file system can
  bool reserve = true;              // reserve the disk space at once; else when it is written
  bool checksums = false;           // remember the CRC32C of written blocks, verify blocks read
};

struct AsyncFileStats {
  QueueStats queue;
  BackendStats backend;
};

// A preallocated scratch file without a name, or one in each of several directories. A transfer is
// split into pieces that are executed in the order of submission, `depth` at a time. Transfers that
// overlap in the file or in memory are ordered only by waiting. Short transfers are continued, and
// EINTR, EAGAIN and ECANCELED are retried; every other failure is kept for `wait`.
//
// Thread-safe. A buffer must stay valid until its ticket is done, even if the transfer fails. In a
// forked child every call except the destructor throws StateError.
class AsyncFile {
 public:
  using Ticket = RequestQueue::Ticket;

  // Reserves `nbytes` on disk (rounded up to 4 KiB). Throws IoError and StateError; then no file is
  // left behind. `hook` is for tests.
  AsyncFile(const std::vector<std::string>& dirs, int64_t nbytes, AsyncFileOptions options = {},
            std::shared_ptr<IoHook> hook = nullptr);
  // Drops the pieces that have not started, and waits for the others.
  ~AsyncFile();
  AsyncFile(const AsyncFile&) = delete;
  AsyncFile& operator=(const AsyncFile&) = delete;

  // Start a transfer. When `direct()`, addresses, sizes and `offset` must be multiples of 4096;
  // with checksums sizes and `offset`. Throw StateError for a range outside the file, a violated
  // alignment, or a closed file.
  // `done`, if set, is called by the thread that ends the transfer; see RequestQueue::push.
  [[nodiscard]] Ticket read(void* buffer, int64_t nbytes, int64_t offset,
                            RequestQueue::Done done = nullptr);
  [[nodiscard]] Ticket write(const void* buffer, int64_t nbytes, int64_t offset,
                             RequestQueue::Done done = nullptr);
  // The same between consecutive bytes of the file and several areas of memory, in their order.
  [[nodiscard]] Ticket readv(const std::vector<iovec>& areas, int64_t offset);
  [[nodiscard]] Ticket writev(const std::vector<iovec>& areas, int64_t offset);

  // Keeps memory pinned for cheaper transfers until `forget` or `close`. Returns false if the
  // system refuses; transfers work unchanged then. The memory must stay mapped until then.
  bool pin(void* address, int64_t nbytes);
  void forget(void* address);

  // Whether no thread will touch the ticket's buffer any longer. Says nothing about success.
  [[nodiscard]] bool done(Ticket ticket) const;
  // Blocks until done and throws the ticket's first error, again on every call: IoError, or
  // ChecksumError.
  void wait(Ticket ticket);
  // Blocks until every transfer is done and throws the first error that no wait has thrown yet.
  void wait_all();
  // Returns the disk space of a range to the file system, for files without `reserve`; no transfer
  // of the range may be in flight. Throws IoError, also if the file system does not support it, and
  // StateError.
  void discard(int64_t offset, int64_t nbytes);
  // Makes the file longer; see UnlinkedFile. Transfers may be in flight. Throws IoError, and
  // StateError if there are checksums or the file is closed.
  void grow(int64_t nbytes);
  // Completes all transfers, joins the threads and frees the disk space. Idempotent. Failures
  // remain readable by `wait`.
  void close();

  [[nodiscard]] bool direct() const noexcept { return direct_; }
  // Whether `discard` returns space: not every file system can, and a file with `reserve` can only
  // after it has grown.
  [[nodiscard]] bool can_discard() const noexcept { return can_discard_; }
  [[nodiscard]] int64_t size() const noexcept { return size_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] BackendKind backend() const noexcept { return backend_kind_; }
  [[nodiscard]] int depth() const noexcept { return depth_; }
  [[nodiscard]] AsyncFileStats stats() const;

 private:
  struct Parts;  // the state that threads use

  [[nodiscard]] Ticket submit(IoKind kind, const std::vector<iovec>& areas, int64_t offset,
                              RequestQueue::Done done = nullptr);
  void check_range(int64_t nbytes, int64_t offset) const;
  void check_alignment(const std::vector<iovec>& areas, int64_t offset) const;
  [[nodiscard]] std::vector<IoPiece> cut(IoKind kind, const std::vector<iovec>& areas,
                                         int64_t position) const;

  ProcessGuard process_;
  const AsyncFileOptions options_;
  std::unique_ptr<Parts> parts_;  // leaked in a forked child: its locks may be held there
                                  // indefinitely
  int depth_;
  bool direct_ = false;
  std::atomic<bool> can_discard_ = false;
  std::atomic<int64_t> size_ = 0;  // atomic: submitting threads read it during grow()
  std::string path_;
  BackendKind backend_kind_ = BackendKind::kThreads;
};

}  // namespace gemini
