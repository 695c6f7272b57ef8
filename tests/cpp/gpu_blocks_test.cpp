// Laws of memory that windows of several sizes share, block by block, on the simulated GPU.
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <vector>

#include "common/error.h"
#include "gpu/gpu_windows.h"
#include "gpu_test_util.h"

namespace gemini {
namespace {

class GpuBlocks : public testing::TestWithParam<uint32_t> {};

// Windows of one, two and three blocks, more than fit, every other group of three floating; one in
// four leaves at random, none fits to any that took its blocks.
TEST_P(GpuBlocks, AnyDelaysGiveEveryOperatorWhatTheOneBeforeLeft) {
  constexpr size_t kNumChunks = 9;
  const int64_t capacity = 5 * kChunkBytes;
  Machine machine(GetParam(), 300);
  GpuSpace space(machine.lanes, 3 * kNumChunks * kChunkBytes, kNumChunks);
  GpuArena arena(machine.lanes, capacity, kChunkBytes);
  PinnedArena host_arena(machine.lanes, 3 * kNumChunks * kChunkBytes);
  GpuEngine engine(machine.lanes, nullptr);
  std::vector<GpuWindow*> windows;
  std::vector<std::unique_ptr<HostPlace>> places;
  for (size_t i = 0; i < kNumChunks; ++i) {
    const int64_t nbytes = static_cast<int64_t>(i % 3 + 1) * kChunkBytes;
    windows.push_back(
        space.create(nbytes, i / 3 % 2 == 0 ? Addresses::kFloating : Addresses::kFixed));
    places.push_back(std::make_unique<HostPlace>(nbytes));
  }
  std::vector<int64_t> values(kNumChunks, 0);
  std::vector<size_t> resident;
  std::mt19937 random(GetParam());
  const auto evict_one = [&] {
    const auto victim = resident.begin() + static_cast<std::ptrdiff_t>(random() % resident.size());
    const size_t chunk = *victim;
    host_arena.map(*places[chunk], Content::kAny);
    await_report(engine, engine.copy(*places[chunk], *windows[chunk], windows[chunk]->nbytes()));
    arena.unmap(*windows[chunk], random() % 8 == 0 ? Spare::kReturned : Spare::kParked);
    resident.erase(victim);
  };
  for (int round = 0; round < 300; ++round) {
    const size_t chunk = random() % kNumChunks;
    GpuWindow& window = *windows[chunk];
    if (!window.mapped()) {
      while (window.span_bytes() > capacity - arena.mapped_bytes()) evict_one();
      if (places[chunk]->mapped()) {
        arena.map_incoming(window);
        await_report(engine, engine.copy(window, *places[chunk], window.nbytes()));
        host_arena.unmap(*places[chunk], Spare::kParked);
      } else {
        arena.map(window, Content::kZeros);
      }
      resident.push_back(chunk);
    }
    machine.increment(window, values[chunk]++);
    if (random() % 4 == 0) evict_one();
    if (random() % 16 == 0) arena.trim(kChunkBytes);
    EXPECT_LE(arena.mapped_bytes() + arena.parked_bytes(), arena.capacity());
    EXPECT_EQ(machine.gpu->used_bytes(), arena.mapped_bytes() + arena.parked_bytes());
  }
  machine.finish();
  EXPECT_EQ(machine.wrong, 0U);
}

INSTANTIATE_TEST_SUITE_P(Seeds, GpuBlocks, testing::Range(0U, 8U));

TEST(GpuArenaBlocks, MemoryGoesToAnotherSizeWhileItsUsersAreStillAtWork) {
  Machine machine;
  GpuSpace space(machine.lanes, 4 * kChunkBytes, 3);
  GpuArena arena(machine.lanes, 2 * kChunkBytes, kChunkBytes);
  GpuWindow& large = *space.create(2 * kChunkBytes);
  GpuWindow& first = *space.create(kChunkBytes);
  GpuWindow& second = *space.create(kChunkBytes);

  Gate gate(*machine.gpu, machine.compute);
  arena.map(large, Content::kZeros);
  machine.increment(large, 0);
  arena.unmap(large, Spare::kParked);
  for (GpuWindow* const small : {&first, &second}) {
    arena.map(*small, Content::kZeros);
    machine.increment(*small, 0);
  }
  EXPECT_EQ(machine.gpu->used_bytes(), arena.capacity());
  gate.open();  // a host that had waited would never have come here
  machine.finish();
  arena.unmap(first, Spare::kParked);
  arena.unmap(second, Spare::kParked);
  arena.map(large, Content::kZeros);
  machine.increment(large, 0);
  machine.finish();
  EXPECT_EQ(machine.wrong, 0U);
}

TEST(GpuArenaBlocks, WindowGetsItsOwnBlocksBackAndOthersOnlyWhereTheyAreGone) {
  Machine machine;
  GpuSpace space(machine.lanes, 3 * kChunkBytes, 2);
  GpuArena arena(machine.lanes, 2 * kChunkBytes, kChunkBytes);
  GpuWindow& large = *space.create(2 * kChunkBytes);
  GpuWindow& small = *space.create(kChunkBytes);
  arena.map(large, Content::kAny);
  arena.unmap(large, Spare::kParked);
  arena.map(large, Content::kAny);
  EXPECT_EQ(machine.gpu->num_maps(), 2);
  arena.unmap(large, Spare::kParked);
  arena.map(small, Content::kAny);
  EXPECT_EQ(machine.gpu->num_maps(), 3);
  arena.trim(0);  // the other block; what showed it shows nothing now
  arena.unmap(small, Spare::kParked);
  arena.map(large, Content::kAny);
  EXPECT_EQ(machine.gpu->num_maps(), 4);
}

// Three chunks take turns in memory for two, which two frames show: nothing is mapped after those.
TEST(GpuArenaBlocks, FloatingWindowsGoWhereTheirMemoryIsShown) {
  constexpr size_t kNumChunks = 3;
  Machine machine;
  GpuSpace space(machine.lanes, 2 * kNumChunks * kChunkBytes, kNumChunks);
  GpuArena arena(machine.lanes, 4 * kChunkBytes, kChunkBytes);
  std::vector<GpuWindow*> windows;
  for (size_t i = 0; i < kNumChunks; ++i) {
    windows.push_back(space.create(2 * kChunkBytes, Addresses::kFloating));
  }
  for (size_t turn = 0; turn < 12; ++turn) {
    GpuWindow& window = *windows[turn % kNumChunks];
    if (turn >= 2) arena.unmap(*windows[(turn - 2) % kNumChunks], Spare::kParked);
    arena.map(window, Content::kZeros);
    machine.increment(window, 0);
    EXPECT_EQ(space.find(window.address()), -1);  // they are nobody's for good
  }
  EXPECT_EQ(machine.gpu->num_maps(), 4);
  machine.finish();
  EXPECT_EQ(machine.wrong, 0U);
}

// A fixed window takes one of two blocks of a frame: the floating one finds the other frame.
TEST(GpuArenaBlocks, FloatingWindowTakesAFrameOfWhichAllBlocksAreThere) {
  Machine machine;
  GpuSpace space(machine.lanes, 5 * kChunkBytes, 3);
  GpuArena arena(machine.lanes, 5 * kChunkBytes, kChunkBytes);
  GpuWindow& one = *space.create(2 * kChunkBytes, Addresses::kFloating);
  GpuWindow& other = *space.create(2 * kChunkBytes, Addresses::kFloating);
  GpuWindow& fixed = *space.create(kChunkBytes);
  arena.map(one, Content::kAny);
  arena.map(other, Content::kAny);
  const GpuAddress whole = other.address();
  arena.unmap(one, Spare::kParked);
  arena.unmap(other, Spare::kParked);
  arena.map(fixed, Content::kAny);  // the oldest that is parked: of the first
  arena.map(one, Content::kAny);
  EXPECT_EQ(one.address(), whole);
  EXPECT_EQ(machine.gpu->num_maps(), 5);
  machine.finish();
}

TEST(GpuArenaBlocks, WindowThatIsNoMultipleHasABlockOfItsOwnSize) {
  Machine machine;
  GpuSpace space(machine.lanes, 6 * kChunkBytes, 2);
  GpuArena arena(machine.lanes, 5 * kChunkBytes, 2 * kChunkBytes);
  GpuWindow& odd = *space.create(3 * kChunkBytes);
  GpuWindow& even = *space.create(2 * kChunkBytes);
  arena.map(odd, Content::kZeros);
  arena.map(even, Content::kZeros);
  machine.increment(odd, 0);
  machine.increment(even, 0);
  EXPECT_EQ(machine.gpu->num_maps(), 2);
  EXPECT_EQ(machine.gpu->used_bytes(), 5 * kChunkBytes);
  machine.finish();
  EXPECT_EQ(machine.wrong, 0U);
  EXPECT_THROW(GpuArena(machine.lanes, kMib, -1), StateError);
}

TEST(GpuArenaBlocks, WindowOfManyUnitsHasABlockOfItsOwnSize) {
  Machine machine;
  GpuSpace space(machine.lanes, 33 * kChunkBytes, 2);
  GpuArena arena(machine.lanes, 33 * kChunkBytes, kChunkBytes);
  arena.map(*space.create(16 * kChunkBytes), Content::kAny);
  EXPECT_EQ(machine.gpu->num_maps(), 16);
  arena.map(*space.create(17 * kChunkBytes), Content::kAny);
  EXPECT_EQ(machine.gpu->num_maps(), 17);
}

TEST(GpuArenaBlocks, GpuWithoutMemoryLeavesTheParkedBlocksParked) {
  Machine machine;
  GpuSpace others_space(machine.lanes, 63 * kMib, 1);
  GpuArena others(machine.lanes, 63 * kMib);
  GpuSpace space(machine.lanes, 2 * kMib, 2);
  GpuArena arena(machine.lanes, 2 * kMib, kMib / 2);
  GpuWindow& small = *space.create(kMib / 2);
  GpuWindow& large = *space.create(3 * kMib / 2);
  arena.map(small, Content::kAny);
  arena.unmap(small, Spare::kParked);
  others.map(*others_space.create(63 * kMib), Content::kAny);
  EXPECT_THROW(arena.map(large, Content::kAny), OutOfBudget);
  EXPECT_FALSE(large.mapped());
  EXPECT_EQ(arena.mapped_bytes(), 0);
  EXPECT_EQ(arena.parked_bytes(), machine.gpu->used_bytes() - 63 * kMib);
  arena.map(small, Content::kZeros);
  machine.increment(small, 0);
  machine.finish();
  EXPECT_EQ(machine.wrong, 0U);
}

// A GPU that can fail to say whether an event has passed, and counts how often it is asked.
class AskedGpu : public SimulatedGpu {
 public:
  AskedGpu() : SimulatedGpu(options(0, 0)) {}
  [[nodiscard]] bool passed(Event event) override {
    ++num_asked;
    if (is_failing) throw Error("injected");
    return SimulatedGpu::passed(event);
  }
  bool is_failing = false;
  int num_asked = 0;
};

TEST(GpuArenaBlocks, GpuThatFailsWhenItIsAskedLosesNoBlock) {
  const auto gpu = std::make_shared<AskedGpu>();
  const auto lanes = std::make_shared<GpuLanes>(gpu);
  const GpuDriver::Stream compute = gpu->create_stream();
  lanes->follow(compute);
  GpuSpace space(lanes, 4 * kChunkBytes, 2);
  GpuArena arena(lanes, 4 * kChunkBytes, kChunkBytes);
  GpuWindow& first = *space.create(2 * kChunkBytes);
  GpuWindow& second = *space.create(2 * kChunkBytes);
  arena.map(first, Content::kZeros);
  arena.unmap(first, Spare::kParked);
  gpu->is_failing = true;
  EXPECT_THROW(arena.map(second, Content::kZeros), Error);
  gpu->is_failing = false;
  EXPECT_FALSE(second.mapped());
  EXPECT_EQ(arena.mapped_bytes(), 0);
  EXPECT_EQ(arena.parked_bytes(), 2 * kChunkBytes);
  arena.map(second, Content::kZeros);
  EXPECT_EQ(gpu->used_bytes(), 2 * kChunkBytes);
  lanes->await(lanes->mark(Lane::kCompute));
}

TEST(GpuArenaBlocks, WhichOfManyBlocksAreIdleTakesFewQuestions) {
  constexpr int kNumChunks = 64;
  const auto gpu = std::make_shared<AskedGpu>();
  const auto lanes = std::make_shared<GpuLanes>(gpu);
  const GpuDriver::Stream compute = gpu->create_stream();
  lanes->follow(compute);
  GpuSpace space(lanes, (kNumChunks + 16) * kChunkBytes, kNumChunks + 1);
  GpuArena arena(lanes, kNumChunks * kChunkBytes, kChunkBytes);
  GpuWindow& large = *space.create(16 * kChunkBytes);
  std::vector<GpuWindow*> windows;
  for (int i = 0; i < kNumChunks; ++i) windows.push_back(space.create(kChunkBytes));
  for (GpuWindow* const window : windows) arena.map(*window, Content::kAny);
  Gate gate(*gpu, compute);
  for (GpuWindow* const window : windows) arena.unmap(*window, Spare::kParked);
  gpu->num_asked = 0;
  arena.map_incoming(large);  // of blocks that are all still in use
  EXPECT_EQ(gpu->num_asked, 1);
  gate.open();
}

}  // namespace
}  // namespace gemini
