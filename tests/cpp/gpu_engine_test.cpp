// Laws of transfers on a GPU, tried on the simulated one: whatever the streams' delays, every
// operator sees what the one before it left, and the host waits for none of it.
#include "gpu/gpu_engine.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <vector>

#include "common/error.h"
#include "gpu/simulated_gpu.h"
#include "gpu_test_util.h"
#include "io_hooks.h"
#include "temp_dir.h"

namespace gemini {
namespace {

class GpuOrder : public testing::TestWithParam<uint32_t> {};

// Chunks that do not fit, used in any order: each has a copy on HOST or on DEVICE, never both.
TEST_P(GpuOrder, AnyDelaysGiveEveryOperatorWhatTheOneBeforeLeft) {
  constexpr size_t kNumChunks = 7;
  Machine machine(GetParam(), 300);
  GpuSpace space(machine.lanes, kNumChunks * kChunkBytes, kNumChunks);
  GpuArena arena(machine.lanes, 3 * kChunkBytes);
  PinnedArena host_arena(machine.lanes, kNumChunks * kChunkBytes);
  GpuEngine engine(machine.lanes, nullptr);
  std::vector<GpuWindow*> windows;
  std::vector<std::unique_ptr<HostPlace>> places;
  for (size_t i = 0; i < kNumChunks; ++i) {
    windows.push_back(space.create(kChunkBytes));
    places.push_back(std::make_unique<HostPlace>(kChunkBytes));
  }
  std::vector<int64_t> values(kNumChunks, 0);
  std::vector<size_t> resident;
  std::mt19937 random(GetParam());
  const auto evict = [&](size_t chunk) {
    host_arena.map(*places[chunk], Content::kAny);
    await_report(engine, engine.copy(*places[chunk], *windows[chunk], kChunkBytes));
    arena.unmap(*windows[chunk], Spare::kParked);
  };
  for (int round = 0; round < 300; ++round) {
    const size_t chunk = random() % kNumChunks;
    if (!windows[chunk]->mapped()) {
      if (resident.size() == 3) {
        const size_t victim = random() % 3;
        evict(resident[victim]);
        resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(victim));
      }
      if (places[chunk]->mapped()) {
        arena.map_incoming(*windows[chunk]);
        await_report(engine, engine.copy(*windows[chunk], *places[chunk], kChunkBytes));
        host_arena.unmap(*places[chunk], Spare::kParked);
      } else {
        arena.map(*windows[chunk], Content::kZeros);
      }
      resident.push_back(chunk);
    }
    machine.increment(*windows[chunk], values[chunk]++);
    EXPECT_LE(arena.mapped_bytes() + arena.parked_bytes(), arena.capacity());
  }
  machine.finish();
  EXPECT_EQ(machine.wrong, 0U);
  EXPECT_LE(machine.gpu->used_bytes(), arena.capacity());
}

INSTANTIATE_TEST_SUITE_P(Seeds, GpuOrder, testing::Range(0U, 8U));

TEST(GpuEngine, HostWaitsForNoOperator) {
  Machine machine;
  GpuSpace space(machine.lanes, 2 * kChunkBytes, 2);
  GpuArena arena(machine.lanes, kChunkBytes);
  PinnedArena host_arena(machine.lanes, 2 * kChunkBytes);
  GpuEngine engine(machine.lanes, nullptr);
  GpuWindow& first = *space.create(kChunkBytes);
  GpuWindow& second = *space.create(kChunkBytes);
  HostPlace first_place(kChunkBytes);
  HostPlace second_place(kChunkBytes);
  host_arena.map(second_place, Content::kAny);
  std::memset(second_place.address(), 0, kChunkBytes);

  Gate gate(*machine.gpu, machine.compute);
  arena.map(first, Content::kZeros);
  machine.increment(first, 0);
  host_arena.map(first_place, Content::kAny);
  await_report(engine, engine.copy(first_place, first, kChunkBytes));
  arena.unmap(first, Spare::kParked);
  arena.map_incoming(second);
  await_report(engine, engine.copy(second, second_place, kChunkBytes));
  machine.increment(second, 0);
  EXPECT_EQ(engine.num_in_flight(), 0);
  EXPECT_FALSE(machine.lanes->passed(machine.lanes->mark(Lane::kCompute)));

  gate.open();
  machine.finish();
  EXPECT_EQ(machine.wrong, 0U);
  EXPECT_EQ(*reinterpret_cast<int64_t*>(first_place.address()), 1);
  EXPECT_GE(engine.stall_seconds(), 0.0);
  engine.drain();
  EXPECT_EQ(engine.stats(Link::kHostToDevice).bytes, kChunkBytes);
  EXPECT_EQ(engine.stats(Link::kDeviceToHost).transfers, 1);
}

// A copy in the background must not see what operators write after it was reported.
TEST(GpuEngine, OperatorsWaitForACopyOfWhatTheyOverwrite) {
  Machine machine;
  GpuSpace space(machine.lanes, kChunkBytes, 1);
  GpuArena arena(machine.lanes, kChunkBytes);
  PinnedArena host_arena(machine.lanes, kChunkBytes);
  GpuEngine engine(machine.lanes, nullptr);
  GpuWindow& window = *space.create(kChunkBytes);
  HostPlace place(kChunkBytes);
  arena.map(window, Content::kZeros);
  host_arena.map(place, Content::kAny);
  Gate gate(*machine.gpu, machine.lanes->stream(Lane::kDeviceToHost));
  await_report(engine, engine.copy(place, window, kChunkBytes));
  machine.increment(window, 0);
  gate.open();
  machine.finish();
  EXPECT_EQ(*reinterpret_cast<int64_t*>(place.address()), 0);
  EXPECT_EQ(*reinterpret_cast<int64_t*>(window.address()), 1);
}

TEST(GpuArena, WindowThatComesBackToItsBlockIsMappedOnce) {
  Machine machine;
  GpuSpace space(machine.lanes, kChunkBytes, 1);
  GpuArena arena(machine.lanes, 2 * kChunkBytes);
  GpuWindow& window = *space.create(kChunkBytes);
  for (int i = 0; i < 5; ++i) {
    arena.map(window, Content::kAny);
    machine.increment(window, i == 0 ? 0 : i);
    arena.unmap(window, Spare::kParked);
  }
  EXPECT_EQ(machine.gpu->num_maps(), 1);
  EXPECT_EQ(arena.parked_bytes(), kChunkBytes);
  arena.trim(0);
  EXPECT_EQ(machine.gpu->used_bytes(), 0);
}

TEST(GpuArena, OperatorsComeAfterWhateverUsedTheirMemoryBefore) {
  Machine machine;
  GpuSpace space(machine.lanes, 2 * kChunkBytes, 2);
  GpuArena arena(machine.lanes, kChunkBytes);
  GpuWindow& first = *space.create(kChunkBytes);
  GpuWindow& second = *space.create(kChunkBytes);
  arena.map(first, Content::kZeros);
  machine.finish();
  const GpuDriver::Stream other = machine.lanes->stream(Lane::kDeviceToHost);
  Gate gate(*machine.gpu, other);
  int64_t seen = -1;
  machine.gpu->launch(other, {{first.address(), kChunkBytes}},
                      [&] { seen = *reinterpret_cast<int64_t*>(first.address()); });
  first.uses().note(Lane::kDeviceToHost, machine.lanes->mark(Lane::kDeviceToHost));
  arena.unmap(first, Spare::kParked);
  arena.map(second, Content::kAny);
  machine.increment(second, 0);
  gate.open();
  machine.finish();
  EXPECT_EQ(seen, 0);
}

TEST(GpuSpace, PoisonedWindowsReadNanUntilTheyAreGivenMemory) {
  Machine machine;
  GpuSpace space(machine.lanes, 2 * kChunkBytes, 2);
  GpuArena arena(machine.lanes, kChunkBytes);
  GpuWindow& first = *space.create(kChunkBytes);
  GpuWindow& second = *space.create(kChunkBytes);
  arena.map(first, Content::kZeros);
  machine.increment(first, 0);
  arena.unmap(first, Spare::kParked);
  space.poison(first);
  space.poison(second);
  machine.increment(first, -1);  // all bits are one; what it leaves there is nobody's
  arena.map(second, Content::kZeros);
  machine.increment(second, 0);
  arena.unmap(second, Spare::kParked);
  arena.map(first, Content::kZeros);
  machine.increment(first, 0);
  machine.finish();
  EXPECT_EQ(machine.wrong, 0U);
  EXPECT_LE(machine.gpu->used_bytes(), kChunkBytes + machine.gpu->granularity());
}

TEST(GpuSpace, PoisonThatCouldNotBeMappedAtFirstIsPoisonLater) {
  Machine machine;
  const int64_t unit = machine.gpu->granularity();
  GpuSpace space(machine.lanes, unit, 1);
  GpuWindow& window = *space.create(unit);
  const GpuDriver::Block in_the_way = machine.gpu->create_block(unit);
  machine.gpu->map(window.address(), unit, in_the_way);
  EXPECT_THROW(space.poison(window), Error);
  machine.gpu->unmap(window.address(), unit);
  machine.gpu->destroy_block(in_the_way);
  space.poison(window);
  machine.finish();
  EXPECT_EQ(*reinterpret_cast<int64_t*>(window.address()), -1);
}

TEST(GpuArena, RefusesWhatDoesNotFitAndChangesNothing) {
  Machine machine;
  GpuSpace space(machine.lanes, 3 * kChunkBytes, 3);
  GpuArena arena(machine.lanes, kChunkBytes);
  GpuWindow& first = *space.create(kChunkBytes);
  GpuWindow& second = *space.create(kChunkBytes);
  arena.map(first, Content::kAny);
  EXPECT_THROW(arena.map(second, Content::kAny), OutOfBudget);
  EXPECT_THROW(arena.map(first, Content::kAny), StateError);
  EXPECT_FALSE(second.mapped());
  EXPECT_EQ(arena.mapped_bytes(), kChunkBytes);
  EXPECT_EQ(space.find(second.address() + 5), 1);
  EXPECT_EQ(space.find(space.address() - 1), -1);
}

TEST(GpuArena, FullGpuIsOutOfBudget) {
  Machine machine;
  GpuSpace space(machine.lanes, 256 * kMib, 1);
  GpuArena arena(machine.lanes, 256 * kMib);
  GpuWindow& window = *space.create(128 * kMib);
  EXPECT_THROW(arena.map(window, Content::kAny), OutOfBudget);
  EXPECT_FALSE(window.mapped());
  EXPECT_EQ(arena.mapped_bytes(), 0);
}

TEST(SimulatedGpu, PunishesUnmappingWhatIsInUse) {
  SimulatedGpu gpu(options(0, 0));
  const GpuDriver::Stream stream = gpu.create_stream();
  const GpuAddress address = gpu.reserve(kChunkBytes);
  const GpuDriver::Block block = gpu.create_block(kChunkBytes);
  gpu.map(address, kChunkBytes, block);
  EXPECT_THROW(gpu.allow(address, 2 * kChunkBytes), Error);
  gpu.allow(address, kChunkBytes);
  EXPECT_THROW(gpu.allow(address, kChunkBytes), Error);  // it may be in use by now
  Gate gate(gpu, stream);
  gpu.fill(address, 0, kChunkBytes, stream);
  EXPECT_THROW(gpu.unmap(address, kChunkBytes), Error);
  gate.open();
  const GpuDriver::Event event = gpu.create_event(GpuDriver::Waits::kSpinning);
  gpu.record(event, stream);
  gpu.await(event);
  gpu.unmap(address, kChunkBytes);
  gpu.destroy_block(block);
  gpu.release(address, kChunkBytes);
  gpu.destroy_event(event);
}

class GpuDisk : public testing::TestWithParam<int64_t> {};

TEST_P(GpuDisk, WhatIsWrittenComesBack) {
  const int64_t nbytes = GetParam();
  const TempDir dir;
  Machine machine(1, 50);
  AsyncFile file({dir.path()}, 2 * nbytes);
  GpuSpace space(machine.lanes, nbytes, 1);
  GpuArena arena(machine.lanes, 64 * kMib);
  PinnedArena host_arena(machine.lanes, nbytes);
  GpuEngine engine(machine.lanes, &file);
  GpuWindow& window = *space.create(nbytes);
  HostPlace place(nbytes);
  arena.map(window, Content::kZeros);
  machine.increment(window, 0);
  await_report(engine, engine.write(window, nbytes, nbytes));
  machine.increment(window, 1);
  host_arena.map(place, Content::kAny);
  await_report(engine, engine.copy(place, window, nbytes));
  await_report(engine, engine.write(place, nbytes, 0));
  arena.unmap(window, Spare::kParked);
  arena.map_incoming(window);
  await_report(engine, engine.read(window, nbytes, nbytes));
  machine.increment(window, 1);
  arena.unmap(window, Spare::kParked);
  arena.map_incoming(window);
  await_report(engine, engine.read(window, nbytes, 0));
  machine.increment(window, 2);
  machine.finish();
  EXPECT_EQ(machine.wrong, 0U);
  EXPECT_EQ(engine.stats(Link::kDiskRead).bytes, 2 * nbytes);
}

INSTANTIATE_TEST_SUITE_P(Sizes, GpuDisk, testing::Values(4096, 4 * kMib, 21 * kMib + 4096));

TEST(GpuEngine, FailedReadIsReportedAndTheNextOneWorks) {
  const TempDir dir;
  const int64_t nbytes = 24 * kMib;
  Machine machine;
  bool broken = true;
  const auto hook = std::make_shared<FaultyHook>([&](IoKind kind, int64_t, int64_t position) {
    return kind == IoKind::kRead && broken && position >= 9 * kMib ? -EIO : 0;
  });
  AsyncFile file({dir.path()}, nbytes, {}, hook);
  GpuSpace space(machine.lanes, nbytes, 1);
  GpuArena arena(machine.lanes, 64 * kMib);
  GpuEngine engine(machine.lanes, &file);
  GpuWindow& window = *space.create(nbytes);
  arena.map(window, Content::kZeros);
  machine.increment(window, 0);
  await_report(engine, engine.write(window, nbytes, 0));
  arena.unmap(window, Spare::kParked);
  arena.map_incoming(window);
  const uint64_t ticket = engine.read(window, nbytes, 0);
  ASSERT_TRUE(engine.wait_any(-1));
  const std::vector<TransferResult> results = engine.poll();
  ASSERT_EQ(results.size(), 1U);
  EXPECT_EQ(results[0].ticket, ticket);
  EXPECT_FALSE(results[0].ok);
  EXPECT_EQ(results[0].error_code, EIO);
  broken = false;
  await_report(engine, engine.read(window, nbytes, 0));
  machine.increment(window, 1);
  machine.finish();
  EXPECT_EQ(machine.wrong, 0U);
}

TEST(GpuEngine, RefusesMisuse) {
  Machine machine;
  GpuSpace space(machine.lanes, kChunkBytes, 1);
  GpuArena arena(machine.lanes, kChunkBytes);
  GpuEngine engine(machine.lanes, nullptr);
  GpuWindow& window = *space.create(kChunkBytes);
  EXPECT_THROW((void)engine.read(window, kChunkBytes, 0), StateError);
  arena.map(window, Content::kAny);
  EXPECT_THROW((void)engine.read(window, kChunkBytes, 0), StateError);
  EXPECT_THROW((void)engine.write(window, 2 * kChunkBytes, 0), StateError);
  engine.close();
  EXPECT_FALSE(engine.wait_any(0));
  EXPECT_TRUE(engine.poll().empty());
}

// A driver that pins nothing.
class Unpinned : public SimulatedGpu {
 public:
  using SimulatedGpu::SimulatedGpu;
  void pin(char*, int64_t) override { throw Error("no memory may be locked"); }
};

TEST(PinnedArena, TakesOrdinaryMemoryWhereNoneMayBeLocked) {
  const auto lanes = std::make_shared<GpuLanes>(std::make_shared<Unpinned>(options(0, 0)));
  PinnedArena arena(lanes, kChunkBytes);
  HostPlace place(kChunkBytes);
  arena.map(place, Content::kAny);
  std::memset(place.address(), 1, kChunkBytes);
  EXPECT_EQ(arena.unpinned_bytes(), kChunkBytes);
  HostPlace other(kChunkBytes);
  EXPECT_THROW(arena.map(other, Content::kAny), OutOfBudget);
  arena.unmap(place, Spare::kParked);
  arena.map(other, Content::kAny);
  EXPECT_EQ(arena.parked_bytes(), 0);
}

}  // namespace
}  // namespace gemini
