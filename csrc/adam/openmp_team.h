// The threads that an OpenMP runtime in this process keeps for the calling thread.
#pragma once

namespace gemini {

// Has each thread of the calling thread's team, the calling one among them, call `work(data)` once,
// and returns when all have. `work` must not throw.
//
// False, and nothing was called, where there is no team of `threads` or more: no runtime, or one
// that was told to use fewer; a forked child, in which the threads are gone; a system that refuses
// threads.
[[nodiscard]] bool run_on_openmp_team(int threads, void (*work)(void*), void* data);

}  // namespace gemini
