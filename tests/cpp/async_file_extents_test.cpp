// Laws of what an asynchronous file does beyond one plain transfer: several areas of memory,
// several directories, pinned memory, checksums, counts.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "async_file_test_util.h"
#include "io_hooks.h"
#include "temp_dir.h"

namespace gemini {
namespace {

class AsyncFileExtents : public testing::TestWithParam<Mode> {};
INSTANTIATE_TEST_SUITE_P(All, AsyncFileExtents, testing::ValuesIn(modes()), mode_name);

// Cuts a buffer into areas of the given sizes.
std::vector<iovec> areas_of(const Buffer& buffer, const std::vector<int64_t>& sizes) {
  std::vector<iovec> areas;
  char* at = buffer.data();
  for (const int64_t size : sizes) {
    areas.push_back({at, static_cast<size_t>(size)});
    at += size;
  }
  return areas;
}

// Descriptors of this process whose file has no name: those of asynchronous files.
std::vector<int> nameless_files() {
  std::vector<int> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    struct stat status;
    if (::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 0) {
      found.push_back(fd);
    }
  }
  return found;
}

void flip_bit(int fd, int64_t offset) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  const int other = ::open(path.c_str(), O_RDWR);
  char byte = 0;
  ASSERT_EQ(::pread(other, &byte, 1, offset), 1);
  byte = static_cast<char>(byte ^ 16);
  ASSERT_EQ(::pwrite(other, &byte, 1, offset), 1);
  ASSERT_EQ(::fsync(other), 0);
  ::close(other);
}

TEST_P(AsyncFileExtents, AreasOfAnySizeAreConsecutiveInTheFile) {
  const TempDir dir;
  AsyncFile file({dir.path()}, kMib, small_pieces(GetParam()));
  const Buffer written(256 * kKib, 1);
  const Buffer read(256 * kKib, 2);
  const Buffer plain(256 * kKib, 3);
  const std::vector<iovec> parts =
      areas_of(written, {4 * kKib, 0, 60 * kKib, 16 * kKib, 8 * kKib, 168 * kKib});
  file.wait(file.writev(parts, 128 * kKib));
  file.wait(file.readv(areas_of(read, {100 * kKib, 4 * kKib, 152 * kKib}), 128 * kKib));
  file.wait(file.read(plain.data(), plain.nbytes(), 128 * kKib));
  EXPECT_TRUE(read == written);
  EXPECT_TRUE(plain == written);
}

TEST_P(AsyncFileExtents, MoreAreasThanOneSystemCallTakes) {
  const TempDir dir;
  AsyncFileOptions options = small_pieces(GetParam());
  options.request_bytes = 16 * kMib;
  AsyncFile file({dir.path()}, 8 * kMib, options);
  const Buffer written(8 * kMib, 1);
  const Buffer read(8 * kMib, 2);
  const std::vector<int64_t> sizes(2048, 4 * kKib);
  file.wait(file.writev(areas_of(written, sizes), 0));
  file.wait(file.readv(areas_of(read, sizes), 0));
  EXPECT_TRUE(read == written);
}

TEST_P(AsyncFileExtents, ShortTransfersOfSeveralAreasAreContinued) {
  const TempDir dir;
  std::atomic<uint32_t> calls{0};
  const auto shorten = [&](IoKind, int64_t, int64_t) -> int64_t {
    return calls++ % 3 == 0 ? 0 : 1 + static_cast<int64_t>(calls * 2654435761U % 40000);
  };
  AsyncFileOptions options = small_pieces(GetParam());
  options.request_bytes = 128 * kKib;
  AsyncFile file({dir.path()}, kMib, options, std::make_shared<FaultyHook>(shorten));
  const Buffer written(kMib, 1);
  const Buffer read(kMib, 2);
  std::vector<int64_t> sizes(32, 12 * kKib);
  sizes.push_back(kMib - 32 * 12 * kKib);
  file.wait(file.writev(areas_of(written, sizes), 0));
  file.wait(file.readv(areas_of(read, sizes), 0));
  EXPECT_TRUE(read == written);
}

TEST_P(AsyncFileExtents, SeveralDirectoriesShareTheBytes) {
  const TempDir first;
  const TempDir second;
  const TempDir third;
  AsyncFile file({first.path(), second.path(), third.path()}, 10 * kMib + 4096,
                 small_pieces(GetParam()));
  EXPECT_GE(file.size(), 10 * kMib + 4096);
  EXPECT_NE(file.path().find(second.path()), std::string::npos);
  const Buffer written(10 * kMib, 1);
  const Buffer read(10 * kMib, 2);
  file.wait(file.write(written.data(), written.nbytes(), 4096));
  for (int64_t at = 0; at < 10 * kMib; at += 40 * kKib) {
    const int64_t nbytes = std::min(40 * kKib, 10 * kMib - at);
    (void)file.read(read.data() + at, nbytes, 4096 + at);
  }
  file.wait_all();
  EXPECT_TRUE(read == written);
  const std::vector<int> descriptors = nameless_files();
  ASSERT_EQ(descriptors.size(), 3u);
  for (const int fd : descriptors) {
    struct stat status;
    ASSERT_EQ(::fstat(fd, &status), 0);
    EXPECT_NEAR(static_cast<double>(status.st_size), 10.0 * kMib / 3, 32.0 * kKib);
  }
}

TEST_P(AsyncFileExtents, MissingSecondDirectoryLeavesNothing) {
  const TempDir dir;
  EXPECT_THROW(AsyncFile({dir.path(), dir.path() + "/missing"}, kMib), IoError);
  EXPECT_TRUE(nameless_files().empty());
}

TEST_P(AsyncFileExtents, PinnedMemoryCarriesTheSameBytes) {
  const TempDir dir;
  AsyncFile file({dir.path()}, kMib, small_pieces(GetParam()));
  const Buffer pinned(kMib, 1);
  const Buffer read(kMib, 2);
  const bool accepted = file.pin(pinned.data(), pinned.nbytes());
  EXPECT_TRUE(!accepted || GetParam().backend == BackendKind::kUring);
  file.wait(file.write(pinned.data(), kMib, 0));
  file.wait(file.read(read.data(), kMib, 0));
  EXPECT_TRUE(read == pinned);
  std::memset(pinned.data(), 0, static_cast<size_t>(kMib));
  file.wait(file.read(pinned.data() + 64 * kKib, 512 * kKib, 64 * kKib));
  EXPECT_EQ(std::memcmp(pinned.data() + 64 * kKib, read.data() + 64 * kKib, 512 * kKib), 0);
  file.forget(pinned.data());
  file.wait(file.read(pinned.data(), kMib, 0));
  EXPECT_TRUE(read == pinned);
}

TEST_P(AsyncFileExtents, PinsAreGivenBackAndTheirNumberIsLimitedWithoutHarm) {
  const TempDir dir;
  AsyncFile file({dir.path()}, kMib, small_pieces(GetParam()));
  const Buffer pages(200 * 4 * kKib, 1);
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 200; ++i) (void)file.pin(pages.data() + i * 4 * kKib, 4 * kKib);
    for (int i = 0; i < 200; ++i) file.forget(pages.data() + i * 4 * kKib);
  }
  EXPECT_NO_THROW(file.wait(file.write(pages.data(), 200 * 4 * kKib, 0)));
}

TEST_P(AsyncFileExtents, FlippedBitIsFoundAndNamed) {
  const TempDir dir;
  AsyncFileOptions options = small_pieces(GetParam());
  options.checksums = true;
  AsyncFile file({dir.path()}, kMib, options);
  const Buffer written(512 * kKib, 1);
  const Buffer read(512 * kKib, 2);
  file.wait(file.write(written.data(), written.nbytes(), 256 * kKib));
  file.wait(file.read(read.data(), read.nbytes(), 256 * kKib));
  EXPECT_TRUE(read == written);
  flip_bit(nameless_files().at(0), 300 * kKib + 77);
  try {
    file.wait(file.read(read.data(), read.nbytes(), 256 * kKib));
    ADD_FAILURE() << "a flipped bit went unnoticed";
  } catch (const ChecksumError& error) {
    EXPECT_EQ(error.code(), EIO);
    EXPECT_EQ(error.offset(), 300 * kKib);
  }
  // Its neighbours are as good as before, and writing heals it.
  EXPECT_NO_THROW(file.wait(file.read(read.data(), 40 * kKib, 256 * kKib)));
  file.wait(file.write(written.data(), written.nbytes(), 256 * kKib));
  EXPECT_NO_THROW(file.wait(file.read(read.data(), read.nbytes(), 256 * kKib)));
}

TEST_P(AsyncFileExtents, ChecksumsOfRangesThatOverlapOtherWritesStayTrue) {
  const TempDir dir;
  AsyncFileOptions options = small_pieces(GetParam());
  options.checksums = true;
  AsyncFile file({dir.path()}, kMib, options);
  const Buffer data(kMib, 1);
  const Buffer read(kMib, 2);
  file.wait(file.read(read.data(), kMib, 0));  // never written: nothing to compare with
  file.wait(file.write(data.data(), kMib, 0));
  file.wait(file.write(data.data() + 8 * kKib, 36 * kKib, 100 * kKib));
  EXPECT_NO_THROW(file.wait(file.read(read.data(), kMib, 0)));
  EXPECT_THROW((void)file.write(data.data(), 1000, 0), StateError);
}

TEST_P(AsyncFileExtents, DiscardedRangesAreForgotten) {
  const TempDir dir;
  AsyncFileOptions options = small_pieces(GetParam());
  options.checksums = true;
  options.reserve = false;
  AsyncFile file({dir.path()}, kMib, options);
  const Buffer data(kMib, 1);
  file.wait(file.write(data.data(), kMib, 0));
  file.discard(128 * kKib, 256 * kKib);
  EXPECT_NO_THROW(file.wait(file.read(data.data(), kMib, 0)));
}

TEST_P(AsyncFileExtents, AFileThatGrowsKeepsItsBytesAndTakesMore) {
  for (const bool reserve : {true, false}) {
    const TempDir dir, other;
    AsyncFileOptions options = small_pieces(GetParam());
    options.reserve = reserve;
    for (const auto& dirs : {std::vector{dir.path()}, std::vector{dir.path(), other.path()}}) {
      AsyncFile file(dirs, kMib, options);
      const int64_t before = file.size();
      const Buffer data(before, 1), more(kMib, 2), read(before + kMib, 3);
      const AsyncFile::Ticket under_way = file.write(data.data(), before, 0);
      file.grow(before / 2);
      EXPECT_EQ(file.size(), before);
      EXPECT_THROW((void)file.write(more.data(), kMib, before), StateError);
      file.grow(before + kMib);
      EXPECT_GE(file.size(), before + kMib);
      file.wait(under_way);
      file.wait(file.write(more.data(), kMib, before));
      file.wait(file.read(read.data(), before + kMib, 0));
      EXPECT_EQ(std::memcmp(read.data(), data.data(), static_cast<size_t>(before)), 0);
      EXPECT_EQ(std::memcmp(read.data() + before, more.data(), kMib), 0);
      if (file.can_discard()) {
        EXPECT_NO_THROW(file.discard(before, kMib));
      }
      file.close();
      EXPECT_THROW(file.grow(4 * kMib), StateError);
    }
  }
}

TEST_P(AsyncFileExtents, AFileWithChecksumsDoesNotGrow) {
  const TempDir dir;
  AsyncFileOptions options = small_pieces(GetParam());
  options.checksums = true;
  AsyncFile file({dir.path()}, kMib, options);
  EXPECT_THROW(file.grow(2 * kMib), StateError);
  EXPECT_EQ(file.size(), kMib);
}

TEST_P(AsyncFileExtents, CountsSayWhatWasDone) {
  const TempDir dir;
  AsyncFileOptions options = small_pieces(GetParam());
  options.depth = 4;
  // A device that takes its time: how many requests are at it is not left to the scheduler.
  const auto slow = [](IoKind, int64_t, int64_t) -> int64_t {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return 0;
  };
  AsyncFile file({dir.path()}, 2 * kMib, options, std::make_shared<FaultyHook>(slow));
  const Buffer data(2 * kMib, 1);
  file.wait(file.write(data.data(), data.nbytes(), 0));
  file.wait(file.read(data.data(), kMib, 0));
  const AsyncFileStats stats = file.stats();
  EXPECT_EQ(stats.queue.bytes_written, 2 * kMib);
  EXPECT_EQ(stats.queue.bytes_read, kMib);
  EXPECT_EQ(stats.queue.requests, 192);
  EXPECT_GT(stats.backend.mean_depth, 3.5);
  EXPECT_LE(stats.backend.mean_depth, 4.0);
  EXPECT_LE(stats.backend.system_calls, 2 * stats.backend.batches);
  EXPECT_GT(stats.backend.cpu_seconds, 0.0);
  file.close();
  EXPECT_GE(file.stats().backend.cpu_seconds, stats.backend.cpu_seconds);
}

}  // namespace
}  // namespace gemini
