// Sizes as text for people, the same as that of gemini/system/config.py.
#pragma once

#include <cstdint>
#include <string>

namespace gemini {

// In powers of 1024, rounded to one digit: "24.0 MiB", "512 B". Equals Python's format_bytes().
[[nodiscard]] std::string format_bytes(int64_t nbytes);

// A size to give as an option: at least `nbytes`, rounded up by 1 % at most, "24.03MiB". Equals
// Python's format_enough().
[[nodiscard]] std::string format_enough(int64_t nbytes);

}  // namespace gemini
