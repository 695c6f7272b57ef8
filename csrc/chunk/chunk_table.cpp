#include "chunk/chunk_table.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "chunk/host_use.h"
#include "chunk/prefetch.h"
#include "chunk/room.h"
#include "common/debug.h"
#include "common/error.h"

namespace gemini {

namespace {

TierLedger::Bytes checked_budgets(int64_t device_bytes, int64_t host_bytes, int64_t disk_bytes) {
  if (device_bytes <= 0 || host_bytes < 0 || disk_bytes < 0) {
    throw StateError("budgets must be DEVICE > 0, HOST >= 0, DISK >= 0, not " +
                     std::to_string(device_bytes) + ", " + std::to_string(host_bytes) + ", " +
                     std::to_string(disk_bytes));
  }
  return {device_bytes, host_bytes, disk_bytes};
}

std::string illegal(TensorId tensor, TensorState from, TensorState to) {
  return "tensor " + std::to_string(tensor) + " cannot go from " + name(from) + " to " + name(to);
}

}  // namespace

ChunkTable::ChunkTable(int64_t device_bytes, int64_t host_bytes, int64_t disk_bytes)
    : chunks_(checked_budgets(device_bytes, host_bytes, disk_bytes)), limit_(device_bytes) {}

ChunkId ChunkTable::add_chunk(int64_t nbytes) { return chunks_.add(nbytes); }

TensorId ChunkTable::add_tensor(ChunkId id) {
  static_cast<void>(chunk(id));
  tensors_.push_back({.chunk = id});
  return num_tensors() - 1;
}

const Chunk& ChunkTable::chunk(ChunkId id) const {
  if (id < 0 || id >= num_chunks()) throw StateError("no chunk " + std::to_string(id));
  return chunks_[id];
}

const ChunkTable::Tensor& ChunkTable::tensor_at(TensorId tensor) const {
  if (tensor < 0 || tensor >= num_tensors()) {
    throw StateError("no tensor " + std::to_string(tensor));
  }
  return tensors_[static_cast<size_t>(tensor)];
}

void ChunkTable::require_compute(std::span<const TensorId> tensors) const {
  for (const TensorId tensor : tensors) {
    if (tensor_at(tensor).state != TensorState::kCompute) {
      throw StateError("tensor " + std::to_string(tensor) + " is " + name(tensor_at(tensor).state) +
                       ", not COMPUTE: access() it first");
    }
  }
}

void ChunkTable::set_state(TensorId tensor, TensorState to) {
  TensorState& state = mut(tensor).state;
  if (!is_legal(state, to)) throw StateError(illegal(tensor, state, to));
  const int32_t was_in_use = state == TensorState::kFree ? 0 : 1;
  state = to;
  chunks_.count_in_use(mut(tensor).chunk, (to == TensorState::kFree ? 0 : 1) - was_in_use);
}

void ChunkTable::collect_chunks(std::span<const TensorId> tensors) {
  wanted_.clear();
  for (const TensorId tensor : tensors) wanted_.push_back(tensor_at(tensor).chunk);
  std::ranges::sort(wanted_);
  const auto repeated = std::ranges::unique(wanted_);
  wanted_.erase(repeated.begin(), repeated.end());
}

void ChunkTable::found_on_disk(std::span<const TensorId> tensors) {
  collect_chunks(tensors);
  int64_t nbytes = 0;
  for (const ChunkId id : wanted_) {
    if (chunks_[id].has_content() || chunks_[id].num_in_use > 0) {
      throw StateError("chunk " + std::to_string(id) + " has content already");
    }
    nbytes += chunks_[id].nbytes;
  }
  if (nbytes > ledger().free_bytes(Tier::kDisk)) {
    throw ledger().does_not_fit(Tier::kDisk, nbytes);
  }
  for (const ChunkId id : wanted_) static_cast<void>(chunks_.allocate(id, Tier::kDisk));
  for (const TensorId tensor : tensors) {
    set_state(tensor, TensorState::kCompute);
    set_state(tensor, TensorState::kHold);
  }
  audit();
}

void ChunkTable::add_choice(const std::vector<std::vector<ChunkId>>& members, bool certain) {
  for (const std::vector<ChunkId>& chunks : members) {
    for (const ChunkId id : chunks) static_cast<void>(chunk(id));
  }
  choices_.add(members, certain);
}

void ChunkTable::widen_choice(ChunkId id, const std::vector<std::vector<ChunkId>>& members) {
  for (const std::vector<ChunkId>& chunks : members) {
    for (const ChunkId each : chunks) static_cast<void>(chunk(each));
  }
  choices_.widen(id, members);
}

int64_t ChunkTable::moments_passed_by(ChunkId id) const {
  static_cast<void>(chunk(id));
  return choices_.moments_passed_by(id, schedule_ != nullptr ? schedule_->num_moments() : 1);
}

// --- operators ---

// Throws if a chunk of `wanted_` is pinned on `tier`: memory is written on one tier at a time.
void ChunkTable::require_unpinned(Tier tier) const {
  for (const ChunkId id : wanted_) {
    if (!chunks_[id].pinned_on(tier)) continue;
    throw StateError("chunk " + std::to_string(id) + " is in use on " + name(tier) +
                     ": it cannot be used on another tier meanwhile");
  }
}

void ChunkTable::begin_access(std::span<const TensorId> tensors, Tier tier) {
  for (const TensorId id : tensors) {
    Tensor& tensor = mut(id);
    if (tensor.num_accesses++ == 0) tensor.idle_state = tensor.state;
    tensor.used_on = tier;
    set_state(id, TensorState::kCompute);
    chunks_.pin(tensor.chunk, tier);
  }
}

void ChunkTable::undo_access(std::span<const TensorId> tensors) {
  for (const TensorId id : tensors) {
    Tensor& tensor = mut(id);
    chunks_.unpin(tensor.chunk, tensor.used_on);
    if (--tensor.num_accesses > 0) continue;
    set_state(id, TensorState::kHold);
    if (tensor.idle_state == TensorState::kFree) set_state(id, TensorState::kFree);
  }
}

// The second half of a release: the number of accesses has been decremented already.
void ChunkTable::end_access(TensorId id) {
  const Tensor& tensor = tensor_at(id);
  chunks_.unpin(tensor.chunk, tensor.used_on);
  chunks_.touch(tensor.chunk);
  if (tensor.num_accesses > 0 || tensor.state != TensorState::kCompute) return;
  set_state(id, TensorState::kHold);
  const bool never_got_content = !chunks_[tensor.chunk].has_content();
  if (never_got_content) set_state(id, TensorState::kFree);
}

bool ChunkTable::continues(std::span<const TensorId> tensors) {
  if (open_choice_ == Choices::kNone) return false;
  collect_chunks(tensors);
  return choices_.common(wanted_) == open_choice_;
}

void ChunkTable::expect(std::span<const TensorId> tensors) {
  collect_chunks(tensors);
  choices_.expect(wanted_);
}

bool ChunkTable::can_access_on_host(std::span<const TensorId> tensors) {
  collect_chunks(tensors);
  return fits_on_host(chunks_, wanted_);
}

Actions ChunkTable::access(std::span<const TensorId> tensors, Access how) {
  const auto [tier, traced] = how;
  collect_chunks(tensors);
  for (const Tier other : kTiers) {
    if (other != tier && !chunks_.pinned(other).empty()) require_unpinned(other);
  }
  const bool was_diverged = diverged_;
  const bool was_untraced = std::exchange(untraced_, !traced);
  const int32_t choice = open_choice_;
  begin_access(tensors, tier);
  const bool advanced = traced && advance(tier);
  try {
    Actions actions = settle(tier);
    if (traced) {
      choices_.note_used(wanted_);
    } else {
      choices_.note_beside(wanted_);
    }
    audit();
    return actions;
  } catch (const OutOfBudget&) {
    undo_access(tensors);
    if (advanced) {
      record_.undo_moment();
      --moment_;
    }
    open_choice_ = choice;
    diverged_ = was_diverged;
    untraced_ = was_untraced;
    audit();
    throw;
  }
}

Actions ChunkTable::ensure(std::span<const TensorId> tensors) {
  require_compute(tensors);
  collect_chunks(tensors);
  Actions actions = settle(tensors.empty() ? Tier::kDevice : mut(tensors.front()).used_on);
  audit();
  return actions;
}

bool ChunkTable::usable(const Tensor& tensor) const {
  return chunks_[tensor.chunk].usable_on(tensor.used_on);
}

bool ChunkTable::ready(std::span<const TensorId> tensors) const {
  for (const TensorId tensor : tensors) {
    if (!usable(tensor_at(tensor))) return false;
  }
  if (!tensors.empty() && tensor_at(tensors.front()).used_on == Tier::kHost) return true;
  if (usage(Tier::kDevice) <= limit()) return true;
  return !chunks_.any_leaving() && !next_victim(chunks_, policy()).has_value();
}

// Decrements the number of accesses of each tensor, or throws with all of them unchanged.
void ChunkTable::claim_releases(std::span<const TensorId> tensors, Use use) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    Tensor& tensor = mut(tensors[i]);
    const bool written_nowhere = use == Use::kWritten && !usable(tensor);
    if (tensor.num_accesses > 0 && !written_nowhere) {
      --tensor.num_accesses;
      continue;
    }
    for (const TensorId claimed : tensors.first(i)) ++mut(claimed).num_accesses;
    throw StateError("tensor " + std::to_string(tensors[i]) +
                     (written_nowhere
                          ? std::string(" is released as written but its chunk is not on ") +
                                name(tensor.used_on)
                          : " is released more often than it was accessed"));
  }
}

void ChunkTable::mark_dirty(const Tensor& tensor, Actions& actions) {
  chunks_.mark_dirty(tensor.chunk, tensor.used_on, actions);
  if (!choices_.has(tensor.chunk)) record_.note_written(tensor.chunk);
}

Actions ChunkTable::release(std::span<const TensorId> tensors, Use use) {
  require_compute(tensors);
  claim_releases(tensors, use);
  Actions actions;
  for (const TensorId tensor : tensors) {
    if (use == Use::kWritten) {
      mark_dirty(mut(tensor), actions);
      if (on_trace() && schedule_->planned()) written_.add(mut(tensor).chunk);
    }
    end_access(tensor);
  }
  if (use == Use::kWritten && on_trace() && schedule_->planned()) {
    written_.start(chunks_, *schedule_, moment_, actions);
  }
  audit();
  return actions;
}

Actions ChunkTable::release_all(Use use) {
  Actions actions;
  for (TensorId id = 0; id < num_tensors(); ++id) {
    Tensor& tensor = mut(id);
    if (tensor.num_accesses == 0) continue;
    if (use == Use::kWritten && usable(tensor)) mark_dirty(tensor, actions);
    for (int32_t left = std::exchange(tensor.num_accesses, 0); left > 0; --left) end_access(id);
  }
  audit();
  return actions;
}

Actions ChunkTable::leave(std::span<const TensorId> tensors) {
  Actions actions;
  if (chunks_.num_absent() == 0) return actions;
  collect_chunks(tensors);
  remove_ahead(chunks_, policy(), wanted_, limit() / 4 * 3, actions);
  audit();
  return actions;
}

Actions ChunkTable::free(std::span<const TensorId> tensors) {
  for (const TensorId tensor : tensors) {
    const TensorState state = tensor_at(tensor).state;
    if (!is_legal(state, TensorState::kFree)) {
      throw StateError(illegal(tensor, state, TensorState::kFree) + ": release() it first");
    }
  }
  Actions actions;
  for (const TensorId tensor : tensors) {
    set_state(tensor, TensorState::kFree);
    const ChunkId id = mut(tensor).chunk;
    if (chunks_[id].num_in_use > 0) continue;
    if (chunks_[id].has_content() && !choices_.has(id)) record_.note_freed(id);
    chunks_.discard(id, actions);
  }
  audit();
  return actions;
}

// --- transfers ---

Actions ChunkTable::prefetch(int32_t max_in_flight) {
  if (!on_trace()) return {};
  Actions actions =
      gemini::prefetch(chunks_, *schedule_, choices_, limit_, {moment_, limit(), max_in_flight});
  if (schedule_->planned()) written_.start(chunks_, *schedule_, moment_, actions);
  evict_ahead(chunks_, *schedule_, moment_, actions);
  audit();
  return actions;
}

Completion ChunkTable::complete(ActionId id) {
  const Completion completion = chunks_.complete(id);
  audit();
  return completion;
}

Completion ChunkTable::abort(ActionId id) {
  const Completion completion = chunks_.abort(id);
  audit();
  return completion;
}

// --- the step ---

void ChunkTable::begin_step() {
  moment_ = 0;
  diverged_ = false;
  untraced_ = false;
  open_choice_ = Choices::kNone;
  choices_.end_moment();
  record_.clear();
}

bool ChunkTable::end_step() {
  if (schedule_ != nullptr && moment_ != schedule_->num_moments()) diverged_ = true;
  return diverged_;
}

void ChunkTable::set_schedule(std::shared_ptr<const Schedule> schedule) {
  if (schedule != nullptr && schedule->num_chunks() > num_chunks()) {
    throw StateError("the schedule is for " + std::to_string(schedule->num_chunks()) +
                     " chunks, the table has " + std::to_string(num_chunks()));
  }
  schedule_ = std::move(schedule);
  if (schedule_ == nullptr || !schedule_->planned()) written_.clear();
  diverged_ = false;
}

// Records the access of `wanted_` and begins the next moment; returns false if it belongs to the
// latest.
bool ChunkTable::advance(Tier tier) {
  const int32_t choice = choices_.common(wanted_);
  if (choice != Choices::kNone && choice == open_choice_) return false;
  choices_.end_moment();
  open_choice_ = choice;
  named_ = wanted_;
  choices_.name(named_);
  record_.open_moment(named_, [this](ChunkId id) {
    return chunks_[id].has_content() ? AccessMode::kRead : AccessMode::kWritten;
  });
  if (on_trace()) {
    diverged_ = moment_ >= schedule_->num_moments() ||
                schedule_->on_host(moment_) != (tier == Tier::kHost) ||
                !std::ranges::equal(named_, schedule_->access_at(moment_));
  }
  ++moment_;
  return true;
}

// --- decisions ---

Actions ChunkTable::settle(Tier tier) {
  if (tier == Tier::kHost) return admit_on_host(chunks_, policy(), wanted_);
  const bool nothing_to_do =
      usage(Tier::kDevice) <= limit() && missing_bytes(chunks_, wanted_) == 0;
  return nothing_to_do ? Actions() : admit(chunks_, policy(), wanted_, limit());
}

Policy ChunkTable::policy() const {
  if (!on_trace()) return Lru{};
  return Belady{.schedule = schedule_.get(), .choices = &choices_, .moment = moment_};
}

void ChunkTable::set_limit(int64_t nbytes) {
  if (nbytes < 0) throw StateError("the DEVICE limit is negative: " + std::to_string(nbytes));
  limit_.set_soft(nbytes);
}

void ChunkTable::raise_disk_budget(int64_t nbytes) {
  if (nbytes < 0 || budget(Tier::kDisk) == 0)
    throw StateError("DISK cannot hold " + std::to_string(nbytes) + " bytes more: it holds " +
                     std::to_string(budget(Tier::kDisk)));
  chunks_.ledger().raise_budget(Tier::kDisk, nbytes);
}

int64_t ChunkTable::limit() const {
  if (schedule_ == nullptr) return limit_.soft();
  if (diverged_ || untraced_ || schedule_->num_moments() == 0) return limit_.at_worst(*schedule_);
  // The current period began with the latest access; before the first one it is the last step's.
  return limit_.at(*schedule_, moment_ + schedule_->num_moments() - 1);
}

void ChunkTable::audit() const {
  if (debug_level() >= 2) check_invariants();
}

void ChunkTable::check_invariants() const {
  chunks_.check_invariants();
  std::vector<std::array<int32_t, kNumTiers>> pins(static_cast<size_t>(num_chunks()));
  std::vector<int32_t> num_in_use(pins.size());
  for (TensorId id = 0; id < num_tensors(); ++id) {
    const Tensor& tensor = tensor_at(id);
    const auto c = static_cast<size_t>(tensor.chunk);
    pins[c][index(tensor.used_on)] += tensor.num_accesses;
    num_in_use[c] += tensor.state == TensorState::kFree ? 0 : 1;
    if ((tensor.num_accesses > 0) != (tensor.state == TensorState::kCompute)) {
      throw StateError("tensor " + std::to_string(id) + " is " + name(tensor.state) + " with " +
                       std::to_string(tensor.num_accesses) + " accesses");
    }
    if (tensor.state == TensorState::kHold && !chunks_[tensor.chunk].has_content()) {
      throw StateError("tensor " + std::to_string(id) + " is HOLD but its content is lost");
    }
  }
  for (ChunkId id = 0; id < num_chunks(); ++id) {
    const auto c = static_cast<size_t>(id);
    if (pins[c] != chunks_[id].pins || num_in_use[c] != chunks_[id].num_in_use) {
      throw StateError("the pins or tensors in use of chunk " + std::to_string(id) + " are wrong");
    }
  }
}

}  // namespace gemini
