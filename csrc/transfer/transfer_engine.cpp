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

#include "common/error.h"
#include "common/steady_clock.h"
#include "common/worker_thread.h"

namespace gemini {
namespace {

// A copy is cut so that the destructor need not wait for a whole chunk.
constexpr int64_t kCopyBytes = 4 << 20;

// What one disk link has at the file at a time, unless one transfer is larger: enough to keep the
// device busy when chunks are small, little enough that reads need not queue behind many writes.
constexpr int64_t kAheadBytes = 16 << 20;

constexpr std::array kLinks = {Link::kHostToDevice, Link::kDeviceToHost, Link::kDiskRead,
                               Link::kDiskWrite};

using Clock = SteadyClock;

bool is_disk(Link link) { return link == Link::kDiskRead || link == Link::kDiskWrite; }

}  // namespace

struct TransferEngine::Job {
  Ticket ticket;
  Link link;
  char* dst;        // null when writing to the file
  const char* src;  // null when reading from the file
  int64_t nbytes;
  int64_t offset;                        // in the file
  AsyncFile::Ticket file_ticket = 0;     // of disk links, once started
  std::exception_ptr refusal = nullptr;  // why it could not be started
  Clock::time_point begin = {};          // once started
};

struct TransferEngine::Queue {
  std::condition_variable ready;  // a job was queued, or stopping
  std::deque<Job> jobs;           // guarded by State::mutex
  std::deque<Job> started;        // guarded by State::mutex; of disk links, at the file
  int64_t started_bytes = 0;      // guarded by State::mutex
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
  Clock::time_point shared_until = {};      // guarded by mutex; sharing is counted up to here
  bool closed = false;                      // guarded by mutex
  bool stopping = false;                    // guarded by mutex: leave when the queue is empty
  std::atomic<bool> abandoned{false};       // destructor: nobody will see the copy's result

  Queue& queue(Link link) { return queues[static_cast<size_t>(link)]; }

  // Counts the time in which both disk links had something at the file. Called with the mutex held
  // before `started` of a disk link changes.
  void count_sharing() {
    const Clock::time_point now = Clock::now();
    Queue& reads = queue(Link::kDiskRead);
    Queue& writes = queue(Link::kDiskWrite);
    if (!reads.started.empty() && !writes.started.empty()) {
      const double shared = seconds(now) - seconds(shared_until);
      reads.stats.shared_seconds += shared;
      writes.stats.shared_seconds += shared;
    }
    shared_until = now;
  }

  // Counts and publishes an outcome; the caller holds the mutex.
  void report(Queue& queue, const Job& job, TransferResult&& result, double busy_seconds) {
    queue.stats.bytes += result.ok ? job.nbytes : 0;
    queue.stats.seconds += busy_seconds;
    ++queue.stats.transfers;
    --num_in_flight;
    completions.push_back(std::move(result));
    progress.notify_all();
  }
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
      queue.thread = start_worker("transfers between tiers", [this, link, &queue] {
        is_disk(link) ? work_disk(queue) : work(queue);
      });
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
  if (is_disk(job.link) && file_ == nullptr) {
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
    if (is_disk(job.link)) start_ready(queue);
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
    Job job = queue.jobs.front();
    queue.jobs.pop_front();
    lock.unlock();
    job.begin = Clock::now();
    TransferResult completion = execute(job);
    lock.lock();
    state.report(queue, job, std::move(completion), completion.end_s - completion.begin_s);
  }
}

// Reports transfers of a disk link in their order, while the file works on those behind.
void TransferEngine::work_disk(Queue& queue) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  double last_s = 0;  // the link has been busy since then, or since its first transfer began
  for (;;) {
    queue.ready.wait(lock, [&] { return state.stopping || !queue.started.empty(); });
    if (queue.started.empty()) return;
    const Job job = queue.started.front();
    lock.unlock();
    TransferResult completion = execute(job);
    const double busy_s = completion.end_s - std::max(last_s, completion.begin_s);
    last_s = completion.end_s;
    lock.lock();
    state.count_sharing();
    queue.started.pop_front();
    queue.started_bytes -= job.nbytes;
    start_ready(queue);
    state.report(queue, job, std::move(completion), busy_s);
  }
}

// Hands jobs of a disk link to the file, which works on several at once. The caller holds the
// mutex.
void TransferEngine::start_ready(Queue& queue) {
  while (!queue.jobs.empty()) {
    Job& job = queue.jobs.front();
    if (!queue.started.empty() && queue.started_bytes + job.nbytes > kAheadBytes) return;
    job.begin = Clock::now();
    try {
      job.file_ticket = job.link == Link::kDiskRead ? file_->read(job.dst, job.nbytes, job.offset)
                                                    : file_->write(job.src, job.nbytes, job.offset);
    } catch (...) {
      job.refusal = std::current_exception();
    }
    state_->count_sharing();
    queue.started_bytes += job.nbytes;
    queue.started.push_back(std::move(job));
    queue.jobs.pop_front();
  }
}

// Never throws: this is the border of the worker thread.
TransferResult TransferEngine::execute(const Job& job) {
  TransferResult result = outcome(job);
  result.begin_s = seconds(job.begin);
  result.end_s = seconds(Clock::now());
  return result;
}

TransferResult TransferEngine::outcome(const Job& job) {
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
  if (job.refusal) std::rethrow_exception(job.refusal);
  if (is_disk(job.link)) return file_->wait(job.file_ticket);
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
