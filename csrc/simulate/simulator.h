// Simulator: the cost of a plan, by running the chunk table itself against a model of time.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "chunk/schedule.h"
#include "chunk/state.h"
#include "simulate/link_clock.h"
#include "simulate/simulated_run.h"

namespace gemini {

struct SimulatedStep {
  double seconds = 0;
  std::vector<double> stall_seconds;  // per moment
  std::array<int64_t, kNumTiers> peak_bytes{};
  std::array<int64_t, kNumSimulatedLinks> link_bytes{};
  std::array<double, kNumSimulatedLinks> link_seconds{};
};

class Simulator {
 public:
  // Throws StateError if the workload contradicts itself.
  Simulator(Workload workload, const SimulatedMachine& machine);

  // Repeats the step until it is steady, and returns the mean of the last `measured` of `steps`
  // steps. For `told` and errors see SimulatedRun.
  [[nodiscard]] SimulatedStep run(const std::shared_ptr<const Schedule>& schedule, int32_t steps,
                                  int32_t measured, bool told = true) const;

  // Returns a run before its first step.
  [[nodiscard]] SimulatedRun begin(const std::shared_ptr<const Schedule>& schedule) const {
    return {workload_, machine_, schedule};
  }

 private:
  std::shared_ptr<const Workload> workload_;
  SimulatedMachine machine_;
};

}  // namespace gemini
