// Laws of the asynchronous file: every byte arrives or an error says where it did not.
#include "aio/async_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "async_file_test_util.h"
#include "common/bytes.h"
#include "common/error.h"
#include "io_hooks.h"
#include "temp_dir.h"

namespace gemini {
namespace {

int open_files() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

class AsyncFileModes : public testing::TestWithParam<Mode> {};
INSTANTIATE_TEST_SUITE_P(All, AsyncFileModes, testing::ValuesIn(modes()), mode_name);

TEST_P(AsyncFileModes, RandomRequestsReturnWhatWasWritten) {
  const TempDir dir;
  constexpr int64_t kSlot = 256 * kKib;
  AsyncFile file({dir.path()}, 16 * kSlot, small_pieces(GetParam()));
  std::mt19937 random(4);
  std::vector<Buffer> written;
  for (uint32_t i = 0; i < 16; ++i) written.emplace_back(kSlot, i);
  for (int i = 0; i < 16; ++i) (void)file.write(written[i].data(), kSlot, i * kSlot);
  file.wait_all();
  std::vector<std::pair<int, Buffer>> reads;
  for (int i = 0; i < 48; ++i) reads.emplace_back(random() % 16, Buffer(kSlot, 99));
  for (auto& [slot, buffer] : reads) (void)file.read(buffer.data(), kSlot, slot * kSlot);
  file.wait_all();
  for (auto& [slot, buffer] : reads) EXPECT_TRUE(buffer == written[slot]);
}

// Interrupted, refused and short calls of any length: nothing of it is visible.
TEST_P(AsyncFileModes, ShortAndInterruptedCallsAreContinued) {
  const TempDir dir;
  std::atomic<uint32_t> calls{0};
  const auto fault = [&](IoKind, int64_t, int64_t) -> int64_t {
    constexpr int64_t kFaults[] = {-EINTR, 4096, -EAGAIN, 100, 5000, 0};
    return kFaults[calls++ % std::size(kFaults)];
  };
  AsyncFile file({dir.path()}, kMib, small_pieces(GetParam()), std::make_shared<FaultyHook>(fault));
  const Buffer written(kMib, 5);
  const Buffer read(kMib, 6);
  file.wait(file.write(written.data(), kMib, 0));
  file.wait(file.read(read.data(), kMib, 0));
  EXPECT_TRUE(read == written);
}

TEST_P(AsyncFileModes, FailureNamesErrnoPathAndOffsetAndOthersSucceed) {
  for (const int code : {ENOSPC, EIO, EDQUOT}) {
    const TempDir dir;
    const auto fault = [&](IoKind kind, int64_t, int64_t offset) -> int64_t {
      return kind == IoKind::kWrite && offset == 48 * kKib ? -code : 0;
    };
    AsyncFile file({dir.path()}, kMib, small_pieces(GetParam()),
                   std::make_shared<FaultyHook>(fault));
    const Buffer data(128 * kKib);
    const AsyncFile::Ticket bad = file.write(data.data(), data.nbytes(), 0);
    const AsyncFile::Ticket good = file.write(data.data(), data.nbytes(), 512 * kKib);
    const IoError error = io_error_of([&] { file.wait(bad); });
    EXPECT_EQ(error.code(), code);
    EXPECT_EQ(error.path(), dir.path() + "/<unlinked>");
    EXPECT_EQ(error.offset(), 48 * kKib);
    EXPECT_NO_THROW(file.wait(good));
    EXPECT_NO_THROW(file.wait_all());       // reported already
    EXPECT_THROW(file.wait(bad), IoError);  // and it stays failed
    EXPECT_NO_THROW(file.wait(file.write(data.data(), data.nbytes(), 512 * kKib)));
  }
}

TEST_P(AsyncFileModes, NoProgressIsAnErrorNotALoop) {
  const TempDir dir;
  for (const int64_t forever : {-EINTR, -EAGAIN}) {
    const auto fault = [&](IoKind, int64_t, int64_t) -> int64_t { return forever; };
    AsyncFile file({dir.path()}, kMib, small_pieces(GetParam()),
                   std::make_shared<FaultyHook>(fault));
    const Buffer data(16 * kKib);
    EXPECT_EQ(io_error_of([&] { file.wait(file.read(data.data(), data.nbytes(), 0)); }).code(),
              -forever);
  }
}

// The file became shorter behind our back.
TEST_P(AsyncFileModes, EndOfFileIsAnInputOutputError) {
  const TempDir dir;
  const auto ended = [](IoKind, int64_t, int64_t) -> int64_t { return 0; };
  AsyncFile file({dir.path()}, kMib, small_pieces(GetParam()), std::make_shared<ResultHook>(ended));
  const Buffer data(16 * kKib);
  const IoError error =
      io_error_of([&] { file.wait(file.read(data.data(), data.nbytes(), 32 * kKib)); });
  EXPECT_EQ(error.code(), EIO);
  EXPECT_EQ(error.offset(), 32 * kKib);
}

TEST_P(AsyncFileModes, WaitAllThrowsAnErrorNobodyWaitedFor) {
  const TempDir dir;
  const auto fault = [](IoKind kind, int64_t, int64_t) -> int64_t {
    return kind == IoKind::kWrite ? -EIO : 0;
  };
  AsyncFile file({dir.path()}, kMib, small_pieces(GetParam()), std::make_shared<FaultyHook>(fault));
  const Buffer data(16 * kKib);
  (void)file.write(data.data(), data.nbytes(), 0);
  EXPECT_THROW(file.wait_all(), IoError);
  EXPECT_NO_THROW(file.wait_all());
}

TEST(AsyncFile, MisalignedDirectRequestsAreRefusedWithTheReason) {
  const TempDir dir;
  AsyncFile file({dir.path()}, kMib);
  if (!file.direct()) GTEST_SKIP() << "the temporary directory has no O_DIRECT";
  const Buffer data(64 * kKib);
  EXPECT_THROW((void)file.read(data.data() + 512, 4096, 0), StateError);
  EXPECT_THROW((void)file.read(data.data(), 100, 0), StateError);
  EXPECT_THROW((void)file.write(data.data(), 4096, 512), StateError);
  EXPECT_NO_THROW(file.wait(file.write(data.data(), 4096, 4096)));
}

TEST(AsyncFile, BufferedRequestsNeedNoAlignment) {
  const TempDir dir;
  AsyncFile file({dir.path()}, kMib, small_pieces({BackendKind::kThreads, false}));
  EXPECT_FALSE(file.direct());
  const Buffer written(64 * kKib, 1);
  const Buffer read(64 * kKib, 2);
  file.wait(file.write(written.data() + 3, 50001, 77));
  file.wait(file.read(read.data() + 11, 50001, 77));
  EXPECT_EQ(std::memcmp(written.data() + 3, read.data() + 11, 50001), 0);
}

TEST(AsyncFile, RequestsOutsideTheFileAreRefused) {
  const TempDir dir;
  AsyncFile file({dir.path()}, 10000);
  EXPECT_EQ(file.size(), 12288);
  const Buffer data(16 * kKib);
  EXPECT_THROW((void)file.read(data.data(), 4096, 12288), StateError);
  EXPECT_THROW((void)file.read(data.data(), 16384, 0), StateError);
  EXPECT_THROW((void)file.read(data.data(), -4096, 0), StateError);
  EXPECT_THROW((void)file.read(data.data(), 4096, -4096), StateError);
  EXPECT_THROW((void)file.read(data.data(), 4096, INT64_MAX - 4095), StateError);
  EXPECT_NO_THROW(file.wait(file.read(data.data(), 0, 0)));
  EXPECT_THROW(file.wait(12345), StateError);
  EXPECT_THROW((void)file.done(0), StateError);
}

TEST(AsyncFile, NothingIsVisibleInTheDirectoryAndNothingIsLeftOpen) {
  const TempDir dir;
  const int before = open_files();
  {
    AsyncFile file({dir.path()}, kMib);
    EXPECT_TRUE(dir.empty());
    EXPECT_GT(open_files(), before);
    file.close();
    EXPECT_EQ(open_files(), before);
  }
  EXPECT_EQ(open_files(), before);
}

TEST(AsyncFile, FullDiskIsMetAtTheStartAndLeavesNothing) {
  const TempDir dir;
  const int before = open_files();
  const IoError error =
      io_error_of([&] { AsyncFile file({dir.path()}, kMib, {}, std::make_shared<FullHook>()); });
  EXPECT_EQ(error.code(), ENOSPC);
  EXPECT_TRUE(dir.empty());
  EXPECT_EQ(open_files(), before);
}

TEST(AsyncFile, MoreThanTheDiskHasIsNotEvenTried) {
  const TempDir dir;
  const auto hook = std::make_shared<FullHook>();
  const IoError error =
      io_error_of([&] { AsyncFile file({dir.path()}, int64_t{1} << 60, {}, hook); });
  EXPECT_EQ(error.code(), ENOSPC);
  EXPECT_EQ(hook->asked, 0);
  EXPECT_TRUE(dir.empty());
}

TEST(AsyncFile, MissingDirectoryAndBadOptionsAreRefused) {
  const TempDir dir;
  const IoError error = io_error_of([&] { AsyncFile file({dir.path() + "/missing"}, kMib); });
  EXPECT_EQ(error.code(), ENOENT);
  EXPECT_EQ(error.path(), dir.path() + "/missing");
  EXPECT_THROW(AsyncFile({dir.path()}, 0), StateError);
  EXPECT_THROW(AsyncFile({dir.path()}, kMib, AsyncFileOptions{.depth = 0}), StateError);
  EXPECT_THROW(AsyncFile({dir.path()}, kMib, AsyncFileOptions{.request_bytes = 1000}), StateError);
}

TEST(AsyncFile, SurvivesTheRemovalOfItsDirectory) {
  auto dir = std::make_unique<TempDir>();
  AsyncFile file({dir->path()}, kMib);
  dir.reset();
  const Buffer written(kMib, 1);
  const Buffer read(kMib, 2);
  file.wait(file.write(written.data(), kMib, 0));
  file.wait(file.read(read.data(), kMib, 0));
  EXPECT_TRUE(read == written);
}

TEST(AsyncFile, CloseCompletesEverythingAndIsIdempotent) {
  const TempDir dir;
  AsyncFile file({dir.path()}, 4 * kMib);
  const Buffer data(4 * kMib);
  const AsyncFile::Ticket ticket = file.write(data.data(), data.nbytes(), 0);
  file.close();
  file.close();
  EXPECT_TRUE(file.done(ticket));
  EXPECT_NO_THROW(file.wait(ticket));
  EXPECT_THROW((void)file.write(data.data(), 4096, 0), StateError);
}

TEST(AsyncFile, ForkedChildIsRefusedAndLeavesWithoutHanging) {
  const TempDir dir;
  auto file = std::make_unique<AsyncFile>(std::vector{dir.path()}, kMib);
  const Buffer data(kMib);
  const pid_t child = ::fork();
  if (child == 0) {
    int refused = 0;
    try {
      (void)file->write(data.data(), 4096, 0);
    } catch (const StateError&) {
      refused = 1;
    }
    file.reset();
    ::_exit(refused == 1 ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_NO_THROW(file->wait(file->write(data.data(), kMib, 0)));
}

}  // namespace
}  // namespace gemini
