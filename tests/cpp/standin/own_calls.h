// What the stand-in for NVIDIA's driver can do for those above it that the driver cannot.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/cuda_abi.h"

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
