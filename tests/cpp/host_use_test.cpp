// Operators of the CPU, which use chunks where they lie on HOST.
#include "chunk/host_use.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chunk/chunk_table.h"
#include "chunk_test_util.h"
#include "common/error.h"

namespace gemini {
namespace {

using testing::kOnHost;
using testing::text;
using testing::World;
using Accesses = std::vector<std::vector<ChunkId>>;

// What an executor does around such an operator.
std::string use_on_host(World& world, const std::vector<TensorId>& tensors, Use how) {
  Actions actions = world.table.access(tensors, kOnHost);
  for (const Action& action : actions) {
    if (action.id != 0) world.table.complete(action.id);
  }
  EXPECT_TRUE(world.table.ready(tensors));
  world.table.check_invariants();
  const Actions released = world.release(tensors, how);
  actions.insert(actions.end(), released.begin(), released.end());
  return text(actions);
}

void follow(World& world, const Accesses& accesses, const std::vector<int64_t>& host_moments) {
  world.table.set_schedule(std::make_shared<Schedule>(accesses, std::vector<int64_t>(),
                                                      world.table.num_chunks(), host_moments));
  world.table.begin_step();
  world.log.clear();
}

TEST(HostUse, WhatIsOnDeviceAloneIsEvictedAndWhatIsNewStartsThere) {
  World world({100, 100, 0}, {10, 10});
  world.use({0}, Use::kWritten);
  EXPECT_EQ(use_on_host(world, {0, 1}, Use::kWritten), "EVICT 0, ALLOCATE 1");
  EXPECT_EQ(world.valid(0) + " " + world.valid(1), "HOST HOST");
  EXPECT_EQ(world.table.usage(Tier::kDevice), 0);
}

TEST(HostUse, AWriteThereMakesTheCopyOnDeviceVoidAndAReadDoesNot) {
  World world({100, 100, 0}, {10});
  world.use({0}, Use::kWritten);
  world.empty_device();
  world.use({0});
  EXPECT_EQ(use_on_host(world, {0}, Use::kRead), "");
  EXPECT_EQ(world.valid(0), "DEVICE+HOST");
  EXPECT_EQ(use_on_host(world, {0}, Use::kWritten), "DROP 0 DEVICE");
  EXPECT_EQ(world.valid(0), "HOST");
}

TEST(HostUse, RoomThereIsMadeOfDuplicates) {
  World world({100, 20, 0}, {10, 10, 10});
  for (const TensorId id : {0, 1}) world.use({id}, Use::kWritten);
  world.empty_device();
  for (const TensorId id : {0, 1}) world.use({id});
  world.use({2}, Use::kWritten);
  EXPECT_TRUE(world.table.can_access_on_host(std::vector<TensorId>{1, 2}));
  EXPECT_EQ(use_on_host(world, {1, 2}, Use::kWritten), "DROP 0 HOST, EVICT 2, DROP 1 DEVICE");
}

TEST(HostUse, WhatFindsNoRoomThereIsRefusedAndNothingHasChanged) {
  World world({100, 10, 0}, {10, 10});
  world.use({0}, Use::kWritten);
  world.empty_device();
  world.use({1}, Use::kWritten);
  EXPECT_FALSE(world.table.can_access_on_host(std::vector<TensorId>{1}));
  EXPECT_THROW(world.table.access(std::vector<TensorId>{1}, kOnHost), OutOfBudget);
  world.table.check_invariants();
  EXPECT_EQ(world.valid(1), "DEVICE");
  EXPECT_EQ(world.table.tensor_state(1), TensorState::kHold);
}

TEST(HostUse, AChunkInUseOnOneTierIsRefusedOnTheOther) {
  World world({100, 100, 0}, {10});
  world.access({0});
  EXPECT_FALSE(world.table.can_access_on_host(std::vector<TensorId>{0}));
  EXPECT_THROW(world.table.access(std::vector<TensorId>{0}, kOnHost), StateError);
  world.release({0}, Use::kWritten);
  world.table.access(std::vector<TensorId>{0}, kOnHost);
  EXPECT_THROW(world.table.access(std::vector<TensorId>{0}), StateError);
}

TEST(HostUse, AStepOnItsScheduleIsOnTheRightTiers) {
  World world({100, 100, 0}, {10});
  world.use({0}, Use::kWritten);
  follow(world, {{0}, {0}}, {1});
  world.use({0});
  use_on_host(world, {0}, Use::kWritten);
  EXPECT_FALSE(world.table.end_step());
  world.table.begin_step();
  world.use({0});
  world.use({0});
  EXPECT_TRUE(world.table.end_step());
}

TEST(HostUse, NothingIsPrefetchedBeforeItsUseOnHost) {
  World world({20, 100, 0}, {10, 10, 10});
  for (const TensorId id : {0, 1, 2}) world.use({id}, Use::kWritten);
  world.empty_device();
  follow(world, {{0}, {1}, {1}, {2}}, {1});
  EXPECT_EQ(text(world.prefetch(4)), "FETCH 0, FETCH 2");
}

TEST(HostUse, WhatIsUsedNextOnHostLeavesDeviceAheadAndFirst) {
  World world({30, 100, 0}, {10, 10, 10, 10});
  for (const TensorId id : {3, 0, 1, 2}) world.use({id}, Use::kWritten);
  world.complete_all();
  follow(world, {{0}, {1}, {2}, {0}, {3}}, {1});
  // Not 0, which DEVICE uses first, nor 2, which it uses next.
  EXPECT_EQ(text(world.prefetch(0)), "EVICT 1");
  EXPECT_EQ(std::as_const(world.table).chunk(1).flight->to, Tier::kHost);
}

TEST(Schedule, AUseOnHostEndsWhatACopyOnDeviceIsGoodFor) {
  const Schedule schedule({{0}, {0}, {0}}, {}, 1, {1});
  EXPECT_EQ(schedule.next_use(0, 0), 0);
  EXPECT_EQ(schedule.next_use(0, 1), kNever);
  EXPECT_EQ(schedule.next_use(0, 2), 2);
  EXPECT_TRUE(schedule.on_host(4));
  EXPECT_THROW(Schedule({{0}}, {}, 1, {1}), StateError);
}

}  // namespace
}  // namespace gemini
