#include "transfer/transfer_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <thread>
#include <utility>

#include "common/error.h"
#include "common/mutex.h"
#include "common/steady_clock.h"
#include "common/worker_thread.h"

namespace gemini {
namespace {

// Copies are split so that the destructor need not wait for a whole chunk.
constexpr int64_t kCopyBytes = 4 << 20;

// The bytes that one disk link has in flight at the file, unless one transfer is larger: enough to
// keep the device busy with small chunks, and few enough that reads do not queue behind many
// writes.
constexpr int64_t kAheadBytes = 16 << 20;

constexpr std::array kLinks = {Link::kHostToDevice, Link::kDeviceToHost, Link::kDiskRead,
                               Link::kDiskWrite};

using Clock = SteadyClock;

bool is_disk(Link link) { return link == Link::kDiskRead || link == Link::kDiskWrite; }

}  // namespace

struct TransferEngine::Job {
  Ticket ticket = 0;
  Link link = Link::kHostToDevice;
  char* dst = nullptr;        // null for a write to the file
  const char* src = nullptr;  // null for a read from the file
  int64_t nbytes = 0;
  int64_t offset = 0;                  // in the file
  SourceFiles* source = nullptr;       // read from this instead of the file, if set
  std::vector<SourcePart> parts{};     // of `source`
  Clock::time_point begin{};           // once started
  bool ended = false;                  // for disk links: reported when those before it are
  std::exception_ptr error = nullptr;  // once ended
};

struct TransferEngine::Queue {
  std::deque<Job> jobs;
  std::deque<Job> started;  // for disk links, at the file
  int64_t started_bytes = 0;
  double last_end_s = 0;  // of the last transfer that was reported
  LinkStats stats;
};

struct TransferEngine::Worker {
  Condition ready;     // a job was queued, or stopping
  std::thread thread;  // constructor, close and destructor only
};

struct TransferEngine::State {
  std::array<Worker, kNumLinks> workers;  // of links between HOST and DEVICE
  Mutex mutex;
  Condition progress;  // a transfer finished
  std::array<Queue, kNumLinks> queues GEMINI_GUARDED_BY(mutex);
  std::vector<TransferResult> completions GEMINI_GUARDED_BY(mutex);  // not polled yet
  int64_t num_in_flight GEMINI_GUARDED_BY(mutex) = 0;
  Ticket next_ticket GEMINI_GUARDED_BY(mutex) = 1;
  Clock::time_point shared_until GEMINI_GUARDED_BY(mutex) = {};  // sharing is counted up to here
  bool closed GEMINI_GUARDED_BY(mutex) = false;
  bool stopping GEMINI_GUARDED_BY(mutex) = false;  // leave when the queue is empty
  std::atomic<bool> abandoned{false};              // destructor: the copy's result will not be read

  Worker& worker(Link link) { return workers[static_cast<size_t>(link)]; }
  Queue& queue(Link link) GEMINI_REQUIRES(mutex) { return queues[static_cast<size_t>(link)]; }

  // Counts the time in which both disk links had transfers at the file. Call it before `started` of
  // a disk link changes.
  void count_sharing() GEMINI_REQUIRES(mutex) {
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

  // Submits jobs of a disk link to the file, which executes several at once, and reports those that
  // ended, in order.
  void advance(TransferEngine& engine, Link link) GEMINI_REQUIRES(mutex) {
    Queue& queue = this->queue(link);
    for (;;) {
      if (!queue.started.empty() && queue.started.front().ended) {
        count_sharing();
        const Job job = std::move(queue.started.front());
        queue.started.pop_front();
        queue.started_bytes -= job.nbytes;
        report(job, engine.file_);
      } else if (!queue.jobs.empty() && may_start(queue)) {
        count_sharing();
        queue.started.push_back(std::move(queue.jobs.front()));
        queue.jobs.pop_front();
        Job& job = queue.started.back();
        queue.started_bytes += job.nbytes;
        job.begin = Clock::now();
        try {
          job.ended = job.nbytes == 0;  // nobody would report its end
          engine.start(job);
        } catch (...) {
          job.ended = true;
          job.error = std::current_exception();
        }
      } else {
        return;
      }
    }
  }

  static bool may_start(const Queue& queue) {
    return queue.started.empty() || queue.started_bytes + queue.jobs.front().nbytes <= kAheadBytes;
  }

  // Counts and publishes the result of a job that has ended.
  void report(const Job& job, const AsyncFile* file) GEMINI_REQUIRES(mutex) {
    TransferResult result = result_of(job, file);
    Queue& queue = this->queue(job.link);
    queue.stats.bytes += result.ok ? job.nbytes : 0;
    queue.stats.seconds += result.end_s - std::max(queue.last_end_s, result.begin_s);
    queue.last_end_s = result.end_s;
    ++queue.stats.transfers;
    --num_in_flight;
    completions.push_back(std::move(result));
    progress.notify_all();
  }

  static TransferResult result_of(const Job& job, const AsyncFile* file) {
    TransferResult result{job.ticket, true, 0, "", 0, ""};
    result.begin_s = seconds(job.begin);
    result.end_s = seconds(Clock::now());
    if (!job.error) return result;
    result.ok = false;
    try {
      std::rethrow_exception(job.error);
    } catch (const IoError& error) {
      result.error_code = error.code();
      result.path = error.path();
      result.offset = error.offset();
      result.message = error.what();
    } catch (const std::exception& error) {
      result.path = file == nullptr ? "" : file->path();
      result.offset = job.offset;
      result.message = error.what();
    }
    return result;
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
      if (is_disk(link)) continue;
      state_->worker(link).thread =
          start_worker("transfers between tiers", [this, link] { work(link); });
    }
  } catch (...) {
    stop();
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
    const Lock lock(state_->mutex);
    for (Queue& queue : state_->queues) queue.jobs.clear();
  }
  stop();
}

// Waits for the transfers at the file, which call this engine at their end, and for the workers.
void TransferEngine::stop() noexcept {
  {
    const Lock lock(state_->mutex);
    state_->closed = true;
    state_->stopping = true;
    for (const Link link : kLinks) {
      while (!state_->queue(link).started.empty()) state_->progress.wait(state_->mutex);
    }
  }
  for (Worker& worker : state_->workers) {
    worker.ready.notify_all();
    if (worker.thread.joinable()) worker.thread.join();
  }
}

void TransferEngine::close() {
  process_.require("this TransferEngine");
  {
    const Lock lock(state_->mutex);
    if (state_->closed) return;
    state_->closed = true;
  }
  stop();
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

TransferEngine::Ticket TransferEngine::read_source(SourceFiles& source,
                                                   std::vector<SourcePart> parts) {
  Job job{.link = Link::kDiskRead, .source = &source};
  for (const SourcePart& part : parts) job.nbytes += part.nbytes;
  job.parts = std::move(parts);
  return submit(std::move(job));
}

TransferEngine::Ticket TransferEngine::submit(Job job) {
  process_.require("this TransferEngine");
  if (is_disk(job.link) && file_ == nullptr && job.source == nullptr) {
    throw StateError("this TransferEngine was made without a file: there is no DISK tier");
  }
  if (job.nbytes < 0) {
    throw StateError("cannot transfer " + std::to_string(job.nbytes) + " bytes");
  }
  {
    const Lock lock(state_->mutex);
    if (state_->closed) throw StateError("this TransferEngine is closed");
    job.ticket = state_->next_ticket;
    state_->queue(job.link).jobs.push_back(job);
    ++state_->next_ticket;
    ++state_->num_in_flight;
    if (is_disk(job.link)) state_->advance(*this, job.link);
  }
  if (!is_disk(job.link)) state_->worker(job.link).ready.notify_one();
  return job.ticket;
}

void TransferEngine::start(const Job& job) {
  const auto done = [this, link = job.link, ticket = job.ticket](const std::exception_ptr& error) {
    end(link, ticket, error);
  };
  if (job.source != nullptr) {
    (void)job.source->read(job.parts, done);
  } else if (job.link == Link::kDiskRead) {
    (void)file_->read(job.dst, job.nbytes, job.offset, done);
  } else {
    (void)file_->write(job.src, job.nbytes, job.offset, done);
  }
}

// Called by a thread of the file. `stop` waits for it.
void TransferEngine::end(Link link, Ticket ticket, const std::exception_ptr& error) noexcept {
  State& state = *state_;
  const Lock lock(state.mutex);
  std::deque<Job>& started = state.queue(link).started;
  const auto job = std::find_if(started.begin(), started.end(),
                                [&](const Job& each) { return each.ticket == ticket; });
  job->ended = true;
  job->error = error;
  state.advance(*this, link);
}

void TransferEngine::work(Link link) {
  State& state = *state_;
  for (;;) {
    Job job;
    {
      const Lock lock(state.mutex);
      Queue& queue = state.queue(link);
      while (!state.stopping && queue.jobs.empty()) state.worker(link).ready.wait(state.mutex);
      if (queue.jobs.empty()) return;
      job = std::move(queue.jobs.front());
      queue.jobs.pop_front();
    }
    job.begin = Clock::now();
    copy_bytes(job);
    const Lock lock(state.mutex);
    state.report(job, file_);
  }
}

void TransferEngine::copy_bytes(const Job& job) {
  for (int64_t begin = 0; begin < job.nbytes && !state_->abandoned; begin += kCopyBytes) {
    const int64_t nbytes = std::min(kCopyBytes, job.nbytes - begin);
    std::memcpy(job.dst + begin, job.src + begin, static_cast<size_t>(nbytes));
  }
}

std::vector<TransferResult> TransferEngine::poll() {
  process_.require("this TransferEngine");
  const Lock lock(state_->mutex);
  return std::exchange(state_->completions, {});
}

bool TransferEngine::wait_any(double timeout_s) {
  process_.require("this TransferEngine");
  const auto end = Condition::end_of(timeout_s);
  const Lock lock(state_->mutex);
  while (state_->completions.empty() && state_->num_in_flight > 0) {
    if (!state_->progress.wait_until(state_->mutex, end)) break;
  }
  return !state_->completions.empty();
}

void TransferEngine::drain() {
  process_.require("this TransferEngine");
  const Lock lock(state_->mutex);
  while (state_->num_in_flight > 0) state_->progress.wait(state_->mutex);
}

int64_t TransferEngine::num_in_flight() const {
  process_.require("this TransferEngine");
  const Lock lock(state_->mutex);
  return state_->num_in_flight;
}

LinkStats TransferEngine::stats(Link link) const {
  process_.require("this TransferEngine");
  const Lock lock(state_->mutex);
  return state_->queue(link).stats;
}

}  // namespace gemini
