// Runs that go on step by step, and their copies.
#include "simulate/simulated_run.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "common/error.h"
#include "simulate/simulator.h"

namespace gemini {
namespace {

// Eight chunks of ten bytes, each modified in the first half of a step and read in the second; four
// fit, and a transfer takes as long as two operators.
class SimulatedRuns : public ::testing::Test {
 protected:
  static constexpr int32_t kChunks = 8;
  static constexpr size_t kMoments = 16;

  SimulatedRuns() {
    std::vector<std::vector<ChunkId>> accesses;
    for (int round = 0; round < 2; ++round) {
      for (ChunkId id = 0; id < kChunks; ++id) accesses.push_back({id});
    }
    order_ = std::make_shared<Schedule>(accesses, std::vector<int64_t>{}, kChunks);
  }

  [[nodiscard]] static Simulator simulator() {
    Workload workload{std::vector<int64_t>(kChunks, 10), {}, {}, {}};
    workload.modes.assign(kMoments / 2, "m");
    workload.modes.resize(kMoments, "r");
    workload.frees.resize(kMoments);
    workload.seconds.assign(kMoments, 1);
    const LinkModel link{5, 0};
    return {std::move(workload),
            {.budgets = {40, 80, 0}, .links = {link, link, link, link}, .disk_shared = false}};
  }

  // Chunk 0 stays for the whole step.
  [[nodiscard]] std::shared_ptr<const Schedule> kept() const {
    Retention plan{std::vector<uint8_t>(kMoments, 0), std::vector<int64_t>(kMoments, 20)};
    plan.intervals[0] = plan.intervals[kChunks] = kKeep;
    return std::make_shared<Schedule>(order_->with_plan(plan));
  }

  static double seconds(SimulatedRun& run) {
    const double begin = run.clock().now();
    std::vector<double> stall_seconds(kMoments, 0.0);
    EXPECT_EQ(run.step(stall_seconds), static_cast<int64_t>(kMoments));
    run.table().check_invariants();
    return run.clock().now() - begin;
  }

  std::shared_ptr<const Schedule> order_;
};

TEST_F(SimulatedRuns, AreWhatTheSimulatorMeasures) {
  SimulatedRun run = simulator().begin(order_);
  for (int i = 0; i < 3; ++i) seconds(run);
  EXPECT_DOUBLE_EQ(seconds(run), simulator().run(order_, 4, 1).seconds);
}

TEST_F(SimulatedRuns, ABranchGoesOnFromTheSameStateAndLeavesTheOriginalAlone) {
  SimulatedRun run = simulator().begin(order_);
  seconds(run);
  std::vector<SimulatedRun> branches;
  for (int i = 0; i < 3; ++i) branches.push_back(run.branch(i == 1 ? kept() : order_));
  const double second = seconds(branches[0]);
  EXPECT_NE(seconds(branches[1]), second);
  EXPECT_DOUBLE_EQ(seconds(branches[2]), second);
  EXPECT_DOUBLE_EQ(seconds(run), second);
}

TEST_F(SimulatedRuns, ABranchFollowsItsPlan) {
  SimulatedRun run = simulator().begin(order_).branch(kept());
  for (int i = 0; i < 6; ++i) seconds(run);
  const int64_t before = run.clock().bytes(SimulatedLink::kHostToDevice);
  seconds(run);
  SimulatedRun planned = simulator().begin(kept());
  for (int i = 0; i < 6; ++i) seconds(planned);
  const int64_t begin = planned.clock().bytes(SimulatedLink::kHostToDevice);
  seconds(planned);
  EXPECT_EQ(run.clock().bytes(SimulatedLink::kHostToDevice) - before,
            planned.clock().bytes(SimulatedLink::kHostToDevice) - begin);
}

TEST_F(SimulatedRuns, AStepThatTakesTooLongIsGivenUp) {
  SimulatedRun run = simulator().begin(order_);
  const double second = [&] {
    seconds(run);
    SimulatedRun branch = run.branch(order_);
    return seconds(branch);
  }();
  ASSERT_GT(second, kMoments);  // it waits
  std::vector<double> stall_seconds(kMoments, 0.0);
  for (const double at_most : {second - 0.5, kMoments - 1.0}) {
    SimulatedRun branch = run.branch(order_);
    EXPECT_LT(branch.step(stall_seconds, at_most), static_cast<int64_t>(kMoments));
  }
  SimulatedRun branch = run.branch(order_);
  EXPECT_EQ(branch.step(stall_seconds, second + 0.5), static_cast<int64_t>(kMoments));
}

TEST_F(SimulatedRuns, AScheduleOfAnotherWorkloadIsRefused) {
  const SimulatedRun run = simulator().begin(order_);
  const std::vector<std::vector<ChunkId>> accesses{{0}};
  const auto other = std::make_shared<Schedule>(accesses, std::vector<int64_t>{}, int32_t{kChunks});
  EXPECT_THROW(static_cast<void>(run.branch(other)), StateError);
}

}  // namespace
}  // namespace gemini
