#include "aio/async_file.h"

#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aio/worker_thread.h"
#include "common/bytes.h"
#include "common/error.h"

namespace gemini {
namespace {

// Retries of one system call that makes no progress, after which it counts as failed.
constexpr int kMaxRetries = 1000;

AsyncFileOptions checked(AsyncFileOptions options) {
  if (options.threads < 1) {
    throw StateError("a file needs at least 1 thread, got " + std::to_string(options.threads));
  }
  if (options.piece_bytes < kPageBytes || options.piece_bytes % kPageBytes != 0) {
    throw StateError("piece_bytes must be a positive multiple of " + std::to_string(kPageBytes) +
                     ", got " + std::to_string(options.piece_bytes));
  }
  return options;
}

}  // namespace

struct AsyncFile::Piece {
  Ticket ticket;
  bool is_write;
  char* buffer;
  int64_t nbytes;
  int64_t offset;
};

struct AsyncFile::State {
  struct Progress {
    int64_t pieces_left;
    std::optional<IoError> error;  // the first one
  };
  struct Failure {
    IoError error;
    bool reported;
  };

  std::mutex mutex;
  std::condition_variable work_ready;              // a piece was queued, or stopping
  std::condition_variable ticket_done;             // a ticket finished
  std::deque<Piece> queue;                         // guarded by mutex
  std::unordered_map<Ticket, Progress> in_flight;  // guarded by mutex
  std::map<Ticket, Failure> failed;                // guarded by mutex; successes are forgotten
  Ticket next_ticket = 1;                          // guarded by mutex
  bool closed = false;                             // guarded by mutex
  bool stopping = false;             // guarded by mutex: leave when the queue is empty
  std::vector<std::thread> threads;  // constructor, close and destructor only

  // Gives one piece back; the caller holds the mutex.
  void finish_piece(Ticket ticket) {
    const auto found = in_flight.find(ticket);
    if (--found->second.pieces_left > 0) return;
    if (found->second.error) failed.emplace(ticket, Failure{*found->second.error, false});
    in_flight.erase(found);
    ticket_done.notify_all();
  }
};

AsyncFile::AsyncFile(const std::string& dir, int64_t nbytes, AsyncFileOptions options)
    : AsyncFile(dir, nbytes, options, std::make_unique<PosixBackend>()) {}

AsyncFile::AsyncFile(const std::string& dir, int64_t nbytes, AsyncFileOptions options,
                     std::unique_ptr<IoBackend> backend)
    : options_(checked(options)),
      backend_(std::move(backend)),
      file_(dir, nbytes, options.direct, options.reserve, *backend_),
      direct_(file_.direct()),
      size_(file_.size()),
      path_(file_.path()),
      state_(std::make_unique<State>()) {
  try {
    start_threads();
  } catch (...) {
    stop_threads();
    throw;
  }
}

AsyncFile::~AsyncFile() {
  if (!process_.is_owner()) {
    (void)state_.release();
    return;
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->queue.clear();
  }
  stop_threads();
}

void AsyncFile::start_threads() {
  for (int i = 0; i < options_.threads; ++i) {
    state_->threads.push_back(start_worker([this] { work(); }));
  }
}

void AsyncFile::stop_threads() noexcept {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
    state_->stopping = true;
  }
  state_->work_ready.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
  state_->threads.clear();
}

void AsyncFile::discard(int64_t offset, int64_t nbytes) {
  process_.require("this AsyncFile");
  if (offset < 0 || nbytes < 0 || offset + nbytes > size_) {
    throw StateError("range " + std::to_string(offset) + "+" + std::to_string(nbytes) +
                     " is outside the file of " + std::to_string(size_) + " bytes");
  }
  file_.discard(offset, nbytes);
}

void AsyncFile::close() {
  process_.require("this AsyncFile");
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closed) return;
    state_->closed = true;
  }
  stop_threads();
  file_.close();
}

AsyncFile::Ticket AsyncFile::read(void* buffer, int64_t nbytes, int64_t offset) {
  return submit(false, static_cast<char*>(buffer), nbytes, offset);
}

AsyncFile::Ticket AsyncFile::write(const void* buffer, int64_t nbytes, int64_t offset) {
  // One piece type serves both directions; a writing piece only reads its buffer.
  return submit(true, static_cast<char*>(const_cast<void*>(buffer)), nbytes, offset);
}

void AsyncFile::check_request(const char* buffer, int64_t nbytes, int64_t offset) const {
  if (nbytes < 0 || offset < 0 || offset > size_ || nbytes > size_ - offset) {
    throw StateError(std::to_string(nbytes) + " bytes at offset " + std::to_string(offset) +
                     " are outside " + path_ + " of " + std::to_string(size_) + " bytes");
  }
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(buffer));
  if (direct_ &&
      (address % kPageBytes != 0 || nbytes % kPageBytes != 0 || offset % kPageBytes != 0)) {
    throw StateError("O_DIRECT on " + path_ + " needs multiples of " + std::to_string(kPageBytes) +
                     ", got address % 4096 = " + std::to_string(address % kPageBytes) +
                     ", nbytes = " + std::to_string(nbytes) +
                     ", offset = " + std::to_string(offset) + "; align them or use direct=False");
  }
}

AsyncFile::Ticket AsyncFile::submit(bool is_write, char* buffer, int64_t nbytes, int64_t offset) {
  process_.require("this AsyncFile");
  check_request(buffer, nbytes, offset);
  const int64_t num_pieces = (nbytes + options_.piece_bytes - 1) / options_.piece_bytes;
  Ticket ticket = 0;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->closed) throw StateError(path_ + " is closed");
    ticket = state_->next_ticket++;
    if (num_pieces == 0) return ticket;
    state_->in_flight.emplace(ticket, State::Progress{num_pieces, std::nullopt});
    for (int64_t begin = 0; begin < nbytes; begin += options_.piece_bytes) {
      const int64_t size = std::min(options_.piece_bytes, nbytes - begin);
      state_->queue.push_back(Piece{ticket, is_write, buffer + begin, size, offset + begin});
    }
  }
  num_pieces == 1 ? state_->work_ready.notify_one() : state_->work_ready.notify_all();
  return ticket;
}

void AsyncFile::work() {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  for (;;) {
    state.work_ready.wait(lock, [&] { return state.stopping || !state.queue.empty(); });
    if (state.queue.empty()) return;
    const Piece piece = state.queue.front();
    state.queue.pop_front();
    std::optional<IoError> error;
    // The rest of a failed request is not worth the disk's time.
    if (!state.in_flight.at(piece.ticket).error) {
      lock.unlock();
      try {
        transfer(piece);
      } catch (const IoError& raised) {
        error = raised;
      }
      lock.lock();
    }
    State::Progress& progress = state.in_flight.at(piece.ticket);
    if (error && !progress.error) progress.error = error;
    state.finish_piece(piece.ticket);
  }
}

void AsyncFile::transfer(const Piece& piece) {
  const char* const doing = piece.is_write ? "cannot write" : "cannot read";
  int retries = 0;
  for (int64_t done_bytes = 0; done_bytes < piece.nbytes;) {
    const int64_t result = transfer_some(piece, done_bytes);
    if (result > 0) {
      done_bytes += result;
      retries = 0;
      continue;
    }
    const bool again = result == -EINTR || result == -EAGAIN;
    if (!again || ++retries > kMaxRetries) {
      // No progress without an error is the end of the file or a broken file system: repeating the
      // call would never end.
      throw IoError(result == 0 ? EIO : static_cast<int>(-result), path_, piece.offset + done_bytes,
                    doing);
    }
    ::sched_yield();
  }
  if (direct_) return;
  const int code = file_.forget_cached(piece.offset, piece.nbytes, piece.is_write);
  if (code != 0) throw IoError(code, path_, piece.offset, doing);
}

// One system call. Returns the bytes it moved or a negated errno.
int64_t AsyncFile::transfer_some(const Piece& piece, int64_t done_bytes) {
  char* const buffer = piece.buffer + done_bytes;
  const int64_t nbytes = piece.nbytes - done_bytes;
  const int64_t offset = piece.offset + done_bytes;
  const int64_t result = piece.is_write ? backend_->pwrite(file_.fd(), buffer, nbytes, offset)
                                        : backend_->pread(file_.fd(), buffer, nbytes, offset);
  if (result <= 0 || !direct_ || result == nbytes) return result;
  // O_DIRECT refuses to go on at an unaligned place: repeat the last, incomplete page.
  const int64_t whole_pages = result / kPageBytes * kPageBytes;
  return whole_pages > 0 ? whole_pages : -EAGAIN;
}

bool AsyncFile::done(Ticket ticket) const {
  process_.require("this AsyncFile");
  const std::lock_guard lock(state_->mutex);
  if (ticket == 0 || ticket >= state_->next_ticket) {
    throw StateError("ticket " + std::to_string(ticket) + " was not issued by " + path_);
  }
  return !state_->in_flight.contains(ticket);
}

void AsyncFile::wait(Ticket ticket) {
  (void)done(ticket);  // checks the ticket
  std::unique_lock lock(state_->mutex);
  state_->ticket_done.wait(lock, [&] { return !state_->in_flight.contains(ticket); });
  const auto found = state_->failed.find(ticket);
  if (found == state_->failed.end()) return;
  found->second.reported = true;
  throw found->second.error;
}

void AsyncFile::wait_all() {
  process_.require("this AsyncFile");
  std::unique_lock lock(state_->mutex);
  state_->ticket_done.wait(lock, [&] { return state_->in_flight.empty(); });
  for (auto& [ticket, failure] : state_->failed) {
    if (std::exchange(failure.reported, true)) continue;
    throw failure.error;
  }
}

}  // namespace gemini
