// Making room: what leaves DEVICE, where to, and how transfers end.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "chunk/chunk_table.h"
#include "chunk_test_util.h"
#include "common/error.h"

namespace gemini {
namespace {

using testing::kUntraced;
using testing::text;
using testing::World;

TEST(Room, ADirtyChunkIsEvictedBeforeItsRoomIsUsed) {
  World world({10, 10, 0}, {10, 10});
  world.use({0});
  EXPECT_EQ(text(world.access({1})), "EVICT 0");
  EXPECT_FALSE(world.table.ready(std::vector<TensorId>{1}));
  EXPECT_EQ(text(world.ensure({1})), "");
  EXPECT_EQ(world.complete_next(), (Completion{.source_freed = true}));
  EXPECT_EQ(world.valid(0), "HOST");
  EXPECT_EQ(text(world.ensure({1})), "ALLOCATE 1");
  EXPECT_TRUE(world.table.ready(std::vector<TensorId>{1}));
}

TEST(Room, EvictingCleanChunkCopiesNothing) {
  World world({10, 100, 0}, {10, 10});
  world.use({0});
  world.use({1});
  world.use({0});
  EXPECT_EQ(text(world.access({1})), "DROP 0 DEVICE, FETCH 1");
  EXPECT_EQ(world.valid(0), "HOST");
}

TEST(Room, FullHostSpillsToDiskAndLoadsBack) {
  World world({10, 10, 20}, {10, 10, 10});
  world.use({0});
  world.use({1});
  EXPECT_EQ(text(world.access({2})), "SPILL 1");
  world.wait_ready({2});
  world.release({2});
  EXPECT_EQ(world.valid(1), "DISK");
  EXPECT_EQ(text(world.access({1})), "SPILL 2");
  world.complete_next();
  EXPECT_EQ(text(world.ensure({1})), "LOAD 1");
  world.complete_next();
  EXPECT_EQ(world.valid(1), "DEVICE+DISK");
}

TEST(Room, DiskTakesAsMuchMoreAsItsBudgetIsRaisedBy) {
  World world({10, 0, 10}, {10, 10, 10});
  world.use({0});
  world.use({1});
  EXPECT_THROW((void)world.access({2}), OutOfBudget);
  world.table.raise_disk_budget(10);
  EXPECT_EQ(world.table.budget(Tier::kDisk), 20);
  EXPECT_EQ(text(world.access({2})), "SPILL 1");
  world.wait_ready({2});
  EXPECT_EQ(world.valid(1), "DISK");
  EXPECT_THROW(world.table.raise_disk_budget(-1), StateError);
  World without({10, 10, 0}, {10});
  EXPECT_THROW(without.table.raise_disk_budget(10), StateError);
}

// Chunk 0 was there first and is on DEVICE again, 2 is there too, 1 is on DISK: with the place of 0
// there, DISK is full.
World full_disk(Use last) {
  World world({20, 0, 20}, {10, 10, 10});
  world.use({0});
  world.use({1});
  world.use({2});
  world.use({0}, last);
  EXPECT_EQ(world.valid(1), "DISK");
  EXPECT_EQ(world.table.usage(Tier::kDisk), 20);
  return world;
}

TEST(Room, AFullDiskGivesUpAPlaceWhoseContentIsVoid) {
  World world = full_disk(Use::kWritten);
  EXPECT_EQ(world.valid(0), "DEVICE");
  EXPECT_EQ(text(world.access({1})), "DROP 0 DISK, SPILL 2");
  EXPECT_EQ(world.table.usage(Tier::kDisk), 20);
  world.wait_ready({1});
  EXPECT_EQ(world.valid(2), "DISK");
}

TEST(Room, AFullDiskGivesUpACopyOfWhatIsOnDevice) {
  World world = full_disk(Use::kRead);
  EXPECT_EQ(world.valid(0), "DEVICE+DISK");
  EXPECT_EQ(text(world.access({0})), "");  // in use: it cannot leave
  EXPECT_EQ(text(world.access({1})), "DROP 0 DISK, SPILL 2");
  EXPECT_EQ(world.valid(0), "DEVICE");
  world.abort_next();  // the disk does not take it
  EXPECT_EQ(world.valid(2), "DEVICE");
  EXPECT_EQ(text(world.ensure({1})), "SPILL 2");
  world.wait_ready({1});
  world.release({0, 1});
  EXPECT_EQ(world.table.usage(Tier::kDisk), 20);
}

TEST(Room, AFullDiskGivesUpThePlaceOfWhatIsBeingEvicted) {
  World world({20, 10, 10}, {10, 10, 20});
  world.use({1});
  world.empty_device();
  world.use({0});
  world.empty_device();
  world.use({0}, Use::kWritten);
  world.use({1});
  EXPECT_EQ(world.valid(0), "DEVICE");  // its place on DISK is void
  EXPECT_EQ(world.valid(1), "DEVICE+HOST");
  EXPECT_EQ(text(world.access({2})), "DROP 1 HOST, EVICT 0, DROP 0 DISK, SPILL 1");
  world.wait_ready({2});
  EXPECT_EQ(world.valid(0), "HOST");
  EXPECT_EQ(world.valid(1), "DISK");
}

TEST(Room, HostDuplicatesGiveWayToAnEviction) {
  World world({20, 20, 0}, {10, 10, 10});
  world.use({0});
  world.use({1});
  world.empty_device();
  world.use({0, 1});  // both DEVICE+HOST now, and HOST is full
  world.use({0}, Use::kWritten);
  EXPECT_EQ(world.valid(0), "DEVICE");
  EXPECT_EQ(text(world.access({2})), "DROP 1 DEVICE, ALLOCATE 2");
  world.release({2});
  EXPECT_EQ(text(world.access({1})), "EVICT 0");  // into the room its own duplicate left
  world.wait_ready({1});
  world.release({1});
  EXPECT_EQ(world.valid(1), "DEVICE+HOST");
  world.use({2}, Use::kWritten);
  EXPECT_EQ(text(world.access({0})), "DROP 1 DEVICE, FETCH 0");
}

TEST(Room, AHostDuplicateIsDroppedOnlyWhereAnotherCopyStays) {
  World world({20, 10, 20}, {10, 10, 10});
  world.use({0});
  world.empty_device();  // 0 on HOST
  world.use({1});
  world.use({0});     // 0 on DEVICE and HOST, 1 dirty on DEVICE
  world.access({0});  // pinned: only 1 can leave, and HOST is full of 0's duplicate
  EXPECT_EQ(text(world.access({2})), "DROP 0 HOST, EVICT 1");
  world.wait_ready({2});
  EXPECT_EQ(world.valid(0), "DEVICE");
  EXPECT_EQ(world.valid(1), "HOST");
}

TEST(Room, NowhereToGoIsRefusedWithNothingLost) {
  World world({30, 10, 0}, {10, 10, 10, 20});
  world.use({0});
  world.use({1});
  world.use({2});
  const int64_t peak = world.table.peak(Tier::kHost);
  try {
    world.access({3});
    FAIL() << "two dirty chunks fit into one place";
  } catch (const OutOfBudget& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("DISK is absent"), std::string::npos) << message;
    EXPECT_NE(message.find("host_bytes"), std::string::npos) << message;
  }
  world.table.check_invariants();
  EXPECT_EQ(world.table.num_in_flight(), 0);
  EXPECT_EQ(world.table.usage(Tier::kHost), 0);
  EXPECT_EQ(world.table.peak(Tier::kHost), peak);
  for (ChunkId id = 0; id < 3; ++id) EXPECT_EQ(world.valid(id), "DEVICE");
  EXPECT_EQ(world.table.moment(), 3);
}

TEST(Room, ARefusedAccessRestoresTheCopiesItWouldHaveDropped) {
  for (const bool duplicate_goes_first : {true, false}) {
    World world({30, 10, 0}, {10, 10, 10, 20});
    world.use({0});
    world.empty_device();
    world.use({0});
    world.use({1});
    world.use({2});
    if (!duplicate_goes_first) world.use({0});
    // 0 has a HOST duplicate: it could be dropped, or make room for 1; then HOST is full.
    EXPECT_THROW(world.access({3}), OutOfBudget);
    world.table.check_invariants();
    EXPECT_EQ(world.valid(0), "DEVICE+HOST");
    EXPECT_EQ(world.valid(1), "DEVICE");
    EXPECT_EQ(world.table.num_in_flight(), 0);
    EXPECT_EQ(world.table.usage(Tier::kDevice), 30);
  }
}

TEST(Room, AnAccessRecallsAChunkThatIsLeaving) {
  World world({20, 20, 0}, {10, 10, 20});
  world.use({0});
  world.use({1});
  world.table.set_limit(10);
  EXPECT_EQ(text(world.table.access({}, kUntraced)), "EVICT 0");
  world.table.set_limit(20);
  EXPECT_EQ(text(world.access({0})), "");
  EXPECT_TRUE(world.table.ready(std::vector<TensorId>{0}));
  EXPECT_EQ(world.table.complete(1), Completion{});
  EXPECT_EQ(world.valid(0), "DEVICE+HOST");
  EXPECT_FALSE(world.table.chunk(0).dirty());
}

TEST(Room, ARecalledChunkIsNotCountedAsComingFree) {
  World world({20, 40, 0}, {10, 10, 10});
  world.use({0});
  world.use({1});
  world.table.set_limit(10);
  EXPECT_EQ(text(world.table.access({}, kUntraced)), "EVICT 0");
  world.table.set_limit(20);
  world.access({0});
  EXPECT_EQ(text(world.access({2})), "EVICT 1");
}

TEST(Room, AnAccessWaitsForAPrefetchInItsWayInsteadOfFailing) {
  World world({20, 40, 0}, {10, 20});
  world.use({0});
  world.use({1});
  world.empty_device();
  world.table.set_schedule(std::make_shared<Schedule>(std::vector<std::vector<ChunkId>>{{0}, {1}},
                                                      std::vector<int64_t>(), 2));
  world.table.begin_step();
  EXPECT_EQ(text(world.prefetch(1)), "FETCH 0");
  EXPECT_EQ(text(world.access({1})), "");
  world.complete_next();
  EXPECT_EQ(text(world.ensure({1})), "DROP 0 DEVICE, FETCH 1");
}

TEST(Room, WritingWhileLeavingVoidsTheCopy) {
  for (const testing::Budgets budgets : {testing::Budgets{10, 10, 0}, {10, 0, 10}}) {
    World world(budgets, {10});
    world.use({0});
    world.table.set_limit(0);
    const Actions leaving = world.table.access({}, kUntraced);
    world.table.set_limit(10);
    world.access({0});
    world.release({0}, Use::kWritten);
    const bool to_host = leaving[0].kind == ActionKind::kEvict;
    EXPECT_EQ(world.table.complete(leaving[0].id), (Completion{.destination_freed = to_host}));
    world.table.check_invariants();
    EXPECT_EQ(world.valid(0), "DEVICE");
  }
}

TEST(Room, AnAbortedTransferLeavesTheSourceAndGivesTheDestinationBack) {
  for (const testing::Budgets budgets : {testing::Budgets{10, 20, 0}, {10, 0, 20}}) {
    World world(budgets, {10, 10});
    const Tier below = budgets.host > 0 ? Tier::kHost : Tier::kDisk;
    world.use({0});
    world.access({1});
    EXPECT_EQ(world.table.usage(below), 10);
    EXPECT_EQ(world.abort_next(), (Completion{.destination_freed = true}));
    EXPECT_EQ(world.table.usage(below), 0);
    EXPECT_EQ(world.valid(0), "DEVICE");
    world.ensure({1});  // tries again
    world.wait_ready({1});
    world.release({1});
    world.access({0});
    world.complete_next();
    world.ensure({0});
    EXPECT_EQ(world.abort_next(), (Completion{.destination_freed = true}));
    EXPECT_EQ(world.table.usage(Tier::kDevice), 0);
    EXPECT_FALSE(world.table.chunk(0).resident());
    world.wait_ready({0});
  }
}

TEST(Room, AnAbortedSpillKeepsTheExtentOfAnEarlierOne) {
  World world({10, 0, 10}, {10});
  world.use({0});
  world.empty_device();
  world.use({0}, Use::kWritten);
  world.table.set_limit(0);
  const Actions spill = world.table.access({}, kUntraced);
  EXPECT_EQ(text(spill), "SPILL 0");
  EXPECT_EQ(world.table.abort(spill[0].id), Completion{});
  EXPECT_EQ(world.table.usage(Tier::kDisk), 10);
  EXPECT_EQ(world.valid(0), "DEVICE");
}

TEST(Room, FreeingAChunkInFlightDoomsTheTransfer) {
  for (const bool completes : {true, false}) {
    World world({10, 10, 10}, {10, 10});
    world.use({0});
    world.access({1});
    EXPECT_EQ(text(world.free({0})), "");
    EXPECT_EQ(world.table.usage(Tier::kDevice), 10);
    const Completion end = completes ? world.complete_next() : world.abort_next();
    EXPECT_EQ(end, (Completion{true, true, true}));
    EXPECT_EQ(world.table.usage(Tier::kDevice), 0);
    EXPECT_EQ(world.table.usage(Tier::kHost), 0);
    EXPECT_EQ(text(world.ensure({1})), "ALLOCATE 1");
  }
}

TEST(Room, TheDiskExtentOfADoomedLoadStaysUntilItsEnd) {
  World world({10, 0, 10}, {10});
  world.use({0});
  world.empty_device();
  EXPECT_EQ(text(world.access({0})), "LOAD 0");
  world.release({0});
  world.free({0});
  EXPECT_EQ(world.table.usage(Tier::kDisk), 10);
  EXPECT_TRUE(world.complete_next().doomed);
  EXPECT_EQ(world.table.usage(Tier::kDisk), 0);
  EXPECT_EQ(world.table.usage(Tier::kDevice), 0);
}

TEST(Room, AChunkUsedAgainWaitsForItsDoomedTransfer) {
  World world({10, 10, 0}, {10});
  world.use({0});
  world.table.set_limit(0);
  const Actions evict = world.table.access({}, kUntraced);
  world.table.set_limit(10);
  world.free({0});
  EXPECT_EQ(text(world.access({0})), "");
  EXPECT_FALSE(world.table.ready(std::vector<TensorId>{0}));
  EXPECT_TRUE(world.table.complete(evict[0].id).doomed);
  EXPECT_EQ(text(world.ensure({0})), "ALLOCATE 0");
}

TEST(Room, NonModelMemoryMakesRoomEvenWhenAllIsResident) {
  World world({40, 40, 0}, {10, 10, 10});
  for (TensorId id = 0; id < 3; ++id) world.use({id});
  const std::vector<std::vector<ChunkId>> accesses{{0}, {1}, {2}};
  world.table.set_schedule(std::make_shared<Schedule>(accesses, std::vector<int64_t>{0, 25, 0}, 3));
  world.table.begin_step();
  EXPECT_EQ(text(world.access({0})), "");
  world.release({0});
  EXPECT_EQ(text(world.access({1})), "EVICT 0, EVICT 2");  // 15 bytes are left for model data
  EXPECT_EQ(world.table.limit(), 15);
  world.wait_ready({1});
  EXPECT_EQ(world.table.usage(Tier::kDevice), 10);
  world.release({1});
  EXPECT_EQ(text(world.access({2})), "FETCH 2");
  world.wait_ready({2});
  world.release({2});
  EXPECT_FALSE(world.table.end_step());
}

TEST(Room, TheSoftLimitYieldsWhereTheOperatorNeedsMore) {
  World world({20, 20, 0}, {10, 10});
  world.table.set_limit(5);
  EXPECT_EQ(text(world.access({0})), "ALLOCATE 0");
  world.release({0});
  EXPECT_EQ(text(world.access({1})), "EVICT 0");
  EXPECT_FALSE(world.table.ready(std::vector<TensorId>{1}));
  world.wait_ready({1});
  EXPECT_EQ(world.table.usage(Tier::kDevice), 10);
}

TEST(Room, EveryUseSucceedsWhileThePinnedChunksAndTheTiersBelowSuffice) {
  std::mt19937 random(11);
  for (int round = 0; round < 40; ++round) {
    std::vector<int64_t> sizes(8);
    int64_t total = 0;
    for (int64_t& nbytes : sizes) total += nbytes = 1 + static_cast<int64_t>(random() % 9);
    World world({20, static_cast<int64_t>(random() % 30), total}, sizes);
    for (int i = 0; i < 200; ++i) {
      const auto first = static_cast<TensorId>(random() % 8);
      const auto second = static_cast<TensorId>(random() % 8);
      world.use({first, second}, random() % 2 == 0 ? Use::kWritten : Use::kRead);
    }
  }
}

}  // namespace
}  // namespace gemini
