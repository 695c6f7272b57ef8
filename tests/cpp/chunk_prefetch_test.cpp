// Prefetching along the schedule, divergence from it, and the record it is made from.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "chunk/chunk_table.h"
#include "chunk_test_util.h"

namespace gemini {
namespace {

using testing::kUntraced;
using testing::text;
using testing::World;
using Accesses = std::vector<std::vector<ChunkId>>;

std::shared_ptr<const Schedule> schedule_of(const World& world, const Accesses& accesses,
                                            std::vector<int64_t> reserve_bytes = {}) {
  return std::make_shared<Schedule>(accesses, std::move(reserve_bytes), world.table.num_chunks());
}

// Gives every chunk content, takes all of them off DEVICE, and begins a step of the schedule.
void begin(World& world, const Accesses& accesses, std::vector<int64_t> reserve_bytes = {}) {
  for (TensorId id = 0; id < world.table.num_chunks(); ++id) world.use({id});
  world.empty_device();
  world.table.set_schedule(schedule_of(world, accesses, std::move(reserve_bytes)));
  world.table.begin_step();
  world.log.clear();
}

TEST(Prefetch, BringsTheNextChunksIntoFreeBytesInOrder) {
  World world({30, 100, 0}, {10, 10, 10, 10});
  begin(world, {{3}, {1}, {0}, {2}});
  EXPECT_EQ(text(world.prefetch(2)), "FETCH 3, FETCH 1");
  EXPECT_EQ(text(world.prefetch(2)), "");
  world.complete_next();
  EXPECT_EQ(text(world.prefetch(2)), "FETCH 0");
  world.complete_all();
  EXPECT_EQ(text(world.prefetch(2)), "");  // 2 is needed last: no victim is needed later
}

TEST(Prefetch, DropsOnlyWhatIsUsedLaterThanTheCandidate) {
  World world({20, 100, 0}, {10, 10, 10});
  begin(world, {{0}, {1}, {2}, {0}, {1}});
  world.use({0});
  world.use({1});
  // Next: 2 at once, then 0, then 1. Only 1 and 0 are resident, and 1 is needed last.
  EXPECT_EQ(text(world.prefetch(2)), "DROP 1 DEVICE, FETCH 2");
}

TEST(Prefetch, ADirtyVictimIsEvictedFirstAndTheCandidateStartsLater) {
  World world({20, 100, 0}, {10, 10, 10});
  begin(world, {{0}, {1}, {2}, {0}, {1}});
  world.use({0}, Use::kWritten);
  world.use({1}, Use::kWritten);
  EXPECT_EQ(text(world.prefetch(2)), "EVICT 1");
  EXPECT_EQ(text(world.prefetch(2)), "");  // what is coming free is enough
  world.complete_all();
  EXPECT_EQ(text(world.prefetch(2)), "FETCH 2");
}

TEST(Prefetch, EveryWaitingCandidateHasItsOwnRoomEvicted) {
  World world({20, 100, 0}, {10, 10, 10, 10});
  begin(world, {{0}, {1}, {2}, {3}, {0}, {1}});
  world.use({0}, Use::kWritten);
  world.use({1}, Use::kWritten);
  EXPECT_EQ(text(world.prefetch(2)), "EVICT 1, EVICT 0");
  world.complete_all();
  EXPECT_EQ(text(world.prefetch(2)), "FETCH 2, FETCH 3");
}

TEST(Prefetch, TakesNoRoomFromTheOperatorThatWaits) {
  World world({20, 100, 0}, {10, 10, 10, 10});
  begin(world, {{0}, {1}, {2}, {3}, {0}, {1}});
  world.use({0}, Use::kWritten);
  world.use({1}, Use::kWritten);
  EXPECT_EQ(text(world.access({2})), "EVICT 1");
  world.complete_next();  // the room of 1 is for 2
  EXPECT_EQ(text(world.prefetch(2)), "EVICT 0");
  EXPECT_EQ(text(world.ensure({2})), "FETCH 2");
}

TEST(Prefetch, LeavesRoomForChunksThatWillBeAllocatedBefore) {
  World world({20, 100, 0}, {10, 10, 10});
  begin(world, {{0}, {1}, {2}});
  world.free({1});
  world.use({0});
  world.access({0});
  world.table.set_schedule(schedule_of(world, {{0}, {0}, {1}, {2}, {0}}));
  EXPECT_EQ(text(world.prefetch(2)), "");
  world.release({0});
}

TEST(Prefetch, KeepsTheLowestLimitUntilTheCandidateIsUsed) {
  World world({30, 100, 0}, {10, 10, 10});
  begin(world, {{0}, {1}, {2}}, {0, 20, 0});
  EXPECT_EQ(text(world.prefetch(3)), "FETCH 0");  // in period 1 only 10 bytes are left
  world.complete_all();
  world.use({0});
  world.use({1});
  EXPECT_EQ(world.table.usage(Tier::kDevice), 10);
  world.use({2});
  EXPECT_FALSE(world.table.end_step());
}

TEST(Prefetch, GivesUpNothingWhereTheRoomWouldNotSuffice) {
  World world({20, 100, 0}, {10, 10, 20});
  begin(world, {{0}, {1}, {2}, {1}, {0}});
  world.use({0});
  world.access({1});
  world.wait_ready({1});
  EXPECT_EQ(text(world.prefetch(2)), "");  // 2 needs both, and 1 is pinned
  EXPECT_EQ(world.valid(0), "DEVICE+HOST");
  world.release({1});
  EXPECT_EQ(text(world.prefetch(2)), "DROP 0 DEVICE, DROP 1 DEVICE, FETCH 2");
}

TEST(Prefetch, DoesNothingWithoutAScheduleOrAfterDivergence) {
  World world({20, 100, 0}, {10, 10, 10});
  begin(world, {{0}, {1}, {2}});
  world.use({1});
  EXPECT_TRUE(world.table.diverged());
  EXPECT_EQ(text(world.prefetch(2)), "");
  world.table.set_schedule(nullptr);
  EXPECT_EQ(text(world.prefetch(2)), "");
}

TEST(Prefetch, NeverHarmsARandomStep) {
  std::mt19937 random(5);
  for (int round = 0; round < 40; ++round) {
    Accesses accesses(12);
    for (auto& access : accesses) {
      access = {static_cast<ChunkId>(random() % 6), static_cast<ChunkId>(random() % 6)};
    }
    World world({30, static_cast<int64_t>(random() % 60), 60}, std::vector<int64_t>(6, 10));
    begin(world, accesses);
    for (const auto& access : accesses) {
      world.prefetch(static_cast<int32_t>(random() % 3));
      if (random() % 2 == 0) world.complete_all();
      world.use({access.begin(), access.end()}, random() % 3 == 0 ? Use::kWritten : Use::kRead);
    }
    EXPECT_FALSE(world.table.end_step());
  }
}

TEST(Step, TheRecordOfAStepIsItsSchedule) {
  World world({60, 0, 0}, {10, 10, 10});
  world.table.begin_step();
  world.use({2, 0, 2});
  world.table.access(std::vector<TensorId>{1}, kUntraced);
  world.release({1});
  world.use({1});
  EXPECT_EQ(world.table.record().accesses(), (Accesses{{0, 2}, {1}}));
  EXPECT_EQ(world.table.moment(), 2);
  world.table.begin_step();
  EXPECT_TRUE(world.table.record().accesses().empty());
  EXPECT_EQ(world.table.moment(), 0);
}

TEST(Step, OnlyAStepEqualToTheScheduleIsOnTrace) {
  const Accesses plan{{0}, {1}};
  for (const Accesses& step : {Accesses{{0}}, {{0}, {0, 1}}, {{0}, {1}, {0}}, {{1}, {0}}, {}}) {
    World world({20, 0, 0}, {10, 10});
    begin(world, {});
    world.table.set_schedule(schedule_of(world, plan));
    world.table.begin_step();
    for (const auto& access : step) world.use({access.begin(), access.end()});
    EXPECT_TRUE(world.table.end_step());
    world.table.begin_step();
    EXPECT_FALSE(world.table.diverged());
    for (const auto& access : plan) world.use({access.begin(), access.end()});
    EXPECT_FALSE(world.table.end_step());
  }
}

TEST(Step, GoingOnAfterTheLastMomentDivergesAtOnce) {
  World world({20, 0, 0}, {10});
  begin(world, {});
  world.table.set_schedule(schedule_of(world, {{0}}));
  world.table.begin_step();
  world.use({0});
  EXPECT_FALSE(world.table.diverged());
  world.use({0});
  EXPECT_TRUE(world.table.diverged());
}

TEST(Step, WithoutAScheduleNothingDiverges) {
  World world({20, 0, 0}, {10});
  world.table.begin_step();
  world.use({0});
  EXPECT_FALSE(world.table.end_step());
}

TEST(Step, ADivergedStepReservesTheWorstPeriod) {
  World world({40, 40, 0}, {10, 10});
  begin(world, {{0}, {1}}, {5, 25});
  world.use({0});
  EXPECT_EQ(world.table.limit(), 35);
  world.table.access(std::vector<TensorId>{0}, kUntraced);
  EXPECT_EQ(world.table.limit(), 15);
  world.release({0});
  world.use({0});
  EXPECT_TRUE(world.table.diverged());
  EXPECT_EQ(world.table.limit(), 15);
  world.table.set_limit(12);
  EXPECT_EQ(world.table.limit(), 12);
}

}  // namespace
}  // namespace gemini
