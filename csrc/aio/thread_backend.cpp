#include "aio/thread_backend.h"

#include <sched.h>
#include <sys/uio.h>

#include <cerrno>
#include <utility>

#include "aio/request_queue.h"
#include "common/thread_cpu.h"
#include "common/worker_thread.h"

namespace gemini {
namespace {

// One system call. Returns the bytes it moved or a negated errno.
int64_t transfer(int fd, const std::vector<iovec>& areas, int64_t offset, IoKind kind) {
  const int count = static_cast<int>(areas.size());
  const bool is_write = kind == IoKind::kWrite;
  ssize_t result = 0;
  if (count == 1) {
    result = is_write ? ::pwrite(fd, areas[0].iov_base, areas[0].iov_len, offset)
                      : ::pread(fd, areas[0].iov_base, areas[0].iov_len, offset);
  } else {
    result = is_write ? ::pwritev(fd, areas.data(), count, offset)
                      : ::preadv(fd, areas.data(), count, offset);
  }
  return result < 0 ? -errno : result;
}

}  // namespace

ThreadBackend::ThreadBackend(RequestQueue& queue, std::vector<int> descriptors, int depth,
                             bool one_writer)
    : queue_(queue), descriptors_(std::move(descriptors)), one_writer_(one_writer) {
  try {
    for (int i = 0; i < depth; ++i) {
      threads_.push_back(start_worker("requests to the disk", [this] { work(); }));
    }
  } catch (...) {
    queue_.stop();
    join();
    throw;
  }
}

void ThreadBackend::join() noexcept {
  const Lock lock(mutex_);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void ThreadBackend::work() {
  IoPiece piece;
  while (queue_.take(piece, RequestQueue::IfEmpty::kWait)) {
    const int64_t executing = ++executing_;
    if (queue_.has_waiting()) depth_.sample(executing);
    while (queue_.settle(piece, execute(piece))) {
      if (piece.retries > 0) ::sched_yield();
    }
    --executing_;
  }
  ended_cpu_seconds_ += own_cpu_seconds();
}

// One attempt at the rest of a piece. Returns the bytes it moved or a negated errno.
int64_t ThreadBackend::execute(const IoPiece& piece) {
  const int64_t allowed = queue_.allowed(piece);
  if (allowed < 0) return allowed;
  const int fd = descriptors_[static_cast<size_t>(piece.file)];
  const std::vector<iovec> areas = piece.rest(allowed);
  const int64_t offset = piece.offset + piece.done_bytes;
  ++system_calls_;
  if (!one_writer_ || !piece.is_write()) return transfer(fd, areas, offset, piece.kind);
  const Lock turn(write_turn_);
  return transfer(fd, areas, offset, piece.kind);
}

BackendStats ThreadBackend::stats() const {
  const Lock lock(mutex_);
  double cpu_seconds = ended_cpu_seconds_;
  for (std::thread& thread : threads_) cpu_seconds += cpu_seconds_of(thread);
  return {system_calls_.load(), system_calls_.load(), depth_.mean(), cpu_seconds};
}

}  // namespace gemini
