// Splitting work over the threads of an OpenMP runtime, GCC's, as torch brings it along.
#include "adam/openmp_team.h"

#include <gtest/gtest.h>

#ifdef _OPENMP

#include <omp.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "adam/adam.h"
#include "adam/parallel.h"
#include "adam_test_util.h"
#include "forbidden_calls.h"

namespace gemini {
namespace {

constexpr unsigned kChildSeconds = 20;  // a child that hangs must not hang the test

// The threads of the calling thread's team.
std::set<std::thread::id> team() {
  struct Met {
    std::mutex mutex;
    std::set<std::thread::id> threads;  // guarded by mutex
  } met;
  const auto meet = [](void* data) {
    auto& [mutex, threads] = *static_cast<Met*>(data);
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  };
  EXPECT_TRUE(run_on_openmp_team(1, meet, &met));
  return met.threads;
}

int64_t sum_to(int64_t count, const Workers& workers) {
  std::atomic<int64_t> sum = 0;
  parallel_ranges(count, 10, workers, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum += i;
  });
  return sum;
}

TEST(OpenmpTeam, TheSameThreadsWorkEveryTime) {
  omp_set_num_threads(3);
  const auto first = team();
  EXPECT_EQ(first.size(), 3);
  EXPECT_TRUE(first.contains(std::this_thread::get_id()));
  std::mutex mutex;
  for (int i = 0; i < 20; ++i) {
    parallel_ranges(300, 1, 2 + i % 2, [&](int64_t, int64_t) {
      const std::lock_guard lock(mutex);
      EXPECT_TRUE(first.contains(std::this_thread::get_id()));
    });
  }
  EXPECT_EQ(team(), first);  // nobody ended it: torch's next operator finds it
}

TEST(OpenmpTeam, AtMostSoManyOfItWork) {
  omp_set_num_threads(4);
  std::mutex mutex;
  std::set<std::thread::id> met;
  parallel_ranges(1000, 1, 2, [&](int64_t, int64_t) {
    const std::lock_guard lock(mutex);
    met.insert(std::this_thread::get_id());
  });
  EXPECT_LE(met.size(), 2);
}

TEST(OpenmpTeam, OneThatIsTooSmallIsNotUsed) {
  omp_set_num_threads(1);
  EXPECT_FALSE(run_on_openmp_team(2, [](void*) { FAIL(); }, nullptr));
  EXPECT_EQ(sum_to(10'000, 3), 49'995'000);
}

TEST(OpenmpTeam, EveryThreadHasItsOwn) {
  std::atomic<int> right = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      omp_set_num_threads(3);
      for (int i = 0; i < 20; ++i) right += sum_to(10'000, 3) == 49'995'000;
    });
  }
  for (std::thread& each : callers) each.join();
  EXPECT_EQ(right, 60);
}

TEST(OpenmpTeam, BitsAndFloatingPointModeAreThoseOfOneThread) {
  omp_set_num_threads(3);
  constexpr int64_t kNumel = 300'000;
  Source source(Values::kTiny, 3);
  Array array(kNumel, 4, 0);
  for (int64_t i = 0; i < kNumel; ++i) array.set_value(FloatType::kFp32, i, source.value());
  const double want = sum_squares(array.data(), FloatType::kFp32, kNumel, 1);
  for (const int threads : {2, 3, 7}) {
    EXPECT_EQ(sum_squares(array.data(), FloatType::kFp32, kNumel, threads), want) << threads;
  }
}

cpu_set_t allowed() {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(::sched_getaffinity(0, sizeof(set), &set), 0);
  return set;
}

TEST(OpenmpTeam, ItKeepsToProcessorsForTheCallAlone) {
  const cpu_set_t before = allowed();
  if (CPU_COUNT(&before) < 2) GTEST_SKIP() << "one processor: there is nothing to keep to";
  omp_set_num_threads(3);
  int near = 0;
  while (CPU_ISSET(near, &before) == 0) ++near;
  (void)team();  // made before, with more processors
  std::atomic<int> elsewhere = 0;
  parallel_ranges(300, 1, {3, {near}},
                  [&](int64_t, int64_t) { elsewhere += ::sched_getcpu() != near; });
  EXPECT_EQ(elsewhere, 0);
  struct Kept {
    const cpu_set_t& before;
    std::atomic<int> threads = 0;
  } kept{before};
  const auto look = [](void* data) {
    auto& [wanted, threads] = *static_cast<Kept*>(data);
    const cpu_set_t now = allowed();
    threads += CPU_EQUAL(&now, &wanted) == 0;
  };
  ASSERT_TRUE(run_on_openmp_team(3, look, &kept));
  EXPECT_EQ(kept.threads, 0);  // torch's next operator runs where it did
}

TEST(OpenmpTeam, AForkedChildWorksWithoutIt) {
  omp_set_num_threads(3);
  (void)team();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(kChildSeconds);
    const bool refused = !run_on_openmp_team(2, [](void*) {}, nullptr);
    ::_exit(refused && sum_to(10'000, 3) == 49'995'000 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(sum_to(10'000, 3), 49'995'000);
}

#if defined(GEMINI_CAN_FORBID_CALLS) && defined(__NR_clone3)

// The runtime itself would end the process.
int work_where_threads_are_refused() {
  if (!forbid(__NR_clone3, __NR_clone, EAGAIN)) return kSkipped;
  omp_set_num_threads(3);
  if (run_on_openmp_team(2, [](void*) {}, nullptr)) return 2;
  return sum_to(10'000, 3) == 49'995'000 ? 0 : 3;
}

TEST(OpenmpTeam, WhereThreadsAreRefusedTheCallingOneWorksAlone) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";  // anew, without a team; the filter stays
  const auto lives = [](int status) {
    return WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kSkipped);
  };
  EXPECT_EXIT(::_exit(work_where_threads_are_refused()), lives, "");
}

#endif

}  // namespace
}  // namespace gemini

#endif
