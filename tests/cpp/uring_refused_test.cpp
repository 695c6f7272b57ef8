// A ring that the system refuses to serve any more while requests wait: they fail, nothing else.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>

#include "async_file_test_util.h"
#include "forbidden_calls.h"
#include "io_hooks.h"
#include "temp_dir.h"

#ifdef GEMINI_CAN_FORBID_CALLS

#include <sys/wait.h>

namespace gemini {
namespace {

// Forbids the ring while the kernel has some of its requests: as the first completion is judged.
class ForbiddingHook : public IoHook {
 public:
  int64_t after(bool, int64_t result, int64_t) override {
    if (!forbidden.exchange(true)) possible = forbid(__NR_io_uring_enter, EPERM);
    return result;
  }
  std::atomic<bool> forbidden{false};
  std::atomic<bool> possible{true};
};

// Returns what a process exits with that does all this: 0 when everything was as it must be.
int use_a_ring_that_fails() {
  const TempDir dir;
  const auto hook = std::make_shared<ForbiddingHook>();
  AsyncFile file({dir.path()}, kMib, small_pieces({BackendKind::kUring, true}), hook);
  const Buffer data(kMib, 1);
  const IoError first = io_error_of([&] { file.wait(file.write(data.data(), kMib, 0)); });
  if (!hook->possible) return kSkipped;
  const IoError later = io_error_of([&] { file.wait(file.read(data.data(), kMib, 0)); });
  EXPECT_EQ(first.code(), EPERM);
  EXPECT_EQ(later.code(), EPERM);
  EXPECT_NE(std::string(later.what()).find("GEMINI_IO_BACKEND=threads"), std::string::npos);
  EXPECT_GE(file.stats().queue.bytes_written, 16 * kKib);  // what the kernel had has ended well
  file.close();
  return testing::Test::HasFailure() ? 1 : 0;
}

TEST(UringRefused, RequestsOfARingThatFailsAreErrorsAndTheProcessLives) {
  if (!uring_refusal().empty()) GTEST_SKIP() << uring_refusal();
  const auto lives = [](int status) {
    return WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kSkipped);
  };
  EXPECT_EXIT(::_exit(use_a_ring_that_fails()), lives, "");
}

}  // namespace
}  // namespace gemini

#endif
