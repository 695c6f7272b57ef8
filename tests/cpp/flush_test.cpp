// Flushing: what a plan says will leave is copied below as soon as it has been written.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "chunk/chunk_table.h"
#include "chunk_test_util.h"

namespace gemini {
namespace {

using testing::kUntraced;
using testing::text;
using testing::World;

// A step in which every chunk is used at a moment of its own, in order, twice; what the first round
// writes is to be flushed.
void begin(World& world) {
  const int32_t chunks = world.table.num_chunks();
  std::vector<std::vector<ChunkId>> accesses;
  Retention plan;
  for (int round = 0; round < 2; ++round) {
    for (ChunkId id = 0; id < chunks; ++id) {
      accesses.push_back({id});
      plan.intervals.push_back(round == 0 ? kFlush : uint8_t{0});
      plan.planned_bytes.push_back(world.table.chunk(id).nbytes);
    }
  }
  for (TensorId id = 0; id < chunks; ++id) world.use({id});
  world.empty_device();
  world.table.set_schedule(
      std::make_shared<Schedule>(Schedule(accesses, {}, chunks).with_plan(std::move(plan))));
  world.table.begin_step();
  world.log.clear();
}

// Uses chunk 0 and writes it.
Actions write_first(World& world) {
  world.access({0});
  world.wait_ready({0});
  return world.release({0}, Use::kWritten);
}

TEST(Flush, KeepsTheCopyOnDeviceAndMakesItClean) {
  World world({40, 100, 0}, {10, 10});
  begin(world);
  EXPECT_EQ(text(write_first(world)), "DROP 0 HOST, EVICT 0");
  EXPECT_EQ(world.valid(0), "DEVICE");
  EXPECT_EQ(world.complete_next(), Completion{});
  EXPECT_EQ(world.valid(0), "DEVICE+HOST");
  EXPECT_FALSE(world.table.chunk(0).dirty());
}

TEST(Flush, GoesToDiskWhereThereIsNoHost) {
  World world({40, 0, 100}, {10, 10});
  begin(world);
  EXPECT_EQ(text(write_first(world)), "SPILL 0");
  world.complete_all();
  EXPECT_EQ(world.valid(0), "DEVICE+DISK");
}

TEST(Flush, AFlushedChunkLeavesWithoutACopy) {
  World world({10, 100, 0}, {10, 10});
  begin(world);
  write_first(world);
  world.complete_all();
  EXPECT_EQ(text(world.access({1})), "DROP 0 DEVICE, FETCH 1");
}

TEST(Flush, OnlyWhatThePlanSaysIsFlushed) {
  World world({40, 100, 0}, {10, 10});
  begin(world);
  for (const TensorId id : {0, 1}) world.use({id});
  world.access({0});
  world.wait_ready({0});
  EXPECT_EQ(text(world.release({0}, Use::kWritten)), "DROP 0 HOST");
}

TEST(Flush, AWriteMeanwhileVoidsWhatArrives) {
  World world({40, 100, 0}, {10, 10});
  begin(world);
  write_first(world);
  world.table.access(std::vector<TensorId>{0}, kUntraced);
  world.release({0}, Use::kWritten);
  const Completion completion = world.complete_next();
  EXPECT_TRUE(completion.destination_freed);
  EXPECT_FALSE(completion.source_freed);
  EXPECT_EQ(world.valid(0), "DEVICE");
}

TEST(Flush, BecomesAnEvictWhereRoomIsNeeded) {
  World world({10, 100, 0}, {10, 10});
  begin(world);
  write_first(world);
  EXPECT_EQ(text(world.access({1})), "");  // the copy that is under way makes the room
  EXPECT_TRUE(world.complete_next().source_freed);
  EXPECT_EQ(world.valid(0), "HOST");
  EXPECT_EQ(text(world.ensure({1})), "FETCH 1");
}

TEST(Flush, AFreeMeanwhileGivesBothEndsBack) {
  World world({40, 100, 0}, {10, 10});
  begin(world);
  write_first(world);
  world.free({0});
  EXPECT_TRUE(world.complete_next().doomed);
  EXPECT_EQ(world.table.usage(Tier::kDevice), 0);
  EXPECT_EQ(world.valid(0), "");
}

TEST(Flush, AnAbortLeavesTheChunkDirtyOnDevice) {
  World world({40, 100, 0}, {10, 10});
  begin(world);
  write_first(world);
  world.abort_next();
  EXPECT_EQ(world.valid(0), "DEVICE");
  EXPECT_TRUE(world.table.chunk(0).dirty());
  EXPECT_EQ(world.table.usage(Tier::kHost), 10);  // chunk 1
}

TEST(Flush, FourAreUnderWayAtATimeAndTheOthersFollow) {
  World world({60, 100, 0}, {10, 10, 10, 10, 10});
  const uint8_t flush = kFlush;
  Retention plan{{flush, flush, flush, flush, flush, 0, 0, 0, 0, 0}, {50, 50}};
  const std::vector<std::vector<ChunkId>> accesses{{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}};
  world.table.set_schedule(
      std::make_shared<Schedule>(Schedule(accesses, {}, 5).with_plan(std::move(plan))));
  world.table.begin_step();
  world.access({0, 1, 2, 3, 4});
  EXPECT_EQ(text(world.release({0, 1, 2, 3, 4}, Use::kWritten)),
            "EVICT 0, EVICT 1, EVICT 2, EVICT 3");
  EXPECT_EQ(text(world.prefetch(2)), "");
  world.complete_next();
  EXPECT_EQ(text(world.prefetch(2)), "EVICT 4");
}

TEST(Flush, WithoutRoomBelowNothingIsStartedAndNothingLost) {
  World world({40, 20, 0}, {10, 10, 10});
  for (const TensorId id : {0, 1, 2}) world.use({id}, Use::kWritten);
  std::vector<std::vector<ChunkId>> accesses{{0}, {1}, {2}};
  Retention plan{{kFlush, kFlush, kFlush}, {10, 10, 10}};
  world.table.set_schedule(
      std::make_shared<Schedule>(Schedule(accesses, {}, 3).with_plan(std::move(plan))));
  world.table.begin_step();
  for (const TensorId id : {0, 1, 2}) world.use({id}, Use::kWritten);
  world.complete_all();
  EXPECT_EQ(world.table.usage(Tier::kHost), 20);
  EXPECT_TRUE(world.table.chunk(2).dirty());
  EXPECT_FALSE(world.table.chunk(0).dirty());
}

}  // namespace
}  // namespace gemini
