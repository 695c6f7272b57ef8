// The Adam step for tensors in the memory of a GPU.
#pragma once

#include <cstdint>
#include <span>

#include "adam/adam.h"

namespace gemini {

// Update every job in place with the bits that adam_step gives; its addresses and scales are memory
// of one GPU. Enqueued on `stream`, a CUDA stream of that GPU as an integer (0: the default one):
// one launch for each layout of types among the jobs. The call returns at once and the jobs' memory
// must stay as it is until the stream has passed; with `all_finite` it waits for the stream and
// says whether all gradients were finite, true for jobs that do not check. Any number of threads
// may call.
//
// Throws StateError as check_job, and for memory that no GPU can reach; nothing has changed then.
// Throws Error where CUDA refuses, and in a build without CUDA.
void cuda_adam_step(std::span<const AdamJob> jobs, uintptr_t stream, bool* all_finite = nullptr);

}  // namespace gemini
