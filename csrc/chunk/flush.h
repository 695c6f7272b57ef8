// Copying what was written below early, while the links are idle, so that giving it up later costs
// nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "chunk/residency.h"
#include "chunk/schedule.h"
#include "chunk/state.h"

namespace gemini {

// The chunks that were written and may have to be flushed, oldest first.
class FlushQueue {
 public:
  void add(ChunkId chunk);
  void clear();

  // Appends the flushes that the plan of `schedule` asks for and that can start now, a few at a
  // time; `moment` is that of the next operator. Chunks that need none leave the queue.
  void start(Residency& chunks, const Schedule& schedule, int64_t moment, Actions& actions);

 private:
  std::vector<ChunkId> chunks_;
  std::vector<bool> queued_;
};

}  // namespace gemini
