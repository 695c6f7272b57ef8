// A table and a clock that run one step after another, and can be copied to try another plan.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "chunk/chunk_table.h"
#include "chunk/prefetch.h"
#include "chunk/schedule.h"
#include "chunk/state.h"
#include "simulate/link_clock.h"

namespace gemini {

// One iteration beside its schedule. All but chunk_bytes have one entry per moment.
struct Workload {
  std::vector<int64_t> chunk_bytes;
  // One letter per chunk of the access, ascending: 'r' read, 'm' modified, 'w' written whole.
  std::vector<std::string> modes;
  std::vector<std::vector<ChunkId>> frees;  // whose content is given up in the period
  std::vector<double> seconds;              // of computing in the period
};

struct SimulatedMachine {
  std::array<int64_t, kNumTiers> budgets{};
  LinkModels links;
  bool disk_shared = true;
  int32_t prefetches = kPrefetchesInFlight;
};

// Does for a table and a clock what the chunk manager does with memory and threads.
class SimulatedRun {
 public:
  // Gives content to the chunks that a step finds with content, and lets the tiers fill up. The
  // table follows the schedule, or, not `told` of it, leaves room for the largest reserve and
  // evicts what was used least recently. Throws StateError for a schedule of another workload,
  // OutOfBudget where the table would; step() does, too.
  SimulatedRun(std::shared_ptr<const Workload> workload, const SimulatedMachine& machine,
               std::shared_ptr<const Schedule> schedule, bool told = true);

  // The same table and clock, between two steps, from now on with another schedule of the workload.
  [[nodiscard]] SimulatedRun branch(std::shared_ptr<const Schedule> schedule) const;

  // One more step. Adds to `stall_seconds`, per moment, how long its operator waited, and returns
  // how many moments were completed: not all where the step takes longer than `at_most` seconds in
  // any case. Such a run is of no further use.
  int64_t step(std::vector<double>& stall_seconds,
               double at_most = std::numeric_limits<double>::infinity());

  [[nodiscard]] int64_t num_moments() const { return schedule_->num_moments(); }
  [[nodiscard]] ChunkTable& table() { return table_; }
  [[nodiscard]] const LinkClock& clock() const { return clock_; }

 private:
  void check(const Schedule& schedule) const;
  void fill();
  double acquire(std::span<const TensorId> tensors);
  void release(int64_t moment);
  void start(const Actions& actions);
  void report();

  std::shared_ptr<const Workload> workload_;
  double compute_seconds_ = 0;  // of a step
  int32_t prefetches_;
  std::shared_ptr<const Schedule> schedule_;
  ChunkTable table_;
  LinkClock clock_;
};

}  // namespace gemini
