// Work on a stream of a simulated GPU that another thread does.
#pragma once

#include <memory>
#include <vector>

#include "gpu/simulated_gpu.h"

namespace gemini {

// Work of a stream that is done by the thread that has the turn. Until it is finished, or
// gone, the stream does nothing else.
class SimulatedTurn {
 public:
  // Takes the next turn on the stream, for work that uses `ranges`.
  SimulatedTurn(SimulatedGpu& gpu, GpuDriver::Stream stream, std::vector<GpuRange> ranges);
  ~SimulatedTurn();
  SimulatedTurn(const SimulatedTurn&) = delete;
  SimulatedTurn& operator=(const SimulatedTurn&) = delete;

  // Blocks until the stream has come to it.
  void await();
  // Idempotent.
  void finish();

 private:
  struct Progress;
  std::shared_ptr<Progress> progress_;
};

}  // namespace gemini
