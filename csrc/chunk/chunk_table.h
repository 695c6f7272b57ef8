// The chunk table: told what operators access, it decides what has to be where, and performs
// nothing.
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

// How tensors are accessed: on DEVICE or on HOST; a traced access is recorded, and moves to the
// next moment.
struct Access {
  Tier on = Tier::kDevice;
  bool traced = true;
};

// What was done to tensors between their access and its release.
enum class Use : bool { kRead, kWritten };

// A state machine for one thread, without I/O. It returns Actions; the executor performs them in
// list order and reports each transfer by complete() or abort(). usage(tier) <= budget(tier)
// always. After any exception the table is as it was before the call.
class ChunkTable {
 public:
  // Hard budgets in bytes; 0 means that the tier is absent. DEVICE must be there.
  ChunkTable(int64_t device_bytes, int64_t host_bytes, int64_t disk_bytes);
  ChunkTable(const ChunkTable&) = default;  // a table of its own, to try something on
  ChunkTable& operator=(const ChunkTable&) = delete;
  ~ChunkTable() = default;

  ChunkId add_chunk(int64_t nbytes);
  TensorId add_tensor(ChunkId chunk);  // FREE
  // FREE -> HOLD for tensors that somebody else has put on DISK, all of a chunk without content.
  // Throws OutOfBudget, and StateError for one that is in use already; then nothing has changed.
  void found_on_disk(std::span<const TensorId> tensors);
  // Makes chunks a choice (choices.h). Throws StateError for one that is not there, and as that.
  void add_choice(const std::vector<std::vector<ChunkId>>& members, bool certain = false);
  // Gives the choice of a chunk further members. Throws alike, and where it is in none.
  void widen_choice(ChunkId id, const std::vector<std::vector<ChunkId>>& members);

  // --- operators ---
  // Puts the tensors in COMPUTE (counted), pins their chunks, and returns what can start now so
  // that they become resident. Throws OutOfBudget where it cannot be done, also after waiting.
  // On HOST operators of the CPU use chunks where they lie, and one without content starts as
  // zeros; StateError where one is pinned on the other tier, OutOfBudget also where one lies on
  // DISK alone: such operators run on DEVICE.
  Actions access(std::span<const TensorId> tensors, Access how = {});
  // Whether a traced access of these would be part of the latest moment: they are of the choice
  // that it was a use of.
  [[nodiscard]] bool continues(std::span<const TensorId> tensors);
  // These are accessed soon, beside the moments: prefetch() may bring those that are in a choice.
  void expect(std::span<const TensorId> tensors);
  [[nodiscard]] bool can_access_on_host(std::span<const TensorId> tensors);
  // What can start now for tensors in COMPUTE; to be called after completions until ready().
  Actions ensure(std::span<const TensorId> tensors);
  // All of them are on DEVICE, and DEVICE usage is within limit() or as near as it can get; of an
  // access on HOST: all are there and in no transfer.
  [[nodiscard]] bool ready(std::span<const TensorId> tensors) const;
  // Ends one access of each tensor: HOLD at the last. kWritten: they were, where they were
  // accessed, which makes copies on other tiers invalid. Tensors of a chunk that never
  // became resident and has no content return to FREE.
  Actions release(std::span<const TensorId> tensors, Use use);
  // Ends every access, for use after an exception. kWritten: resident ones may have been.
  Actions release_all(Use use);
  // These will not be used soon: those of them that can start to leave DEVICE now, if it is nearly
  // full and there are chunks that are not on it.
  Actions leave(std::span<const TensorId> tensors);
  // HOLD -> FREE. With the last tensor of a chunk its content is gone.
  Actions free(std::span<const TensorId> tensors);

  // --- transfers ---
  // Starts what comes next, and the flushes of a plan. Nothing without a schedule.
  [[nodiscard]] Actions prefetch(int32_t max_in_flight);
  Completion complete(ActionId id);
  Completion abort(ActionId id);

  // --- the step ---
  void begin_step();
  bool end_step();  // whether the step differed from the schedule
  void set_schedule(std::shared_ptr<const Schedule> schedule);  // may be null
  [[nodiscard]] const StepRecord& record() const { return record_; }
  [[nodiscard]] int64_t moment() const { return moment_; }
  [[nodiscard]] bool diverged() const { return diverged_; }

  // --- bytes ---
  void set_limit(int64_t nbytes);
  [[nodiscard]] int64_t limit() const;  // in force for the period under way
  [[nodiscard]] int64_t usage(Tier tier) const { return ledger().usage(tier); }
  [[nodiscard]] int64_t peak(Tier tier) const { return ledger().peak(tier); }
  [[nodiscard]] int64_t budget(Tier tier) const { return ledger().budget(tier); }
  void reset_peak() { chunks_.ledger().reset_peak(); }
  // Lets DISK hold `nbytes` more. Throws StateError where that is negative, or there is no DISK.
  void raise_disk_budget(int64_t nbytes);

  // --- queries; they throw StateError for an unknown id ---
  [[nodiscard]] const Chunk& chunk(ChunkId chunk) const;
  [[nodiscard]] ChunkId chunk_of(TensorId tensor) const { return tensor_at(tensor).chunk; }
  [[nodiscard]] TensorState tensor_state(TensorId tensor) const { return tensor_at(tensor).state; }
  [[nodiscard]] int32_t num_chunks() const { return chunks_.size(); }
  [[nodiscard]] int32_t num_tensors() const { return static_cast<int32_t>(tensors_.size()); }
  // How many moments go by in expectation between the next one of the chunk's choice and one that
  // uses it, by the schedule; 0 for a chunk that is in no choice.
  [[nodiscard]] int64_t moments_passed_by(ChunkId chunk) const;
  [[nodiscard]] int32_t num_in_flight() const {
    return static_cast<int32_t>(chunks_.in_flight().size());
  }

  // Recomputes everything from the chunks and tensors; throws StateError for a contradiction. Done
  // after every change when GEMINI_DEBUG >= 2.
  void check_invariants() const;

 private:
  struct Tensor {
    ChunkId chunk = 0;
    int32_t num_accesses = 0;
    TensorState state = TensorState::kFree;
    TensorState idle_state = TensorState::kFree;  // what it was before it went to COMPUTE
    Tier used_on = Tier::kDevice;                 // while it is in COMPUTE
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
  int32_t open_choice_ = Choices::kNone;  // which the latest moment was a use of, and nothing else
  std::vector<ChunkId> wanted_;           // scratch: the chunks of one call, ascending, each once
  std::vector<ChunkId> named_;            // scratch: the same as the schedule calls them
};

}  // namespace gemini
