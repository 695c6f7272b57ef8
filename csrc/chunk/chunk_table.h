// The chunk table: gets the accesses of operators and decides where each chunk must be. It performs
// nothing itself.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "chunk/choices.h"
#include "chunk/device_limit.h"
#include "chunk/eviction.h"
#include "chunk/flush.h"
#include "chunk/residency.h"
#include "chunk/schedule.h"
#include "chunk/state.h"
#include "chunk/step_record.h"

namespace gemini {

// How tensors are accessed: on DEVICE or on HOST. A traced access is recorded and begins the next
// moment.
struct Access {
  Tier on = Tier::kDevice;
  bool traced = true;
};

// What an operator did to tensors between access and release.
enum class Use : bool { kRead, kWritten };

// A state machine for one thread, without I/O. It returns Actions; the executor performs them in
// list order and reports each transfer by complete() or abort(). Invariant: usage(tier) <=
// budget(tier). After any exception the table is as it was before the call.
class ChunkTable {
 public:
  // Hard budgets in bytes; 0 means that the tier is absent. DEVICE must not be absent.
  ChunkTable(int64_t device_bytes, int64_t host_bytes, int64_t disk_bytes);
  ChunkTable(const ChunkTable&) = default;  // an independent table, for trying a change
  ChunkTable& operator=(const ChunkTable&) = delete;
  ~ChunkTable() = default;

  ChunkId add_chunk(int64_t nbytes);
  TensorId add_tensor(ChunkId chunk);  // FREE
  // FREE -> HOLD for tensors with content that was put on DISK from outside: all tensors of a chunk
  // that has no content. Throws OutOfBudget, and StateError for a tensor that is in use; nothing
  // has changed then.
  void found_on_disk(std::span<const TensorId> tensors);
  // Makes chunks a choice (choices.h). Throws StateError for an unknown chunk, and as
  // Choices::add().
  void add_choice(const std::vector<std::vector<ChunkId>>& members, bool certain = false);
  // Adds members to the choice of a chunk. Throws in the same cases, and if it is in no choice.
  void widen_choice(ChunkId id, const std::vector<std::vector<ChunkId>>& members);

  // --- operators ---
  // Puts the tensors in COMPUTE (counted), pins their chunks, and returns the actions that can
  // start now to make them resident. Throws OutOfBudget if this is impossible even after waiting.
  // On HOST, operators of the CPU use chunks on HOST, and a chunk without content starts as zeros.
  // There it throws StateError if a chunk is pinned on DEVICE, and OutOfBudget also if a chunk is
  // only on DISK: such operators must run on DEVICE.
  Actions access(std::span<const TensorId> tensors, Access how = {});
  // Whether a traced access of these would belong to the latest moment, because they are in the
  // choice that this moment uses.
  [[nodiscard]] bool continues(std::span<const TensorId> tensors);
  // These are accessed soon, outside the moments: prefetch() may fetch those in a choice.
  void expect(std::span<const TensorId> tensors);
  [[nodiscard]] bool can_access_on_host(std::span<const TensorId> tensors);
  // The actions that can start now for tensors in COMPUTE; call it after completions until ready().
  Actions ensure(std::span<const TensorId> tensors);
  // On DEVICE: all are there, and DEVICE usage is within limit() or as near as possible. For an
  // access on HOST: all are there and in no transfer.
  [[nodiscard]] bool ready(std::span<const TensorId> tensors) const;
  // Ends one access of each tensor; the last one returns it to HOLD. kWritten: the tensors were
  // written on the tier of the access, which makes copies on other tiers invalid. Tensors of a
  // chunk that never became resident and has no content return to FREE.
  Actions release(std::span<const TensorId> tensors, Use use);
  // Ends every access, after an exception. kWritten: resident tensors may have been written.
  Actions release_all(Use use);
  // These will not be used soon: starts moving those off DEVICE that can leave now, if it is nearly
  // full and some chunks are not on it.
  Actions leave(std::span<const TensorId> tensors);
  // HOLD -> FREE. The last tensor of a chunk discards its content.
  Actions free(std::span<const TensorId> tensors);

  // --- transfers ---
  // Starts the next incoming transfers, and the flushes of a plan. Does nothing without a schedule.
  [[nodiscard]] Actions prefetch(int32_t max_in_flight);
  Completion complete(ActionId id);
  Completion abort(ActionId id);

  // --- the step ---
  void begin_step();
  bool end_step();  // returns whether the step differed from the schedule
  void set_schedule(std::shared_ptr<const Schedule> schedule);  // may be null
  [[nodiscard]] const StepRecord& record() const { return record_; }
  [[nodiscard]] int64_t moment() const { return moment_; }
  [[nodiscard]] bool diverged() const { return diverged_; }

  // --- bytes ---
  void set_limit(int64_t nbytes);
  [[nodiscard]] int64_t limit() const;  // in force for the current period
  [[nodiscard]] int64_t usage(Tier tier) const { return ledger().usage(tier); }
  [[nodiscard]] int64_t peak(Tier tier) const { return ledger().peak(tier); }
  [[nodiscard]] int64_t budget(Tier tier) const { return ledger().budget(tier); }
  void reset_peak() { chunks_.ledger().reset_peak(); }
  // Raises the DISK budget by `nbytes`. Throws StateError if that is negative, or there is no DISK.
  void raise_disk_budget(int64_t nbytes);

  // --- queries; they throw StateError for an unknown id ---
  [[nodiscard]] const Chunk& chunk(ChunkId chunk) const;
  [[nodiscard]] ChunkId chunk_of(TensorId tensor) const { return tensor_at(tensor).chunk; }
  [[nodiscard]] TensorState tensor_state(TensorId tensor) const { return tensor_at(tensor).state; }
  [[nodiscard]] int32_t num_chunks() const { return chunks_.size(); }
  [[nodiscard]] int32_t num_tensors() const { return static_cast<int32_t>(tensors_.size()); }
  // The expected number of moments from the next one of the chunk's choice to one that uses the
  // chunk, by the schedule; 0 for a chunk in no choice.
  [[nodiscard]] int64_t moments_passed_by(ChunkId chunk) const;
  [[nodiscard]] int32_t num_in_flight() const {
    return static_cast<int32_t>(chunks_.in_flight().size());
  }

  // Recomputes all totals from the chunks and tensors; throws StateError for a contradiction. Runs
  // after every change if GEMINI_DEBUG >= 2.
  void check_invariants() const;

 private:
  struct Tensor {
    ChunkId chunk = 0;
    int32_t num_accesses = 0;
    TensorState state = TensorState::kFree;
    TensorState idle_state = TensorState::kFree;  // the state before COMPUTE
    Tier used_on = Tier::kDevice;                 // while in COMPUTE
  };

  [[nodiscard]] const TierLedger& ledger() const { return chunks_.ledger(); }
  [[nodiscard]] const Tensor& tensor_at(TensorId tensor) const;
  Tensor& mut(TensorId tensor) { return tensors_[static_cast<size_t>(tensor)]; }
  void require_compute(std::span<const TensorId> tensors) const;
  void set_state(TensorId tensor, TensorState to);
  void collect_chunks(std::span<const TensorId> tensors);

  void require_unpinned(Tier tier) const;
  [[nodiscard]] bool usable(const Tensor& tensor) const;
  void begin_access(std::span<const TensorId> tensors, Tier tier);
  void undo_access(std::span<const TensorId> tensors);
  void claim_releases(std::span<const TensorId> tensors, Use use);
  void end_access(TensorId tensor);
  void mark_dirty(const Tensor& tensor, Actions& actions);
  bool advance(Tier tier);
  Actions settle(Tier tier);
  [[nodiscard]] bool on_trace() const { return schedule_ != nullptr && !diverged_; }
  [[nodiscard]] Policy policy() const;
  void audit() const;

  Residency chunks_;
  std::vector<Tensor> tensors_;
  DeviceLimit limit_;
  Choices choices_;
  FlushQueue written_;
  std::shared_ptr<const Schedule> schedule_;
  int64_t moment_ = 0;
  bool diverged_ = false;
  bool untraced_ = false;  // the latest access was not part of the step
  StepRecord record_;
  int32_t open_choice_ = Choices::kNone;  // the choice that the latest moment uses, if it uses
                                          // nothing else
  std::vector<ChunkId> wanted_;           // scratch: the chunks of one call, ascending, without
                                          // duplicates
  std::vector<ChunkId> named_;            // scratch: the same with the ids of the schedule
};

}  // namespace gemini
