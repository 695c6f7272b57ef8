#include "simulate/simulator.h"

#include <algorithm>
#include <utility>

#include "common/error.h"

namespace gemini {

namespace {

constexpr std::array kLinks{SimulatedLink::kHostToDevice, SimulatedLink::kDeviceToHost,
                            SimulatedLink::kDiskRead, SimulatedLink::kDiskWrite};

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

// One table and one clock; does for them what the chunk manager does with memory and threads.
class Run {
 public:
  Run(const Workload& workload, const SimulatedMachine& machine,
      const std::shared_ptr<const Schedule>& schedule, bool told)
      : workload_(workload),
        machine_(machine),
        schedule_(*schedule),
        table_(machine.budgets[0], machine.budgets[1], machine.budgets[2]),
        clock_(machine.links, machine.disk_shared) {
    for (const int64_t nbytes : workload.chunk_bytes) {
      table_.add_tensor(table_.add_chunk(nbytes));
    }
    fill();
    if (told) table_.set_schedule(schedule);
    if (!told) table_.set_limit(std::max(machine.budgets[0] - schedule->max_reserve(), int64_t{0}));
  }

  void step(std::vector<double>& stall_seconds) {
    table_.begin_step();
    for (int64_t moment = 0; moment < schedule_.num_moments(); ++moment) {
      const auto m = static_cast<size_t>(moment);
      stall_seconds[m] += acquire(schedule_.access_at(moment));
      report();
      start(table_.prefetch(machine_.prefetches));
      clock_.advance_to(clock_.now() + workload_.seconds[m]);
      release(moment);
      start(table_.free(workload_.frees[m]));
    }
    table_.end_step();
  }

  [[nodiscard]] ChunkTable& table() { return table_; }
  [[nodiscard]] const LinkClock& clock() const { return clock_; }

 private:
  // Gives content to the chunks that a step finds with content, and lets the tiers fill up.
  void fill() {
    std::vector<bool> seen(workload_.chunk_bytes.size(), false);
    for (int64_t moment = 0; moment < schedule_.num_moments(); ++moment) {
      const auto chunks = schedule_.access_at(moment);
      const std::string& modes = workload_.modes[static_cast<size_t>(moment)];
      for (size_t i = 0; i < chunks.size(); ++i) {
        const auto chunk = static_cast<size_t>(chunks[i]);
        const bool is_first = !seen[chunk];
        seen[chunk] = true;
        if (!is_first || modes[i] == 'w') continue;
        acquire(chunks.subspan(i, 1));
        start(table_.release(chunks.subspan(i, 1), true));
      }
    }
  }

  double acquire(std::span<const TensorId> tensors) {
    const double begin = clock_.now();
    start(table_.access(tensors));
    while (!table_.ready(tensors)) {
      clock_.await_one();
      report();
      start(table_.ensure(tensors));
    }
    return clock_.now() - begin;
  }

  void release(int64_t moment) {
    const auto chunks = schedule_.access_at(moment);
    const std::string& modes = workload_.modes[static_cast<size_t>(moment)];
    for (size_t i = 0; i < chunks.size(); ++i) {
      start(table_.release(chunks.subspan(i, 1), modes[i] != 'r'));
    }
  }

  void start(const Actions& actions) {
    for (const Action& action : actions) {
      if (action.id != 0) clock_.submit(link_of(action), action.id, action.nbytes);
    }
  }

  void report() {
    for (const ActionId id : clock_.take_finished()) static_cast<void>(table_.complete(id));
  }

  const Workload& workload_;
  const SimulatedMachine& machine_;
  const Schedule& schedule_;
  ChunkTable table_;
  LinkClock clock_;
};

}  // namespace

Simulator::Simulator(Workload workload, const SimulatedMachine& machine)
    : workload_(std::move(workload)), machine_(machine) {
  const size_t moments = workload_.modes.size();
  if (workload_.frees.size() != moments || workload_.seconds.size() != moments) {
    throw StateError("a workload needs modes, frees and seconds for each of its moments");
  }
}

void Simulator::check(const Schedule& schedule) const {
  bool fits = static_cast<size_t>(schedule.num_moments()) == workload_.modes.size() &&
              static_cast<size_t>(schedule.num_chunks()) == workload_.chunk_bytes.size();
  for (size_t m = 0; fits && m < workload_.modes.size(); ++m) {
    fits = schedule.access_at(static_cast<int64_t>(m)).size() == workload_.modes[m].size();
  }
  if (!fits) throw StateError("the schedule is not one of this workload");
}

SimulatedStep Simulator::run(const std::shared_ptr<const Schedule>& schedule, int32_t steps,
                             int32_t measured, bool told) const {
  if (measured < 1 || steps < measured) throw StateError("measure at least one of the steps");
  check(*schedule);
  Run run(workload_, machine_, schedule, told);
  const size_t moments = workload_.modes.size();
  std::vector<double> ignored(moments, 0.0);
  for (int32_t i = measured; i < steps; ++i) run.step(ignored);
  SimulatedStep result;
  result.stall_seconds.assign(moments, 0.0);
  run.table().reset_peak();
  const LinkClock before = run.clock();
  for (int32_t i = 0; i < measured; ++i) run.step(result.stall_seconds);
  result.seconds = (run.clock().now() - before.now()) / measured;
  for (double& seconds : result.stall_seconds) seconds /= measured;
  for (const Tier tier : kTiers) {
    result.peak_bytes[static_cast<size_t>(tier)] = run.table().peak(tier);
  }
  for (const SimulatedLink link : kLinks) {
    const auto l = static_cast<size_t>(link);
    result.link_bytes[l] = (run.clock().bytes(link) - before.bytes(link)) / measured;
    result.link_seconds[l] =
        (run.clock().busy_seconds(link) - before.busy_seconds(link)) / measured;
  }
  return result;
}

}  // namespace gemini
