// The launches of the CUDA kernel for a list of jobs, and their rows. Plain C++: tested without a
// GPU.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "adam/adam.h"

namespace gemini {

// A job, and the position of its blocks among all blocks of its launch.
struct CudaRow {
  AdamRange range;
  int64_t begin;    // number of blocks of the launch before it
  int64_t scalars;  // index among the plan's
  bool quads;       // every array is aligned to four of its elements
};

// Consecutive rows of one layout of types.
struct CudaLaunch {
  int64_t first_row;
  int64_t num_rows;
  int64_t num_blocks;
};

struct CudaPlan {
  std::vector<AdamScalars> scalars;
  std::vector<CudaRow> rows;  // none is empty
  std::vector<CudaLaunch> launches;
};

// Throws as check_job.
[[nodiscard]] CudaPlan plan_launches(std::span<const AdamJob> jobs);

}  // namespace gemini
