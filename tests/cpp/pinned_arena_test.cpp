// HOST memory that the CPU itself reads and writes, between copies that streams have not done yet.
#include "gpu/pinned_arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "gpu/gpu_engine.h"
#include "gpu/simulated_gpu.h"

namespace gemini {
namespace {

constexpr int64_t kChunkBytes = 64 << 10;

// A GPU with one window, and copies that begin late.
struct Machine {
  Machine()
      : gpu(std::make_shared<SimulatedGpu>(
            SimulatedGpuOptions{int64_t{1} << 24, 16 << 10, 20'000, 7})),
        lanes(std::make_shared<GpuLanes>(gpu)),
        space(lanes, kChunkBytes, 1),
        arena(lanes, kChunkBytes),
        host_arena(lanes, 2 * kChunkBytes),
        engine(lanes, nullptr),
        window(*space.create(kChunkBytes)) {
    arena.map(window, Content::kZeros);
    std::memset(reinterpret_cast<void*>(window.address()), 0x5A, kChunkBytes);
  }

  // Starts a copy of the window; operators may count on it, the CPU may not.
  void evict_to(HostPlace& place) {
    host_arena.map(place, Content::kAny);
    const auto ticket = engine.copy(place, window, kChunkBytes);
    ASSERT_TRUE(engine.wait_any(-1));
    EXPECT_EQ(engine.poll().front().ticket, ticket);
  }

  std::shared_ptr<SimulatedGpu> gpu;
  std::shared_ptr<GpuLanes> lanes;
  GpuSpace space;
  GpuArena arena;
  PinnedArena host_arena;
  GpuEngine engine;
  GpuWindow& window;
};

bool all_bytes_are(const HostPlace& place, char value) {
  return std::all_of(place.address(), place.address() + kChunkBytes,
                     [value](char byte) { return byte == value; });
}

TEST(PinnedArena, TheCpuWaitsForACopyThatWasReportedBeforeItsEnd) {
  Machine machine;
  HostPlace place(kChunkBytes);
  machine.evict_to(place);
  machine.host_arena.await(place);
  EXPECT_TRUE(all_bytes_are(place, 0x5A));
}

TEST(PinnedArena, ZerosComeAfterWhateverUsedTheirMemoryBefore) {
  Machine machine;
  HostPlace before(kChunkBytes);
  HostPlace place(kChunkBytes);
  machine.evict_to(before);
  machine.host_arena.unmap(before, Spare::kParked);
  machine.host_arena.map(place, Content::kZeros);
  machine.engine.drain();
  EXPECT_TRUE(all_bytes_are(place, 0));
}

TEST(PinnedArena, CountsNothingAsUnpinnedThatIsPinned) {
  Machine machine;
  HostPlace place(kChunkBytes);
  machine.host_arena.map(place, Content::kAny);
  EXPECT_EQ(machine.host_arena.unpinned_bytes(), 0);
}

}  // namespace
}  // namespace gemini
