// A ring that the system refuses to serve any more while requests wait: they fail, nothing else.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

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
  int64_t after(IoKind, int64_t result, int64_t) override {
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

// The same for a filter that allows all but asking what the ring can do.
int ask_where_it_is_forbidden() {
  if (!forbid(__NR_io_uring_register, EPERM)) return kSkipped;
  const std::string& refusal = uring_refusal();
  if (refusal.starts_with("io_uring_setup") || refusal.starts_with("this build")) return kSkipped;
  EXPECT_EQ(refusal, std::string("io_uring_register: ") + std::strerror(EPERM));
  return testing::Test::HasFailure() ? 1 : 0;
}

bool lives(int status) {
  return WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kSkipped);
}

TEST(UringRefused, TheCallThatIsRefusedIsNamed) {
  testing::FLAGS_gtest_death_test_style =
      "threadsafe";  // anew: the refusal is found once for a process
  EXPECT_EXIT(::_exit(ask_where_it_is_forbidden()), lives, "");
}

TEST(UringRefused, RequestsOfARingThatFailsAreErrorsAndTheProcessLives) {
  if (!uring_refusal().empty()) GTEST_SKIP() << uring_refusal();
  EXPECT_EXIT(::_exit(use_a_ring_that_fails()), lives, "");
}

}  // namespace
}  // namespace gemini

#endif
