#include "chunk/schedule.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "common/error.h"

namespace gemini {
namespace {

using Accesses = std::vector<std::vector<ChunkId>>;

int64_t next_use_by_walking(const Accesses& accesses, ChunkId chunk, int64_t moment) {
  const auto length = static_cast<int64_t>(accesses.size());
  for (int64_t m = moment; m < moment + length; ++m) {
    for (const ChunkId used : accesses[static_cast<size_t>(m % length)]) {
      if (used == chunk) return m;
    }
  }
  return kNever;
}

TEST(Schedule, NextUseEqualsAWalkAlongTheRepeatedStep) {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    constexpr int32_t kChunks = 6;
    Accesses accesses(1 + random() % 9);
    for (auto& access : accesses) {
      for (size_t i = random() % 4; i > 0; --i) {
        access.push_back(static_cast<ChunkId>(random() % (kChunks - 1)));
      }
    }
    const Schedule schedule(accesses, {}, kChunks);
    for (int64_t moment = 0; moment < 3 * schedule.num_moments(); ++moment) {
      for (ChunkId chunk = 0; chunk < kChunks; ++chunk) {
        EXPECT_EQ(schedule.next_use(chunk, moment), next_use_by_walking(accesses, chunk, moment));
      }
    }
  }
}

TEST(Schedule, AccessesAreSortedAndUnique) {
  const Schedule schedule({{2, 0, 2}, {}}, {5, 9}, 3);
  const auto first = schedule.access_at(0);
  EXPECT_EQ(std::vector<ChunkId>(first.begin(), first.end()), (std::vector<ChunkId>{0, 2}));
  EXPECT_TRUE(schedule.access_at(1).empty());
  EXPECT_EQ(schedule.access_at(2).size(), 2U);
  EXPECT_EQ(schedule.reserve_bytes(3), 9);
  EXPECT_EQ(schedule.max_reserve(), 9);
}

TEST(Schedule, AnEmptyStepUsesNothing) {
  const Schedule schedule({}, {}, 2);
  EXPECT_EQ(schedule.next_use(0, 5), kNever);
  EXPECT_EQ(schedule.reserve_bytes(5), 0);
  EXPECT_TRUE(schedule.access_at(5).empty());
}

TEST(Schedule, AnUnknownChunkIsNeverUsed) {
  const Schedule schedule({{0}}, {}, 1);
  EXPECT_EQ(schedule.next_use(1, 0), kNever);
  EXPECT_EQ(schedule.next_use(-1, 0), kNever);
}

TEST(Schedule, ContradictionsAreRefused) {
  EXPECT_THROW(Schedule({{3}}, {}, 3), StateError);
  EXPECT_THROW(Schedule({{-1}}, {}, 3), StateError);
  EXPECT_THROW(Schedule({{0}}, {1, 2}, 3), StateError);
  EXPECT_THROW(Schedule({{0}}, {-1}, 3), StateError);
  EXPECT_THROW(Schedule({}, {}, -1), StateError);
}

}  // namespace
}  // namespace gemini
