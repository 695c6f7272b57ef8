// SimulatedRun: a chunk table and a clock that run one step after another, and can be copied to try
// another plan.
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

// The data of one iteration besides its schedule. All vectors except chunk_bytes have one entry per
// moment.
struct Workload {
  std::vector<int64_t> chunk_bytes;
  // One letter per chunk of the access, ascending: 'r' read, 'm' modified, 'w' written completely.
  std::vector<std::string> modes;
  std::vector<std::vector<ChunkId>> frees;  // chunks with content discarded in the period
  std::vector<double> seconds;              // of computation in the period
};

struct SimulatedMachine {
  std::array<int64_t, kNumTiers> budgets{};
  LinkModels links;
  bool disk_shared = true;
  int32_t prefetches = kPrefetchesInFlight;
};

// Does with a table and a clock what the chunk manager does with memory and threads.
class SimulatedRun {
 public:
  // Gives content to the chunks that a step expects to have content, and fills the tiers. The table
  // follows the schedule or, without `told`, leaves room for the largest reserve and evicts the
  // least recently used chunk. Throws StateError for a schedule of another workload, and
  // OutOfBudget if the table does; so does step().
  SimulatedRun(std::shared_ptr<const Workload> workload, const SimulatedMachine& machine,
               std::shared_ptr<const Schedule> schedule, bool told = true);

  // Copies the table and the clock between two steps, to continue with another schedule of the
  // workload.
  [[nodiscard]] SimulatedRun branch(std::shared_ptr<const Schedule> schedule) const;

  // Runs one more step. Adds the waiting time of each operator to `stall_seconds`, per moment.
  // Returns the number of completed moments: fewer than all if the step certainly takes longer than
  // `at_most` seconds. Such a run must not be used further.
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
  double compute_seconds_ = 0;  // of one step
  int32_t prefetches_;
  std::shared_ptr<const Schedule> schedule_;
  ChunkTable table_;
  LinkClock clock_;
};

}  // namespace gemini
