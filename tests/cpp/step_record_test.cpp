// How accesses and frees of a step are recorded.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "chunk/chunk_table.h"
#include "chunk_test_util.h"
#include "common/error.h"

namespace gemini {
namespace {

using testing::kUntraced;
using testing::World;
using Modes = std::vector<std::string>;
using Frees = std::vector<std::vector<ChunkId>>;

TEST(StepRecord, AnAccessIsWrittenReadOrModified) {
  World world({100, 100, 0}, {10, 10});
  world.use({0, 1});
  world.use({0});
  world.use({0, 1}, Use::kWritten);
  EXPECT_EQ(world.table.record().modes(), (Modes{"ww", "r", "mm"}));
}

TEST(StepRecord, WhatAllocatesStaysWrittenWhenItIsReleasedAsWritten) {
  World world({100, 100, 0}, {10});
  world.use({0}, Use::kWritten);
  EXPECT_EQ(world.table.record().modes(), (Modes{"w"}));
}

TEST(StepRecord, AReleaseCountsToTheLatestAccessOfItsChunk) {
  World world({100, 100, 0}, {10, 10});
  world.use({0, 1});
  world.access({0});
  world.access({0});
  world.use({1});
  world.release({0}, Use::kWritten);
  world.release({0});
  EXPECT_EQ(world.table.record().modes(), (Modes{"ww", "r", "m", "r"}));
}

TEST(StepRecord, OnlyTheTensorsReleasedAsWrittenAreModified) {
  World world({100, 100, 0}, {10, 10});
  world.use({0, 1});
  world.access({0, 1});
  world.release({1}, Use::kWritten);
  world.release({0});
  EXPECT_EQ(world.table.record().modes(), (Modes{"ww", "rm"}));
}

TEST(StepRecord, AnEvictedChunkStillHasItsContent) {
  World world({10, 100, 0}, {10});
  world.use({0});
  world.empty_device();
  world.use({0});
  EXPECT_EQ(world.table.record().modes(), (Modes{"w", "r"}));
}

TEST(StepRecord, AFreeBelongsToTheLatestMomentAndTheNextAccessWrites) {
  World world({100, 100, 0}, {10, 10});
  const TensorId second = world.table.add_tensor(0);
  world.use({0, second});
  world.use({1});
  world.free({0});
  EXPECT_EQ(world.table.record().frees(), (Frees{{}, {}}));
  world.free({second});
  world.use({0});
  EXPECT_EQ(world.table.record().frees(), (Frees{{}, {0}, {}}));
  EXPECT_EQ(world.table.record().modes(), (Modes{"w", "w", "w"}));
}

TEST(StepRecord, FreeingWhatHasNoContentIsNoFree) {
  World world({100, 100, 0}, {10, 10});
  world.use({0});
  world.free({1});
  world.free({0});
  world.free({0});
  EXPECT_EQ(world.table.record().frees(), (Frees{{0}}));
}

TEST(StepRecord, AFreeBeforeTheFirstMomentBelongsToTheLastPeriod) {
  World world({100, 100, 0}, {10, 10, 10});
  world.use({0, 1, 2});
  world.table.begin_step();
  world.free({1});
  world.use({0});
  world.use({0});
  world.free({2});
  EXPECT_EQ(world.table.record().frees(), (Frees{{}, {1, 2}}));
}

TEST(StepRecord, AFreeWhileTheChunkIsOnItsWayIsOne) {
  World world({10, 100, 0}, {10, 10});
  world.use({0});
  world.access({1});  // evicts 0
  world.free({0});
  world.wait_ready({1});
  world.release({1});
  world.use({0});
  EXPECT_EQ(world.table.record().frees(), (Frees{{}, {0}, {}}));
  EXPECT_EQ(world.table.record().modes(), (Modes{"w", "w", "w"}));
}

TEST(StepRecord, UntracedAccessesAreNotRecordedTheirWritesCountToTheLatestAccess) {
  World world({100, 100, 0}, {10, 10});
  world.use({0});
  world.use({0});
  world.table.access(std::vector<TensorId>{0, 1}, kUntraced);
  world.release({0, 1}, Use::kWritten);
  EXPECT_EQ(world.table.record().accesses(), (std::vector<std::vector<ChunkId>>{{0}, {0}}));
  EXPECT_EQ(world.table.record().modes(), (Modes{"w", "m"}));
}

TEST(StepRecord, AWriteAfterTheStepHasBegunDoesNotReachTheStepBefore) {
  World world({100, 100, 0}, {10, 10});
  world.use({0, 1});
  world.access({0});
  world.table.begin_step();
  world.use({1});
  world.release({0}, Use::kWritten);
  EXPECT_EQ(world.table.record().modes(), (Modes{"r"}));
}

TEST(StepRecord, ARefusedAccessLeavesTheRecordAsItWas) {
  World world({100, 100, 0}, {60, 30, 60});
  world.use({0, 1});
  world.use({0, 1});
  EXPECT_THROW(world.access({0, 2}), OutOfBudget);
  world.access({1});
  world.table.access(std::vector<TensorId>{0}, kUntraced);
  world.release({0}, Use::kWritten);
  world.release({1});
  EXPECT_EQ(world.table.record().modes(), (Modes{"ww", "mr", "r"}));
}

TEST(StepRecord, ReleasingAllAsWrittenModifiesWhatIsThere) {
  World world({100, 100, 0}, {10, 10});
  world.use({0, 1});
  world.access({0});
  world.access({1});
  world.table.release_all(Use::kWritten);
  EXPECT_EQ(world.table.record().modes(), (Modes{"ww", "m", "m"}));
}

}  // namespace
}  // namespace gemini
