// Byte arithmetic shared by layouts, windows and files.
#pragma once

#include <cstdint>

namespace gemini {

inline constexpr int64_t kPageBytes = 4096;         // unit of windows, arenas and O_DIRECT
inline constexpr int64_t kHugePageBytes = 2 << 20;  // windows this large start on such a boundary

[[nodiscard]] constexpr int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// The bytes of whole huge pages at the beginning of an aligned range.
[[nodiscard]] constexpr int64_t whole_huge_pages(int64_t nbytes) {
  return nbytes / kHugePageBytes * kHugePageBytes;
}

}  // namespace gemini
