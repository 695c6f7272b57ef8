#include "gpu/simulated_turn.h"

#include <condition_variable>
#include <mutex>
#include <utility>

namespace gemini {

struct SimulatedTurn::Progress {
  std::mutex mutex;
  std::condition_variable changed;
  bool begun = false;     // guarded by mutex
  bool finished = false;  // guarded by mutex
};

SimulatedTurn::SimulatedTurn(SimulatedGpu& gpu, GpuDriver::Stream stream,
                             std::vector<GpuRange> ranges)
    : progress_(std::make_shared<Progress>()) {
  gpu.launch(stream, std::move(ranges), [progress = progress_] {
    std::unique_lock lock(progress->mutex);
    progress->begun = true;
    progress->changed.notify_all();
    progress->changed.wait(lock, [&] { return progress->finished; });
  });
}

SimulatedTurn::~SimulatedTurn() { finish(); }

void SimulatedTurn::await() {
  std::unique_lock lock(progress_->mutex);
  progress_->changed.wait(lock, [&] { return progress_->begun; });
}

void SimulatedTurn::finish() {
  const std::lock_guard lock(progress_->mutex);
  progress_->finished = true;
  progress_->changed.notify_all();
}

}  // namespace gemini
