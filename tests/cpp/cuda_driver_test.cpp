// Laws of GPU memory and copies on the driver of CUDA itself: that of a GPU, or, where there is
// none, a stand-in for its library (standin/libcuda.cpp). Operators are what a driver can do: they
// fill memory, and what they find they copy to the host, where it is looked at in the end.
#include "gpu/cuda_driver.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/bytes.h"
#include "common/error.h"
#include "gpu/gpu_engine.h"
#include "gpu_test_util.h"
#include "temp_dir.h"

namespace gemini {
namespace {

class CudaDriver : public testing::Test {
 protected:
  void SetUp() override {
    try {
      driver_ = make_cuda_driver(0);
    } catch (const Error& error) {
      // scripts/gpu_check.sh asks for a GPU: there it is a failure.
      if (std::getenv("GEMINI_NEEDS_GPU") != nullptr) throw;
      GTEST_SKIP() << error.what();
    }
    unit_ = driver_->granularity();
    lanes_ = std::make_shared<GpuLanes>(driver_);
  }

  void finish() { lanes_->await(lanes_->mark(Lane::kCompute)); }

  std::shared_ptr<GpuDriver> driver_;
  std::shared_ptr<GpuLanes> lanes_;
  int64_t unit_ = 0;
};

// Operators on a stream of their own, or on CUDA's legacy one.
class Operators {
 public:
  Operators(std::shared_ptr<GpuLanes> lanes, bool own_stream)
      : lanes_(std::move(lanes)), log_(lanes_, kLogBytes) {
    if (own_stream) stream_ = lanes_->driver().create_stream();
    lanes_->follow(stream_);
  }
  ~Operators() {
    if (stream_ != 0) lanes_->driver().destroy_stream(stream_);
  }

  // Notes the first and the last word of a window, and leaves `value` in every byte of it.
  void use(GpuWindow& window, uint8_t expected, uint8_t value) {
    const GpuAddress last = window.address() + static_cast<uint64_t>(window.nbytes()) - kWord;
    for (const GpuAddress address : {window.address(), last}) {
      char* const noted = log_.address() + static_cast<int64_t>(expected_.size()) * kWord;
      lanes_->driver().copy(reinterpret_cast<GpuAddress>(noted), address, kWord, stream_);
      expected_.push_back(expected);
    }
    lanes_->driver().fill(window.address(), value, window.nbytes(), stream_);
  }

  // How many notes are not what was expected.
  [[nodiscard]] size_t num_wrong() {
    lanes_->await(lanes_->mark(Lane::kCompute));
    size_t wrong = 0;
    for (size_t i = 0; i < expected_.size(); ++i) {
      const std::vector<uint8_t> want(kWord, expected_[i]);
      wrong += std::memcmp(log_.address() + i * kWord, want.data(), kWord) != 0;
    }
    return wrong;
  }

 private:
  static constexpr int64_t kWord = 8;
  static constexpr int64_t kLogBytes = 1 << 16;

  std::shared_ptr<GpuLanes> lanes_;
  PinnedBlock log_;
  GpuDriver::Stream stream_ = 0;
  std::vector<uint8_t> expected_;
};

struct Order {
  uint32_t seed;
  bool own_stream;
};

class CudaOrder : public CudaDriver, public testing::WithParamInterface<Order> {};

// Windows of one, two and three blocks, more than fit.
TEST_P(CudaOrder, EveryOperatorFindsWhatTheOneBeforeLeft) {
  constexpr size_t kNumChunks = 9;
  const int64_t capacity = 5 * unit_;
  Operators operators(lanes_, GetParam().own_stream);
  GpuSpace space(lanes_, 3 * kNumChunks * unit_, kNumChunks);
  GpuArena arena(lanes_, capacity, unit_);
  PinnedArena host_arena(lanes_, 3 * kNumChunks * unit_);
  GpuEngine engine(lanes_, nullptr);
  std::vector<GpuWindow*> windows;
  std::vector<std::unique_ptr<HostPlace>> places;
  for (size_t i = 0; i < kNumChunks; ++i) {
    const int64_t nbytes = static_cast<int64_t>(i % 3 + 1) * unit_;
    windows.push_back(space.create(nbytes));
    places.push_back(std::make_unique<HostPlace>(nbytes));
  }
  std::vector<uint8_t> values(kNumChunks, 0);
  std::vector<size_t> resident;
  std::mt19937 random(GetParam().seed);
  const auto evict_one = [&] {
    const auto victim = resident.begin() + static_cast<std::ptrdiff_t>(random() % resident.size());
    const size_t chunk = *victim;
    host_arena.map(*places[chunk], Content::kAny);
    await_report(engine, engine.copy(*places[chunk], *windows[chunk], windows[chunk]->nbytes()));
    arena.unmap(*windows[chunk], random() % 8 == 0 ? Spare::kReturned : Spare::kParked);
    resident.erase(victim);
  };
  for (int round = 0; round < 300; ++round) {
    const size_t chunk = random() % kNumChunks;
    GpuWindow& window = *windows[chunk];
    if (!window.mapped()) {
      while (window.span_bytes() > capacity - arena.mapped_bytes()) evict_one();
      if (places[chunk]->mapped()) {
        arena.map_incoming(window);
        await_report(engine, engine.copy(window, *places[chunk], window.nbytes()));
        host_arena.unmap(*places[chunk], Spare::kParked);
      } else {
        arena.map(window, Content::kZeros);
      }
      resident.push_back(chunk);
    }
    const auto next = static_cast<uint8_t>(values[chunk] + 1);
    operators.use(window, values[chunk], next);
    values[chunk] = next;
    EXPECT_LE(arena.mapped_bytes() + arena.parked_bytes(), capacity);
  }
  EXPECT_EQ(operators.num_wrong(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaOrder,
                         testing::Values(Order{0, true}, Order{1, true}, Order{2, true},
                                         Order{3, false}));

TEST_F(CudaDriver, WhatIsWrittenToTheDiskComesBack) {
  const TempDir dir;
  const int64_t nbytes = round_up(21 * kMib, unit_);
  AsyncFile file({dir.path()}, nbytes);
  Operators operators(lanes_, true);
  GpuSpace space(lanes_, nbytes, 1);
  GpuArena arena(lanes_, nbytes);
  GpuEngine engine(lanes_, &file);
  GpuWindow& window = *space.create(nbytes);
  arena.map(window, Content::kZeros);
  operators.use(window, 0, 7);
  await_report(engine, engine.write(window, nbytes, 0));
  arena.unmap(window, Spare::kParked);
  arena.map(window, Content::kZeros);
  operators.use(window, 0, 9);
  arena.unmap(window, Spare::kParked);
  arena.map_incoming(window);
  await_report(engine, engine.read(window, nbytes, 0));
  operators.use(window, 7, 8);
  EXPECT_EQ(operators.num_wrong(), 0U);
}

TEST_F(CudaDriver, PoisonedWindowsReadNan) {
  Operators operators(lanes_, true);
  GpuSpace space(lanes_, 3 * unit_, 1);
  GpuArena arena(lanes_, 3 * unit_, unit_);
  GpuWindow& window = *space.create(3 * unit_);
  arena.map(window, Content::kZeros);
  operators.use(window, 0, 5);
  arena.unmap(window, Spare::kParked);
  space.poison(window);
  operators.use(window, 0xFF, 0xFF);
  EXPECT_EQ(operators.num_wrong(), 0U);
}

TEST_F(CudaDriver, MemoryIsCountedWhileAnythingShowsIt) {
  const int64_t before = driver_->memory().free_bytes;
  GpuSpace space(lanes_, 64 * unit_, 1);
  GpuWindow& window = *space.create(64 * unit_);
  {
    GpuArena arena(lanes_, 64 * unit_);
    arena.map(window, Content::kZeros);
    finish();
    EXPECT_LE(driver_->memory().free_bytes, before - 32 * unit_);  // others may give some back
    arena.unmap(window, Spare::kReturned);
  }
  EXPECT_GE(driver_->memory().free_bytes, before - 32 * unit_);
}

TEST_F(CudaDriver, NoMemoryIsOutOfBudgetAndWhatFitsIsHadAfterwards) {
  const GpuDriver::Memory memory = driver_->memory();
  EXPECT_THROW((void)driver_->create_block(round_up(memory.total_bytes, unit_) + unit_),
               OutOfBudget);
  const GpuDriver::Block block = driver_->create_block(unit_);
  driver_->destroy_block(block);
}

TEST_F(CudaDriver, RefusalsNameTheCall) {
  const GpuAddress address = driver_->reserve(unit_);
  const GpuDriver::Block block = driver_->create_block(unit_);
  try {
    driver_->map(address, unit_ + 1, block);
    FAIL() << "that is more than whole units";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find("CUDA cannot map memory: "), 0U) << error.what();
  }
  driver_->destroy_block(block);
  driver_->release(address, unit_);
}

TEST_F(CudaDriver, EventsOfAnyThreadAreTimedInTheirOrder) {
  PinnedBlock from(lanes_, unit_);
  GpuSpace space(lanes_, unit_, 1);
  GpuArena arena(lanes_, unit_);
  GpuWindow& window = *space.create(unit_);
  arena.map(window, Content::kZeros);
  const GpuDriver::Stream stream = driver_->create_stream();
  const GpuDriver::Event begin = driver_->create_event(GpuDriver::Waits::kSpinning);
  const GpuDriver::Event end = driver_->create_event(GpuDriver::Waits::kAsleep);
  EXPECT_TRUE(driver_->passed(begin));  // of an event that was never recorded
  finish();
  std::thread([&] {
    driver_->record(begin, stream);
    driver_->copy(window.address(), reinterpret_cast<GpuAddress>(from.address()), unit_, stream);
    driver_->record(end, stream);
  }).join();
  driver_->await(end);
  EXPECT_TRUE(driver_->passed(end));
  EXPECT_GE(driver_->seconds(begin, end), 0.0);
  driver_->destroy_event(begin);
  driver_->destroy_event(end);
  driver_->destroy_stream(stream);
}

TEST_F(CudaDriver, GpuThatDoesNotExistIsRefused) {
  EXPECT_THROW((void)make_cuda_driver(4096), Error);
}

}  // namespace
}  // namespace gemini
