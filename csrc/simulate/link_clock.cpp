#include "simulate/link_clock.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "common/error.h"

namespace gemini {

namespace {

constexpr double kNothingLeft = 1e-12;  // seconds; rounding errors are far smaller

constexpr size_t index(SimulatedLink link) { return static_cast<size_t>(link); }

}  // namespace

LinkClock::LinkClock(const LinkModels& models, bool disk_shared)
    : models_(models), disk_shared_(disk_shared) {}

void LinkClock::submit(SimulatedLink link, ActionId id, int64_t nbytes) {
  const LinkModel& model = models_[index(link)];
  if (model.bytes_per_second <= 0) {
    throw StateError("a transfer was simulated on a link without a bandwidth");
  }
  const double seconds =
      model.latency_seconds + static_cast<double>(nbytes) / model.bytes_per_second;
  links_[index(link)].queue.push_back({id, seconds});
  links_[index(link)].bytes += nbytes;
}

bool LinkClock::busy() const {
  return std::ranges::any_of(links_, [](const State& link) { return !link.queue.empty(); });
}

double LinkClock::speed(size_t link) const {
  const bool is_disk = link >= index(SimulatedLink::kDiskRead);
  const bool both =
      !at(SimulatedLink::kDiskRead).queue.empty() && !at(SimulatedLink::kDiskWrite).queue.empty();
  return is_disk && disk_shared_ && both ? 0.5 : 1.0;
}

double LinkClock::seconds_to_next() const {
  double next = std::numeric_limits<double>::infinity();
  for (size_t link = 0; link < kNumSimulatedLinks; ++link) {
    if (links_[link].queue.empty()) continue;
    next = std::min(next, links_[link].queue.front().seconds_left / speed(link));
  }
  return next;
}

// Advances time by an interval in which at most the first transfer of each link ends.
void LinkClock::pass(double seconds) {
  std::array<double, kNumSimulatedLinks> done{};
  for (size_t link = 0; link < kNumSimulatedLinks; ++link) done[link] = seconds * speed(link);
  now_ += seconds;
  for (size_t link = 0; link < kNumSimulatedLinks; ++link) {
    State& state = links_[link];
    if (state.queue.empty()) continue;
    state.busy_seconds += done[link];
    state.queue.front().seconds_left -= done[link];
    if (state.queue.front().seconds_left > kNothingLeft) continue;
    finished_.push_back(state.queue.front().id);
    state.queue.pop_front();
  }
}

void LinkClock::advance_to(double seconds) {
  while (now_ < seconds) {
    const double next = seconds_to_next();
    if (now_ + next >= seconds) {
      pass(seconds - now_);
      now_ = seconds;
    } else {
      pass(next);
    }
  }
}

void LinkClock::await_one() {
  if (finished_.empty() && !busy()) {
    throw StateError("the simulated step waits for a transfer but none is under way");
  }
  while (finished_.empty()) pass(seconds_to_next());
}

std::vector<ActionId> LinkClock::take_finished() { return std::exchange(finished_, {}); }

}  // namespace gemini
