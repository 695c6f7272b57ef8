// The Adam step for tensors in GPU memory.
#pragma once

#include <cstdint>
#include <span>

#include "adam/adam.h"

namespace gemini {

// Updates every job in place, with the same bits as adam_step; its addresses and scales are in
// memory of one GPU. Enqueued on `stream`, a CUDA stream of that GPU as an integer (0: the default
// stream), with one launch for each layout of types among the jobs. The call returns at once, and
// the jobs' memory must not change until the stream has executed it. With `all_finite` it waits for
// the stream and reports whether all gradients were finite, true for jobs that do not check.
// Thread-safe.
//
// Throws StateError as check_job, and for memory that no GPU can access, with nothing changed.
// Throws Error if CUDA fails, and in a build without CUDA.
void cuda_adam_step(std::span<const AdamJob> jobs, uintptr_t stream, bool* all_finite = nullptr);

}  // namespace gemini
