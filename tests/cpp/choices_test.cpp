// Choices: which uses are one moment, what leaves first, and what comes ahead of its use.
#include "chunk/choices.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "chunk/chunk_table.h"
#include "chunk_test_util.h"
#include "common/error.h"

namespace gemini {
namespace {

using testing::World;

// Chunks 0 and 1 are dense; experts 0 to 3 have one chunk in each of two arrays: 2 to 5, 6 to 9.
constexpr ChunkId kUp = 2;
constexpr ChunkId kDown = 6;

class TwoArrays : public ::testing::Test {
 protected:
  explicit TwoArrays(int64_t chunks_on_device = 10)
      : world({10 * chunks_on_device, 0, 1000}, std::vector<int64_t>(10, 10)) {
    world.table.add_choice({{2, 6}, {3, 7}, {4, 8}, {5, 9}});
    for (TensorId id = 0; id < 10; ++id) world.use({id});
    world.empty_device();
    world.complete_all();
  }

  // One pass: a dense chunk, the experts' products, the other dense chunk.
  void pass(const std::vector<ChunkId>& experts) {
    world.table.begin_step();
    world.use({0});
    for (const ChunkId array : {kUp, kDown}) {
      std::vector<TensorId> rows;
      for (const ChunkId expert : experts) rows.push_back(array + expert);
      world.use(rows);
    }
    world.use({1});
  }

  void follow() {
    const std::vector<std::vector<ChunkId>> accesses{{0}, {kUp}, {1}};
    world.table.set_schedule(std::make_shared<Schedule>(accesses, std::vector<int64_t>{}, 10));
  }

  bool resident(ChunkId chunk) const { return world.table.chunk(chunk).resident(); }

  World world;
};

class FewOnDevice : public TwoArrays {
 protected:
  FewOnDevice() : TwoArrays(5) {}
};

TEST_F(TwoArrays, UsesOfOneChoiceThatFollowEachOtherAreOneMoment) {
  pass({1, 3});
  EXPECT_EQ(world.table.record().accesses(), (std::vector<std::vector<ChunkId>>{{0}, {kUp}, {1}}));
  EXPECT_EQ(world.table.moment(), 3);
}

TEST_F(TwoArrays, WhicheverMembersAPassUsesItFollowsTheOrder) {
  follow();
  for (const std::vector<ChunkId>& experts : {std::vector<ChunkId>{0}, {1, 2}, {0, 1, 2, 3}, {3}}) {
    pass(experts);
    EXPECT_FALSE(world.table.end_step());
  }
  world.table.begin_step();
  world.use({1});
  EXPECT_TRUE(world.table.diverged());
}

TEST_F(TwoArrays, AnAccessWithADenseChunkIsAMomentOfItsOwn) {
  world.table.begin_step();
  world.use({kUp});
  EXPECT_TRUE(world.table.continues(std::vector<TensorId>{kUp + 1}));
  EXPECT_FALSE(world.table.continues(std::vector<TensorId>{kUp + 1, 0}));
  world.use({kUp + 1, 0});
  EXPECT_EQ(world.table.moment(), 2);
}

TEST_F(TwoArrays, WhatAMemberNeedsNextComesWhileItsFirstChunkIsUsed) {
  follow();
  world.table.begin_step();
  world.use({0});
  world.access({kUp + 1, kUp + 2});
  world.wait_ready({kUp + 1, kUp + 2});
  world.prefetch(8);
  world.complete_all();
  EXPECT_TRUE(resident(kDown + 1));
  EXPECT_TRUE(resident(kDown + 2));
  EXPECT_FALSE(resident(kDown));  // of a member that is not used
  world.release({kUp + 1, kUp + 2});
}

TEST_F(FewOnDevice, OfAChoiceTheMemberThatIsUsedRarelyLeavesFirst) {
  follow();
  for (int i = 0; i < 8; ++i) pass({0});
  pass({1});
  pass({0});
  EXPECT_TRUE(resident(kUp));
  EXPECT_TRUE(resident(kDown));
  EXPECT_FALSE(resident(kUp + 1) && resident(kDown + 1));
}

TEST_F(FewOnDevice, ADenseChunkStaysBesideMembersOfWhichPassesUseSome) {
  follow();
  for (const ChunkId expert : {0, 1, 2, 3, 0, 1, 2, 3}) pass({expert});
  EXPECT_TRUE(resident(0));
  EXPECT_TRUE(resident(1));
}

TEST_F(FewOnDevice, AnAccessThatDoesNotFitLeavesTheMomentAsItWas) {
  world.table.begin_step();
  world.use({kUp});
  const int64_t moment = world.table.moment();
  const std::vector<TensorId> all{2, 3, 4, 5, 6, 7};
  EXPECT_THROW(world.access(all), OutOfBudget);
  EXPECT_EQ(world.table.moment(), moment);
  EXPECT_TRUE(world.table.continues(std::vector<TensorId>{kUp + 1}));
}

TEST_F(TwoArrays, WhatIsExpectedComesBesideTheMoment) {
  follow();
  world.table.begin_step();
  world.use({0});
  world.use({kUp});
  world.table.expect(std::vector<TensorId>{kUp + 3, 0});
  world.prefetch(8);
  world.complete_all();
  EXPECT_TRUE(resident(kUp + 3));
  EXPECT_FALSE(resident(kDown + 3));  // an access beside the moment says nothing of its member
  world.access({kUp + 3}, testing::kUntraced);
  world.release({kUp + 3});
  EXPECT_EQ(world.table.moment(), 2);
  EXPECT_TRUE(world.table.continues(std::vector<TensorId>{kUp + 1}));
}

TEST_F(TwoArrays, WhatNearlyEveryPassUsesComesAheadOfIt) {
  follow();
  for (int i = 0; i < 40; ++i) pass({1});
  world.empty_device();
  world.complete_all();
  world.table.begin_step();
  world.use({0});
  world.prefetch(8);
  world.complete_all();
  EXPECT_TRUE(resident(kUp + 1));
  EXPECT_FALSE(resident(kUp));
}

// Dense chunks 0 and 1, and four blocks of keys and values.
class Blocks : public ::testing::Test {
 protected:
  Blocks() : world({50, 0, 1000}, std::vector<int64_t>(6, 10)) {
    world.table.add_choice({{2}, {3}, {4}, {5}}, true);
    const std::vector<std::vector<ChunkId>> accesses{{0}, {2}, {1}};
    world.table.set_schedule(std::make_shared<Schedule>(accesses, std::vector<int64_t>{}, 6));
  }

  void pass(const std::vector<TensorId>& blocks) {
    world.table.begin_step();
    world.use({0});
    world.use(blocks);
    world.use({1});
  }

  bool resident(ChunkId chunk) const { return world.table.chunk(chunk).resident(); }

  World world;
};

TEST_F(Blocks, OfACertainChoiceComeAheadIfTheLastPassUsedThem) {
  pass({2, 3});
  pass({3, 4});
  world.empty_device();
  world.table.begin_step();
  world.use({0});
  world.prefetch(8);
  world.complete_all();
  EXPECT_FALSE(resident(2));
  EXPECT_TRUE(resident(3));
  EXPECT_TRUE(resident(4));
}

TEST_F(Blocks, OfACertainChoiceAreAsFarAwayAsItsMoment) {
  pass({2});
  for (const ChunkId block : {2, 3}) EXPECT_EQ(world.table.moments_passed_by(block), 0);
}

TEST_F(FewOnDevice, WhatWillNotBeUsedSoonLeavesANearlyFullDevice) {
  world.use({0, 1, kUp});
  world.leave({kUp});
  EXPECT_TRUE(resident(kUp));  // three of five chunks
  world.use({kUp + 1});
  world.leave({kUp});
  world.complete_all();
  EXPECT_FALSE(resident(kUp));
}

TEST_F(TwoArrays, MembersThatComeLaterAreOfTheSameChoice) {
  const ChunkId later = world.table.add_chunk(10);
  world.table.widen_choice(kUp, {{later}});
  world.table.begin_step();
  world.use({kUp});
  const TensorId tensor = world.table.add_tensor(later);
  EXPECT_TRUE(world.table.continues(std::vector<TensorId>{tensor}));
  EXPECT_THROW(world.table.widen_choice(kUp, {{later}}), StateError);
  EXPECT_THROW(world.table.widen_choice(0, {{1}}), StateError);
}

TEST(Choices, RefuseAChunkTwice) {
  Choices choices;
  choices.add({{2}, {3}});
  EXPECT_THROW(choices.add({{3}, {4}}), StateError);
  EXPECT_THROW(choices.add({{5}, {5}}), StateError);
  EXPECT_THROW(choices.add({{6}, {}}), StateError);
  EXPECT_THROW(choices.add({}), StateError);
  EXPECT_FALSE(choices.has(4));
}

}  // namespace
}  // namespace gemini
