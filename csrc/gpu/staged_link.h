// One disk link of a GPU: between the file and GPU memory through a few page-locked buffers.
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

// A transfer between the file and memory of the GPU, or of the host where `host` is set.
struct StagedJob {
  uint64_t ticket = 0;
  GpuAddress gpu = 0;
  char* host = nullptr;
  int64_t nbytes = 0;
  int64_t offset = 0;  // in the file
  Uses after;          // the transfer begins after these
};

// Carries transfers of one direction out in order, on a thread of its own. The file's reads and
// writes overlap with the copies of the pieces before.
class StagedLink {
 public:
  using Report = std::function<void(const StagedJob&, TransferResult)>;

  // What a transfer is cut into, and how many pieces have a buffer at a time.
  static constexpr int64_t kPieceBytes = 4 << 20;
  static constexpr int kNumPieces = 4;

  // `report` is called on the link's thread, when nothing touches the memory any more. `link` is
  // kDiskRead or kDiskWrite. The file must outlive it.
  StagedLink(std::shared_ptr<GpuLanes> lanes, AsyncFile& file, Link link, Report report);
  // Drops what has not started, waits for the rest.
  ~StagedLink();
  StagedLink(const StagedLink&) = delete;
  StagedLink& operator=(const StagedLink&) = delete;

  void submit(StagedJob job);
  // Carries out what was submitted and joins the thread. Idempotent.
  void close();

 private:
  struct Piece;  // a buffer, and what last used it

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
  std::vector<std::unique_ptr<Piece>> pieces_;  // the thread's; made by the first transfer
  const GpuStream stream_;
  Mutex mutex_;
  Condition ready_;  // a job was submitted, or closing
  std::deque<StagedJob> jobs_ GEMINI_GUARDED_BY(mutex_);
  bool closing_ GEMINI_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace gemini
