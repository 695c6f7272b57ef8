#include "simulate/simulator.h"

#include <algorithm>
#include <utility>

#include "common/error.h"

namespace gemini {

namespace {

constexpr std::array kLinks{SimulatedLink::kHostToDevice, SimulatedLink::kDeviceToHost,
                            SimulatedLink::kDiskRead, SimulatedLink::kDiskWrite};

}  // namespace

Simulator::Simulator(Workload workload, const SimulatedMachine& machine)
    : workload_(std::make_shared<const Workload>(std::move(workload))), machine_(machine) {
  const size_t moments = workload_->modes.size();
  if (workload_->frees.size() != moments || workload_->seconds.size() != moments) {
    throw StateError("a workload needs modes, frees and seconds for each of its moments");
  }
}

SimulatedStep Simulator::run(const std::shared_ptr<const Schedule>& schedule, int32_t steps,
                             int32_t measured, bool told) const {
  if (measured < 1 || steps < measured) throw StateError("measure at least one of the steps");
  SimulatedRun run(workload_, machine_, schedule, told);
  const size_t moments = workload_->modes.size();
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
