#include "aio/source_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "common/error.h"
#include "common/mutex.h"
#include "common/worker_thread.h"

namespace gemini {
namespace {

constexpr int64_t kBlock = 4096;
constexpr int64_t kPieceBytes = 1 << 20;

int64_t round_down(int64_t value) { return value / kBlock * kBlock; }
int64_t round_up(int64_t value) { return round_down(value + kBlock - 1); }

bool is_aligned(const SourcePart& part) {
  const auto address = reinterpret_cast<uintptr_t>(part.destination);
  return address % kBlock == 0 && part.offset % kBlock == 0 && part.nbytes % kBlock == 0;
}

struct Free {
  void operator()(char* buffer) const { std::free(buffer); }
};

}  // namespace

struct SourceFiles::State {
  struct Progress {
    int64_t pieces_left = 0;
    std::exception_ptr error = nullptr;  // the first one
    Done done = nullptr;                 // may be empty
  };

  // Counts a piece as read, and calls who waits for its ticket if it was the last one.
  void finish(Ticket ticket, std::exception_ptr error) {
    Progress ended;
    {
      const Lock lock(mutex);
      const auto found = tickets.find(ticket);
      Progress& progress = found->second;
      if (error && !progress.error) progress.error = std::move(error);
      if (--progress.pieces_left > 0) return;
      if (!progress.done) return ticket_done.notify_all();
      ended = std::move(progress);
      tickets.erase(found);
    }
    ended.done(ended.error);
  }

  Mutex mutex;
  Condition piece_ready;  // a piece was queued, or stopping
  Condition ticket_done;
  std::deque<Piece> waiting GEMINI_GUARDED_BY(mutex);
  std::map<Ticket, Progress> tickets GEMINI_GUARDED_BY(mutex);
  Ticket next_ticket GEMINI_GUARDED_BY(mutex) = 1;
  bool closed GEMINI_GUARDED_BY(mutex) = false;
  bool stopping GEMINI_GUARDED_BY(mutex) = false;
  std::vector<std::thread> threads;  // constructor, close and destructor only
};

SourceFiles::SourceFiles(std::vector<std::string> paths, int num_threads)
    : paths_(std::move(paths)), state_(std::make_unique<State>()) {
  if (paths_.empty()) throw StateError("SourceFiles needs a file");
  try {
    for (const std::string& path : paths_) open(path);
    for (int i = 0; i < num_threads; ++i) {
      state_->threads.push_back(start_worker("reading a checkpoint", [this] { work(); }));
    }
  } catch (...) {
    stop();
    throw;
  }
}

SourceFiles::~SourceFiles() {
  if (!process_.is_owner()) {
    (void)state_.release();
    return;
  }
  {
    const Lock lock(state_->mutex);
    state_->waiting.clear();
  }
  stop();
}

void SourceFiles::open(const std::string& path) {
  File file;
  file.descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_DIRECT);
  file.direct = file.descriptor >= 0;
  if (!file.direct && errno == EINVAL) {
    file.descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  }
  if (file.descriptor < 0) throw IoError(errno, path, 0, "cannot open");
  files_.push_back(file);
  if (::fstat(file.descriptor, &files_.back().opened) != 0) {
    throw IoError(errno, path, 0, "cannot look at");
  }
  if (!S_ISREG(files_.back().opened.st_mode)) {
    throw StateError(path + " is no regular file");
  }
}

void SourceFiles::stop() noexcept {
  {
    const Lock lock(state_->mutex);
    state_->closed = true;
    state_->stopping = true;
    state_->piece_ready.notify_all();
  }
  for (std::thread& thread : state_->threads) thread.join();
  state_->threads.clear();
  for (File& file : files_) {
    if (file.descriptor >= 0) ::close(file.descriptor);
    file.descriptor = -1;
  }
}

void SourceFiles::close() {
  process_.require("this SourceFiles");
  stop();
}

bool SourceFiles::direct() const noexcept {
  return std::ranges::all_of(files_, [](const File& file) { return file.direct; });
}

SourceFiles::Ticket SourceFiles::read(const std::vector<SourcePart>& parts, Done done) {
  process_.require("this SourceFiles");
  std::vector<Piece> pieces;
  for (const SourcePart& part : parts) {
    if (part.file < 0 || static_cast<size_t>(part.file) >= files_.size() || part.offset < 0 ||
        part.nbytes < 0) {
      throw StateError("there is no range of " + std::to_string(part.nbytes) + " bytes at " +
                       std::to_string(part.offset) + " of source file " +
                       std::to_string(part.file));
    }
    // Later pieces begin at a block, so that no block is read twice.
    for (int64_t begin = 0; begin < part.nbytes;) {
      const int64_t end =
          std::min(part.nbytes, round_down(part.offset + begin + kPieceBytes) - part.offset);
      pieces.push_back({0,
                        {part.file, part.offset + begin,
                         static_cast<char*>(part.destination) + begin, end - begin}});
      begin = end;
    }
  }
  const Lock lock(state_->mutex);
  if (state_->closed) throw StateError("this SourceFiles is closed");
  const Ticket ticket = state_->next_ticket++;
  if (pieces.empty() && done) return ticket;
  const auto num_pieces = static_cast<int64_t>(pieces.size());
  state_->tickets.emplace(ticket, State::Progress{num_pieces, nullptr, std::move(done)});
  for (Piece& piece : pieces) {
    piece.ticket = ticket;
    state_->waiting.push_back(piece);
  }
  state_->piece_ready.notify_all();
  return ticket;
}

void SourceFiles::wait(Ticket ticket) {
  process_.require("this SourceFiles");
  State& state = *state_;
  std::exception_ptr error;
  {
    const Lock lock(state.mutex);
    auto found = state.tickets.find(ticket);
    if (found == state.tickets.end()) {
      throw StateError("no read " + std::to_string(ticket) + " is under way");
    }
    while (found->second.pieces_left > 0) state.ticket_done.wait(state.mutex);
    error = found->second.error;
    state.tickets.erase(found);
  }
  if (error) std::rethrow_exception(error);
}

void SourceFiles::work() {
  const std::unique_ptr<char, Free> buffer(
      static_cast<char*>(std::aligned_alloc(kBlock, kPieceBytes + 2 * kBlock)));
  State& state = *state_;
  for (;;) {
    Piece piece;
    {
      const Lock lock(state.mutex);
      while (!state.stopping && state.waiting.empty()) state.piece_ready.wait(state.mutex);
      if (state.waiting.empty()) return;
      piece = state.waiting.front();
      state.waiting.pop_front();
    }
    std::exception_ptr error;
    try {
      if (buffer == nullptr) throw IoError(ENOMEM, paths_.front(), 0, "no buffer to read");
      read_piece(piece.part, buffer.get());
    } catch (...) {
      error = std::current_exception();
    }
    state.finish(piece.ticket, std::move(error));
  }
}

void SourceFiles::read_piece(const SourcePart& part, char* buffer) const {
  if (files_[static_cast<size_t>(part.file)].direct) {
    read_direct(part, buffer);
  } else {
    read_buffered(part);
  }
  require_unchanged(part);  // bytes read before a change belong to the old version
}

void SourceFiles::read_direct(const SourcePart& part, char* buffer) const {
  const auto index = static_cast<size_t>(part.file);
  const bool aligned = is_aligned(part);
  const int64_t begin = round_down(part.offset);
  const int64_t wanted = part.offset + part.nbytes - begin;  // the last block may end with the file
  char* const target = aligned ? static_cast<char*>(part.destination) : buffer;
  for (int64_t done = 0; done < wanted;) {
    const ssize_t count = ::pread(files_[index].descriptor, target + done,
                                  static_cast<size_t>(round_up(wanted) - done), begin + done);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count < 0) throw IoError(errno, paths_[index], begin + done, "cannot read");
    const bool at_end = count == 0 || count % kBlock != 0;
    if (at_end && count < wanted - done) {
      throw IoError(EIO, paths_[index], begin + done + count, "the file has become shorter:");
    }
    done += count;
  }
  if (!aligned) {
    std::memcpy(part.destination, buffer + (part.offset - begin), static_cast<size_t>(part.nbytes));
  }
}

void SourceFiles::read_buffered(const SourcePart& part) const {
  const auto index = static_cast<size_t>(part.file);
  const int descriptor = files_[index].descriptor;
  for (int64_t done = 0; done < part.nbytes;) {
    const ssize_t count = ::pread(descriptor, static_cast<char*>(part.destination) + done,
                                  static_cast<size_t>(part.nbytes - done), part.offset + done);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count < 0) throw IoError(errno, paths_[index], part.offset + done, "cannot read");
    if (count == 0) {
      throw IoError(EIO, paths_[index], part.offset + done, "the file has become shorter:");
    }
    done += count;
  }
  ::posix_fadvise(descriptor, part.offset, part.nbytes, POSIX_FADV_DONTNEED);
}

void SourceFiles::require_unchanged(const SourcePart& part) const {
  const auto index = static_cast<size_t>(part.file);
  const struct stat& before = files_[index].opened;
  struct stat now = {};
  if (::fstat(files_[index].descriptor, &now) != 0) {
    throw IoError(errno, paths_[index], part.offset, "cannot look at");
  }
  if (now.st_size != before.st_size || now.st_mtim.tv_sec != before.st_mtim.tv_sec ||
      now.st_mtim.tv_nsec != before.st_mtim.tv_nsec) {
    throw IoError(ESTALE, paths_[index], part.offset,
                  "the file was changed since the model was loaded from it; load it again:");
  }
}

}  // namespace gemini
