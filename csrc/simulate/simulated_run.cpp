#include "simulate/simulated_run.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/error.h"

namespace gemini {

namespace {

SimulatedLink link_of(const Action& action) {
  switch (action.kind) {
    case ActionKind::kFetch:
      return SimulatedLink::kHostToDevice;
    case ActionKind::kEvict:
      return SimulatedLink::kDeviceToHost;
    case ActionKind::kLoad:
      return SimulatedLink::kDiskRead;
    case ActionKind::kSpill:
    case ActionKind::kAllocate:
    case ActionKind::kDrop:
      break;
  }
  return SimulatedLink::kDiskWrite;
}

}  // namespace

SimulatedRun::SimulatedRun(std::shared_ptr<const Workload> workload,
                           const SimulatedMachine& machine,
                           std::shared_ptr<const Schedule> schedule, bool told)
    : workload_(std::move(workload)),
      compute_seconds_(std::reduce(workload_->seconds.begin(), workload_->seconds.end())),
      prefetches_(machine.prefetches),
      schedule_(std::move(schedule)),
      table_(machine.budgets[0], machine.budgets[1], machine.budgets[2]),
      clock_(machine.links, machine.disk_shared) {
  check(*schedule_);
  for (const int64_t nbytes : workload_->chunk_bytes) {
    table_.add_tensor(table_.add_chunk(nbytes));
  }
  fill();
  if (told) table_.set_schedule(schedule_);
  if (!told) table_.set_limit(std::max(machine.budgets[0] - schedule_->max_reserve(), int64_t{0}));
}

SimulatedRun SimulatedRun::branch(std::shared_ptr<const Schedule> schedule) const {
  check(*schedule);
  SimulatedRun copy(*this);
  copy.schedule_ = std::move(schedule);
  copy.table_.set_schedule(copy.schedule_);
  return copy;
}

void SimulatedRun::check(const Schedule& schedule) const {
  bool fits = static_cast<size_t>(schedule.num_moments()) == workload_->modes.size() &&
              static_cast<size_t>(schedule.num_chunks()) == workload_->chunk_bytes.size();
  for (size_t m = 0; fits && m < workload_->modes.size(); ++m) {
    fits = schedule.access_at(static_cast<int64_t>(m)).size() == workload_->modes[m].size();
  }
  if (!fits) throw StateError("the schedule is not one of this workload");
}

int64_t SimulatedRun::step(std::vector<double>& stall_seconds, double at_most) {
  // The time left for waiting.
  double spare = at_most - compute_seconds_;
  table_.begin_step();
  for (int64_t moment = 0; moment < num_moments(); ++moment) {
    const auto m = static_cast<size_t>(moment);
    const double waited = acquire(schedule_->access_at(moment));
    stall_seconds[m] += waited;
    spare -= waited;
    if (spare < 0) return moment;
    report();
    start(table_.prefetch(prefetches_));
    clock_.advance_to(clock_.now() + workload_->seconds[m]);
    release(moment);
    start(table_.free(workload_->frees[m]));
  }
  table_.end_step();
  return num_moments();
}

void SimulatedRun::fill() {
  std::vector<bool> seen(workload_->chunk_bytes.size(), false);
  for (int64_t moment = 0; moment < num_moments(); ++moment) {
    const auto chunks = schedule_->access_at(moment);
    const std::string& modes = workload_->modes[static_cast<size_t>(moment)];
    for (size_t i = 0; i < chunks.size(); ++i) {
      const auto chunk = static_cast<size_t>(chunks[i]);
      const bool is_first = !seen[chunk];
      seen[chunk] = true;
      if (!is_first || modes[i] == 'w') continue;
      acquire(chunks.subspan(i, 1));
      start(table_.release(chunks.subspan(i, 1), Use::kWritten));
    }
  }
}

double SimulatedRun::acquire(std::span<const TensorId> tensors) {
  const double begin = clock_.now();
  start(table_.access(tensors));
  while (!table_.ready(tensors)) {
    clock_.await_one();
    report();
    start(table_.ensure(tensors));
  }
  return clock_.now() - begin;
}

void SimulatedRun::release(int64_t moment) {
  const auto chunks = schedule_->access_at(moment);
  const std::string& modes = workload_->modes[static_cast<size_t>(moment)];
  for (size_t i = 0; i < chunks.size(); ++i) {
    start(table_.release(chunks.subspan(i, 1), modes[i] == 'r' ? Use::kRead : Use::kWritten));
  }
}

void SimulatedRun::start(const Actions& actions) {
  for (const Action& action : actions) {
    if (action.id != 0) clock_.submit(link_of(action), action.id, action.nbytes);
  }
}

void SimulatedRun::report() {
  for (const ActionId id : clock_.take_finished()) static_cast<void>(table_.complete(id));
}

}  // namespace gemini
