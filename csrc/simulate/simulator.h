// What a plan would cost: the chunk table itself, run against a model of time.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
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

struct SimulatedStep {
  double seconds = 0;
  std::vector<double> stall_seconds;  // per moment
  std::array<int64_t, kNumTiers> peak_bytes{};
  std::array<int64_t, kNumSimulatedLinks> link_bytes{};
  std::array<double, kNumSimulatedLinks> link_seconds{};
};

class Simulator {
 public:
  // Throws StateError where the workload contradicts itself.
  Simulator(Workload workload, const SimulatedMachine& machine);

  // Repeats the step until it is steady and returns the mean of the last `measured` of `steps`
  // steps. The table follows the schedule, or, not `told` of it, leaves room for the largest
  // reserve and evicts what was used least recently. Throws OutOfBudget where the table would.
  [[nodiscard]] SimulatedStep run(const std::shared_ptr<const Schedule>& schedule, int32_t steps,
                                  int32_t measured, bool told = true) const;

 private:
  void check(const Schedule& schedule) const;

  Workload workload_;
  SimulatedMachine machine_;
};

}  // namespace gemini
