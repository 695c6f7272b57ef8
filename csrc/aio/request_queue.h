// RequestQueue: the requests of one AsyncFile. It accepts pieces, hands them to a backend, and
// evaluates the results.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "aio/io_hook.h"
#include "aio/io_piece.h"
#include "common/mutex.h"

namespace gemini {

struct QueueStats {
  int64_t requests = 0;  // successful ones, without counting continuations
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
};

// Thread-safe. A ticket is done when all its pieces are; its error is the first error of a piece.
class RequestQueue {
 public:
  using Ticket = uint64_t;  // unique per queue, never 0
  // Called once, with the error or nullptr, on the thread that ends the last piece. It holds no
  // lock of the queue, and must not throw.
  using Done = std::function<void(const std::exception_ptr&)>;
  // Called around the execution of a piece, on the backend's thread: before the first attempt, and
  // after all of it was transferred. An exception returned by `complete` makes the piece fail.
  struct Steps {
    std::function<void(const IoPiece&)> prepare;
    std::function<std::exception_ptr(const IoPiece&)> complete;
  };

  // `whole_pages`: O_DIRECT, which can continue only at page boundaries. `hook` may be null.
  RequestQueue(std::string path, bool whole_pages, std::shared_ptr<IoHook> hook, Steps steps);

  // Queues a transfer; without pieces its ticket is done at once, and `done` is not called. If
  // `done` is set it gets the ticket's error, which `wait` and `wait_all` then do not throw. Throws
  // StateError if closed.
  [[nodiscard]] Ticket push(std::vector<IoPiece> pieces, Done done = nullptr);
  [[nodiscard]] bool done(Ticket ticket) const;
  void wait(Ticket ticket);
  void wait_all();

  // Stops accepting transfers; returns whether it accepted them until now.
  bool close();
  // Drops pieces that no backend has taken. Call it only if nobody will wait for them.
  void drop();
  // Makes `take` return false once the queue is empty. Also closes.
  void stop() noexcept;

  // -- for the backend

  enum class IfEmpty : bool { kReturn, kWait };
  // Moves the next piece to `piece`; false if there is none, with kWait only after `stop`.
  [[nodiscard]] bool take(IoPiece& piece, IfEmpty if_empty);
  // The most bytes that the next attempt at `piece` may move, or a negated errno as its result.
  [[nodiscard]] int64_t allowed(const IoPiece& piece);
  // Evaluates one attempt by `result`, the bytes moved or a negated errno. True: attempt the rest.
  [[nodiscard]] bool settle(IoPiece& piece, int64_t result);
  // Ends a taken piece without another attempt, with the error `code`; `why` begins the message.
  void fail(const IoPiece& piece, int code, const std::string& why);
  // Whether pieces are waiting; may be outdated at once.
  [[nodiscard]] bool has_waiting() const noexcept { return num_waiting_.load() > 0; }

  [[nodiscard]] QueueStats stats() const;

 private:
  struct Progress {
    int64_t pieces_left;
    std::exception_ptr error;  // the first one
    Done done;                 // may be empty
  };
  struct Failure {
    std::exception_ptr error;
    bool reported;
  };

  enum class Taken { kNothing, kPiece, kPieceOfFailed };
  [[nodiscard]] Taken take_waiting(IoPiece& piece, IfEmpty if_empty);
  [[nodiscard]] int64_t usable(const IoPiece& piece, int64_t result) const;
  void finish(const IoPiece& piece, std::exception_ptr error);
  void require_issued(Ticket ticket) const GEMINI_REQUIRES(mutex_);

  const std::string path_;
  const bool whole_pages_;
  const std::shared_ptr<IoHook> hook_;
  const Steps steps_;

  mutable Mutex mutex_;
  Condition piece_ready_;  // a piece was queued, or stopping
  Condition ticket_done_;  // a ticket finished
  std::deque<IoPiece> waiting_ GEMINI_GUARDED_BY(mutex_);
  std::unordered_map<Ticket, Progress> in_flight_ GEMINI_GUARDED_BY(mutex_);
  std::map<Ticket, Failure> failed_ GEMINI_GUARDED_BY(mutex_);  // successes are not stored
  Ticket next_ticket_ GEMINI_GUARDED_BY(mutex_) = 1;
  bool closed_ GEMINI_GUARDED_BY(mutex_) = false;
  bool stopping_ GEMINI_GUARDED_BY(mutex_) = false;
  QueueStats stats_ GEMINI_GUARDED_BY(mutex_);
  std::atomic<int64_t> num_waiting_{0};
};

}  // namespace gemini
