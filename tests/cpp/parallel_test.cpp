// Splitting work over threads that are started for the call: there is no OpenMP runtime here.
#include "adam/parallel.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <thread>
#include <vector>

#include "adam/openmp_team.h"
#include "forbidden_calls.h"

namespace gemini {
namespace {

// How often each index of [0, count) is visited.
std::vector<int> visits(int64_t count, int64_t grain, const Workers& workers) {
  std::vector<int> seen(static_cast<size_t>(std::max<int64_t>(count, 0)), 0);
  parallel_ranges(count, grain, workers, [&](int64_t begin, int64_t end) {
    if (end - begin > grain || begin % grain != 0 || begin >= end) return;  // shows as unseen
    for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];   // disjoint: no lock
  });
  return seen;
}

TEST(ParallelRanges, CoverEveryIndexOnceInRangesOfAtMostGrain) {
  for (const int64_t count : {-3, 0, 1, 63, 64, 65, 1000, 4097}) {
    for (const int64_t grain : {1, 7, 64, 5000}) {
      for (const int threads : {0, 1, 2, 5, 64}) {
        const std::vector<int> seen = visits(count, grain, threads);
        ASSERT_EQ(seen, std::vector<int>(seen.size(), 1)) << count << " " << grain;
      }
    }
  }
}

TEST(ParallelRanges, RunOnTheCallingThreadAloneForOneThreadAndForOneRange) {
  const std::thread::id caller = std::this_thread::get_id();
  const auto check = [&](int64_t, int64_t) { EXPECT_EQ(std::this_thread::get_id(), caller); };
  parallel_ranges(1000, 10, 1, check);
  parallel_ranges(1000, 1000, 4, check);
}

TEST(ParallelRanges, SeveralThreadsMayCallAtOnce) {
  std::vector<std::thread> callers;
  std::atomic<int> right = 0;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 20; ++i) right += visits(1000, 7, 3) == std::vector<int>(1000, 1);
    });
  }
  for (std::thread& each : callers) each.join();
  EXPECT_EQ(right, 80);
}

TEST(OpenmpTeam, WithoutARuntimeThereIsNone) {
  EXPECT_FALSE(run_on_openmp_team(2, [](void*) { FAIL(); }, nullptr));
}

#if defined(GEMINI_CAN_FORBID_CALLS) && defined(__NR_clone3)

int work_without_threads() {
  if (!forbid(__NR_clone3, __NR_clone, EAGAIN)) return kSkipped;
  const std::thread::id caller = std::this_thread::get_id();
  bool alone = true;
  int64_t done = 0;
  parallel_ranges(100, 1, 4, [&](int64_t begin, int64_t end) {
    alone = alone && std::this_thread::get_id() == caller;
    done += end - begin;
  });
  return alone && done == 100 ? 0 : 1;
}

TEST(ParallelRanges, WhereThreadsAreRefusedTheCallingOneWorksAlone) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";  // the filter stays
  const auto lives = [](int status) {
    return WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kSkipped);
  };
  EXPECT_EXIT(::_exit(work_without_threads()), lives, "");
}

#endif

}  // namespace
}  // namespace gemini
