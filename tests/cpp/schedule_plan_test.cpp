// What a plan adds to a schedule, and how eviction and prefetching obey it.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "chunk/chunk_table.h"
#include "chunk/schedule.h"
#include "chunk_test_util.h"
#include "common/error.h"

namespace gemini {
namespace {

using testing::text;
using testing::World;
using Accesses = std::vector<std::vector<ChunkId>>;
using Flags = std::vector<std::vector<uint8_t>>;

std::shared_ptr<const Schedule> planned(const Accesses& accesses, const Flags& flags,
                                        std::vector<int64_t> planned_bytes, int32_t num_chunks) {
  Retention plan{{}, std::move(planned_bytes)};
  for (const auto& of_moment : flags) {
    plan.intervals.insert(plan.intervals.end(), of_moment.begin(), of_moment.end());
  }
  const Schedule order(accesses, {}, num_chunks);
  return std::make_shared<Schedule>(order.with_plan(std::move(plan)));
}

// Every chunk has content below and none is on DEVICE when the step begins.
void begin(World& world, const std::shared_ptr<const Schedule>& schedule) {
  for (TensorId id = 0; id < world.table.num_chunks(); ++id) world.use({id});
  world.empty_device();
  world.table.set_schedule(schedule);
  world.table.begin_step();
  world.log.clear();
}

TEST(PlannedSchedule, AFlagBelongsToTheIntervalThatEndsWithTheNextUse) {
  const auto schedule =
      planned({{0, 1}, {1}, {0}}, {{kKeep, 0}, {kFlush}, {kKeep | kFlush}}, {5, 6, 7}, 2);
  EXPECT_EQ(schedule->next(0, 1).flags, kKeep);           // from moment 0 to 2
  EXPECT_EQ(schedule->next(0, 3).flags, kKeep | kFlush);  // from moment 2 to 0 of the next step
  EXPECT_EQ(schedule->next(1, 1).flags, 0);
  EXPECT_EQ(schedule->next(1, 2).flags, kFlush);
  EXPECT_EQ(schedule->next(1, 2).moment, 3);
  EXPECT_EQ(schedule->planned_bytes(4), 6);
}

TEST(PlannedSchedule, WithoutAPlanThereAreNoFlags) {
  const Schedule schedule({{0}, {0}}, {}, 1);
  EXPECT_FALSE(schedule.planned());
  EXPECT_EQ(schedule.next(0, 1).flags, 0);
  EXPECT_EQ(schedule.planned_bytes(0), 0);
}

TEST(PlannedSchedule, APlanOfAnotherShapeIsRefused) {
  EXPECT_THROW(planned({{0}, {1}}, {{0}}, {1}, 2), StateError);
  EXPECT_THROW(planned({{0}, {1}}, {{0}, {0}}, {1}, 2), StateError);
  EXPECT_THROW(planned({{0}, {1}}, {{0}, {0, 0}}, {1, 1}, 2), StateError);
  EXPECT_THROW(planned({{1, 0}}, {{0, 0}}, {1}, 2), StateError);
}

TEST(Plan, AKeptChunkIsNotGivenUpForAPrefetch) {
  const Accesses accesses{{0}, {1}, {2}, {1}, {0}};
  for (const bool keep : {false, true}) {
    World world({20, 100, 0}, {10, 10, 10});
    const uint8_t flag = keep ? kKeep : 0;
    begin(world, planned(accesses, {{flag}, {0}, {0}, {0}, {0}}, {0, 0, 0, 0, 0}, 3));
    world.use({0});
    world.use({1});
    // 0 is used last, so it would be the one to go; 1 is used later than 2 as well.
    EXPECT_EQ(text(world.prefetch(1)), keep ? "DROP 1 DEVICE, FETCH 2" : "DROP 0 DEVICE, FETCH 2");
  }
}

TEST(Plan, NothingIsPrefetchedWhereAllIsKept) {
  World world({20, 100, 0}, {10, 10, 10});
  begin(world,
        planned({{0}, {1}, {2}, {1}, {0}}, {{kKeep}, {kKeep}, {0}, {0}, {0}}, {0, 0, 0, 0, 0}, 3));
  world.use({0});
  world.use({1});
  EXPECT_EQ(text(world.prefetch(1)), "");
}

TEST(Plan, AnOperatorEvictsKeptChunksLast) {
  World world({20, 100, 0}, {10, 10, 10});
  begin(world,
        planned({{0}, {1}, {2}, {1}, {0}}, {{kKeep}, {0}, {0}, {0}, {0}}, {0, 0, 0, 0, 0}, 3));
  world.use({0});
  world.use({1});
  EXPECT_EQ(text(world.access({2})), "DROP 1 DEVICE, FETCH 2");
}

TEST(Plan, AnOperatorThatNeedsTheRoomEvictsWhatIsKept) {
  World world({20, 100, 0}, {10, 20});
  begin(world, planned({{0}, {1}, {0}}, {{kKeep}, {0}, {0}}, {0, 0, 0}, 2));
  world.use({0});
  EXPECT_EQ(text(world.access({1})), "DROP 0 DEVICE, FETCH 1");
}

TEST(Plan, APrefetchLeavesTheBytesThatLaterPeriodsHavePlanned) {
  const Accesses accesses{{0}, {1}, {2}};
  for (const int64_t bytes_of_period_1 : {20, 30}) {
    World world({30, 100, 0}, {10, 10, 10});
    begin(world, planned(accesses, {{0}, {0}, {0}}, {10, bytes_of_period_1, 10}, 3));
    world.use({0});
    // Until its use 2 would be there in period 1, too.
    const bool fits = bytes_of_period_1 == 20;
    EXPECT_EQ(text(world.prefetch(2)), fits ? "FETCH 1, FETCH 2" : "FETCH 1");
  }
}

// Transfers that end in any order and at any time, as slow disks have them.
TEST(Plan, RandomDelaysBreakNoBudgetAndStopNoStep) {
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    Accesses accesses(14);
    Flags flags(14);
    for (size_t m = 0; m < accesses.size(); ++m) {
      accesses[m] = {static_cast<ChunkId>(random() % 6)};
      flags[m] = {static_cast<uint8_t>(random() % 4)};
    }
    const auto host = static_cast<int64_t>(random() % 61);
    World world({30, host, 60}, std::vector<int64_t>(6, 10));
    begin(world, planned(accesses, flags, std::vector<int64_t>(14, 10 + random() % 21), 6));
    for (int step = 0; step < 3; ++step) {
      world.table.begin_step();
      for (const auto& access : accesses) {
        world.prefetch(2);
        for (size_t ending = random() % 3; ending > 0 && !world.flights.empty(); --ending) {
          std::swap(world.flights.front(), world.flights[random() % world.flights.size()]);
          world.complete_next();
        }
        world.use({access.begin(), access.end()}, random() % 2 == 0 ? Use::kWritten : Use::kRead);
      }
      EXPECT_FALSE(world.table.end_step());
    }
    EXPECT_LE(world.table.peak(Tier::kDevice), 30);
    EXPECT_LE(world.table.peak(Tier::kHost), host);
    EXPECT_LE(world.table.peak(Tier::kDisk), 60);
  }
}

TEST(Plan, ADivergedStepForgetsThePlan) {
  World world({20, 100, 0}, {10, 10, 10});
  begin(world, planned({{0}, {1}, {0}}, {{kKeep}, {0}, {0}}, {0, 0, 0}, 3));
  world.use({0});
  world.use({2});
  EXPECT_TRUE(world.table.diverged());
  EXPECT_EQ(text(world.access({1})), "DROP 0 DEVICE, FETCH 1");  // the least recently used
}

}  // namespace
}  // namespace gemini
