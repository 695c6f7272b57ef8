// Laws of windows: stable aligned addresses, and stray accesses that cost a NaN, not the process.
#include <gtest/gtest.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "common/bytes.h"
#include "common/error.h"
#include "transfer/arena.h"
#include "transfer/fault_guard.h"
#include "transfer/window_space.h"

namespace gemini {
namespace {

constexpr int64_t kMib = 1 << 20;

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

volatile char* bytes_of(const Window& window) { return window.address(); }

// Runs `body` in a child and returns its wait status.
template <class Body>
int status_of_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

// Faults outside every window space.
void touch_a_strange_page() {
  void* const page = ::mmap(nullptr, kPageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *static_cast<volatile char*>(page) = 1;
}

TEST(WindowSpace, WindowsAreAlignedAndDisjoint) {
  std::mt19937 random(1);
  WindowSpace space(256 * kMib);
  uintptr_t end = number(space.address());
  for (int i = 0; i < 100; ++i) {
    const int64_t nbytes = 1 + static_cast<int64_t>(random() % (i % 3 == 0 ? 5 * kMib : 9000));
    const Window* window = space.create(nbytes);
    const int64_t alignment = nbytes >= kHugePageBytes ? kHugePageBytes : kPageBytes;
    EXPECT_EQ(number(window->address()) % static_cast<uintptr_t>(alignment), 0u);
    EXPECT_GE(number(window->address()), end);
    EXPECT_EQ(window->nbytes(), nbytes);
    EXPECT_EQ(window->span_bytes(), round_up(nbytes, kPageBytes));
    EXPECT_FALSE(window->mapped());
    end = number(window->address()) + static_cast<uintptr_t>(window->span_bytes());
  }
  EXPECT_LE(end, number(space.address()) + static_cast<uintptr_t>(space.reserved_bytes()));
}

// The promise of the constructor: whole pages that sum up to the total always fit.
TEST(WindowSpace, AnyOrderOfWindowsFitsTheTotal) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    std::vector<int64_t> sizes;
    int64_t total = 0;
    for (int i = 0; i < 40; ++i) {
      sizes.push_back(kPageBytes * (1 + static_cast<int64_t>(random() % (random() % 2 ? 700 : 3))));
      total += sizes.back();
    }
    WindowSpace space(total);
    for (const int64_t nbytes : sizes) EXPECT_NO_THROW(space.create(nbytes));
  }
}

TEST(WindowSpace, WindowBeyondTheReservationIsRefusedAndNothingChanges) {
  WindowSpace space(4 * kMib);
  space.create(4 * kMib);
  EXPECT_THROW(space.create(5 * kMib), OutOfBudget);
  EXPECT_EQ(space.num_windows(), 1);
  EXPECT_NO_THROW(space.create(4 * kMib));
  EXPECT_THROW(space.create(0), StateError);
  EXPECT_THROW(WindowSpace(0), StateError);
  EXPECT_THROW(WindowSpace(int64_t{1} << 60), Error);
}

TEST(WindowSpace, FindAgreesWithALinearSearch) {
  std::mt19937 random(2);
  WindowSpace space(64 * kMib);
  std::vector<const Window*> windows;
  for (int i = 0; i < 30; ++i) windows.push_back(space.create(1 + random() % (3 * kMib)));
  for (int i = 0; i < 2000; ++i) {
    const uintptr_t address =
        number(space.address()) - 5000 + random() % (space.reserved_bytes() + 10000);
    const auto found = std::find_if(windows.begin(), windows.end(), [&](const Window* window) {
      return address - number(window->address()) < static_cast<uintptr_t>(window->span_bytes());
    });
    EXPECT_EQ(space.find(address), found == windows.end() ? -1 : found - windows.begin());
  }
}

TEST(Window, AddressNeverChanges) {
  WindowSpace space(8 * kMib);
  Arena arena(8 * kMib);
  Window* window = space.create(3 * kMib);
  const char* const address = window->address();
  for (const Spare spare : {Spare::kParked, Spare::kReturned, Spare::kParked}) {
    arena.map(*window, Content::kAny);
    window->address()[3 * kMib - 1] = 1;
    arena.unmap(*window, spare);
    EXPECT_EQ(window->address(), address);
  }
}

TEST(FaultGuard, StrayReadGivesNanAndIsReported) {
  WindowSpace space(kMib);
  const Window* window = space.create(kMib);
  (void)take_stray();
  const uint64_t before = stray_count();
  const char* const touched = window->address() + 70000;
  float value = 0;
  std::memcpy(&value, touched, sizeof value);
  EXPECT_TRUE(std::isnan(value));
  EXPECT_EQ(stray_count(), before + 1);
  EXPECT_EQ(take_stray(), number(touched));
  EXPECT_EQ(take_stray(), std::nullopt);
}

TEST(FaultGuard, WholeStrayWindowIsPoisonUpToItsEdges) {
  WindowSpace space(kMib);
  const Window* before = space.create(kPageBytes);
  const Window* window = space.create(200000);
  const Window* after = space.create(kPageBytes);
  for (int64_t i = 0; i < window->span_bytes(); i += 1000) {
    EXPECT_EQ(bytes_of(*window)[i], char(0xFF));
  }
  const uint64_t strays = stray_count();
  EXPECT_EQ(bytes_of(*before)[0], char(0xFF));  // the neighbours were not touched until now
  EXPECT_EQ(bytes_of(*after)[0], char(0xFF));
  EXPECT_EQ(stray_count(), strays + 2);
}

TEST(FaultGuard, MappingReplacesPoisonAndStrayWritesAreLost) {
  WindowSpace space(kMib);
  Arena arena(kMib);
  Window* window = space.create(kMib);
  for (const Spare spare : {Spare::kParked, Spare::kReturned, Spare::kParked}) {
    bytes_of(*window)[5] = 7;
    bytes_of(*window)[kMib - 5] = 7;
    arena.map(*window, Content::kZeros);
    const char* const data = window->address();
    EXPECT_TRUE(std::all_of(data, data + kMib, [](char byte) { return byte == 0; }));
    arena.unmap(*window, spare);
  }
}

TEST(FaultGuard, HealedWindowFaultsAgain) {
  WindowSpace space(kMib);
  Arena arena(kMib);
  Window* stray = space.create(kPageBytes);
  Window* live = space.create(kPageBytes);
  arena.map(*live, Content::kZeros);
  live->address()[0] = 42;
  (void)bytes_of(*stray)[0];
  EXPECT_EQ(space.heal(), 1);
  EXPECT_EQ(space.heal(), 0);
  const uint64_t before = stray_count();
  (void)bytes_of(*stray)[0];
  EXPECT_EQ(stray_count(), before + 1);
  EXPECT_EQ(live->address()[0], 42);
}

// A fault that races with a fetch must not poison the page that arrives.
TEST(FaultGuard, MappingDuringAStrayReadNeverLeavesPoison) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a stray read is a data race, and ThreadSanitizer says so";
#endif
  WindowSpace space(kMib);
  Arena arena(kMib);
  Window* window = space.create(kPageBytes);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) (void)bytes_of(*window)[0];
  });
  int64_t num_poisoned = 0;
  for (int round = 0; round < 20000; ++round) {
    arena.map(*window, Content::kZeros);
    for (int64_t i = 0; i < kPageBytes; i += 16) num_poisoned += bytes_of(*window)[i] != 0;
    arena.unmap(*window, round % 2 == 0 ? Spare::kParked : Spare::kReturned);
  }
  stop = true;
  reader.join();
  EXPECT_EQ(num_poisoned, 0);
}

TEST(FaultGuard, FaultElsewhereStillEndsTheProcess) {
  WindowSpace space(kMib);
  const int status = status_of_child(touch_a_strange_page);
  EXPECT_FALSE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(FaultGuard, RaisedSignalStillEndsTheProcess) {
  WindowSpace space(kMib);
  const int status = status_of_child([] { ::raise(SIGSEGV); });
  EXPECT_FALSE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

sigjmp_buf jump;

TEST(FaultGuard, HandlerInstalledBeforeStillGetsItsFaults) {
  struct sigaction mine = {};
  struct sigaction old = {};
  mine.sa_handler = [](int) { siglongjmp(jump, 1); };
  ASSERT_EQ(::sigaction(SIGSEGV, &mine, &old), 0);
  WindowSpace space(kMib);
  const Window* window = space.create(kMib);
  const uint64_t before = stray_count();
  volatile bool caught = false;
  if (sigsetjmp(jump, 1) == 0) {
    touch_a_strange_page();
  } else {
    caught = true;
  }
  EXPECT_TRUE(caught);
  EXPECT_EQ(bytes_of(*window)[0], char(0xFF));
  EXPECT_EQ(stray_count(), before + 1);
  ASSERT_EQ(::sigaction(SIGSEGV, &old, nullptr), 0);
}

TEST(FaultGuard, HandlerIsInstalledAgainOverAReplacement) {
  const WindowSpace first(kMib);
  struct sigaction plain = {};
  plain.sa_handler = SIG_DFL;
  ASSERT_EQ(::sigaction(SIGSEGV, &plain, nullptr), 0);
  WindowSpace second(kMib);
  EXPECT_EQ(bytes_of(*second.create(10))[0], char(0xFF));
}

// A process with many libraries collects garbage late: hundreds of models may wait for it.
TEST(FaultGuard, ThousandSpacesAreGuardedAndTheirPlacesUsedAgain) {
  std::vector<std::unique_ptr<WindowSpace>> spaces;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 1000; ++i) spaces.push_back(std::make_unique<WindowSpace>(4096));
    for (int i : {0, 500, 999}) {
      EXPECT_EQ(bytes_of(*spaces[i]->create(10))[0], char(0xFF));
    }
    spaces.clear();
  }
}

TEST(WindowSpace, ForkedChildReadsPoisonAndTheParentKeepsItsBytes) {
  WindowSpace space(kMib);
  Arena arena(kMib);
  Window* window = space.create(kMib);
  arena.map(*window, Content::kZeros);
  window->address()[0] = 42;
  const int status = status_of_child([&] {
    const bool poison = !window->mapped() && bytes_of(*window)[0] == char(0xFF);
    ::_exit(poison ? 0 : 1);
  });
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(window->address()[0], 42);
  EXPECT_TRUE(window->mapped());
}

TEST(WindowSpace, DestroyedInAForkedChildItTouchesNothing) {
  auto space = std::make_unique<WindowSpace>(kMib);
  auto arena = std::make_unique<Arena>(kMib);
  Window* window = space->create(kMib);
  arena->map(*window, Content::kZeros);
  const int status = status_of_child([&] {
    int refused = 0;
    try {
      arena->unmap(*window, Spare::kReturned);
    } catch (const StateError&) {
      refused = 1;
    }
    space.reset();
    arena.reset();
    ::_exit(refused == 1 ? 0 : 1);
  });
  EXPECT_EQ(status, 0);
  window->address()[0] = 1;
}

}  // namespace
}  // namespace gemini
