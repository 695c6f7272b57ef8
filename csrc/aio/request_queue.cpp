#include "aio/request_queue.h"

#include <cerrno>
#include <utility>

#include "common/bytes.h"
#include "common/error.h"
#include "common/size_text.h"

namespace gemini {
namespace {

// Attempts at one piece without progress before it fails.
constexpr int kMaxRetries = 1000;

bool is_transient(int64_t result) {
  return result == -EINTR || result == -EAGAIN || result == -ECANCELED;
}

}  // namespace

RequestQueue::RequestQueue(std::string path, bool whole_pages, std::shared_ptr<IoHook> hook,
                           Steps steps)
    : path_(std::move(path)),
      whole_pages_(whole_pages),
      hook_(std::move(hook)),
      steps_(std::move(steps)) {}

RequestQueue::Ticket RequestQueue::push(std::vector<IoPiece> pieces, Done done) {
  Ticket ticket = 0;
  {
    const Lock lock(mutex_);
    if (closed_) throw StateError(path_ + " is closed");
    ticket = next_ticket_++;
    if (pieces.empty()) return ticket;
    in_flight_.emplace(ticket,
                       Progress{static_cast<int64_t>(pieces.size()), nullptr, std::move(done)});
    for (IoPiece& piece : pieces) {
      piece.ticket = ticket;
      waiting_.push_back(std::move(piece));
    }
    num_waiting_ = static_cast<int64_t>(waiting_.size());
  }
  pieces.size() == 1 ? piece_ready_.notify_one() : piece_ready_.notify_all();
  return ticket;
}

RequestQueue::Taken RequestQueue::take_waiting(IoPiece& piece, IfEmpty if_empty) {
  const Lock lock(mutex_);
  while (if_empty == IfEmpty::kWait && !stopping_ && waiting_.empty()) piece_ready_.wait(mutex_);
  if (waiting_.empty()) return Taken::kNothing;
  piece = std::move(waiting_.front());
  waiting_.pop_front();
  num_waiting_ = static_cast<int64_t>(waiting_.size());
  return in_flight_.at(piece.ticket).error ? Taken::kPieceOfFailed : Taken::kPiece;
}

bool RequestQueue::take(IoPiece& piece, IfEmpty if_empty) {
  for (;;) {
    switch (take_waiting(piece, if_empty)) {
      case Taken::kNothing:
        return false;
      case Taken::kPieceOfFailed:
        finish(piece, nullptr);  // do not spend device time on it
        continue;
      case Taken::kPiece:
        if (steps_.prepare) steps_.prepare(piece);
        return true;
    }
  }
}

int64_t RequestQueue::allowed(const IoPiece& piece) {
  const int64_t left = piece.nbytes - piece.done_bytes;
  if (!hook_) return left;
  const int64_t most = hook_->before(piece.kind, left, piece.position + piece.done_bytes);
  if (most < 0 || !whole_pages_) return most;
  return std::min(round_up(most, kPageBytes), left);
}

// The part of `result` that counts: O_DIRECT cannot continue inside a page, so an incomplete page
// is repeated.
int64_t RequestQueue::usable(const IoPiece& piece, int64_t result) const {
  const bool complete = result == piece.nbytes - piece.done_bytes;
  if (result <= 0 || !whole_pages_ || complete) return result;
  const int64_t pages = result / kPageBytes * kPageBytes;
  return pages > 0 ? pages : -EAGAIN;
}

bool RequestQueue::settle(IoPiece& piece, int64_t result) {
  if (hook_) result = hook_->after(piece.kind, result, piece.position + piece.done_bytes);
  result = usable(piece, result);
  if (result > 0) {
    piece.done_bytes += result;
    piece.retries = 0;
    if (piece.done_bytes < piece.nbytes) return true;
    finish(piece, steps_.complete ? steps_.complete(piece) : nullptr);
    return false;
  }
  if (is_transient(result) && ++piece.retries <= kMaxRetries) return true;
  // No progress without an error means the end of the file or a broken file system: repeating the
  // request would never end.
  fail(piece, result == 0 ? EIO : static_cast<int>(-result), "");
  return false;
}

void RequestQueue::fail(const IoPiece& piece, int code, const std::string& why) {
  const std::string left = format_bytes(piece.nbytes - piece.done_bytes);
  const char* const doing = piece.is_write() ? "cannot write " : "cannot read ";
  finish(piece, std::make_exception_ptr(IoError(code, path_, piece.position + piece.done_bytes,
                                                why + doing + left + " of")));
}

void RequestQueue::finish(const IoPiece& piece, std::exception_ptr error) {
  Progress ended;
  {
    const Lock lock(mutex_);
    if (!error && piece.done_bytes == piece.nbytes) {  // else it was not attempted
      ++stats_.requests;
      (piece.is_write() ? stats_.bytes_written : stats_.bytes_read) += piece.nbytes;
    }
    const auto found = in_flight_.find(piece.ticket);
    Progress& progress = found->second;
    // Moved while locked: a copy that this thread released later would race with the callback.
    if (error && !progress.error) progress.error = std::move(error);
    if (--progress.pieces_left > 0) return;
    ended = std::move(progress);
    in_flight_.erase(found);
    if (ended.error && !ended.done) {
      failed_.emplace(piece.ticket, Failure{ended.error, false});
    }
    ticket_done_.notify_all();
  }
  if (ended.done) ended.done(ended.error);
}

void RequestQueue::require_issued(Ticket ticket) const {
  if (ticket != 0 && ticket < next_ticket_) return;
  throw StateError("ticket " + std::to_string(ticket) + " was not issued by " + path_);
}

bool RequestQueue::done(Ticket ticket) const {
  const Lock lock(mutex_);
  require_issued(ticket);
  return !in_flight_.contains(ticket);
}

void RequestQueue::wait(Ticket ticket) {
  const Lock lock(mutex_);
  require_issued(ticket);
  while (in_flight_.contains(ticket)) ticket_done_.wait(mutex_);
  const auto found = failed_.find(ticket);
  if (found == failed_.end()) return;
  found->second.reported = true;
  std::rethrow_exception(found->second.error);
}

void RequestQueue::wait_all() {
  const Lock lock(mutex_);
  while (!in_flight_.empty()) ticket_done_.wait(mutex_);
  for (auto& [ticket, failure] : failed_) {
    if (std::exchange(failure.reported, true)) continue;
    std::rethrow_exception(failure.error);
  }
}

bool RequestQueue::close() {
  const Lock lock(mutex_);
  return !std::exchange(closed_, true);
}

void RequestQueue::drop() {
  const Lock lock(mutex_);
  waiting_.clear();
  num_waiting_ = 0;
}

void RequestQueue::stop() noexcept {
  {
    const Lock lock(mutex_);
    closed_ = true;
    stopping_ = true;
  }
  piece_ready_.notify_all();
}

QueueStats RequestQueue::stats() const {
  const Lock lock(mutex_);
  return stats_;
}

}  // namespace gemini
