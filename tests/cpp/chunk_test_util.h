// A table with one tensor per chunk, and an executor whose transfers end when the test says so.
#pragma once

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "chunk/chunk_table.h"

namespace gemini::testing {

inline constexpr Access kUntraced{.traced = false};
inline constexpr Access kOnHost{.on = Tier::kHost};

struct Budgets {
  int64_t device = 0;
  int64_t host = 0;
  int64_t disk = 0;
};

// Tensor i is the only tensor of chunk i. Every call checks the invariants.
class World {
 public:
  World(Budgets budgets, const std::vector<int64_t>& chunk_bytes)
      : table(budgets.device, budgets.host, budgets.disk) {
    for (const int64_t nbytes : chunk_bytes) table.add_tensor(table.add_chunk(nbytes));
  }

  Actions access(const std::vector<TensorId>& tensors, Access how = {}) {
    return note(table.access(tensors, how));
  }
  Actions leave(const std::vector<TensorId>& tensors) { return note(table.leave(tensors)); }
  Actions ensure(const std::vector<TensorId>& tensors) { return note(table.ensure(tensors)); }
  Actions prefetch(int32_t max_in_flight) { return note(table.prefetch(max_in_flight)); }
  Actions free(const std::vector<TensorId>& tensors) { return note(table.free(tensors)); }
  Actions release(const std::vector<TensorId>& tensors, Use how = Use::kRead) {
    return note(table.release(tensors, how));
  }

  Completion complete_next() {
    const Action action = flights.front();
    flights.pop_front();
    const Completion completion = table.complete(action.id);
    table.check_invariants();
    return completion;
  }
  Completion abort_next() {
    const Action action = flights.front();
    flights.pop_front();
    const Completion completion = table.abort(action.id);
    table.check_invariants();
    return completion;
  }
  void complete_all() {
    while (!flights.empty()) complete_next();
  }

  // What an executor does around an operator, to the end.
  void use(const std::vector<TensorId>& tensors, Use how = Use::kRead) {
    access(tensors);
    wait_ready(tensors);
    release(tensors, how);
  }
  void wait_ready(const std::vector<TensorId>& tensors) {
    while (!table.ready(tensors)) {
      if (!flights.empty()) complete_next();
      const bool stuck = ensure(tensors).empty() && flights.empty() && !table.ready(tensors);
      if (stuck) throw std::logic_error("nothing to wait for, and not ready");
    }
  }
  // Every unpinned chunk leaves DEVICE.
  void empty_device() {
    const int64_t limit = table.limit();
    table.set_limit(0);
    note(table.access({}, kUntraced));
    complete_all();
    table.set_limit(limit);
  }

  [[nodiscard]] std::string valid(ChunkId chunk) const {
    const TierSet tiers = table.chunk(chunk).valid;
    std::string text;
    for (const Tier tier : kTiers) {
      if (tiers.has(tier)) text += std::string(text.empty() ? "" : "+") + name(tier);
    }
    return text;
  }

  ChunkTable table;
  std::deque<Action> flights;
  std::vector<Action> log;  // everything decided so far

 private:
  Actions note(Actions actions) {
    table.check_invariants();
    for (const Action& action : actions) {
      log.push_back(action);
      if (action.id != 0) flights.push_back(action);
    }
    return actions;
  }
};

// "EVICT 2, FETCH 0": the decisions, in order.
inline std::string text(const Actions& actions) {
  std::string result;
  for (const Action& action : actions) {
    if (!result.empty()) result += ", ";
    result += std::string(name(action.kind)) + " " + std::to_string(action.chunk);
    if (action.kind == ActionKind::kDrop) result += std::string(" ") + name(action.from);
  }
  return result;
}

}  // namespace gemini::testing
