#include "gpu/simulated_gpu.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "common/bytes.h"
#include "common/error.h"
#include "common/mutex.h"
#include "common/size_text.h"
#include "common/unique_fd.h"
#include "common/worker_thread.h"

namespace gemini {
namespace {

using Clock = std::chrono::steady_clock;

// A point in the order of a stream; `at` is when it passed.
struct Point {
  bool passed = false;
  Clock::time_point at = {};
};
using PointRef = std::shared_ptr<Point>;

void* memory_at(GpuAddress address) { return reinterpret_cast<void*>(address); }

bool overlap(const GpuRange& a, const GpuRange& b) {
  return a.address < b.address + static_cast<uint64_t>(b.nbytes) &&
         b.address < a.address + static_cast<uint64_t>(a.nbytes);
}

[[noreturn]] void fail(const std::string& doing) {
  throw Error("the simulated GPU cannot " + doing + ": " + std::strerror(errno));
}

}  // namespace

struct SimulatedGpu::State {
  struct Mapping {
    int64_t nbytes;
    bool allowed = false;
  };

  // Throw Error for an unknown stream or event.
  [[nodiscard]] Worker& worker(Stream stream) GEMINI_REQUIRES(mutex);
  [[nodiscard]] PointRef& point(Event event) GEMINI_REQUIRES(mutex);

  explicit State(int64_t nbytes) : file(::memfd_create("gemini-simulated-gpu", MFD_CLOEXEC)) {
    if (file.get() < 0 || ::ftruncate(file.get(), nbytes) != 0) fail("make its memory");
    holes[0] = nbytes;
  }

  Mutex mutex;
  Condition passed;  // a point has passed
  UniqueFd file;
  std::map<Block, int64_t> blocks GEMINI_GUARDED_BY(mutex);   // sizes
  std::map<int64_t, int64_t> holes GEMINI_GUARDED_BY(mutex);  // free ranges, by offset
  std::map<GpuAddress, Mapping> mappings GEMINI_GUARDED_BY(mutex);
  std::map<Stream, std::unique_ptr<Worker>> workers GEMINI_GUARDED_BY(mutex);
  std::map<Event, PointRef> events GEMINI_GUARDED_BY(mutex);
  uint64_t next_number GEMINI_GUARDED_BY(mutex) = 1;
  int64_t used_bytes GEMINI_GUARDED_BY(mutex) = 0;
  int64_t num_maps GEMINI_GUARDED_BY(mutex) = 0;
  std::minstd_rand random GEMINI_GUARDED_BY(mutex);
};

// A stream: work in order, on its own thread.
class SimulatedGpu::Worker {
 public:
  struct Work {
    std::vector<GpuRange> ranges;
    std::function<void()> run;  // empty: only a point
    PointRef before;            // if set, the work begins after it has passed
    PointRef after;             // if set, passed when the work is done
    std::chrono::microseconds delay{0};
  };

  explicit Worker(State& state)
      : state_(state), thread_(start_worker("a stream of the simulated GPU", [this] { loop(); })) {}
  ~Worker() { thread_.join(); }

  // The caller must hold the state's mutex.
  void give(Work work) {
    state_.mutex.is_held();
    queue_.push_back(std::move(work));
    given_.notify_one();
  }
  void end() {
    state_.mutex.is_held();
    ending_ = true;
    given_.notify_one();
  }
  [[nodiscard]] bool uses(const GpuRange& range) const {
    state_.mutex.is_held();
    return std::any_of(queue_.begin(), queue_.end(), [&](const Work& work) {
      return std::any_of(work.ranges.begin(), work.ranges.end(),
                         [&](const GpuRange& own) { return overlap(own, range); });
    });
  }

 private:
  void loop() {
    while (Work* const work = next()) {
      if (work->run) {
        std::this_thread::sleep_for(work->delay);
        work->run();
      }
      const Lock lock(state_.mutex);
      if (work->after) {
        *work->after = {true, Clock::now()};
        state_.passed.notify_all();
      }
      queue_.pop_front();
    }
  }
  // The first work, when it may begin; it stays in the queue until it is done. Null when the stream
  // has ended.
  [[nodiscard]] Work* next() {
    const Lock lock(state_.mutex);
    while (!ending_ && queue_.empty()) given_.wait(state_.mutex);
    if (queue_.empty()) return nullptr;
    Work& work = queue_.front();
    while (work.before && !work.before->passed) state_.passed.wait(state_.mutex);
    return &work;
  }

  State& state_;
  Condition given_;                                         // work was given, or the stream ends
  std::deque<Work> queue_ GEMINI_GUARDED_BY(state_.mutex);  // references to elements stay valid
  bool ending_ GEMINI_GUARDED_BY(state_.mutex) = false;
  std::thread thread_;  // last: it uses the other members
};

SimulatedGpu::Worker& SimulatedGpu::State::worker(Stream stream) {
  const auto found = workers.find(stream);
  if (found == workers.end()) throw Error("the simulated GPU has no such stream");
  return *found->second;
}

PointRef& SimulatedGpu::State::point(Event event) {
  const auto found = events.find(event);
  if (found == events.end()) throw Error("the simulated GPU has no such event");
  return found->second;
}

SimulatedGpu::SimulatedGpu(SimulatedGpuOptions options)
    : options_(std::move(options)),
      state_(std::make_unique<State>(round_up(options_.total_bytes, options_.granularity))) {
  state_->random.seed(options_.seed);
}

SimulatedGpu::~SimulatedGpu() {
  std::map<Stream, std::unique_ptr<Worker>> workers;
  {
    const Lock lock(state_->mutex);
    for (const auto& [stream, worker] : state_->workers) worker->end();
    workers.swap(state_->workers);
  }
  workers.clear();
  for (const auto& [address, mapping] : state_->mappings) {
    (void)::munmap(memory_at(address), static_cast<size_t>(mapping.nbytes));
  }
}

void SimulatedGpu::launch(Stream stream, std::vector<GpuRange> ranges, std::function<void()> work) {
  if (stream == 0) return work();
  const Lock lock(state_->mutex);
  std::uniform_int_distribution<int64_t> delays(0, options_.max_delay_us);
  state_->worker(stream).give({std::move(ranges), std::move(work), nullptr, nullptr,
                               std::chrono::microseconds(delays(state_->random))});
}

int64_t SimulatedGpu::used_bytes() const {
  const Lock lock(state_->mutex);
  return state_->used_bytes;
}

int64_t SimulatedGpu::num_maps() const {
  const Lock lock(state_->mutex);
  return state_->num_maps;
}

int64_t SimulatedGpu::granularity() const { return options_.granularity; }

GpuDriver::Memory SimulatedGpu::memory() {
  const Lock lock(state_->mutex);
  return {options_.total_bytes - state_->used_bytes, options_.total_bytes};
}

GpuAddress SimulatedGpu::reserve(int64_t nbytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const address = ::mmap(nullptr, static_cast<size_t>(nbytes), PROT_NONE, kFlags, -1, 0);
  if (address == MAP_FAILED) fail("reserve addresses");
  return reinterpret_cast<GpuAddress>(address);
}

void SimulatedGpu::release(GpuAddress address, int64_t nbytes) noexcept {
  (void)::munmap(memory_at(address), static_cast<size_t>(nbytes));
}

// First fit. A block's number is its offset in the file, plus one.
GpuDriver::Block SimulatedGpu::create_block(int64_t nbytes) {
  const Lock lock(state_->mutex);
  auto& holes = state_->holes;
  const auto hole = std::find_if(holes.begin(), holes.end(),
                                 [&](const auto& each) { return each.second >= nbytes; });
  if (hole == holes.end()) {
    throw OutOfBudget("the simulated GPU has no " + format_enough(nbytes) +
                      " left; lower device_bytes");
  }
  const auto [offset, size] = *hole;
  holes.erase(hole);
  if (size > nbytes) holes[offset + nbytes] = size - nbytes;
  const Block block = static_cast<Block>(offset) + 1;
  state_->blocks[block] = nbytes;
  state_->used_bytes += nbytes;
  return block;
}

void SimulatedGpu::destroy_block(Block block) noexcept {
  const Lock lock(state_->mutex);
  const auto found = state_->blocks.find(block);
  if (found == state_->blocks.end()) return;
  const auto offset = static_cast<int64_t>(block - 1);
  (void)::fallocate(state_->file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset,
                    found->second);
  state_->used_bytes -= found->second;
  auto [hole, inserted] = state_->holes.emplace(offset, found->second);
  state_->blocks.erase(found);
  if (const auto next = std::next(hole);
      next != state_->holes.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    state_->holes.erase(next);
  }
  if (hole != state_->holes.begin()) {
    const auto before = std::prev(hole);
    if (before->first + before->second == hole->first) {
      before->second += hole->second;
      state_->holes.erase(hole);
    }
  }
}

void SimulatedGpu::map(GpuAddress address, int64_t nbytes, Block block) {
  const Lock lock(state_->mutex);
  if (state_->mappings.contains(address)) throw Error("the address is mapped already");
  if (!state_->blocks.contains(block)) throw Error("there is no such block");
  void* const mapped =
      ::mmap(memory_at(address), static_cast<size_t>(nbytes), PROT_NONE, MAP_SHARED | MAP_FIXED,
             state_->file.get(), static_cast<off_t>(block - 1));
  if (mapped == MAP_FAILED) fail("map memory");
  state_->mappings[address] = {nbytes};
  ++state_->num_maps;
}

void SimulatedGpu::allow(GpuAddress address, int64_t nbytes) {
  const Lock lock(state_->mutex);
  const GpuAddress end = address + static_cast<uint64_t>(nbytes);
  const auto first = state_->mappings.find(address);
  auto behind = first;
  GpuAddress reached = address;
  while (behind != state_->mappings.end() && behind->first == reached && reached < end) {
    if (behind->second.allowed) throw Error("access is given to memory that may be in use");
    reached += static_cast<uint64_t>(behind->second.nbytes);
    ++behind;
  }
  if (reached != end) throw Error("not all of the range is mapped");
  if (::mprotect(memory_at(address), static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE) != 0) {
    fail("give access to memory");
  }
  std::for_each(first, behind, [](auto& mapping) { mapping.second.allowed = true; });
}

void SimulatedGpu::unmap(GpuAddress address, int64_t nbytes) {
  const Lock lock(state_->mutex);
  const auto found = state_->mappings.find(address);
  if (found == state_->mappings.end()) throw Error("the address is not mapped");
  for (const auto& [stream, worker] : state_->workers) {
    if (worker->uses({address, nbytes})) throw Error("memory is unmapped while it is in use");
  }
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (::mmap(memory_at(address), static_cast<size_t>(nbytes), PROT_NONE, kFlags, -1, 0) ==
      MAP_FAILED) {
    fail("unmap memory");
  }
  state_->mappings.erase(found);
}

void SimulatedGpu::pin(char*, int64_t) {}  // streams are threads: no page-locking necessary

void SimulatedGpu::unpin(char*) noexcept {}

GpuDriver::Stream SimulatedGpu::create_stream() {
  auto worker = std::make_unique<Worker>(*state_);
  const Lock lock(state_->mutex);
  const Stream stream = state_->next_number++;
  state_->workers[stream] = std::move(worker);
  return stream;
}

void SimulatedGpu::destroy_stream(Stream stream) noexcept {
  std::unique_ptr<Worker> ended;
  {
    const Lock lock(state_->mutex);
    const auto found = state_->workers.find(stream);
    if (found == state_->workers.end()) return;
    found->second->end();
    ended = std::move(found->second);
    state_->workers.erase(found);
  }
}

GpuDriver::Event SimulatedGpu::create_event(Waits) {
  const Lock lock(state_->mutex);
  const Event event = state_->next_number++;
  state_->events[event] = std::make_shared<Point>(Point{true, Clock::now()});
  return event;
}

void SimulatedGpu::destroy_event(Event event) noexcept {
  const Lock lock(state_->mutex);
  state_->events.erase(event);
}

void SimulatedGpu::record(Event event, Stream stream) {
  const Lock lock(state_->mutex);
  auto point = std::make_shared<Point>();
  if (stream == 0) {
    *point = {true, Clock::now()};
  } else {
    state_->worker(stream).give({{}, nullptr, nullptr, point});
  }
  state_->point(event) = std::move(point);
}

void SimulatedGpu::wait(Stream stream, Event event) {
  const Lock lock(state_->mutex);
  const PointRef point = state_->point(event);
  if (stream == 0) {
    while (!point->passed) state_->passed.wait(state_->mutex);
  } else {
    state_->worker(stream).give({{}, nullptr, point, nullptr});
  }
}

void SimulatedGpu::await(Event event) { wait(0, event); }

bool SimulatedGpu::passed(Event event) {
  const Lock lock(state_->mutex);
  return state_->point(event)->passed;
}

double SimulatedGpu::seconds(Event from, Event to) {
  const Lock lock(state_->mutex);
  const Point& begin = *state_->point(from);
  const Point& end = *state_->point(to);
  if (!begin.passed || !end.passed) throw Error("an event to be timed has not passed");
  return std::chrono::duration<double>(end.at - begin.at).count();
}

void SimulatedGpu::copy(GpuAddress dst, GpuAddress src, int64_t nbytes, Stream stream) {
  launch(stream, {{dst, nbytes}, {src, nbytes}},
         [=] { std::memcpy(memory_at(dst), memory_at(src), static_cast<size_t>(nbytes)); });
}

void SimulatedGpu::fill(GpuAddress address, uint8_t value, int64_t nbytes, Stream stream) {
  launch(stream, {{address, nbytes}},
         [=] { std::memset(memory_at(address), value, static_cast<size_t>(nbytes)); });
}

}  // namespace gemini
