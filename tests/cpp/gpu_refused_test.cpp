// A system that refuses a thread to what has streams of a GPU by then: they are given back.
#include <gtest/gtest.h>

#include <cerrno>
#include <memory>

#include "common/error.h"
#include "forbidden_calls.h"
#include "gpu/staged_link.h"
#include "gpu_test_util.h"
#include "temp_dir.h"

#ifdef GEMINI_CAN_FORBID_CALLS

#include <sys/wait.h>

namespace gemini {
namespace {

// Counts its streams, and has no thread started once there are `last`.
class CountingGpu : public SimulatedGpu {
 public:
  explicit CountingGpu(int last) : SimulatedGpu(options(0, 0)), last_(last) {}

  [[nodiscard]] Stream create_stream() override {
    const Stream stream = SimulatedGpu::create_stream();
    if (++num_streams == last_) possible = forbid(__NR_clone, __NR_clone3, EAGAIN);
    return stream;
  }
  void destroy_stream(Stream stream) noexcept override {
    SimulatedGpu::destroy_stream(stream);
    --num_streams;
  }

  int num_streams = 0;
  bool possible = true;

 private:
  const int last_;
};

// Returns what a process exits with that does all this: 0 when everything was as it must be.
int make_a_link_without_a_thread() {
  const TempDir dir;
  AsyncFile file({dir.path()}, kMib);
  const auto gpu = std::make_shared<CountingGpu>(3);
  const auto lanes = std::make_shared<GpuLanes>(gpu);
  EXPECT_EQ(gpu->num_streams, 2);
  try {
    const StagedLink link(lanes, file, Link::kDiskRead,
                          [](const StagedJob&, const TransferResult&) {});
    if (gpu->possible) ADD_FAILURE() << "the link has a thread";
  } catch (const ThreadError& error) {
    EXPECT_EQ(error.code(), EAGAIN);
  }
  EXPECT_EQ(gpu->num_streams, 2);
  if (!gpu->possible) return kSkipped;
  return testing::Test::HasFailure() ? 1 : 0;
}

// The stream of a simulated GPU is a thread itself: the second one is refused.
int make_lanes_without_a_second_stream() {
  const auto gpu = std::make_shared<CountingGpu>(1);
  EXPECT_THROW(GpuLanes{gpu}, std::exception);
  EXPECT_EQ(gpu->num_streams, 0);
  if (!gpu->possible) return kSkipped;
  return testing::Test::HasFailure() ? 1 : 0;
}

bool lives(int status) {
  return WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kSkipped);
}

TEST(GpuRefused, ALinkWhoseThreadIsRefusedGivesItsStreamBack) {
  EXPECT_EXIT(::_exit(make_a_link_without_a_thread()), lives, "");
}

TEST(GpuRefused, LanesGiveTheirFirstStreamBackWhereTheSecondIsRefused) {
  EXPECT_EXIT(::_exit(make_lanes_without_a_second_stream()), lives, "");
}

}  // namespace
}  // namespace gemini

#endif
