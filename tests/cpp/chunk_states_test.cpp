// Tensor states, pins, dirty bits, and what a refused call leaves behind.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "chunk/chunk_table.h"
#include "chunk/ledger.h"
#include "chunk_test_util.h"
#include "common/error.h"

namespace gemini {
namespace {

using testing::text;
using testing::World;
using enum TensorState;

TEST(States, OnlyTheSeedsTransitionsAreLegal) {
  EXPECT_TRUE(is_legal(kFree, kCompute));
  EXPECT_TRUE(is_legal(kHold, kCompute));
  EXPECT_TRUE(is_legal(kCompute, kCompute));
  EXPECT_TRUE(is_legal(kCompute, kHold));
  EXPECT_TRUE(is_legal(kHold, kFree));
  EXPECT_TRUE(is_legal(kFree, kFree));
  EXPECT_FALSE(is_legal(kCompute, kFree));
  EXPECT_FALSE(is_legal(kFree, kHold));
  EXPECT_FALSE(is_legal(kHold, kHold));
}

TEST(States, WhatIsFoundOnDiskIsLoadedAndDroppedWithoutBeingWritten) {
  World world({100, 0, 100}, {40, 40, 40});
  world.table.found_on_disk(std::vector<TensorId>{0, 1});
  EXPECT_EQ(world.table.tensor_state(0), kHold);
  EXPECT_EQ(world.table.usage(Tier::kDisk), 80);
  EXPECT_EQ(text(world.access({0})), "LOAD 0");
  EXPECT_THROW(world.table.found_on_disk(std::vector<TensorId>{0}), StateError);
  EXPECT_THROW(world.table.found_on_disk(std::vector<TensorId>{2}), OutOfBudget);
  EXPECT_EQ(world.table.usage(Tier::kDisk), 80);
  EXPECT_EQ(world.table.tensor_state(2), kFree);
}

TEST(States, FirstAccessAllocatesAndTheContentIsDirty) {
  World world({100, 100, 0}, {40});
  EXPECT_EQ(text(world.access({0})), "ALLOCATE 0");
  EXPECT_TRUE(world.table.ready(std::vector<TensorId>{0}));
  EXPECT_EQ(world.table.tensor_state(0), kCompute);
  world.release({0});
  EXPECT_EQ(world.table.tensor_state(0), kHold);
  EXPECT_TRUE(world.table.chunk(0).dirty());
  EXPECT_EQ(world.table.usage(Tier::kDevice), 40);
}

TEST(States, NestedAccessesAreCounted) {
  World world({100, 0, 0}, {40});
  world.access({0, 0});
  world.access({0});
  EXPECT_EQ(world.table.chunk(0).pins[index(Tier::kDevice)], 3);
  world.release({0, 0});
  EXPECT_EQ(world.table.tensor_state(0), kCompute);
  world.release({0});
  EXPECT_EQ(world.table.tensor_state(0), kHold);
  EXPECT_EQ(world.table.chunk(0).pins[index(Tier::kDevice)], 0);
}

TEST(States, ReleasingTooOftenChangesNothing) {
  World world({100, 0, 0}, {40, 40});
  world.access({0, 1});
  EXPECT_THROW(world.release({0, 1, 1}), StateError);
  EXPECT_EQ(world.table.chunk(0).pins[index(Tier::kDevice)], 1);
  EXPECT_EQ(world.table.tensor_state(1), kCompute);
  world.release({0, 1});
  EXPECT_THROW(world.release({0}), StateError);
  world.table.check_invariants();
}

TEST(States, FreeingATensorInUseNamesItAndBothStates) {
  World world({100, 0, 0}, {40, 40});
  world.use({1});
  world.access({0});
  try {
    world.free({1, 0});
    FAIL() << "freed a tensor in COMPUTE";
  } catch (const StateError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("tensor 0"), std::string::npos) << message;
    EXPECT_NE(message.find("COMPUTE to FREE"), std::string::npos) << message;
  }
  EXPECT_EQ(world.table.tensor_state(1), kHold);
  world.table.check_invariants();
}

TEST(States, FreeGivesUpEveryCopyOnceAllTensorsAreFree) {
  World world({100, 100, 100}, {40});
  const TensorId second = world.table.add_tensor(0);
  world.use({0, second});
  EXPECT_EQ(text(world.free({0})), "");
  EXPECT_EQ(text(world.free({second})), "DROP 0 DEVICE");
  EXPECT_EQ(text(world.free({0, second})), "");
  EXPECT_EQ(world.table.usage(Tier::kDevice), 0);
  EXPECT_EQ(text(world.access({0})), "ALLOCATE 0");
}

TEST(States, WritingMakesTheHostDuplicateInvalid) {
  World world({40, 100, 0}, {40});
  world.use({0});
  world.empty_device();
  world.access({0});
  world.wait_ready({0});
  EXPECT_EQ(world.valid(0), "DEVICE+HOST");
  EXPECT_EQ(text(world.release({0}, Use::kWritten)), "DROP 0 HOST");
  EXPECT_EQ(world.valid(0), "DEVICE");
  EXPECT_EQ(world.table.usage(Tier::kHost), 0);
}

TEST(States, ADiskExtentSurvivesWritingAndEndsWithFree) {
  World world({40, 0, 100}, {40});
  world.use({0});
  world.empty_device();
  world.use({0}, Use::kWritten);
  EXPECT_EQ(world.valid(0), "DEVICE");
  EXPECT_EQ(world.table.usage(Tier::kDisk), 40);
  world.free({0});
  EXPECT_EQ(world.table.usage(Tier::kDisk), 0);
}

TEST(States, WritingWhatIsNotOnDeviceIsRefused) {
  World world({40, 100, 0}, {40});
  world.use({0});
  world.empty_device();
  world.access({0});
  EXPECT_THROW(world.release({0}, Use::kWritten), StateError);
  EXPECT_EQ(world.table.chunk(0).pins[index(Tier::kDevice)], 1);
  world.release({0});
  world.complete_all();
  EXPECT_EQ(world.valid(0), "DEVICE+HOST");
}

TEST(States, AFailedAccessLeavesEverythingAsBefore) {
  World world({100, 100, 0}, {60, 30, 60});
  const TensorId second = world.table.add_tensor(0);
  world.use({0, 1});
  world.free({second});
  EXPECT_THROW(world.access({0, second, 2}), OutOfBudget);
  world.table.check_invariants();
  EXPECT_EQ(world.table.tensor_state(0), kHold);
  EXPECT_EQ(world.table.tensor_state(second), kFree);
  EXPECT_EQ(world.table.tensor_state(2), kFree);
  EXPECT_EQ(world.table.moment(), 1);
  EXPECT_EQ(world.table.record().accesses(), (std::vector<std::vector<ChunkId>>{{0, 1}}));
  EXPECT_EQ(world.valid(0), "DEVICE");
  EXPECT_EQ(world.table.usage(Tier::kDevice), 90);
}

TEST(States, OutOfBudgetSaysTheNumbersAndTheWayOut) {
  World world({100, 0, 0}, {60, 70});
  try {
    world.access({0, 1});
    FAIL() << "130 bytes fit into 100";
  } catch (const OutOfBudget& error) {
    const std::string message = error.what();
    for (const char* part : {"130", "100", "70", "device_bytes"}) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
  }
}

TEST(States, ATensorWhoseChunkNeverCameReturnsToFree) {
  World world({40, 100, 0}, {40, 40});
  world.use({0});
  EXPECT_EQ(text(world.access({1})), "EVICT 0");
  world.table.release_all(Use::kWritten);
  world.table.check_invariants();
  EXPECT_EQ(world.table.tensor_state(1), kFree);
  world.complete_all();
  EXPECT_EQ(world.valid(0), "HOST");
  EXPECT_EQ(world.table.usage(Tier::kDevice), 0);
}

TEST(States, ReleaseAllAsWrittenKeepsWhatWasWritten) {
  World world({40, 100, 0}, {40});
  world.use({0});
  world.empty_device();
  world.access({0, 0});
  world.wait_ready({0});
  EXPECT_EQ(text(world.table.release_all(Use::kWritten)), "DROP 0 HOST");
  EXPECT_EQ(world.table.tensor_state(0), kHold);
  EXPECT_EQ(world.table.chunk(0).pins[index(Tier::kDevice)], 0);
  world.table.check_invariants();
}

TEST(States, UnknownIdsAndSizesAreRefused) {
  World world({40, 0, 0}, {40});
  EXPECT_THROW(world.access({1}), StateError);
  EXPECT_THROW(world.access({-1}), StateError);
  EXPECT_THROW(world.ensure({0}), StateError);
  EXPECT_THROW(world.table.add_tensor(1), StateError);
  EXPECT_THROW(world.table.add_chunk(0), StateError);
  EXPECT_THROW(world.table.complete(1), StateError);
  EXPECT_THROW(world.table.abort(1), StateError);
  EXPECT_THROW(world.table.set_limit(-1), StateError);
  EXPECT_THROW(ChunkTable(0, 1, 1), StateError);
  EXPECT_THROW(ChunkTable(1, -1, 1), StateError);
  world.table.check_invariants();
}

TEST(Ledger, AReservationGivesItsBytesBack) {
  TierLedger ledger({10, 0, 0});
  {
    Reservation outer = ledger.reserve(Tier::kDevice, 6);
    EXPECT_THROW(static_cast<void>(ledger.reserve(Tier::kDevice, 5)), OutOfBudget);
    EXPECT_THROW(static_cast<void>(ledger.reserve(Tier::kHost, 1)), OutOfBudget);
    Reservation moved = std::move(outer);
    EXPECT_EQ(ledger.usage(Tier::kDevice), 6);
    moved = ledger.reserve(Tier::kDevice, 4);
    EXPECT_EQ(ledger.usage(Tier::kDevice), 4);
  }
  EXPECT_EQ(ledger.usage(Tier::kDevice), 0);
  EXPECT_EQ(ledger.peak(Tier::kDevice), 10);
}

}  // namespace
}  // namespace gemini
