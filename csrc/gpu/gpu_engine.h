// GpuEngine: transfers between the tiers of a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "aio/async_file.h"
#include "common/mutex.h"
#include "common/process_guard.h"
#include "gpu/gpu_lanes.h"
#include "gpu/gpu_windows.h"
#include "gpu/pinned_arena.h"
#include "gpu/staged_link.h"
#include "transfer/transfer_engine.h"

namespace gemini {

// Copies between GPU and host never make the host wait. Marks order them after earlier uses of
// either memory, and later uses after them. So `wait_any` may report a copy that has not ended, and
// makes the operators' stream wait for it; `poll` reports those that have ended.
//
// The memory of a transfer must stay mapped until it was reported. One thread at a time, as for the
// lanes; in a forked child every call throws StateError.
class GpuEngine {
 public:
  using Ticket = uint64_t;  // unique per engine, never 0

  // `file` serves the disk links and must outlive the engine; without it they refuse transfers.
  GpuEngine(std::shared_ptr<GpuLanes> lanes, AsyncFile* file);
  // Drops disk transfers that have not started, and waits for the others.
  ~GpuEngine();
  GpuEngine(const GpuEngine&) = delete;
  GpuEngine& operator=(const GpuEngine&) = delete;

  // Start a transfer of the first `nbytes`. No operator may have used the destination since it was
  // mapped, because operators leave no marks. Throw StateError if something is not mapped or too
  // small, without a file, or on a closed engine. Failures of the file are reported.
  [[nodiscard]] Ticket copy(GpuWindow& dst, HostPlace& src, int64_t nbytes);
  [[nodiscard]] Ticket copy(HostPlace& dst, GpuWindow& src, int64_t nbytes);
  [[nodiscard]] Ticket read(GpuWindow& dst, int64_t nbytes, int64_t offset);
  [[nodiscard]] Ticket write(GpuWindow& src, int64_t nbytes, int64_t offset);
  [[nodiscard]] Ticket write(HostPlace& src, int64_t nbytes, int64_t offset);

  // Returns the transfers that have ended, or were passed to the order of the lanes, since the last
  // call.
  [[nodiscard]] std::vector<TransferResult> poll();
  // Makes `poll` return something: by making operators wait for a copy or, if there are only disk
  // transfers, by blocking up to `timeout_s` seconds (a negative value waits without limit).
  // Returns whether `poll` would return something.
  [[nodiscard]] bool wait_any(double timeout_s);
  // Blocks until nothing is in flight or running. Results remain to be polled.
  void drain();
  // Completes all transfers and joins the threads. Idempotent; `poll` still works.
  void close();

  [[nodiscard]] int64_t num_in_flight() const;
  [[nodiscard]] LinkStats stats(Link link);
  // Seconds that operators have waited for copies, for the waits that are over.
  [[nodiscard]] double stall_seconds();

 private:
  struct Copy {
    Ticket ticket;
    Link link;
    int64_t nbytes;
    Mark begin;
    Mark end;
    double submitted_s;
    bool reported;
  };
  struct Stall {
    Mark begin;
    Mark end;
  };

  [[nodiscard]] Ticket next_ticket(int64_t nbytes, int64_t room_bytes);
  [[nodiscard]] Ticket start_copy(Lane lane, GpuAddress dst, GpuAddress src, int64_t nbytes,
                                  Uses& dst_uses, Uses& src_uses);
  [[nodiscard]] Ticket start_staged(std::unique_ptr<StagedLink>& link, StagedJob job);
  void report_ended();
  void count(const Copy& copy);
  void measure_stalls();
  [[nodiscard]] Copy* next_unreported();

  ProcessGuard process_;
  const std::shared_ptr<GpuLanes> lanes_;
  Ticket next_ticket_ = 1;
  bool closed_ = false;
  std::deque<Copy> copies_;   // not ended yet, in order of submission
  std::deque<Stall> stalls_;  // not over yet
  double stall_seconds_ = 0;
  int64_t num_unreported_copies_ = 0;
  std::array<LinkStats, 2> copy_stats_;  // for h2d, d2h

  struct Staged {
    Mutex mutex;
    Condition progress;
    std::vector<TransferResult> results GEMINI_GUARDED_BY(mutex);  // not polled yet
    std::array<LinkStats, 2> stats GEMINI_GUARDED_BY(mutex);       // for reads, writes
    int64_t num_in_flight GEMINI_GUARDED_BY(mutex) = 0;
  };
  mutable Staged staged_;
  std::vector<TransferResult> results_;  // for copies, not polled yet
  std::unique_ptr<StagedLink> reads_;    // last: their threads use the other members
  std::unique_ptr<StagedLink> writes_;
};

}  // namespace gemini
