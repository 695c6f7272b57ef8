// Reads and writes of one private file in the background.
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
  int depth = 8;  // requests at the device at one time; in memory one per processor at most
  int64_t request_bytes = 1 << 20;  // larger transfers are cut; a multiple of 4 KiB, at most 1 GiB
  bool direct = true;               // bypass the page cache where the file system can
  bool reserve = true;              // take the disk space at once; else where it is written
  bool checksums = false;           // remember CRC32C of what is written, verify what is read
};

struct AsyncFileStats {
  QueueStats queue;
  BackendStats backend;
};

// A preallocated scratch file without a name, or one in each of several directories. A transfer is
// cut into pieces that are executed in the order of submission, `depth` at a time; transfers that
// overlap in the file or in memory are ordered only by waiting. Short transfers are continued and
// EINTR, EAGAIN and ECANCELED repeated; every other failure is kept for `wait`.
//
// Thread-safe. A buffer must stay valid until its ticket is done, also when it fails. In a forked
// child every call but the destructor throws StateError.
class AsyncFile {
 public:
  using Ticket = RequestQueue::Ticket;

  // Reserves `nbytes` on disk (rounded up to 4 KiB). Throws IoError and StateError; then nothing is
  // left behind. `hook` is for tests.
  AsyncFile(const std::vector<std::string>& dirs, int64_t nbytes, AsyncFileOptions options = {},
            std::shared_ptr<IoHook> hook = nullptr);
  // Drops the pieces that have not started, waits for those that have.
  ~AsyncFile();
  AsyncFile(const AsyncFile&) = delete;
  AsyncFile& operator=(const AsyncFile&) = delete;

  // Start a transfer. When `direct()`, addresses, sizes and `offset` must be multiples of 4096;
  // with checksums sizes and `offset`. Throw StateError for a range outside the file, a violated
  // alignment, or a closed file.
  [[nodiscard]] Ticket read(void* buffer, int64_t nbytes, int64_t offset);
  [[nodiscard]] Ticket write(const void* buffer, int64_t nbytes, int64_t offset);
  // The same between consecutive bytes of the file and several areas of memory, in their order.
  [[nodiscard]] Ticket readv(const std::vector<iovec>& areas, int64_t offset);
  [[nodiscard]] Ticket writev(const std::vector<iovec>& areas, int64_t offset);

  // Keeps memory pinned for cheaper transfers until `forget` or `close`. False where the system
  // refuses: nothing is different then. The memory must stay mapped until then.
  bool pin(void* address, int64_t nbytes);
  void forget(void* address);

  // Whether no thread will touch the ticket's buffer any more. Says nothing about success.
  [[nodiscard]] bool done(Ticket ticket) const;
  // Blocks until done and throws the ticket's first error, again on every call: IoError, or
  // ChecksumError.
  void wait(Ticket ticket);
  // Blocks until every transfer is done and throws the first error that no wait has thrown yet.
  void wait_all();
  // Gives the disk space of a range back, for files that do not `reserve`; no transfer on it may be
  // under way. Throws IoError, also where the file system cannot, and StateError.
  void discard(int64_t offset, int64_t nbytes);
  // Makes the file longer; see UnlinkedFile. Transfers may be under way. Throws IoError, and
  // StateError where there are checksums, or the file is closed.
  void grow(int64_t nbytes);
  // Completes all transfers, joins the threads and frees the disk space. Idempotent. Failures
  // remain readable by `wait`.
  void close();

  [[nodiscard]] bool direct() const noexcept { return direct_; }
  // Whether `discard` gives space back: not on every file system, and of a file with `reserve` only
  // once it has grown.
  [[nodiscard]] bool can_discard() const noexcept { return can_discard_; }
  [[nodiscard]] int64_t size() const noexcept { return size_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] BackendKind backend() const noexcept { return backend_kind_; }
  [[nodiscard]] int depth() const noexcept { return depth_; }
  [[nodiscard]] AsyncFileStats stats() const;

 private:
  struct Parts;  // what threads use

  [[nodiscard]] Ticket submit(IoKind kind, const std::vector<iovec>& areas, int64_t offset);
  void check_range(int64_t nbytes, int64_t offset) const;
  void check_alignment(const std::vector<iovec>& areas, int64_t offset) const;
  [[nodiscard]] std::vector<IoPiece> cut(IoKind kind, const std::vector<iovec>& areas,
                                         int64_t position) const;

  ProcessGuard process_;
  const AsyncFileOptions options_;
  std::unique_ptr<Parts> parts_;  // leaked in a forked child: its locks may be held there for ever
  int depth_;
  bool direct_ = false;
  std::atomic<bool> can_discard_ = false;
  std::atomic<int64_t> size_ = 0;  // threads that submit see it grow
  std::string path_;
  BackendKind backend_kind_ = BackendKind::kThreads;
};

}  // namespace gemini
