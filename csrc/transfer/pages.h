// Checked system calls on ranges of virtual addresses. All sizes are bytes, multiples of 4 KiB.
#pragma once

#include <cstdint>

namespace gemini::pages {

// Reserves addresses without memory behind them, aligned to `alignment`.
[[nodiscard]] char* reserve(int64_t nbytes, int64_t alignment);

// Unmaps a range we own and keeps it reserved, in one step: no other thread can get the addresses
// in between.
void reserve_at(char* address, int64_t nbytes);

// Maps fresh zero pages into a range we own; large ranges request huge pages. A forked child does
// not inherit them: copy-on-write would double the memory outside the budget.
void commit_at(char* address, int64_t nbytes);

// Returns a range and its memory to the system.
void release(char* address, int64_t nbytes);

// The same for callers that cannot handle an error. The kernel refuses only to split a mapping if
// the process has the maximum number of mappings.
void discard(char* address, int64_t nbytes) noexcept;

// The addresses that pages are moved from are unmapped, or kept with zero pages.
enum class Source : bool { kGivenUp, kKept };

// Moves the pages of one range into another range we own, replacing its pages. Returns false, with
// nothing changed, if the kernel cannot do it.
[[nodiscard]] bool move(char* from, char* to, int64_t nbytes, Source source) noexcept;

// The type of `move`, so that tests can replace it.
using Mover = bool (*)(char* from, char* to, int64_t nbytes, Source source);

}  // namespace gemini::pages
