// Runs work on the threads that an OpenMP runtime in this process keeps for the calling thread.
#pragma once

namespace gemini {

// Calls `work(data)` once on each thread of the calling thread's team, including the calling one,
// and returns when all have finished. `work` must not throw.
//
// Returns false, with nothing called, if there is no team of at least `threads`: there is no
// runtime, or it was configured for fewer; in a forked child, which has no such threads; or the
// system refuses threads.
[[nodiscard]] bool run_on_openmp_team(int threads, void (*work)(void*), void* data);

}  // namespace gemini
