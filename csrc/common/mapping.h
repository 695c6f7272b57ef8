// The content of memory when it is mapped under a window, and its fate afterwards.
#pragma once

namespace gemini {

enum class Content : bool { kAny, kZeros };

// kParked: kept for the next windows; kReturned: returned to the system or the GPU.
enum class Spare : bool { kReturned, kParked };

}  // namespace gemini
