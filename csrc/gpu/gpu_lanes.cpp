#include "gpu/gpu_lanes.h"

#include <utility>

#include "common/mutex.h"

namespace gemini {
namespace {

constexpr std::array kLanes = {Lane::kCompute, Lane::kHostToDevice, Lane::kDeviceToHost};

}  // namespace

void Uses::include(const Uses& others) {
  for (size_t lane = 0; lane < last_.size(); ++lane) {
    const Mark& other = others.last_[lane];
    if (other && (!last_[lane] || other->number > last_[lane]->number)) last_[lane] = other;
  }
}

bool PassedUses::contain(const Uses& uses) {
  for (const Lane lane : kLanes) {
    const Mark& mark = uses.of(lane);
    uint64_t& passed = passed_[static_cast<size_t>(lane)];
    uint64_t& waiting = waiting_[static_cast<size_t>(lane)];
    if (!mark || mark->number <= passed) continue;
    if (mark->number >= waiting) return false;
    if (!lanes_.passed(mark)) {
      waiting = mark->number;
      return false;
    }
    passed = mark->number;
  }
  return true;
}

// Lives as long as the last mark.
struct GpuLanes::EventPool {
  explicit EventPool(std::shared_ptr<GpuDriver> driver) : driver(std::move(driver)) {}
  ~EventPool() {
    for (const GpuDriver::Event event : idle) driver->destroy_event(event);
  }

  GpuDriver::Event take() {
    {
      const Lock lock(mutex);
      if (!idle.empty()) {
        const GpuDriver::Event event = idle.back();
        idle.pop_back();
        return event;
      }
    }
    return driver->create_event(GpuDriver::Waits::kSpinning);
  }
  void give_back(GpuDriver::Event event) noexcept {
    try {
      const Lock lock(mutex);
      idle.push_back(event);
    } catch (...) {
      driver->destroy_event(event);
    }
  }

  const std::shared_ptr<GpuDriver> driver;
  Mutex mutex;
  std::vector<GpuDriver::Event> idle GEMINI_GUARDED_BY(mutex);
};

GpuLanes::GpuLanes(std::shared_ptr<GpuDriver> driver)
    : driver_(std::move(driver)),
      events_(std::make_shared<EventPool>(driver_)),
      to_device_(*driver_),
      to_host_(*driver_),
      streams_{0, to_device_.get(), to_host_.get()} {}

void GpuLanes::follow(GpuDriver::Stream stream) {
  auto& compute = streams_[static_cast<size_t>(Lane::kCompute)];
  if (stream == compute) return;
  const Mark before = mark(Lane::kCompute);
  driver_->wait(stream, before->event);
  compute = stream;
}

Mark GpuLanes::mark(Lane lane) {
  struct Deleter {
    std::shared_ptr<EventPool> pool;
    void operator()(const LanePoint* point) const noexcept {
      pool->give_back(point->event);
      delete point;
    }
  };
  auto point = std::make_unique<const LanePoint>(events_->take(), ++num_marks_);
  const Mark result(point.release(), Deleter{events_});
  driver_->record(result->event, stream(lane));
  return result;
}

void GpuLanes::wait(Lane lane, const Uses& uses) {
  for (const Lane other : kLanes) {
    const Mark& mark = uses.of(other);
    if (other != lane && mark) driver_->wait(stream(lane), mark->event);
  }
}

void GpuLanes::wait(GpuDriver::Stream stream, const Uses& uses) const {
  for (const Lane lane : kLanes) {
    if (const Mark& mark = uses.of(lane)) driver_->wait(stream, mark->event);
  }
}

bool GpuLanes::passed(const Mark& mark) const { return !mark || driver_->passed(mark->event); }

void GpuLanes::await(const Mark& mark) const {
  if (mark) driver_->await(mark->event);
}

void GpuLanes::await(const Uses& uses) const {
  for (const Lane lane : kLanes) {
    await(uses.of(lane));
  }
}

double GpuLanes::seconds(const Mark& from, const Mark& to) const {
  return driver_->seconds(from->event, to->event);
}

}  // namespace gemini
