// Divides work among threads.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "common/processors.h"

namespace gemini {

// The threads that share the work of a call: at most `threads`, including the calling one (0: one
// per available core), on `processors` only if there are any (common/processors.h).
struct Workers {
  // Implicit: most calls only give the number.
  Workers(int threads = 0, Processors processors = {})  // NOLINT(google-explicit-constructor)
      : threads(threads), processors(std::move(processors)) {}
  int threads;
  Processors processors;
};

// Calls `body(begin, end)` on ranges of at most `grain` that cover [0, count), each once, on the
// calling thread and others, and returns when all are done. A free thread takes the next range, so
// a core that is slowed down does less. `body` must not throw.
//
// The other threads are those that torch computes with: they exist and are awake after an operator,
// and a second pool would share cores with them. If they are not available (openmp_team.h), or
// fewer than `workers` requests, threads are started for the call. If the system refuses those too,
// the calling thread works alone.
void parallel_ranges(int64_t count, int64_t grain, const Workers& workers,
                     const std::function<void(int64_t, int64_t)>& body);

}  // namespace gemini
