// Faults of every kind and at every place: bytes arrive as they were, or an error says where not.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "async_file_test_util.h"
#include "io_hooks.h"
#include "temp_dir.h"

namespace gemini {
namespace {

class AsyncFileFaults : public testing::TestWithParam<Mode> {};
INSTANTIATE_TEST_SUITE_P(All, AsyncFileFaults, testing::ValuesIn(modes()), mode_name);

constexpr int64_t kBytes = 256 * kKib;

TEST_P(AsyncFileFaults, ShortTransferOfEverySize) {
  const TempDir dir;
  std::atomic<int64_t> length{0};
  std::atomic<bool> first{true};
  const auto shorten = [&](IoKind, int64_t, int64_t) -> int64_t {
    return first.exchange(false) ? length.load() : 0;
  };
  AsyncFile file({dir.path()}, kBytes, small_pieces(GetParam()),
                 std::make_shared<FaultyHook>(shorten));
  const Buffer written(16 * kKib, 1);
  const Buffer read(16 * kKib, 2);
  for (length = 1; length <= 16 * kKib; length += length < 20 ? 1 : 509) {
    first = true;
    file.wait(file.write(written.data(), written.nbytes(), 0));
    std::memset(read.data(), 0, static_cast<size_t>(read.nbytes()));
    first = true;
    file.wait(file.read(read.data(), read.nbytes(), 0));
    ASSERT_TRUE(read == written) << length;
  }
}

TEST_P(AsyncFileFaults, StormOfInterruptionsChangesNothing) {
  const TempDir dir;
  std::mutex mutex;
  std::mt19937 random(7);
  const auto storm = [&](IoKind, int64_t nbytes, int64_t) -> int64_t {
    const std::lock_guard lock(mutex);
    constexpr int64_t kAnswers[] = {-EINTR, -EAGAIN, -ECANCELED, -EINTR};
    const uint32_t drawn = random() % 10;
    if (drawn < 7) return kAnswers[drawn % 4];
    return drawn == 7 ? 1 + random() % nbytes : 0;
  };
  AsyncFile file({dir.path()}, kBytes, small_pieces(GetParam()),
                 std::make_shared<FaultyHook>(storm));
  for (uint32_t round = 0; round < 5; ++round) {
    const Buffer written(kBytes, round);
    const Buffer read(kBytes, 99);
    file.wait(file.write(written.data(), kBytes, 0));
    file.wait(file.read(read.data(), kBytes, 0));
    ASSERT_TRUE(read == written);
  }
}

// Reports of the system, not of the hook before it: what was moved counts, whatever is said of it.
TEST_P(AsyncFileFaults, ResultsThatSayLessThanWasMovedAreHarmless) {
  const TempDir dir;
  std::atomic<uint32_t> calls{0};
  const auto less = [&](IoKind, int64_t result, int64_t) -> int64_t {
    switch (calls++ % 4) {
      case 0:
        return -ECANCELED;
      case 1:
        return result > 1 ? result - 1 : result;
      case 2:
        return -EINTR;
      default:
        return result;
    }
  };
  AsyncFile file({dir.path()}, kBytes, small_pieces(GetParam()),
                 std::make_shared<ResultHook>(less));
  const Buffer written(kBytes, 1);
  const Buffer read(kBytes, 2);
  file.wait(file.write(written.data(), kBytes, 0));
  file.wait(file.read(read.data(), kBytes, 0));
  EXPECT_TRUE(read == written);
}

TEST_P(AsyncFileFaults, DelayedAndReorderedCompletions) {
  const TempDir dir;
  std::atomic<uint32_t> calls{0};
  const auto delay = [&](IoKind, int64_t result, int64_t) -> int64_t {
    std::this_thread::sleep_for(std::chrono::microseconds(calls++ * 7919 % 900));
    return result;
  };
  AsyncFile file({dir.path()}, 4 * kBytes, small_pieces(GetParam()),
                 std::make_shared<ResultHook>(delay));
  std::vector<Buffer> written;
  std::vector<Buffer> read;
  std::vector<AsyncFile::Ticket> tickets;
  for (uint32_t i = 0; i < 4; ++i) {
    written.emplace_back(kBytes, i);
    read.emplace_back(kBytes, 99);
    tickets.push_back(file.write(written[i].data(), kBytes, i * kBytes));
  }
  for (uint32_t i = 4; i-- > 0;) {
    file.wait(tickets[i]);
    tickets[i] = file.read(read[i].data(), kBytes, i * kBytes);
  }
  for (uint32_t i = 0; i < 4; ++i) {
    file.wait(tickets[i]);
    EXPECT_TRUE(read[i] == written[i]);
  }
}

// Every request of a small run in its turn fails once: the error names it, and the run can be
// repeated on the same file.
TEST_P(AsyncFileFaults, ErrorAtEveryRequest) {
  constexpr int kCodes[] = {EIO, ENOSPC, EDQUOT, EROFS};
  for (int64_t at = 0; at < 32; ++at) {
    const int code = kCodes[at % 4];
    const TempDir dir;
    std::atomic<int64_t> calls{0};
    std::atomic<int64_t> failed_position{-1};
    const auto fail = [&](IoKind, int64_t, int64_t position) -> int64_t {
      if (calls++ != at) return 0;
      failed_position = position;
      return -code;
    };
    AsyncFile file({dir.path()}, kBytes, small_pieces(GetParam()),
                   std::make_shared<FaultyHook>(fail));
    const Buffer written(kBytes, 1);
    const Buffer read(kBytes, 2);
    const auto run = [&] {
      file.wait(file.write(written.data(), kBytes, 0));
      file.wait(file.read(read.data(), kBytes, 0));
    };
    const IoError error = io_error_of(run);
    ASSERT_EQ(error.code(), code);
    ASSERT_EQ(error.offset(), failed_position.load());
    ASSERT_NE(std::string(error.what()).find(" 16.0 KiB of "), std::string::npos) << error.what();
    run();
    ASSERT_TRUE(read == written);
  }
}

TEST_P(AsyncFileFaults, RestOfAFailedTransferIsNotExecuted) {
  const TempDir dir;
  std::atomic<int64_t> calls{0};
  const auto fail = [&](IoKind, int64_t, int64_t) -> int64_t { return calls++ == 0 ? -EIO : 0; };
  AsyncFileOptions options = small_pieces(GetParam());
  options.depth = 1;
  AsyncFile file({dir.path()}, kBytes, options, std::make_shared<FaultyHook>(fail));
  const Buffer data(kBytes, 1);
  EXPECT_THROW(file.wait(file.write(data.data(), kBytes, 0)), IoError);
  EXPECT_EQ(calls.load(), 1);
}

TEST_P(AsyncFileFaults, WhoeverIsCalledGetsTheErrorOnceAndWaitDoesNot) {
  const TempDir dir;
  const auto fail = [&](IoKind, int64_t, int64_t position) -> int64_t {
    return position < kBytes / 2 ? -EIO : 0;
  };
  AsyncFile file({dir.path()}, kBytes, small_pieces(GetParam()),
                 std::make_shared<FaultyHook>(fail));
  const Buffer data(kBytes, 1);
  std::mutex mutex;
  std::vector<int> codes;
  const auto note = [&](const std::exception_ptr& error) {
    const std::lock_guard lock(mutex);
    try {
      if (error) std::rethrow_exception(error);
      codes.push_back(0);
    } catch (const IoError& failure) {
      codes.push_back(failure.code());
    }
  };
  const auto bad = file.write(data.data(), kBytes, 0, note);
  file.wait(bad);
  const auto good = file.write(data.data(), kBytes / 2, kBytes / 2, note);
  file.wait(good);
  (void)file.write(data.data(), 0, 0, note);  // done at once
  file.wait_all();
  file.close();
  EXPECT_EQ(codes, (std::vector<int>{EIO, 0}));
}

TEST_P(AsyncFileFaults, DestructionWhileManyRequestsWaitNeitherHangsNorTouchesMemoryLater) {
  for (int round = 0; round < 20; ++round) {
    const TempDir dir;
    auto data = std::make_unique<Buffer>(4 * kBytes, 1);
    {
      AsyncFile file({dir.path()}, 4 * kBytes, small_pieces(GetParam()));
      for (int64_t i = 0; i < 8; ++i) {
        (void)file.read(data->data() + i * kBytes / 2, kBytes / 2, i * kBytes / 2);
      }
    }
    data.reset();  // address sanitizer sees a late write
  }
}

TEST_P(AsyncFileFaults, ManyThreadsShareOneFile) {
  const TempDir dir;
  constexpr int kThreads = 4;
  AsyncFile file({dir.path()}, kThreads * kBytes, small_pieces(GetParam()));
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int index = 0; index < kThreads; ++index) {
    threads.emplace_back([&, index] {
      for (uint32_t round = 0; round < 20; ++round) {
        const Buffer written(kBytes, round * 10 + static_cast<uint32_t>(index));
        const Buffer read(kBytes, 99);
        file.wait(file.write(written.data(), kBytes, index * kBytes));
        file.wait(file.read(read.data(), kBytes, index * kBytes));
        if (!(read == written)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
}

// Pieces of a piece of memory may be smaller than what sleeps in the kernel: none must be missed.
TEST_P(AsyncFileFaults, RequestsThatArriveWhileOthersAreUnderWayAreStarted) {
  const TempDir dir;
  AsyncFile file({dir.path()}, kBytes, small_pieces(GetParam()));
  const Buffer data(kBytes, 1);
  for (int round = 0; round < 300; ++round) {
    const AsyncFile::Ticket first = file.write(data.data(), 16 * kKib, 0);
    if (round % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(round));
    const AsyncFile::Ticket second = file.write(data.data() + 16 * kKib, 16 * kKib, 16 * kKib);
    file.wait(second);
    file.wait(first);
  }
}

}  // namespace
}  // namespace gemini
