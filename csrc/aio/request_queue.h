// The requests of one AsyncFile on their way: accepted as pieces, executed by a backend, judged.
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
  int64_t requests = 0;  // executed well, continuations not counted
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
};

// Thread-safe. A ticket is done when all its pieces are; the first error of one is the ticket's.
class RequestQueue {
 public:
  using Ticket = uint64_t;  // unique per queue, never 0
  // Around the execution of a piece, on the backend's thread: before the first attempt, and when
  // all of it was transferred; an exception that the latter returns fails it after all.
  struct Steps {
    std::function<void(const IoPiece&)> prepare;
    std::function<std::exception_ptr(const IoPiece&)> complete;
  };

  // `whole_pages`: O_DIRECT, which can go on only at page boundaries. `hook` may be null.
  RequestQueue(std::string path, bool whole_pages, std::shared_ptr<IoHook> hook, Steps steps);

  // Queues a transfer; without pieces its ticket is done at once. Throws StateError when closed.
  [[nodiscard]] Ticket push(std::vector<IoPiece> pieces);
  [[nodiscard]] bool done(Ticket ticket) const;
  void wait(Ticket ticket);
  void wait_all();

  // Accepts nothing more; returns whether it did until now.
  bool close();
  // Forgets what no backend has taken. Only when nobody will wait.
  void drop();
  // Lets `take` end once the queue is empty. Closes, too.
  void stop() noexcept;

  // -- the backend's side

  enum class IfEmpty : bool { kReturn, kWait };
  // Moves the next piece to `piece`; false when there is none, with kWait only after `stop`.
  [[nodiscard]] bool take(IoPiece& piece, IfEmpty if_empty);
  // The most bytes the next attempt at `piece` may move, or a negated errno that is its result.
  [[nodiscard]] int64_t allowed(const IoPiece& piece);
  // Judges one attempt by `result`, the bytes moved or a negated errno. True: attempt the rest.
  [[nodiscard]] bool settle(IoPiece& piece, int64_t result);
  // Ends a piece that was taken without another attempt, because of `code`; `why` begins the
  // message.
  void fail(const IoPiece& piece, int code, const std::string& why);
  // Whether pieces are waiting; may be out of date at once.
  [[nodiscard]] bool has_waiting() const noexcept { return num_waiting_.load() > 0; }

  [[nodiscard]] QueueStats stats() const;

 private:
  struct Progress {
    int64_t pieces_left;
    std::exception_ptr error;  // the first one
  };
  struct Failure {
    std::exception_ptr error;
    bool reported;
  };

  [[nodiscard]] bool take_waiting(IoPiece& piece, IfEmpty if_empty);
  [[nodiscard]] int64_t usable(const IoPiece& piece, int64_t result) const;
  void finish(const IoPiece& piece, const std::exception_ptr& error);
  void finish_locked(const IoPiece& piece, const std::exception_ptr& error) GEMINI_REQUIRES(mutex_);
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
  std::map<Ticket, Failure> failed_ GEMINI_GUARDED_BY(mutex_);  // successes are forgotten
  Ticket next_ticket_ GEMINI_GUARDED_BY(mutex_) = 1;
  bool closed_ GEMINI_GUARDED_BY(mutex_) = false;
  bool stopping_ GEMINI_GUARDED_BY(mutex_) = false;
  QueueStats stats_ GEMINI_GUARDED_BY(mutex_);
  std::atomic<int64_t> num_waiting_{0};
};

}  // namespace gemini
