// The stand-in for NVIDIA's driver, for those that are linked to it: the driver's calls, and what
// it can do that the driver cannot.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/cuda_abi.h"

namespace gemini::cuda_abi {

extern "C" {
#define STANDIN_DECLARE(member, symbol, parameters) \
  Result standin_driver_##member parameters __asm__(symbol);
GEMINI_CUDA_CALLS(STANDIN_DECLARE)
#undef STANDIN_DECLARE
}

inline constexpr Calls kStandin = [] {
  Calls calls;
#define STANDIN_SET(member, symbol, parameters) calls.member = &standin_driver_##member;
  GEMINI_CUDA_CALLS(STANDIN_SET)
#undef STANDIN_SET
  return calls;
}();

}  // namespace gemini::cuda_abi

extern "C" {

// Has a stream call `work(data)`, which uses (address, bytes) each of `ranges`: what a kernel does.
gemini::cuda_abi::Result standin_launch(gemini::cuda_abi::Stream stream, const uint64_t* ranges,
                                        size_t num_ranges, void (*work)(void*), void* data);

// Counts bytes as taken, or given back where they are negative: memory that the caller has itself.
gemini::cuda_abi::Result standin_take(int64_t nbytes);

// Makes memory of the caller the GPU's, until standin_remove.
void standin_bring(const void* memory, size_t nbytes);
void standin_remove(const void* memory);

// The range of the GPU's memory that an address is in, [begin, end); an empty one: none.
void standin_find(uint64_t address, uint64_t* begin, uint64_t* end);

}  // extern "C"
