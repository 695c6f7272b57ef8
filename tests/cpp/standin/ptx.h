// Kernels for a GPU, run on the CPU from the code that nvcc makes of them. What an instruction does
// is in NVIDIA's "Parallel Thread Execution ISA"; those that ours need are here, and any other is
// refused by name. So is arithmetic that may be contracted: the bits of such a kernel are not
// known.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace gemini::standin {

inline constexpr int kLanes = 32;
inline constexpr uint32_t kWholeWarp = 0xffffffff;

// A register of a warp: the value of each lane in its low bits.
using Lanes = std::array<uint64_t, kLanes>;

struct PtxError : std::runtime_error {
  using runtime_error::runtime_error;
};

// Memory of the GPU: [begin, end).
struct MemoryRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};
// The range that an address is in; an empty one if it is not memory of the GPU.
using FindMemory = std::function<MemoryRange(uint64_t address)>;

struct Instruction;

struct Warp {
  std::vector<Lanes> registers;
  uint32_t mask = 0;  // the lanes that carry out the instruction
  const FindMemory* find_memory = nullptr;
  MemoryRange last_found;
};

using Operation = void (*)(Warp& warp, const Instruction& instruction);

enum class Flow : uint8_t { kNext, kBranch, kReturn };

struct Instruction {
  Operation operation = nullptr;  // null where only `flow` counts
  Flow flow = Flow::kNext;
  int guard = -1;              // register of the predicate; -1: none
  bool guard_negated = false;  // carried out where it is false
  std::vector<int> to;         // registers
  std::vector<int> from;
  int64_t offset = 0;  // bytes, of an address
  size_t target = 0;   // of a branch: index of an instruction
  std::string text;
};

// An argument: its bytes follow those before it, aligned.
struct Parameter {
  size_t offset;
  size_t nbytes;
};

struct PtxKernel {
  std::string name;
  std::vector<Parameter> parameters;
  std::vector<Instruction> code;
  std::vector<Lanes> registers;      // as a warp finds them: constants have their values
  std::vector<int> parameter_bases;  // registers for the addresses of the arguments
  int thread_register = -1;          // %tid.x; -1: not used
  int block_register = -1;           // %ctaid.x
};

// The kernels in a text. Throws PtxError for what it does not know.
std::vector<PtxKernel> parse_ptx(std::string_view text);

// What an instruction does; null for one that is not known.
Operation find_operation(std::string_view name);

// Carries out all threads of a launch, one warp after the other. `arguments` points to each
// argument. Throws PtxError for what a GPU would punish: an address that is not its memory, or not
// aligned, or a warp that is not whole where all its lanes must meet.
void run_kernel(const PtxKernel& kernel, void* const* arguments, uint32_t num_blocks,
                uint32_t block_threads, const FindMemory& find_memory);

}  // namespace gemini::standin
