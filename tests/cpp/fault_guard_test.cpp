// A guard that goes while one of its faults is being answered.
#include "transfer/fault_guard.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>

namespace gemini {
namespace {

constexpr auto kLong = std::chrono::milliseconds(100);  // enough for what nobody holds up
constexpr unsigned kChildSeconds = 20;

// A page that nobody may read, until a fault there was answered, which takes as long as is wanted.
class SlowTarget : public FaultTarget {
 public:
  SlowTarget() : page_(::mmap(nullptr, kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    EXPECT_NE(page_, MAP_FAILED);
    guard_faults(*this, begin(), begin() + kPage);
  }
  ~SlowTarget() override { ::munmap(page_, kPage); }

  FaultAnswer absorb(uintptr_t, bool) noexcept override {
    entered = true;
    entered.notify_all();
    leaves.wait(false);
    left = true;
    ::mprotect(page_, kPage, PROT_READ | PROT_WRITE);
    return FaultAnswer::kPoisoned;
  }
  void before_fork() noexcept override {}
  void after_fork(ForkSide) noexcept override {}

  [[nodiscard]] char read() const { return *static_cast<volatile char*>(page_); }

  std::atomic<bool> entered = false;
  std::atomic<bool> leaves = false;
  std::atomic<bool> left = false;

 private:
  static constexpr size_t kPage = 4096;
  [[nodiscard]] uintptr_t begin() const { return reinterpret_cast<uintptr_t>(page_); }

  void* const page_;
};

TEST(FaultGuard, GoesWhenNoFaultIsBeingAnswered) {
  SlowTarget target;
  std::thread stray([&] { EXPECT_EQ(target.read(), 0); });
  target.entered.wait(false);
  std::atomic<bool> gone = false;
  std::thread owner([&] {
    unguard_faults(target);
    gone = true;
    EXPECT_TRUE(target.left);  // else the answer would be given by memory that is no more
  });
  const auto until = std::chrono::steady_clock::now() + kLong;
  while (!gone && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  EXPECT_FALSE(gone);
  target.leaves = true;
  target.leaves.notify_all();
  stray.join();
  owner.join();
  EXPECT_NE(take_stray(), std::nullopt);
}

TEST(FaultGuard, OthersGoMeanwhile) {
  SlowTarget slow;
  auto other = std::make_unique<SlowTarget>();
  std::thread stray([&] { EXPECT_EQ(slow.read(), 0); });
  slow.entered.wait(false);
  unguard_faults(*other);
  other.reset();
  slow.leaves = true;
  slow.leaves.notify_all();
  stray.join();
  unguard_faults(slow);
  (void)take_stray();
}

TEST(FaultGuard, GoesInAChildForkedWhileAFaultWasBeingAnswered) {
  SlowTarget target;
  std::thread stray([&] { EXPECT_EQ(target.read(), 0); });
  target.entered.wait(false);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(kChildSeconds);
    unguard_faults(target);  // the thread that it would wait for is not here
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  target.leaves = true;
  target.leaves.notify_all();
  stray.join();
  unguard_faults(target);
  (void)take_stray();
}

}  // namespace
}  // namespace gemini
