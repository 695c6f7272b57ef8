// LinkClock: links in virtual time, first in, first out, each with a latency and a bandwidth.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "chunk/state.h"

namespace gemini {

inline constexpr size_t kNumSimulatedLinks = 4;
enum class SimulatedLink : uint8_t { kHostToDevice, kDeviceToHost, kDiskRead, kDiskWrite };

struct LinkModel {
  double bytes_per_second = 0;
  double latency_seconds = 0;
};

using LinkModels = std::array<LinkModel, kNumSimulatedLinks>;

// Transfers, and a clock that moves only on request. Not thread-safe.
class LinkClock {
 public:
  // `disk_shared`: reads and writes of the disk share its time equally while both wait.
  LinkClock(const LinkModels& models, bool disk_shared);

  void submit(SimulatedLink link, ActionId id, int64_t nbytes);
  // Moves the clock to `seconds`; transfers that end by then have ended.
  void advance_to(double seconds);
  // Moves the clock to the end of the next transfer, unless an ended one was not taken yet. Throws
  // StateError if there is none.
  void await_one();
  // Transfers that have ended since the last call, in order.
  [[nodiscard]] std::vector<ActionId> take_finished();

  [[nodiscard]] double now() const { return now_; }
  [[nodiscard]] bool busy() const;
  [[nodiscard]] int64_t bytes(SimulatedLink link) const { return at(link).bytes; }
  [[nodiscard]] double busy_seconds(SimulatedLink link) const { return at(link).busy_seconds; }

 private:
  struct Transfer {
    ActionId id = 0;
    double seconds_left = 0;  // if the link works on it only
  };
  struct State {
    std::deque<Transfer> queue;
    int64_t bytes = 0;  // submitted
    double busy_seconds = 0;
  };

  [[nodiscard]] const State& at(SimulatedLink link) const {
    return links_[static_cast<size_t>(link)];
  }
  [[nodiscard]] double speed(size_t link) const;  // seconds of work done per second
  [[nodiscard]] double seconds_to_next() const;   // infinite if idle
  void pass(double seconds);

  LinkModels models_;
  bool disk_shared_;
  std::array<State, kNumSimulatedLinks> links_;
  std::vector<ActionId> finished_;
  double now_ = 0;
};

}  // namespace gemini
