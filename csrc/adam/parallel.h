// Splitting work over threads that live for one call.
#pragma once

#include <cstdint>
#include <functional>

namespace gemini {

// Calls `body(begin, end)` on ranges of at most `grain` that cover [0, count), each once, on the
// calling thread and at most `threads` - 1 others (0: one per available core), and returns when all
// are done. Whoever is free takes the next range, so a core that others slow down does less. `body`
// must not throw. Threads are not kept: there is nothing for fork or exit to trip over, and no
// second pool of threads spins beside torch's.
void parallel_ranges(int64_t count, int64_t grain, int threads,
                     const std::function<void(int64_t, int64_t)>& body);

}  // namespace gemini
