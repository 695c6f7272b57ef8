#include "gpu/staged_link.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "common/error.h"
#include "common/processors.h"
#include "common/steady_clock.h"
#include "common/worker_thread.h"

namespace gemini {
namespace {

GpuAddress number(const char* address) { return reinterpret_cast<GpuAddress>(address); }

}  // namespace

struct StagedLink::Piece {
  explicit Piece(const std::shared_ptr<GpuLanes>& lanes)
      : buffer(lanes, kPieceBytes),
        copied(lanes->driver().create_event(GpuDriver::Waits::kAsleep)) {}

  PinnedBlock buffer;
  GpuDriver::Event copied;       // the end of its last copy from or to the GPU
  AsyncFile::Ticket ticket = 0;  // of the file; 0: none in flight
};

StagedLink::StagedLink(std::shared_ptr<GpuLanes> lanes, AsyncFile& file, Link link, Report report)
    : lanes_(std::move(lanes)),
      file_(file),
      link_(link),
      report_(std::move(report)),
      stream_(lanes_->driver()),
      thread_(start_worker("transfers between GPU and disk", [this] { work(); })) {}

StagedLink::~StagedLink() {
  {
    const Lock lock(mutex_);
    jobs_.clear();
  }
  close();
  for (const auto& piece : pieces_) lanes_->driver().destroy_event(piece->copied);
}

void StagedLink::submit(StagedJob job) {
  {
    const Lock lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  ready_.notify_one();
}

void StagedLink::close() {
  {
    const Lock lock(mutex_);
    closing_ = true;
  }
  ready_.notify_one();
  if (thread_.joinable()) thread_.join();
}

// nullopt when it is closing and all jobs are done.
std::optional<StagedJob> StagedLink::next_job() {
  const Lock lock(mutex_);
  while (!closing_ && jobs_.empty()) ready_.wait(mutex_);
  if (jobs_.empty()) return std::nullopt;
  std::optional<StagedJob> job(std::move(jobs_.front()));
  jobs_.pop_front();
  return job;
}

void StagedLink::work() {
  const KeepsTo near(lanes_->driver().processors());
  while (const std::optional<StagedJob> next = next_job()) {
    const StagedJob& job = *next;
    TransferResult result{job.ticket, true, 0, "", 0, ""};
    result.begin_s = now_seconds();
    try {
      transfer(job);
    } catch (const IoError& error) {
      result = {job.ticket,     false,        error.code(),  error.path(),
                error.offset(), error.what(), result.begin_s};
    } catch (const std::exception& error) {
      result = {job.ticket, false, 0, file_.path(), job.offset, error.what(), result.begin_s};
    }
    result.end_s = now_seconds();
    report_(job, std::move(result));
  }
}

void StagedLink::transfer(const StagedJob& job) {
  if (job.host != nullptr) {
    lanes_->await(job.after);
    file_.wait(link_ == Link::kDiskRead ? file_.read(job.host, job.nbytes, job.offset)
                                        : file_.write(job.host, job.nbytes, job.offset));
    return;
  }
  make_pieces();
  lanes_->wait(stream_.get(), job.after);
  try {
    link_ == Link::kDiskRead ? read_pieces(job) : write_pieces(job);
  } catch (...) {
    settle();
    throw;
  }
}

// The file reads ahead by the number of buffers.
void StagedLink::read_pieces(const StagedJob& job) {
  GpuDriver& driver = lanes_->driver();
  const int64_t count = (job.nbytes + kPieceBytes - 1) / kPieceBytes;
  const auto size = [&](int64_t i) { return std::min(kPieceBytes, job.nbytes - i * kPieceBytes); };
  const auto start = [&](int64_t i) {
    Piece& piece = *pieces_[static_cast<size_t>(i % kNumPieces)];
    driver.await(piece.copied);
    piece.ticket = file_.read(piece.buffer.address(), size(i), job.offset + i * kPieceBytes);
  };
  for (int64_t i = 0; i < std::min<int64_t>(count, kNumPieces); ++i) start(i);
  for (int64_t i = 0; i < count; ++i) {
    Piece& piece = *pieces_[static_cast<size_t>(i % kNumPieces)];
    file_.wait(std::exchange(piece.ticket, 0));
    driver.copy(job.gpu + static_cast<uint64_t>(i * kPieceBytes), number(piece.buffer.address()),
                size(i), stream_.get());
    driver.record(piece.copied, stream_.get());
    // The copy of the previous piece has had time to end: its buffer is filled next.
    if (i > 0 && i - 1 + kNumPieces < count) start(i - 1 + kNumPieces);
  }
  for (const auto& piece : pieces_) driver.await(piece->copied);
}

// The GPU copies ahead by the number of buffers.
void StagedLink::write_pieces(const StagedJob& job) {
  GpuDriver& driver = lanes_->driver();
  const int64_t count = (job.nbytes + kPieceBytes - 1) / kPieceBytes;
  const auto size = [&](int64_t i) { return std::min(kPieceBytes, job.nbytes - i * kPieceBytes); };
  const auto start = [&](int64_t i) {
    Piece& piece = *pieces_[static_cast<size_t>(i % kNumPieces)];
    if (piece.ticket != 0) file_.wait(std::exchange(piece.ticket, 0));
    driver.copy(number(piece.buffer.address()), job.gpu + static_cast<uint64_t>(i * kPieceBytes),
                size(i), stream_.get());
    driver.record(piece.copied, stream_.get());
  };
  for (int64_t i = 0; i < std::min<int64_t>(count, kNumPieces); ++i) start(i);
  for (int64_t i = 0; i < count; ++i) {
    Piece& piece = *pieces_[static_cast<size_t>(i % kNumPieces)];
    driver.await(piece.copied);
    piece.ticket = file_.write(piece.buffer.address(), size(i), job.offset + i * kPieceBytes);
    if (i > 0 && i - 1 + kNumPieces < count) start(i - 1 + kNumPieces);
  }
  for (const auto& piece : pieces_) {
    if (piece->ticket != 0) file_.wait(std::exchange(piece->ticket, 0));
  }
}

void StagedLink::make_pieces() {
  while (pieces_.size() < kNumPieces) pieces_.push_back(std::make_unique<Piece>(lanes_));
}

// After a failure: waits until nothing uses the buffers.
void StagedLink::settle() noexcept {
  for (const auto& piece : pieces_) {
    try {
      if (piece->ticket != 0) file_.wait(std::exchange(piece->ticket, 0));
    } catch (const std::exception&) {
      // Only the first failure is reported.
    }
    try {
      lanes_->driver().await(piece->copied);
    } catch (const std::exception&) {
      // A GPU that has failed uses nothing any longer.
    }
  }
}

}  // namespace gemini
