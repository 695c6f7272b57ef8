#include "gpu/gpu_lanes.h"

#include <utility>

namespace gemini {

// Lives as long as the last mark.
struct GpuLanes::EventPool {
  explicit EventPool(std::shared_ptr<GpuDriver> driver) : driver(std::move(driver)) {}
  ~EventPool() {
    for (const GpuDriver::Event event : idle) driver->destroy_event(event);
  }

  GpuDriver::Event take() {
    {
      const std::lock_guard lock(mutex);
      if (!idle.empty()) {
        const GpuDriver::Event event = idle.back();
        idle.pop_back();
        return event;
      }
    }
    return driver->create_event(false);
  }
  void give_back(GpuDriver::Event event) noexcept {
    try {
      const std::lock_guard lock(mutex);
      idle.push_back(event);
    } catch (...) {
      driver->destroy_event(event);
    }
  }

  const std::shared_ptr<GpuDriver> driver;
  std::mutex mutex;
  std::vector<GpuDriver::Event> idle;  // guarded by mutex
};

GpuLanes::GpuLanes(std::shared_ptr<GpuDriver> driver)
    : driver_(std::move(driver)), events_(std::make_shared<EventPool>(driver_)) {
  for (const Lane own : {Lane::kHostToDevice, Lane::kDeviceToHost}) {
    streams_[static_cast<size_t>(own)] = driver_->create_stream();
  }
}

GpuLanes::~GpuLanes() {
  for (const Lane own : {Lane::kHostToDevice, Lane::kDeviceToHost}) {
    driver_->destroy_stream(stream(own));
  }
}

void GpuLanes::follow(GpuDriver::Stream stream) {
  auto& compute = streams_[static_cast<size_t>(Lane::kCompute)];
  if (stream == compute) return;
  const Mark before = mark(Lane::kCompute);
  driver_->wait(stream, *before);
  compute = stream;
}

Mark GpuLanes::mark(Lane lane) {
  struct Deleter {
    std::shared_ptr<EventPool> pool;
    void operator()(const GpuDriver::Event* event) const noexcept {
      pool->give_back(*event);
      delete event;
    }
  };
  auto event = std::make_unique<const GpuDriver::Event>(events_->take());
  const Mark result(event.release(), Deleter{events_});
  driver_->record(*result, stream(lane));
  return result;
}

void GpuLanes::wait(Lane lane, const Uses& uses) {
  for (const Lane other : {Lane::kCompute, Lane::kHostToDevice, Lane::kDeviceToHost}) {
    const Mark& mark = uses.of(other);
    if (other != lane && mark) driver_->wait(stream(lane), *mark);
  }
}

void GpuLanes::wait(GpuDriver::Stream stream, const Uses& uses) const {
  for (const Lane lane : {Lane::kCompute, Lane::kHostToDevice, Lane::kDeviceToHost}) {
    if (const Mark& mark = uses.of(lane)) driver_->wait(stream, *mark);
  }
}

bool GpuLanes::passed(const Mark& mark) const { return !mark || driver_->passed(*mark); }

bool GpuLanes::passed(const Uses& uses) const {
  return passed(uses.of(Lane::kCompute)) && passed(uses.of(Lane::kHostToDevice)) &&
         passed(uses.of(Lane::kDeviceToHost));
}

void GpuLanes::await(const Mark& mark) const {
  if (mark) driver_->await(*mark);
}

void GpuLanes::await(const Uses& uses) const {
  for (const Lane lane : {Lane::kCompute, Lane::kHostToDevice, Lane::kDeviceToHost}) {
    await(uses.of(lane));
  }
}

double GpuLanes::seconds(const Mark& from, const Mark& to) const {
  return driver_->seconds(*from, *to);
}

}  // namespace gemini
