#include <algorithm>
#include <cstring>
#include <limits>

#include "ptx.h"

namespace gemini::standin {
namespace {

constexpr size_t kDone = std::numeric_limits<size_t>::max();

// A warp on its way. Those of its lanes that are behind go first: they meet the others where the
// branches of code that nvcc made come together.
class WarpRun {
 public:
  WarpRun(const PtxKernel& kernel, Warp warp) : code_(kernel.code), warp_(std::move(warp)) {
    places_.fill(0);
  }

  void run() {
    for (size_t place = 0; place != kDone; place = *std::ranges::min_element(places_)) {
      run_from(place);
    }
  }

 private:
  // Runs the lanes that are at `place`, up to a branch or to where another lane waits.
  void run_from(size_t place) {
    uint32_t group = 0;
    size_t limit = kDone;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      if (places_[lane] == place)
        group |= 1u << lane;
      else
        limit = std::min(limit, places_[lane]);
    }
    while (place < limit) {
      if (place >= code_.size()) throw PtxError("ran past the end");
      const Instruction& next = code_[place++];
      warp_.mask = group & guard_mask(next);
      if (next.flow != Flow::kNext) {
        move(group, place);
        move(warp_.mask, next.flow == Flow::kReturn ? kDone : next.target);
        return;
      }
      if (warp_.mask != 0) next.operation(warp_, next);
    }
    move(group, place);
  }

  void move(uint32_t lanes, size_t place) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      if ((lanes >> lane & 1) != 0) places_[lane] = place;
    }
  }

  [[nodiscard]] uint32_t guard_mask(const Instruction& instruction) const {
    if (instruction.guard < 0) return kWholeWarp;
    const Lanes& values = warp_.registers[static_cast<size_t>(instruction.guard)];
    uint32_t mask = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      if ((values[lane] != 0) != instruction.guard_negated) mask |= 1u << lane;
    }
    return mask;
  }

  const std::vector<Instruction>& code_;
  Warp warp_;
  std::array<size_t, kLanes> places_;
};

std::vector<Lanes> registers_of(const PtxKernel& kernel, const char* arguments, uint32_t block,
                                uint32_t first_thread) {
  std::vector<Lanes> registers = kernel.registers;
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const char* const argument = arguments + kernel.parameters[i].offset;
    registers[static_cast<size_t>(kernel.parameter_bases[i])].fill(
        reinterpret_cast<uint64_t>(argument));
  }
  if (kernel.block_register >= 0) registers[static_cast<size_t>(kernel.block_register)].fill(block);
  if (kernel.thread_register >= 0) {
    Lanes& threads = registers[static_cast<size_t>(kernel.thread_register)];
    for (uint32_t lane = 0; lane < kLanes; ++lane) threads[lane] = first_thread + lane;
  }
  return registers;
}

}  // namespace

void run_kernel(const PtxKernel& kernel, void* const* arguments, uint32_t num_blocks,
                uint32_t block_threads, const FindMemory& find_memory) {
  if (block_threads % kLanes != 0) throw PtxError("blocks of whole warps only");
  const Parameter last = kernel.parameters.empty() ? Parameter{} : kernel.parameters.back();
  std::vector<char> bytes(last.offset + last.nbytes);
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    std::memcpy(bytes.data() + kernel.parameters[i].offset, arguments[i],
                kernel.parameters[i].nbytes);
  }
  for (uint32_t block = 0; block < num_blocks; ++block) {
    for (uint32_t thread = 0; thread < block_threads; thread += kLanes) {
      Warp warp{registers_of(kernel, bytes.data(), block, thread), 0, &find_memory, {}};
      WarpRun(kernel, std::move(warp)).run();
    }
  }
}

}  // namespace gemini::standin
