// What memory holds when it comes under a window, and where it goes afterwards.
#pragma once

namespace gemini {

enum class Content : bool { kAny, kZeros };

// kParked: kept for the next windows; kReturned: given back to the system or the GPU.
enum class Spare : bool { kReturned, kParked };

}  // namespace gemini
