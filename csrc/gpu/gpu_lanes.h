// GpuLanes: the order of the GPU work of the runtime, by three streams and marks that order one
// after another.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "gpu/gpu_driver.h"
#include "gpu/gpu_stream.h"

namespace gemini {

// kCompute: the stream of the caller's operators. The others are the runtime's own.
enum class Lane { kCompute, kHostToDevice, kDeviceToHost };
inline constexpr int kNumLanes = 3;

// A point in a lane. Its event is reused when no mark refers to the point any longer.
struct LanePoint {
  GpuDriver::Event event;
  uint64_t number;  // increases along a lane
};

// A point in the order of a lane; null means the beginning.
using Mark = std::shared_ptr<const LanePoint>;

class GpuLanes;

// The last use of a piece of memory by each lane.
class Uses {
 public:
  // `mark` must be later than the one noted for the lane before.
  void note(Lane lane, Mark mark) { last_[static_cast<size_t>(lane)] = std::move(mark); }
  // Takes the later mark of each lane: work after these uses comes after `others` too.
  void include(const Uses& others);
  [[nodiscard]] const Mark& of(Lane lane) const { return last_[static_cast<size_t>(lane)]; }

 private:
  std::array<Mark, kNumLanes> last_;
};

// Tells for many uses, at one moment, which have passed. Marks of a lane pass in order, so most
// answers follow from earlier ones without a call of the driver.
class PassedUses {
 public:
  explicit PassedUses(const GpuLanes& lanes) : lanes_(lanes) {
    waiting_.fill(std::numeric_limits<uint64_t>::max());
  }
  [[nodiscard]] bool contain(const Uses& uses);

 private:
  const GpuLanes& lanes_;
  std::array<uint64_t, kNumLanes> passed_{};   // by lane: marks up to this number have passed,
  std::array<uint64_t, kNumLanes> waiting_{};  // marks from this number on have not
};

// Only `await` waits for the GPU. `mark`, `wait` and `follow` are for one thread at a time; marks
// may be dropped, waited for and queried on any thread.
class GpuLanes {
 public:
  explicit GpuLanes(std::shared_ptr<GpuDriver> driver);
  ~GpuLanes() = default;
  GpuLanes(const GpuLanes&) = delete;
  GpuLanes& operator=(const GpuLanes&) = delete;

  [[nodiscard]] GpuDriver& driver() const noexcept { return *driver_; }
  [[nodiscard]] GpuDriver::Stream stream(Lane lane) const noexcept {
    return streams_[static_cast<size_t>(lane)];
  }

  // From now on operators run on `stream`; it continues after the previous one.
  void follow(GpuDriver::Stream stream);

  // Marks the end of the lane's work so far.
  [[nodiscard]] Mark mark(Lane lane);
  // Later work of the lane begins after the last uses by the other lanes.
  void wait(Lane lane, const Uses& uses);
  // The same for a stream that is not a lane. May be called on any thread.
  void wait(GpuDriver::Stream stream, const Uses& uses) const;

  [[nodiscard]] bool passed(const Mark& mark) const;
  // Block the calling thread until it has passed.
  void await(const Mark& mark) const;
  void await(const Uses& uses) const;
  // Seconds between two marks that have passed.
  [[nodiscard]] double seconds(const Mark& from, const Mark& to) const;

 private:
  struct EventPool;

  std::shared_ptr<GpuDriver> driver_;
  std::shared_ptr<EventPool> events_;
  const GpuStream to_device_;
  const GpuStream to_host_;
  std::array<GpuDriver::Stream, kNumLanes> streams_;  // by lane
  uint64_t num_marks_ = 0;
};

}  // namespace gemini
