// StagedLink: one disk link of a GPU, between the file and GPU memory through a few page-locked
// buffers.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "aio/async_file.h"
#include "common/mutex.h"
#include "gpu/gpu_lanes.h"
#include "gpu/gpu_stream.h"
#include "gpu/pinned_arena.h"
#include "transfer/transfer_engine.h"

namespace gemini {

// A transfer between the file and memory of the GPU, or of the host if `host` is set.
struct StagedJob {
  uint64_t ticket = 0;
  GpuAddress gpu = 0;
  char* host = nullptr;
  int64_t nbytes = 0;
  int64_t offset = 0;  // in the file
  Uses after;          // the transfer begins after these
};

// Executes transfers of one direction in order, on its own thread. Reads and writes of the file
// overlap with the copies of earlier pieces.
class StagedLink {
 public:
  using Report = std::function<void(const StagedJob&, TransferResult)>;

  // The size of the pieces of a transfer, and the number of pieces with a buffer at one time.
  static constexpr int64_t kPieceBytes = 4 << 20;
  static constexpr int kNumPieces = 4;

  // `report` is called on the link's thread when nothing touches the memory any longer. `link` is
  // kDiskRead or kDiskWrite. The file must outlive this object.
  StagedLink(std::shared_ptr<GpuLanes> lanes, AsyncFile& file, Link link, Report report);
  // Drops transfers that have not started, and waits for the others.
  ~StagedLink();
  StagedLink(const StagedLink&) = delete;
  StagedLink& operator=(const StagedLink&) = delete;

  void submit(StagedJob job);
  // Executes all submitted transfers and joins the thread. Idempotent.
  void close();

 private:
  struct Piece;  // a buffer and its last use

  void work();
  [[nodiscard]] std::optional<StagedJob> next_job();
  void transfer(const StagedJob& job);
  void read_pieces(const StagedJob& job);
  void write_pieces(const StagedJob& job);
  void make_pieces();
  void settle() noexcept;

  const std::shared_ptr<GpuLanes> lanes_;
  AsyncFile& file_;
  const Link link_;
  const Report report_;
  std::vector<std::unique_ptr<Piece>> pieces_;  // used by the thread only; created by the first
                                                // transfer
  const GpuStream stream_;
  Mutex mutex_;
  Condition ready_;  // a job was submitted, or closing
  std::deque<StagedJob> jobs_ GEMINI_GUARDED_BY(mutex_);
  bool closing_ GEMINI_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the other members
};

}  // namespace gemini
