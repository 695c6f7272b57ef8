#include "transfer/transfer_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "aio/worker_thread.h"
#include "common/error.h"

namespace gemini {
namespace {

// A copy is cut so that the destructor need not wait for a whole chunk.
constexpr int64_t kCopyBytes = 4 << 20;

constexpr std::array kLinks = {Link::kHostToDevice, Link::kDeviceToHost, Link::kDiskRead,
                               Link::kDiskWrite};

using Clock = std::chrono::steady_clock;

}  // namespace

struct TransferEngine::Job {
  Ticket ticket;
  Link link;
  char* dst;        // null when writing to the file
  const char* src;  // null when reading from the file
  int64_t nbytes;
  int64_t offset;  // in the file
};

struct TransferEngine::Queue {
  std::condition_variable ready;  // a job was queued, or stopping
  std::deque<Job> jobs;           // guarded by State::mutex
  LinkStats stats;                // guarded by State::mutex
  std::thread thread;             // constructor, close and destructor only
};

struct TransferEngine::State {
  std::mutex mutex;
  std::condition_variable progress;  // a transfer finished
  std::array<Queue, kNumLinks> queues;
  std::vector<TransferResult> completions;  // guarded by mutex; not polled yet
  int64_t num_in_flight = 0;                // guarded by mutex
  Ticket next_ticket = 1;                   // guarded by mutex
  bool closed = false;                      // guarded by mutex
  bool stopping = false;                    // guarded by mutex: leave when the queue is empty
  std::atomic<bool> abandoned{false};       // destructor: nobody will see the copy's result

  Queue& queue(Link link) { return queues[static_cast<size_t>(link)]; }
};

const char* link_name(Link link) noexcept {
  switch (link) {
    case Link::kHostToDevice:
      return "h2d";
    case Link::kDeviceToHost:
      return "d2h";
    case Link::kDiskRead:
      return "disk_read";
    case Link::kDiskWrite:
      return "disk_write";
  }
  return "unknown";
}

TransferEngine::TransferEngine(AsyncFile* file) : file_(file), state_(std::make_unique<State>()) {
  try {
    for (const Link link : kLinks) {
      Queue& queue = state_->queue(link);
      queue.thread = start_worker([this, &queue] { work(queue); });
    }
  } catch (...) {
    stop_threads();
    throw;
  }
}

TransferEngine::~TransferEngine() {
  if (!process_.is_owner()) {
    (void)state_.release();
    return;
  }
  state_->abandoned = true;
  {
    const std::lock_guard lock(state_->mutex);
    for (Queue& queue : state_->queues) queue.jobs.clear();
  }
  stop_threads();
}

void TransferEngine::stop_threads() noexcept {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
    state_->stopping = true;
  }
  for (Queue& queue : state_->queues) {
    queue.ready.notify_all();
    if (queue.thread.joinable()) queue.thread.join();
  }
}

void TransferEngine::close() {
  process_.require("this TransferEngine");
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closed) return;
    state_->closed = true;
  }
  stop_threads();
}

TransferEngine::Ticket TransferEngine::copy(void* dst, const void* src, int64_t nbytes, Link link) {
  if (link != Link::kHostToDevice && link != Link::kDeviceToHost) {
    throw StateError(std::string("copy needs the link h2d or d2h, got ") + link_name(link));
  }
  return submit(Job{0, link, static_cast<char*>(dst), static_cast<const char*>(src), nbytes, 0});
}

TransferEngine::Ticket TransferEngine::read(void* dst, int64_t nbytes, int64_t offset, Link link) {
  if (link != Link::kDiskRead) {
    throw StateError(std::string("read needs the link disk_read, got ") + link_name(link));
  }
  return submit(Job{0, link, static_cast<char*>(dst), nullptr, nbytes, offset});
}

TransferEngine::Ticket TransferEngine::write(const void* src, int64_t nbytes, int64_t offset,
                                             Link link) {
  if (link != Link::kDiskWrite) {
    throw StateError(std::string("write needs the link disk_write, got ") + link_name(link));
  }
  return submit(Job{0, link, nullptr, static_cast<const char*>(src), nbytes, offset});
}

TransferEngine::Ticket TransferEngine::submit(Job job) {
  process_.require("this TransferEngine");
  const bool needs_file = job.link == Link::kDiskRead || job.link == Link::kDiskWrite;
  if (needs_file && file_ == nullptr) {
    throw StateError("this TransferEngine was made without a file: there is no DISK tier");
  }
  if (job.nbytes < 0) {
    throw StateError("cannot transfer " + std::to_string(job.nbytes) + " bytes");
  }
  Queue& queue = state_->queue(job.link);
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closed) throw StateError("this TransferEngine is closed");
    job.ticket = state_->next_ticket;
    queue.jobs.push_back(job);
    ++state_->next_ticket;
    ++state_->num_in_flight;
  }
  queue.ready.notify_one();
  return job.ticket;
}

void TransferEngine::work(Queue& queue) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  for (;;) {
    queue.ready.wait(lock, [&] { return state.stopping || !queue.jobs.empty(); });
    if (queue.jobs.empty()) return;
    const Job job = queue.jobs.front();
    queue.jobs.pop_front();
    lock.unlock();
    const Clock::time_point start = Clock::now();
    TransferResult completion = execute(job);
    const std::chrono::duration<double> busy = Clock::now() - start;
    lock.lock();
    queue.stats.bytes += completion.ok ? job.nbytes : 0;
    queue.stats.seconds += busy.count();
    ++queue.stats.transfers;
    --state.num_in_flight;
    state.completions.push_back(std::move(completion));
    state.progress.notify_all();
  }
}

// Never throws: this is the border of the worker thread.
TransferResult TransferEngine::execute(const Job& job) {
  try {
    transfer(job);
    return TransferResult{job.ticket, true, 0, "", 0, ""};
  } catch (const IoError& error) {
    return TransferResult{job.ticket,   false,          error.code(),
                          error.path(), error.offset(), error.what()};
  } catch (const std::exception& error) {
    const std::string path = file_ == nullptr ? "" : file_->path();
    return TransferResult{job.ticket, false, 0, path, job.offset, error.what()};
  }
}

void TransferEngine::transfer(const Job& job) {
  if (job.link == Link::kDiskRead) return file_->wait(file_->read(job.dst, job.nbytes, job.offset));
  if (job.link == Link::kDiskWrite) {
    return file_->wait(file_->write(job.src, job.nbytes, job.offset));
  }
  for (int64_t begin = 0; begin < job.nbytes && !state_->abandoned; begin += kCopyBytes) {
    const int64_t nbytes = std::min(kCopyBytes, job.nbytes - begin);
    std::memcpy(job.dst + begin, job.src + begin, static_cast<size_t>(nbytes));
  }
}

std::vector<TransferResult> TransferEngine::poll() {
  process_.require("this TransferEngine");
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->completions, {});
}

bool TransferEngine::wait_any(double timeout_s) {
  process_.require("this TransferEngine");
  std::unique_lock lock(state_->mutex);
  const auto settled = [&] { return !state_->completions.empty() || state_->num_in_flight == 0; };
  if (timeout_s < 0) {
    state_->progress.wait(lock, settled);
  } else {
    // Longer waits overflow the clock; a day is for ever here.
    const std::chrono::duration<double> timeout(std::min(timeout_s, 86400.0));
    state_->progress.wait_for(lock, timeout, settled);
  }
  return !state_->completions.empty();
}

void TransferEngine::drain() {
  process_.require("this TransferEngine");
  std::unique_lock lock(state_->mutex);
  state_->progress.wait(lock, [&] { return state_->num_in_flight == 0; });
}

int64_t TransferEngine::num_in_flight() const {
  process_.require("this TransferEngine");
  const std::lock_guard lock(state_->mutex);
  return state_->num_in_flight;
}

LinkStats TransferEngine::stats(Link link) const {
  process_.require("this TransferEngine");
  const std::lock_guard lock(state_->mutex);
  return state_->queue(link).stats;
}

}  // namespace gemini
