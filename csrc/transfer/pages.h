// Checked system calls on ranges of virtual addresses. All sizes are bytes, multiples of 4 KiB.
#pragma once

#include <cstdint>

namespace gemini::pages {

// Reserves addresses without memory behind them, starting at a multiple of `alignment`.
[[nodiscard]] char* reserve(int64_t nbytes, int64_t alignment);

// Drops whatever is mapped in a range we own and leaves it reserved, in one step: no other thread
// can be given the addresses in between.
void reserve_at(char* address, int64_t nbytes);

// Puts fresh zero pages into a range we own; large ranges ask for huge pages. A forked child does
// not inherit them: copy-on-write would double the memory behind the budget's back.
void commit_at(char* address, int64_t nbytes);

// Gives a range and its memory back to the system.
void release(char* address, int64_t nbytes);

// The same where nothing could be done about a refusal. The kernel refuses only to cut a mapping in
// two when a process has as many as it may.
void discard(char* address, int64_t nbytes) noexcept;

// What becomes of the addresses that pages are moved from: kKept ones have zero pages.
enum class Source : bool { kGivenUp, kKept };

// Moves the pages of one range into another range we own, replacing what is there.
// Returns false, having changed nothing, where the kernel cannot do it.
[[nodiscard]] bool move(char* from, char* to, int64_t nbytes, Source source) noexcept;

// The type of `move`, so that tests can refuse it.
using Mover = bool (*)(char* from, char* to, int64_t nbytes, Source source);

}  // namespace gemini::pages
