#include "aio/uring_backend.h"

#include "common/error.h"

#ifdef GEMINI_HAVE_URING

#include <liburing.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <deque>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "aio/io_piece.h"
#include "aio/request_queue.h"
#include "common/mutex.h"
#include "common/thread_cpu.h"
#include "common/unique_fd.h"
#include "common/worker_thread.h"

namespace gemini {
namespace {

constexpr unsigned kMaxPinned = 64;  // areas of pinned memory per ring
constexpr uint64_t kWakeTag = ~uint64_t{0};

// RAII owner of an io_uring.
class Ring {
 public:
  explicit Ring(unsigned entries) {
    const int code = ::io_uring_queue_init(entries, &ring_, 0);
    if (code < 0) throw SystemError(-code, "cannot set up io_uring");
  }
  ~Ring() { ::io_uring_queue_exit(&ring_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  io_uring* get() noexcept { return &ring_; }

 private:
  io_uring ring_{};
};

class UringBackend final : public IoBackend {
 public:
  UringBackend(RequestQueue& queue, std::vector<int> descriptors, int depth)
      : queue_(queue),
        descriptors_(std::move(descriptors)),
        ring_(std::in_place,
              static_cast<unsigned>(depth) + 2),  // plus the event that wakes the thread
        event_(::eventfd(0, EFD_CLOEXEC)),
        slots_(static_cast<size_t>(depth)) {
    if (event_.get() < 0) throw SystemError(errno, "cannot make an eventfd");
    for (size_t i = slots_.size(); i > 0; --i) free_.push_back(i - 1);
    const auto num_files = static_cast<unsigned>(descriptors_.size());
    fixed_files_ = ::io_uring_register_files(ring(), descriptors_.data(), num_files) == 0;
    can_pin_ = ::io_uring_register_buffers_sparse(ring(), kMaxPinned) == 0;
    thread_ = start_worker("requests to the disk", [this] { work(); });
  }
  ~UringBackend() override { join(); }

  [[nodiscard]] BackendKind kind() const noexcept override { return BackendKind::kUring; }

  void wake() noexcept override {
    if (!asleep_.load()) return;
    constexpr uint64_t kOne = 1;
    // Fails only if the counter is full, and then the thread wakes up anyway.
    (void)!::write(event_.get(), &kOne, sizeof kOne);
  }

  void join() noexcept override {
    const Lock lock(mutex_);
    if (thread_.joinable()) thread_.join();
    const Lock pin_lock(pin_mutex_);
    can_pin_ = false;
    pinned_.clear();
    ring_.reset();
    event_.reset();
  }

  bool pin(void* address, int64_t nbytes) override {
    const Lock lock(pin_mutex_);
    if (!can_pin_ || pinned_.size() == kMaxPinned) return false;
    unsigned index = 0;
    while (index_used(index)) ++index;
    const iovec area{address, static_cast<size_t>(nbytes)};
    if (::io_uring_register_buffers_update_tag(ring(), index, &area, nullptr, 1) != 1) {
      return false;  // mostly because of RLIMIT_MEMLOCK
    }
    pinned_.push_back({static_cast<char*>(address), nbytes, static_cast<int>(index)});
    return true;
  }

  void forget(void* address) override {
    const Lock lock(pin_mutex_);
    for (auto pinned = pinned_.begin(); pinned != pinned_.end(); ++pinned) {
      if (pinned->address != address) continue;
      const iovec nothing{nullptr, 0};
      (void)::io_uring_register_buffers_update_tag(ring(), static_cast<unsigned>(pinned->index),
                                                   &nothing, nullptr, 1);
      pinned_.erase(pinned);
      return;
    }
  }

  [[nodiscard]] BackendStats stats() const override {
    const Lock lock(mutex_);
    return {system_calls_.load(), batches_.load(), depth_.mean(),
            ended_cpu_seconds_ + cpu_seconds_of(thread_)};
  }

 private:
  struct Slot {
    IoPiece piece;
    std::vector<iovec> areas;  // of the current attempt: the kernel may read them late
  };
  struct Pinned {
    char* address;
    int64_t nbytes;
    int index;
  };

  void work() {
    bool more = true;
    while (more && error_ == 0) {
      fill();
      if (num_in_flight() == 0) {
        more = wait_for_work();
        continue;
      }
      exchange();
    }
    if (error_ != 0) fail_all();
    ended_cpu_seconds_ += own_cpu_seconds();
  }

  // Blocks until there is a piece, and starts it. Returns false if the queue has stopped.
  bool wait_for_work() {
    const size_t index = free_.back();
    if (!queue_.take(slots_[index].piece, RequestQueue::IfEmpty::kWait)) return false;
    free_.pop_back();
    start(index);
    return true;
  }

  // Prepares requests until the device has the maximum number or none is waiting.
  void fill() {
    while (!free_.empty() && queue_.has_waiting()) {
      const size_t index = free_.back();
      if (!queue_.take(slots_[index].piece, RequestQueue::IfEmpty::kReturn)) return;
      free_.pop_back();
      start(index);
    }
  }

  // Prepares an attempt at the piece of a slot, unless its result is known without an attempt.
  void start(size_t index) {
    Slot& slot = slots_[index];
    for (;;) {
      if (error_ != 0) {
        fail(index);
        return;
      }
      const int64_t allowed = queue_.allowed(slot.piece);
      if (allowed >= 0) {
        prepare(index, allowed);
        return;
      }
      if (!queue_.settle(slot.piece, allowed)) {
        free_.push_back(index);
        return;
      }
    }
  }

  // The ring is broken, and a thread must not throw. Fails the requests that the kernel has not
  // taken, and all later ones. Requests that it has taken end by themselves; only then is their
  // memory free.
  void fail_all() {
    for (const uint64_t tag : unsubmitted_) {
      if (tag != kWakeTag) fail(tag);
    }
    while (num_in_flight() > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // only the broken system call
                                                                  // would wait without polling
      collect();
    }
    while (wait_for_work()) {
    }
  }

  void fail(size_t index) {
    queue_.fail(slots_[index].piece, error_,
                "io_uring failed (GEMINI_IO_BACKEND=threads does without): ");
    free_.push_back(index);
  }

  void prepare(size_t index, int64_t allowed) {
    Slot& slot = slots_[index];
    const IoPiece& piece = slot.piece;
    slot.areas = piece.rest(allowed);
    io_uring_sqe* const sqe = next_entry(index);
    const iovec& area = slot.areas.front();
    const auto count = static_cast<unsigned>(slot.areas.size());
    const auto length = static_cast<unsigned>(area.iov_len);
    const auto offset = static_cast<uint64_t>(piece.offset + piece.done_bytes);
    const auto file = static_cast<size_t>(piece.file);
    const int fd = fixed_files_ ? piece.file : descriptors_[file];
    const int pinned = count == 1 ? pinned_index(area) : -1;
    if (count > 1) {
      piece.is_write() ? ::io_uring_prep_writev(sqe, fd, slot.areas.data(), count, offset)
                       : ::io_uring_prep_readv(sqe, fd, slot.areas.data(), count, offset);
    } else if (pinned >= 0) {
      piece.is_write() ? ::io_uring_prep_write_fixed(sqe, fd, area.iov_base, length, offset, pinned)
                       : ::io_uring_prep_read_fixed(sqe, fd, area.iov_base, length, offset, pinned);
    } else {
      piece.is_write() ? ::io_uring_prep_write(sqe, fd, area.iov_base, length, offset)
                       : ::io_uring_prep_read(sqe, fd, area.iov_base, length, offset);
    }
    if (fixed_files_) sqe->flags |= IOSQE_FIXED_FILE;
    sqe->user_data = index;
  }

  // The ring has room for every slot and the event, so there always is an entry. The caller
  // prepares it and then sets its tag.
  io_uring_sqe* next_entry(uint64_t tag) {
    io_uring_sqe* const sqe = ::io_uring_get_sqe(ring());
    assert(sqe != nullptr);
    unsubmitted_.push_back(tag);
    return sqe;
  }

  // Submits the prepared requests, waits for at least one completion, and evaluates the completed
  // ones.
  void exchange() {
    if (!unsubmitted_.empty() && queue_.has_waiting()) {
      depth_.sample(static_cast<int64_t>(num_in_flight()));
    }
    asleep_ = !free_.empty();
    if (asleep_ && !event_armed_) {
      io_uring_sqe* const sqe = next_entry(kWakeTag);
      ::io_uring_prep_read(sqe, event_.get(), &event_count_, sizeof event_count_, 0);
      sqe->user_data = kWakeTag;
      event_armed_ = true;
    }
    // A piece pushed before `asleep_` was visible would wait for the next completion.
    const bool missed = asleep_ && queue_.has_waiting();
    enter(missed ? 0 : 1);
    asleep_ = false;
    collect();
  }

  // One system call.
  void enter(unsigned wait_for) {
    if (!unsubmitted_.empty()) ++batches_;
    ++system_calls_;
    const int code = ::io_uring_submit_and_wait(ring(), wait_for);
    if (code >= 0) {
      const auto taken = std::min(unsubmitted_.size(), static_cast<size_t>(code));
      unsubmitted_.erase(unsubmitted_.begin(), unsubmitted_.begin() + static_cast<int64_t>(taken));
    } else if (code == -EAGAIN || code == -EBUSY) {
      ::sched_yield();  // out of memory, or completions must be collected first
    } else if (code != -EINTR) {
      error_ = -code;  // of the ring itself: this call has submitted nothing
    }
  }

  void collect() {
    io_uring_cqe* cqe = nullptr;
    while (::io_uring_peek_cqe(ring(), &cqe) == 0) {
      const uint64_t tag = cqe->user_data;
      const int64_t result = cqe->res;
      ::io_uring_cqe_seen(ring(), cqe);
      if (tag == kWakeTag) {
        event_armed_ = false;
      } else if (queue_.settle(slots_[tag].piece, result)) {
        start(tag);
      } else {
        free_.push_back(tag);
      }
    }
  }

  [[nodiscard]] io_uring* ring() { return ring_->get(); }

  [[nodiscard]] size_t num_in_flight() const { return slots_.size() - free_.size(); }

  [[nodiscard]] int pinned_index(const iovec& area) {
    const Lock lock(pin_mutex_);
    const char* const begin = static_cast<const char*>(area.iov_base);
    for (const Pinned& pinned : pinned_) {
      const bool inside =
          begin >= pinned.address && begin + area.iov_len <= pinned.address + pinned.nbytes;
      if (inside) return pinned.index;
    }
    return -1;
  }

  [[nodiscard]] bool index_used(unsigned index) const GEMINI_REQUIRES(pin_mutex_) {
    for (const Pinned& pinned : pinned_) {
      if (pinned.index == static_cast<int>(index)) return true;
    }
    return false;
  }

  RequestQueue& queue_;
  const std::vector<int> descriptors_;
  std::optional<Ring> ring_;  // until join
  UniqueFd event_;
  bool fixed_files_ = false;  // the ring has registered the descriptors
  Mutex pin_mutex_;
  bool can_pin_ GEMINI_GUARDED_BY(pin_mutex_) = false;
  std::vector<Pinned> pinned_ GEMINI_GUARDED_BY(pin_mutex_);

  // Used by the thread only.
  std::vector<Slot> slots_;  // never resized: requests in flight point into it
  std::vector<size_t> free_;
  std::deque<uint64_t> unsubmitted_;  // tags of prepared requests that the kernel has not taken
  int error_ = 0;                     // why the ring is no longer used
  bool event_armed_ = false;
  uint64_t event_count_ = 0;  // written by the kernel

  std::atomic<bool> asleep_{false};  // in the kernel, with room for more requests
  std::atomic<int64_t> system_calls_{0};
  std::atomic<int64_t> batches_{0};
  DepthMeter depth_;
  std::atomic<double> ended_cpu_seconds_{0};
  mutable Mutex mutex_;
  mutable std::thread thread_ GEMINI_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<IoBackend> make_uring_backend(RequestQueue& queue, std::vector<int> descriptors,
                                              int depth) {
  return std::make_unique<UringBackend>(queue, std::move(descriptors), depth);
}

}  // namespace gemini

#else

namespace gemini {

std::unique_ptr<IoBackend> make_uring_backend(RequestQueue&, std::vector<int>, int) {
  throw Error(uring_refusal());
}

}  // namespace gemini

#endif
