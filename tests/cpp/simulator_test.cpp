// Simulated steps whose times can be computed by hand, and the clock of the links.
#include "simulate/simulator.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "simulate/link_clock.h"

namespace gemini {
namespace {

constexpr int64_t kChunk = 10;  // bytes

struct Links {
  double read_seconds = 1;  // of a chunk
  double write_seconds = 1;
};

LinkModels models(const Links& links) {
  const LinkModel read{kChunk / links.read_seconds, 0};
  const LinkModel write{kChunk / links.write_seconds, 0};
  return {read, write, read, write};
}

// Operators of a second each, one after the other, each with one chunk and its mode.
class Step {
 public:
  explicit Step(const std::vector<std::pair<ChunkId, char>>& uses) {
    for (const auto& [chunk, mode] : uses) {
      accesses_.push_back({chunk});
      workload_.modes.emplace_back(1, mode);
      workload_.frees.emplace_back();
      workload_.seconds.push_back(1);
      const auto count = static_cast<size_t>(chunk) + 1;
      if (workload_.chunk_bytes.size() < count) workload_.chunk_bytes.resize(count, kChunk);
    }
  }
  Step& free_at(size_t moment, ChunkId chunk) {
    workload_.frees[moment] = {chunk};
    return *this;
  }

  // With room for so many chunks on DEVICE, and for all of them on HOST.
  [[nodiscard]] SimulatedStep run(int64_t room, const Links& links, bool told = true) const {
    const auto chunks = static_cast<int64_t>(workload_.chunk_bytes.size());
    const SimulatedMachine machine{.budgets = {room * kChunk, chunks * kChunk, 0},
                                   .links = models(links)};
    return Simulator(workload_, machine).run(schedule(), 8, 4, told);
  }
  [[nodiscard]] std::shared_ptr<const Schedule> schedule() const {
    return std::make_shared<Schedule>(accesses_, std::vector<int64_t>{},
                                      static_cast<int32_t>(workload_.chunk_bytes.size()));
  }
  [[nodiscard]] const Workload& workload() const { return workload_; }

 private:
  std::vector<std::vector<ChunkId>> accesses_;
  Workload workload_;
};

TEST(LinkClock, TransfersOfALinkComeOneAfterTheOther) {
  LinkClock clock({{{10, 0.5}, {}, {}, {}}}, true);
  clock.submit(SimulatedLink::kHostToDevice, 1, 10);
  clock.submit(SimulatedLink::kHostToDevice, 2, 20);
  clock.await_one();
  EXPECT_DOUBLE_EQ(clock.now(), 1.5);
  EXPECT_EQ(clock.take_finished(), std::vector<ActionId>{1});
  clock.advance_to(10);
  EXPECT_EQ(clock.take_finished(), std::vector<ActionId>{2});
  EXPECT_DOUBLE_EQ(clock.busy_seconds(SimulatedLink::kHostToDevice), 4.0);
  EXPECT_EQ(clock.bytes(SimulatedLink::kHostToDevice), 30);
}

TEST(LinkClock, ReadsAndWritesOfASharedDiskTakeTurns) {
  for (const bool shared : {true, false}) {
    LinkClock clock({{{}, {}, {10, 0}, {10, 0}}}, shared);
    clock.submit(SimulatedLink::kDiskRead, 1, 10);
    clock.submit(SimulatedLink::kDiskWrite, 2, 20);
    clock.await_one();
    EXPECT_DOUBLE_EQ(clock.now(), shared ? 2.0 : 1.0);
    clock.await_one();  // the first has not been taken
    EXPECT_DOUBLE_EQ(clock.now(), shared ? 2.0 : 1.0);
    EXPECT_EQ(clock.take_finished(), std::vector<ActionId>{1});
    clock.await_one();
    EXPECT_DOUBLE_EQ(clock.now(), shared ? 3.0 : 2.0);
  }
}

TEST(LinkClock, WaitingForNothingIsAnError) {
  LinkClock clock({{{10, 0}, {}, {}, {}}}, true);
  EXPECT_THROW(clock.await_one(), StateError);
  EXPECT_THROW(clock.submit(SimulatedLink::kDiskRead, 1, 10), StateError);
  clock.advance_to(3);
  EXPECT_DOUBLE_EQ(clock.now(), 3.0);
}

TEST(Simulator, WhereEverythingFitsNothingMoves) {
  const SimulatedStep step = Step({{0, 'm'}, {1, 'r'}}).run(2, {});
  EXPECT_DOUBLE_EQ(step.seconds, 2.0);
  EXPECT_EQ(step.link_bytes, (std::array<int64_t, kNumSimulatedLinks>{}));
  EXPECT_EQ(step.peak_bytes[0], 2 * kChunk);
}

TEST(Simulator, WithoutRoomEveryOperatorWaitsForItsChunk) {
  const SimulatedStep step = Step({{0, 'r'}, {1, 'r'}}).run(1, {.read_seconds = 3});
  EXPECT_DOUBLE_EQ(step.seconds, 2 * (1 + 3));
  EXPECT_EQ(step.stall_seconds, (std::vector<double>{3, 3}));
  EXPECT_EQ(step.link_bytes[0], 2 * kChunk);
  EXPECT_EQ(step.link_bytes[1], 0);  // clean chunks are dropped
}

TEST(Simulator, WhatWasWrittenIsCopiedBeforeItsRoomIsUsed) {
  const Links links{.read_seconds = 3, .write_seconds = 2};
  const SimulatedStep step = Step({{0, 'm'}, {1, 'm'}}).run(1, links);
  EXPECT_DOUBLE_EQ(step.seconds, 2 * (1 + 2 + 3));
  EXPECT_DOUBLE_EQ(step.link_seconds[1], 2 * 2);
}

TEST(Simulator, PrefetchingHidesTransfersBehindComputing) {
  EXPECT_DOUBLE_EQ(Step({{0, 'r'}, {1, 'r'}, {2, 'r'}}).run(2, {}).seconds, 3.0);
}

TEST(Simulator, AStepThatIsNotToldItsOrderMissesEveryChunkOfAScan) {
  const Step step({{0, 'r'}, {1, 'r'}, {2, 'r'}});
  EXPECT_DOUBLE_EQ(step.run(2, {}, false).seconds, 3 * (1 + 1));
}

TEST(Simulator, DeadContentIsNeitherCopiedNorFetched) {
  const SimulatedStep step = Step({{0, 'w'}, {1, 'r'}}).free_at(0, 0).run(1, {});
  EXPECT_EQ(step.link_bytes[0], kChunk);  // chunk 1, which made room for 0
  EXPECT_EQ(step.link_bytes[1], 0);
}

TEST(Simulator, ContradictionsAreRefused) {
  const Step step({{0, 'r'}});
  Workload workload = step.workload();
  workload.seconds.clear();
  EXPECT_THROW(Simulator(workload, {}), StateError);
  const Simulator simulator(step.workload(), {.budgets = {kChunk, 0, 0}, .links = {}});
  EXPECT_THROW(static_cast<void>(simulator.run(step.schedule(), 1, 2)), StateError);
  EXPECT_THROW(static_cast<void>(simulator.run(Step({{1, 'r'}}).schedule(), 4, 2)), StateError);
}

TEST(Simulator, AStepThatDoesNotFitIsOutOfBudget) {
  const Step step({{0, 'r'}, {1, 'r'}});
  const Simulator simulator(step.workload(), {.budgets = {kChunk, 0, 0}, .links = {}});
  EXPECT_THROW(static_cast<void>(simulator.run(step.schedule(), 4, 2)), OutOfBudget);
}

}  // namespace
}  // namespace gemini
