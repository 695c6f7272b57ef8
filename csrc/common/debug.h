// GEMINI_DEBUG: 0 off, 2 check invariants after every public call, 3 also poison evicted memory.
#pragma once

#include <cstdlib>

namespace gemini {

inline int debug_level() {
  static const int level = [] {
    const char* text = std::getenv("GEMINI_DEBUG");
    return text == nullptr ? 0 : static_cast<int>(std::strtol(text, nullptr, 10));
  }();
  return level;
}

}  // namespace gemini
