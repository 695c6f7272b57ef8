// Flushes: copies written chunks to a lower tier early, while the links are idle, so that evicting
// them later costs nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "chunk/residency.h"
#include "chunk/schedule.h"
#include "chunk/state.h"

namespace gemini {

// The chunks that were written and may need a flush, oldest first.
class FlushQueue {
 public:
  void add(ChunkId chunk);
  void clear();

  // Appends the flushes that the plan of `schedule` requests and that can start now, a few at a
  // time; `moment` is that of the next operator. Chunks that need no flush leave the queue.
  void start(Residency& chunks, const Schedule& schedule, int64_t moment, Actions& actions);

 private:
  std::vector<ChunkId> chunks_;
  std::vector<bool> queued_;
};

}  // namespace gemini
