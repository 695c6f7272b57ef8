// Splitting a range of elements over threads that live for one call.
#pragma once

#include <cstdint>
#include <functional>

namespace gemini {

// Calls `body(begin, end)` on disjoint ranges that cover [0, numel), the first on the calling
// thread, and returns when all are done. At most `threads` of them (0: one per available core),
// each of `grain` elements or more; a thread the system refuses to start is done by the caller.
// `body` must not throw. Threads are not kept: there is nothing for fork or exit to trip over, and
// no second pool of threads spins beside torch's.
void parallel_ranges(int64_t numel, int64_t grain, int threads,
                     const std::function<void(int64_t, int64_t)>& body);

}  // namespace gemini
