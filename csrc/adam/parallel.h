// Splitting work over threads.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "common/processors.h"

namespace gemini {

// Who shares the work of a call: at most `threads`, the calling one among them (0: one per
// available core), on `processors` alone where there are any (common/processors.h).
struct Workers {
  // Implicit: most calls only say how many.
  Workers(int threads = 0, Processors processors = {})  // NOLINT(google-explicit-constructor)
      : threads(threads), processors(std::move(processors)) {}
  int threads;
  Processors processors;
};

// Calls `body(begin, end)` on ranges of at most `grain` that cover [0, count), each once, on the
// calling thread and others, and returns when all are done. A free thread takes the next range,
// so a core that others slow down does less. `body` must not throw.
//
// The others are those that torch computes with: they are there and awake after an operator, and a
// second pool would share cores with them. Where they cannot be had (openmp_team.h), or are fewer
// than `workers` says, threads are started for the call; where the system refuses those too, the
// calling thread works alone.
void parallel_ranges(int64_t count, int64_t grain, const Workers& workers,
                     const std::function<void(int64_t, int64_t)>& body);

}  // namespace gemini
