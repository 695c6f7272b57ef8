// SimulatedTurn: work in a stream of a simulated GPU that another thread executes.
#pragma once

#include <memory>
#include <vector>

#include "gpu/simulated_gpu.h"

namespace gemini {

// The thread with the turn executes the work. Until the turn is finished or destroyed, the stream
// does nothing else.
class SimulatedTurn {
 public:
  // Takes the next turn in the stream, for work that uses `ranges`.
  SimulatedTurn(SimulatedGpu& gpu, GpuDriver::Stream stream, std::vector<GpuRange> ranges);
  ~SimulatedTurn();
  SimulatedTurn(const SimulatedTurn&) = delete;
  SimulatedTurn& operator=(const SimulatedTurn&) = delete;

  // Blocks until the stream has reached the turn.
  void await();
  // Idempotent.
  void finish();

 private:
  struct Progress;
  std::shared_ptr<Progress> progress_;
};

}  // namespace gemini
