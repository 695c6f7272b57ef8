// The eviction policies against what they promise.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "chunk/chunk_table.h"
#include "chunk/eviction.h"
#include "chunk_test_util.h"

namespace gemini {
namespace {

using testing::kUntraced;
using testing::text;
using testing::World;

// The fewest fetches with which `slots` equal chunks of DEVICE can serve the trace, starting empty.
// Tries every victim; states that were met before are remembered.
class Optimum {
 public:
  Optimum(std::vector<ChunkId> trace, int slots) : trace_(std::move(trace)), slots_(slots) {}

  int fetches(size_t position = 0, unsigned resident = 0) {
    if (position == trace_.size()) return 0;
    const auto known = known_.find({position, resident});
    if (known != known_.end()) return known->second;
    const unsigned wanted = 1U << trace_[position];
    int best = std::numeric_limits<int>::max();
    if ((resident & wanted) != 0) {
      best = fetches(position + 1, resident);
    } else if (std::popcount(resident) < slots_) {
      best = 1 + fetches(position + 1, resident | wanted);
    } else {
      for (unsigned victim = 1; victim <= resident; victim <<= 1) {
        if ((resident & victim) == 0) continue;
        best = std::min(best, 1 + fetches(position + 1, (resident & ~victim) | wanted));
      }
    }
    return known_[{position, resident}] = best;
  }

 private:
  std::vector<ChunkId> trace_;
  int slots_;
  std::map<std::pair<size_t, unsigned>, int> known_;
};

// Fetches of one step of single-chunk accesses, all chunks clean on HOST and DEVICE empty.
int fetches_by_the_table(const std::vector<ChunkId>& trace, int slots, bool scheduled) {
  constexpr int32_t kChunks = 6;
  World world({10 * slots, 10 * kChunks, 0}, std::vector<int64_t>(kChunks, 10));
  for (TensorId id = 0; id < kChunks; ++id) world.use({id});
  world.empty_device();
  std::vector<std::vector<ChunkId>> accesses;
  for (const ChunkId id : trace) accesses.push_back({id});
  if (scheduled) {
    world.table.set_schedule(std::make_shared<Schedule>(accesses, std::vector<int64_t>(), kChunks));
  }
  world.table.begin_step();
  world.log.clear();
  for (const ChunkId id : trace) world.use({id});
  return static_cast<int>(std::ranges::count_if(
      world.log, [](const Action& action) { return action.kind == ActionKind::kFetch; }));
}

TEST(Belady, FetchesAsFewAsTheBestOfAllChoices) {
  std::mt19937 random(3);
  int lru_is_worse = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<ChunkId> trace(14);
    for (ChunkId& id : trace) id = static_cast<ChunkId>(random() % 6);
    const int slots = 2 + static_cast<int>(random() % 3);
    const int optimum = Optimum(trace, slots).fetches();
    EXPECT_EQ(fetches_by_the_table(trace, slots, true), optimum);
    lru_is_worse += fetches_by_the_table(trace, slots, false) > optimum ? 1 : 0;
  }
  EXPECT_GT(lru_is_worse, 50);  // the traces do tell the policies apart
}

TEST(Belady, FurthestNextUseGoesFirstAndCleanCountsTwice) {
  const Schedule schedule({{0}, {1}, {2}, {3}, {4}, {5}}, {}, 8);
  const Policy belady = Belady{.schedule = &schedule, .moment = 1};
  const auto at = [&](ChunkId chunk, bool clean) { return score(belady, {chunk, clean, 0}); };
  EXPECT_GT(at(5, false), at(4, false));
  EXPECT_GT(at(0, false), at(5, false));  // the next step begins after this one
  EXPECT_GT(at(3, true), at(5, false));   // 2 * 3 > 5
  EXPECT_LT(at(2, true), at(5, false));   // 2 * 2 < 5
  EXPECT_GT(at(7, false), at(0, true));   // never used
  EXPECT_GT(at(7, true), at(7, false));
}

TEST(Belady, WhatIsUsedNotAfterABoundMustStay) {
  const Schedule schedule({{0}, {1}, {2}}, {}, 4);
  const Policy belady = Belady{.schedule = &schedule, .moment = 0, .after = 1};
  EXPECT_FALSE(score(belady, {0, true, 0}).has_value());
  EXPECT_FALSE(score(belady, {1, true, 0}).has_value());
  EXPECT_TRUE(score(belady, {2, true, 0}).has_value());
  EXPECT_TRUE(score(belady, {3, true, 0}).has_value());
}

TEST(Lru, TheLeastRecentlyReleasedGoesFirst) {
  EXPECT_GT(score(Lru{}, {0, false, 3}), score(Lru{}, {1, true, 4}));
}

// Chunks 0 and 1 are resident, 0 used longer ago; the schedule needs 0 again before 1.
World two_residents() { return World({20, 40, 0}, {10, 10, 10, 10}); }

void run_two_moments(World& world) {
  for (TensorId id = 0; id < 4; ++id) world.use({id});
  world.empty_device();
  const std::vector<std::vector<ChunkId>> accesses{{0}, {1}, {2}, {0}, {1}, {3}};
  world.table.set_schedule(std::make_shared<Schedule>(accesses, std::vector<int64_t>(), 4));
  world.table.begin_step();
  world.use({0});
  world.use({1});
}

TEST(Divergence, OnTraceTheFurthestGoesAndOffTraceTheOldest) {
  World on_trace = two_residents();
  run_two_moments(on_trace);
  EXPECT_EQ(text(on_trace.access({2})), "DROP 1 DEVICE, FETCH 2");
  World off_trace = two_residents();
  run_two_moments(off_trace);
  EXPECT_EQ(text(off_trace.access({3})), "DROP 0 DEVICE, FETCH 3");
  EXPECT_TRUE(off_trace.table.diverged());
}

TEST(Divergence, AnUntracedAccessStillKnowsTheSchedule) {
  World world = two_residents();
  run_two_moments(world);
  EXPECT_EQ(text(world.table.access(std::vector<TensorId>{3}, kUntraced)),
            "DROP 1 DEVICE, FETCH 3");
  EXPECT_FALSE(world.table.diverged());
  EXPECT_EQ(world.table.moment(), 2);
}

}  // namespace
}  // namespace gemini
