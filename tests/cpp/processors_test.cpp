// Threads that keep to the processors near a device, on whatever processors this machine has.
#include "common/processors.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "adam/parallel.h"
#include "gpu/pinned_arena.h"
#include "gpu/simulated_gpu.h"
#include "temp_dir.h"

namespace gemini {
namespace {

Processors allowed() {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(::sched_getaffinity(0, sizeof(set), &set), 0);
  Processors found;
  for (int each = 0; each < CPU_SETSIZE; ++each) {
    if (CPU_ISSET(each, &set)) found.push_back(each);
  }
  return found;
}

TEST(Processors, AListIsReadAsTheKernelWritesIt) {
  EXPECT_EQ(parse_processors("0-3,8\n"), (Processors{0, 1, 2, 3, 8}));
  EXPECT_EQ(parse_processors("5"), Processors{5});
  EXPECT_EQ(parse_processors("6,1-2"), (Processors{1, 2, 6}));
}

TEST(Processors, WhatIsNoListNamesNone) {
  for (const char* text : {"", "\n", "-", "a", "3-1", "1,", "1-", "0-99999999999", "1 2", "-1"}) {
    EXPECT_TRUE(parse_processors(text).empty()) << text;
  }
}

TEST(Processors, ThoseOfADeviceAreFoundByItsBus) {
  const TempDir sysfs;
  const std::string device = sysfs.path() + "/bus/pci/devices/0000:3b:00.0";
  std::filesystem::create_directories(device);
  std::ofstream(device + "/local_cpulist") << "16-18\n";
  EXPECT_EQ(processors_near_pci("0000:3B:00.0", sysfs.path()), (Processors{16, 17, 18}));
  EXPECT_TRUE(processors_near_pci("0000:3C:00.0", sysfs.path()).empty());
}

TEST(KeepsTo, TheThreadAndThoseItStartsRunThereAlone) {
  const Processors before = allowed();
  if (before.size() < 2) GTEST_SKIP() << "one processor: there is nothing to keep to";
  const int near = before.back();
  {
    const KeepsTo keeps({near, 8000});
    EXPECT_TRUE(keeps.restricts());
    EXPECT_EQ(allowed(), Processors{near});
    std::atomic<int> elsewhere = 0;
    parallel_ranges(64, 1, 4, [&](int64_t, int64_t) { elsewhere += ::sched_getcpu() != near; });
    EXPECT_EQ(elsewhere, 0);
  }
  EXPECT_EQ(allowed(), before);
}

TEST(KeepsTo, WhereNoneIsLeftTheThreadRunsWhereItDid) {
  const Processors before = allowed();
  for (const Processors& each : {Processors{}, Processors{8000}, before}) {
    const KeepsTo keeps(each);
    EXPECT_FALSE(keeps.restricts());
    EXPECT_EQ(allowed(), before);
  }
}

// The memory of a simulated GPU that notes where it was taken.
class NotingGpu : public SimulatedGpu {
 public:
  using SimulatedGpu::SimulatedGpu;
  void pin(char*, int64_t) override { taken_on = allowed(); }
  Processors taken_on;
};

TEST(KeepsTo, HostMemoryOfAGpuIsTakenNearIt) {
  const Processors before = allowed();
  if (before.size() < 2) GTEST_SKIP() << "one processor: there is nothing to keep to";
  SimulatedGpuOptions options;
  options.processors = {before.front()};
  const auto gpu = std::make_shared<NotingGpu>(options);
  PinnedArena arena(std::make_shared<GpuLanes>(gpu), 1 << 20);
  HostPlace place(4096);
  arena.map(place, Content::kZeros);
  EXPECT_EQ(gpu->taken_on, Processors{before.front()});
  EXPECT_EQ(allowed(), before);
}

}  // namespace
}  // namespace gemini
