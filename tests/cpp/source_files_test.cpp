// Laws of files of others: any range arrives, at any alignment; a file that changed is refused.
#include "aio/source_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "common/error.h"
#include "temp_dir.h"
#include "transfer/transfer_engine.h"

namespace gemini {
namespace {

std::vector<char> pattern(int64_t nbytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<char> bytes(static_cast<size_t>(nbytes));
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

std::string write(const TempDir& dir, const std::string& name, const std::vector<char>& bytes) {
  const std::string path = dir.path() + "/" + name;
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<int64_t>(bytes.size()));
  return path;
}

int code_of(SourceFiles& files, const SourcePart& part) {
  try {
    files.wait(files.read({part}));
  } catch (const IoError& error) {
    return error.code();
  }
  return 0;
}

TEST(SourceFiles, AnyRangeArrivesAtAnyAlignment) {
  const TempDir dir;
  const std::vector<char> bytes = pattern(3'000'001, 1);
  SourceFiles files({write(dir, "a", bytes)});
  std::mt19937 random(2);
  std::vector<char> memory(bytes.size() + 8192, 'x');
  for (int round = 0; round < 40; ++round) {
    const int64_t offset = round % 4 == 0 ? 4096 * (random() % 700) : random() % bytes.size();
    const int64_t left = static_cast<int64_t>(bytes.size()) - offset;
    const int64_t nbytes = round % 5 == 0 ? left : static_cast<int64_t>(random()) % (left + 1);
    char* const target = memory.data() + 1 + random() % 64;
    files.wait(files.read({{0, offset, target, nbytes}}));
    ASSERT_EQ(std::memcmp(target, bytes.data() + offset, static_cast<size_t>(nbytes)), 0);
    ASSERT_EQ(target[nbytes], 'x') << "a byte behind the range was written";
    std::fill(memory.begin(), memory.end(), 'x');
  }
}

TEST(SourceFiles, PartsOfSeveralFilesAreOneRead) {
  const TempDir dir;
  const std::vector<char> one = pattern(70'000, 3);
  const std::vector<char> two = pattern(5'000, 4);
  SourceFiles files({write(dir, "one", one), write(dir, "two", two)});
  TransferEngine engine(nullptr);
  std::vector<char> memory(3'000);
  const auto ticket = engine.read_source(
      files, {{0, 69'001, memory.data(), 999}, {1, 17, memory.data() + 999, 2'001}});
  engine.drain();
  const auto results = engine.poll();
  ASSERT_EQ(results.size(), 1);
  EXPECT_EQ(results[0].ticket, ticket);
  EXPECT_TRUE(results[0].ok) << results[0].message;
  EXPECT_EQ(std::memcmp(memory.data(), one.data() + 69'001, 999), 0);
  EXPECT_EQ(std::memcmp(memory.data() + 999, two.data() + 17, 2'001), 0);
  EXPECT_EQ(engine.stats(Link::kDiskRead).bytes, 3'000);
  engine.close();
}

TEST(SourceFiles, AFileThatChangedOrBecameShorterIsRefusedAndOthersAreNot) {
  const TempDir dir;
  const std::string changed = write(dir, "changed", pattern(10'000, 5));
  SourceFiles files({changed, write(dir, "other", pattern(10'000, 6))});
  std::vector<char> memory(10'000);
  EXPECT_EQ(code_of(files, {0, 0, memory.data(), 10'000}), 0);
  struct stat before = {};
  ASSERT_EQ(::stat(changed.c_str(), &before), 0);
  const timespec later[] = {before.st_atim, {before.st_mtim.tv_sec + 1, 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, changed.c_str(), later, 0), 0);
  EXPECT_EQ(code_of(files, {0, 0, memory.data(), 10'000}), ESTALE);
  EXPECT_EQ(code_of(files, {1, 0, memory.data(), 10'000}), 0);
  ASSERT_EQ(::truncate(changed.c_str(), 5'000), 0);
  EXPECT_NE(code_of(files, {0, 4'000, memory.data(), 6'000}), 0);
}

TEST(SourceFiles, WhatIsNoFileOrNoRangeIsRefused) {
  const TempDir dir;
  EXPECT_THROW(SourceFiles({dir.path() + "/none"}), IoError);
  EXPECT_THROW(SourceFiles(std::vector<std::string>{}), StateError);
  const std::string fifo = dir.path() + "/fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_THROW(SourceFiles({fifo}), Error);
  SourceFiles files({write(dir, "a", pattern(100, 7))});
  std::vector<char> memory(100);
  EXPECT_THROW(static_cast<void>(files.read({{1, 0, memory.data(), 10}})), StateError);
  EXPECT_THROW(static_cast<void>(files.read({{0, -1, memory.data(), 10}})), StateError);
  EXPECT_NE(code_of(files, {0, 50, memory.data(), 60}), 0) << "behind the end";
  files.close();
  EXPECT_THROW(static_cast<void>(files.read({{0, 0, memory.data(), 10}})), StateError);
}

TEST(SourceFiles, WhoeverIsCalledGetsTheErrorOfItsReadOnce) {
  const TempDir dir;
  std::vector<char> memory(2'000'000);
  std::mutex mutex;
  std::vector<int> failed;
  const auto note = [&](const std::exception_ptr& error) {
    const std::lock_guard lock(mutex);
    failed.push_back(error ? 1 : 0);
  };
  SourceFiles files({write(dir, "a", pattern(2'000'000, 9))});
  EXPECT_NE(files.read({{0, 0, memory.data(), 2'000'000}}, note), 0u);
  EXPECT_NE(files.read({{0, 1'500'000, memory.data(), 1'000'000}}, note), 0u);  // behind the end
  EXPECT_NE(files.read({{0, 0, memory.data(), 0}}, note), 0u);                  // not called
  files.close();
  std::ranges::sort(failed);
  EXPECT_EQ(failed, (std::vector<int>{0, 1}));
}

TEST(SourceFiles, ReadsUnderWayEndBeforeItIsClosed) {
  const TempDir dir;
  const std::vector<char> bytes = pattern(8 << 20, 8);
  std::vector<char> memory(bytes.size());
  SourceFiles files({write(dir, "a", bytes)});
  const auto ticket = files.read({{0, 0, memory.data(), static_cast<int64_t>(bytes.size())}});
  files.close();
  files.wait(ticket);
  EXPECT_EQ(memory, bytes);
}

}  // namespace
}  // namespace gemini
