#include "gpu/simulated_turn.h"

#include <utility>

#include "common/mutex.h"

namespace gemini {

struct SimulatedTurn::Progress {
  Mutex mutex;
  Condition changed;
  bool begun GEMINI_GUARDED_BY(mutex) = false;
  bool finished GEMINI_GUARDED_BY(mutex) = false;
};

SimulatedTurn::SimulatedTurn(SimulatedGpu& gpu, GpuDriver::Stream stream,
                             std::vector<GpuRange> ranges)
    : progress_(std::make_shared<Progress>()) {
  gpu.launch(stream, std::move(ranges), [progress = progress_] {
    const Lock lock(progress->mutex);
    progress->begun = true;
    progress->changed.notify_all();
    while (!progress->finished) progress->changed.wait(progress->mutex);
  });
}

SimulatedTurn::~SimulatedTurn() { finish(); }

void SimulatedTurn::await() {
  const Lock lock(progress_->mutex);
  while (!progress_->begun) progress_->changed.wait(progress_->mutex);
}

void SimulatedTurn::finish() {
  const Lock lock(progress_->mutex);
  progress_->finished = true;
  progress_->changed.notify_all();
}

}  // namespace gemini
