// Laws of the transfer engine: order per link, overlap between links, each outcome reported once.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "common/error.h"
#include "io_hooks.h"
#include "temp_dir.h"
#include "transfer/arena.h"
#include "transfer/transfer_engine.h"
#include "transfer/window_space.h"

namespace gemini {
namespace {

constexpr int64_t kMib = 1 << 20;

std::vector<char> pattern(int64_t nbytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<char> bytes(static_cast<size_t>(nbytes));
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

std::vector<TransferResult> finish(TransferEngine& engine) {
  engine.drain();
  return engine.poll();
}

TEST(TransferEngine, CopiesArriveInOrderPerLinkAndOnce) {
  TransferEngine engine(nullptr);
  const std::vector<char> source = pattern(9 * kMib, 1);
  std::vector<std::vector<char>> copies(20, std::vector<char>(source.size()));
  std::vector<uint64_t> forth;
  std::vector<uint64_t> back;
  for (size_t i = 0; i < copies.size(); ++i) {
    const Link link = i % 2 == 0 ? Link::kHostToDevice : Link::kDeviceToHost;
    auto& tickets = i % 2 == 0 ? forth : back;
    const auto nbytes = static_cast<int64_t>(source.size());
    tickets.push_back(engine.copy(copies[i].data(), source.data(), nbytes, link));
  }
  std::vector<uint64_t> reported;
  while (engine.wait_any(-1)) {
    for (const TransferResult& done : engine.poll()) {
      EXPECT_TRUE(done.ok);
      reported.push_back(done.ticket);
    }
  }
  ASSERT_EQ(reported.size(), copies.size());
  for (const auto& tickets : {forth, back}) {
    std::vector<uint64_t> order;
    std::copy_if(reported.begin(), reported.end(), std::back_inserter(order), [&](uint64_t one) {
      return std::find(tickets.begin(), tickets.end(), one) != tickets.end();
    });
    EXPECT_EQ(order, tickets);
  }
  for (const auto& copy : copies) EXPECT_EQ(copy, source);
}

// A chunk's life: computed in one window, spilled, its memory given to another, loaded again.
TEST(TransferEngine, BytesSurviveTheDiskWhileMemoryMovesBetweenWindows) {
  constexpr int kNumChunks = 8;
  constexpr int64_t kChunk = 3 * kMib;
  const TempDir dir;
  AsyncFile file({dir.path()}, kNumChunks * kChunk);
  TransferEngine engine(&file);
  WindowSpace space(kNumChunks * kChunk);
  Arena arena(2 * kChunk);  // two of eight at a time
  std::vector<Window*> windows;
  for (int i = 0; i < kNumChunks; ++i) {
    windows.push_back(space.create(kChunk));
    arena.map(*windows[i], Content::kAny);
    const std::vector<char> bytes = pattern(kChunk, i);
    std::memcpy(windows[i]->address(), bytes.data(), bytes.size());
    (void)engine.write(windows[i]->address(), kChunk, i * kChunk, Link::kDiskWrite);
    for (const TransferResult& done : finish(engine)) EXPECT_TRUE(done.ok) << done.message;
    arena.unmap(*windows[i], i % 3 == 0 ? Spare::kReturned : Spare::kParked);
  }
  for (const int i : {5, 0, 7, 2, 2, 1, 6, 3, 4}) {
    arena.map(*windows[i], Content::kAny);
    (void)engine.read(windows[i]->address(), kChunk, i * kChunk, Link::kDiskRead);
    for (const TransferResult& done : finish(engine)) EXPECT_TRUE(done.ok) << done.message;
    const std::vector<char> want = pattern(kChunk, i);
    EXPECT_EQ(std::memcmp(windows[i]->address(), want.data(), want.size()), 0);
    arena.unmap(*windows[i], Spare::kParked);
  }
}

TEST(TransferEngine, FailureIsReportedWithItsPlaceAndLaterTransfersSucceed) {
  const TempDir dir;
  const auto full = [](IoKind kind, int64_t, int64_t position) -> int64_t {
    return kind == IoKind::kWrite && position >= 4 * kMib ? -ENOSPC : 0;
  };
  AsyncFile file({dir.path()}, 8 * kMib, {}, std::make_shared<FaultyHook>(full));
  TransferEngine engine(&file);
  WindowSpace space(2 * kMib);
  Arena arena(2 * kMib);
  Window* window = space.create(2 * kMib);
  arena.map(*window, Content::kZeros);
  const uint64_t bad = engine.write(window->address(), 2 * kMib, 6 * kMib, Link::kDiskWrite);
  const uint64_t good = engine.write(window->address(), 2 * kMib, 0, Link::kDiskWrite);
  const std::vector<TransferResult> done = finish(engine);
  ASSERT_EQ(done.size(), 2u);
  EXPECT_EQ(done[0].ticket, bad);
  EXPECT_FALSE(done[0].ok);
  EXPECT_EQ(done[0].error_code, ENOSPC);
  EXPECT_EQ(done[0].path, file.path());
  EXPECT_GE(done[0].offset, 6 * kMib);
  EXPECT_NE(done[0].message.find("No space"), std::string::npos);
  EXPECT_EQ(done[1].ticket, good);
  EXPECT_TRUE(done[1].ok);
  EXPECT_EQ(engine.stats(Link::kDiskWrite).bytes, 2 * kMib);
  EXPECT_EQ(engine.stats(Link::kDiskWrite).transfers, 2);
}

TEST(TransferEngine, SlowDiskHoldsUpNeitherCopiesNorTheOtherDirection) {
  const TempDir dir;
  const auto gate = std::make_shared<GateHook>();
  AsyncFile file({dir.path()}, kMib, {.direct = false}, gate);
  TransferEngine engine(&file);
  std::vector<char> from(1000, 1);
  std::vector<char> to(1000);
  const uint64_t slow = engine.write(from.data(), 1000, 0, Link::kDiskWrite);
  const uint64_t fast = engine.copy(to.data(), from.data(), 1000, Link::kHostToDevice);
  ASSERT_TRUE(engine.wait_any(-1));
  std::vector<TransferResult> done = engine.poll();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].ticket, fast);
  EXPECT_EQ(engine.num_in_flight(), 1);
  EXPECT_FALSE(engine.wait_any(0));
  gate->open();
  done = finish(engine);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].ticket, slow);
}

TEST(TransferEngine, TheTimeInWhichBothDirectionsUseTheDiskIsCountedForBoth) {
  const TempDir dir;
  const auto gate = std::make_shared<GateHook>();
  AsyncFile file({dir.path()}, kMib, {.direct = false}, gate);
  TransferEngine engine(&file);
  std::vector<char> from(1000, 1);
  std::vector<char> to(1000);
  (void)engine.write(from.data(), 1000, 0, Link::kDiskWrite);
  (void)engine.read(to.data(), 1000, 4096, Link::kDiskRead);  // while the gate holds the write back
  gate->open();
  (void)finish(engine);
  const LinkStats reads = engine.stats(Link::kDiskRead);
  const LinkStats writes = engine.stats(Link::kDiskWrite);
  EXPECT_GT(reads.shared_seconds, 0);
  EXPECT_EQ(reads.shared_seconds, writes.shared_seconds);
  (void)engine.write(from.data(), 1000, 0, Link::kDiskWrite);
  (void)finish(engine);
  (void)engine.read(to.data(), 1000, 0, Link::kDiskRead);
  (void)finish(engine);
  EXPECT_EQ(engine.stats(Link::kDiskRead).shared_seconds, reads.shared_seconds);
  EXPECT_EQ(engine.stats(Link::kHostToDevice).shared_seconds, 0);
}

TEST(TransferEngine, CopiesOfOneLinkRunOneAfterTheOther) {
  TransferEngine engine(nullptr);
  std::vector<char> bytes(2 * kMib);
  for (int i = 0; i < 50; ++i) {
    (void)engine.copy(bytes.data(), bytes.data() + kMib, kMib, Link::kHostToDevice);
  }
  double last = 0;
  double busy = 0;
  for (const TransferResult& done : finish(engine)) {
    EXPECT_GT(done.begin_s, 0);
    EXPECT_GE(done.begin_s, last);
    EXPECT_GE(done.end_s, done.begin_s);
    last = done.end_s;
    busy += done.end_s - done.begin_s;
  }
  EXPECT_DOUBLE_EQ(engine.stats(Link::kHostToDevice).seconds, busy);
}

TEST(TransferEngine, ADiskLinkHasNoMoreAtTheFileThanItsLimitOrOneTransfer) {
  constexpr int64_t kLimit = 16 * kMib;
  const std::vector<int64_t> sizes = {5, 5, 5, 5, 40, 1, 1, 1, 1, 20, 9, 9, 9};  // MiB
  const TempDir dir;
  AsyncFile file({dir.path()}, 40 * kMib);
  TransferEngine engine(&file);
  std::vector<char> bytes(40 * kMib);
  for (const int64_t mib : sizes) {
    (void)engine.write(bytes.data(), mib * kMib, 0, Link::kDiskWrite);
  }
  const std::vector<TransferResult> done = finish(engine);
  ASSERT_EQ(done.size(), sizes.size());
  for (size_t i = 0; i < done.size(); ++i) {
    int64_t together = 0;  // at the file when this one began, itself included
    for (size_t j = 0; j <= i; ++j) {
      if (done[j].end_s > done[i].begin_s) together += sizes[j] * kMib;
    }
    EXPECT_TRUE(together <= kLimit || together == sizes[i] * kMib) << together;
    EXPECT_TRUE(i == 0 || done[i].end_s >= done[i - 1].end_s);
  }
}

TEST(TransferEngine, WaitingForNothingReturnsAtOnce) {
  TransferEngine engine(nullptr);
  EXPECT_FALSE(engine.wait_any(-1));
  engine.drain();
  EXPECT_TRUE(engine.poll().empty());
}

TEST(TransferEngine, MisuseIsRefusedAndNothingIsInFlight) {
  const TempDir dir;
  AsyncFile file({dir.path()}, kMib);
  TransferEngine engine(&file);
  TransferEngine no_disk(nullptr);
  char byte = 0;
  EXPECT_THROW((void)engine.copy(&byte, &byte, 1, Link::kDiskRead), StateError);
  EXPECT_THROW((void)engine.read(&byte, 1, 0, Link::kDiskWrite), StateError);
  EXPECT_THROW((void)engine.write(&byte, 1, 0, Link::kHostToDevice), StateError);
  EXPECT_THROW((void)engine.copy(&byte, &byte, -1, Link::kDeviceToHost), StateError);
  EXPECT_THROW((void)no_disk.read(&byte, 1, 0, Link::kDiskRead), StateError);
  EXPECT_EQ(engine.num_in_flight(), 0);
  EXPECT_EQ(no_disk.num_in_flight(), 0);
}

TEST(TransferEngine, RangeOutsideTheFileIsAFailedCompletion) {
  const TempDir dir;
  AsyncFile file({dir.path()}, kMib, {.direct = false});
  TransferEngine engine(&file);
  std::vector<char> bytes(4096);
  (void)engine.read(bytes.data(), 4096, 5 * kMib, Link::kDiskRead);
  file.close();
  (void)engine.read(bytes.data(), 4096, 0, Link::kDiskRead);
  const std::vector<TransferResult> done = finish(engine);
  ASSERT_EQ(done.size(), 2u);
  for (const TransferResult& one : done) {
    EXPECT_FALSE(one.ok);
    EXPECT_FALSE(one.message.empty());
  }
}

TEST(TransferEngine, CloseCompletesEverythingAndIsIdempotent) {
  TransferEngine engine(nullptr);
  const std::vector<char> source = pattern(8 * kMib, 2);
  std::vector<char> copy(source.size());
  const uint64_t ticket = engine.copy(copy.data(), source.data(), 8 * kMib, Link::kHostToDevice);
  engine.close();
  engine.close();
  EXPECT_EQ(copy, source);
  const std::vector<TransferResult> done = engine.poll();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].ticket, ticket);
  EXPECT_THROW((void)engine.copy(copy.data(), copy.data(), 1, Link::kHostToDevice), StateError);
}

TEST(TransferEngine, DestructionDropsWhatHasNotStarted) {
  constexpr int64_t kBytes = 32 * kMib;
  std::vector<char> bytes(2 * kBytes);
  const char from = 5;
  char to = 0;
  auto engine = std::make_unique<TransferEngine>(nullptr);
  for (int i = 0; i < 100; ++i) {
    (void)engine->copy(bytes.data(), bytes.data() + kBytes, kBytes, Link::kDeviceToHost);
  }
  (void)engine->copy(&to, &from, 1, Link::kDeviceToHost);
  engine.reset();  // long before 3.2 GB are copied
  EXPECT_EQ(to, 0);
}

TEST(TransferEngine, DestructionWaitsForTransfersAtTheFile) {
  const TempDir dir;
  const auto gate = std::make_shared<GateHook>();
  AsyncFile file({dir.path()}, 64 * kMib, {.direct = false}, gate);
  auto bytes = std::make_unique<std::vector<char>>(64 * kMib, 1);
  auto engine = std::make_unique<TransferEngine>(&file);
  for (int64_t i = 0; i < 8; ++i) {  // the limit lets two of them start
    (void)engine->write(bytes->data() + i * 8 * kMib, 8 * kMib, i * 8 * kMib, Link::kDiskWrite);
  }
  std::thread destruction([&] {
    engine.reset();
    bytes.reset();  // address sanitizer sees a late read
  });
  gate->open();
  destruction.join();
  EXPECT_LE(file.stats().queue.bytes_written, 64 * kMib);
}

// Nobody but the threads of the file ends a transfer, in whatever order they do.
TEST(TransferEngine, TransfersOfADiskLinkAreReportedInTheirOrderWhicheverEndsFirst) {
  const TempDir dir;
  std::mutex mutex;
  std::condition_variable changed;
  int ended = 0;
  // Holds the first read back until the others have ended.
  const auto order = [&](IoKind kind, int64_t result, int64_t position) {
    if (kind == IoKind::kWrite) return result;
    std::unique_lock lock(mutex);
    if (position == 0) changed.wait(lock, [&] { return ended == 3; });
    ++ended;
    changed.notify_all();
    return result;
  };
  AsyncFileOptions options{.backend = BackendKind::kThreads, .direct = false};
  AsyncFile file({dir.path()}, 4 * kMib, options, std::make_shared<ResultHook>(order));
  TransferEngine engine(&file);
  std::vector<char> memory(4 * kMib);
  std::vector<uint64_t> tickets;
  for (int64_t i = 0; i < 4; ++i) {
    char* const to = memory.data() + i * kMib;
    tickets.push_back(engine.read(to, kMib, i * kMib, Link::kDiskRead));
  }
  tickets.push_back(engine.read(memory.data(), 0, 0, Link::kDiskRead));
  tickets.push_back(
      engine.read(memory.data(), kMib, 4 * kMib, Link::kDiskRead));  // not in the file
  const std::vector<TransferResult> done = finish(engine);
  ASSERT_EQ(done.size(), tickets.size());
  for (size_t i = 0; i < done.size(); ++i) {
    EXPECT_EQ(done[i].ticket, tickets[i]);
    EXPECT_EQ(done[i].ok, i + 1 < done.size());
    EXPECT_GE(done[i].end_s, done[i].begin_s);
    EXPECT_TRUE(i == 0 || done[i].end_s >= done[i - 1].end_s);
  }
}

TEST(TransferEngine, ForkedChildIsRefusedAndLeavesWithoutHanging) {
  auto engine = std::make_unique<TransferEngine>(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    int refused = 0;
    try {
      (void)engine->poll();
    } catch (const StateError&) {
      refused = 1;
    }
    engine.reset();
    ::_exit(refused == 1 ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  char from = 5;
  char to = 0;
  (void)engine->copy(&to, &from, 1, Link::kHostToDevice);
  EXPECT_EQ(finish(*engine).size(), 1u);
  EXPECT_EQ(to, 5);
}

}  // namespace
}  // namespace gemini
