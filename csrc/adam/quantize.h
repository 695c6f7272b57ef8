// Constants of the compact moments, shared by the CPU kernels, the CUDA kernel and the tests.
#pragma once

#include <cstdint>

namespace gemini {

// Elements that share a scale. Ranges of compact moments must be cut at multiples of it.
inline constexpr int64_t kBlockNumel = 256;

inline constexpr int32_t kMaxCode = 127;      // exp_avg: codes -127..127, value = code * scale
inline constexpr int32_t kMaxRootCode = 255;  // sqrt(exp_avg_sq): codes 0..255

// Blocks with a largest scale below this are stored as zeros: it is far below any eps, and the
// square of a smaller root would not be a normal float.
inline constexpr float kMinScale = 0x1p-63f;

// Dithers: fractions in a fixed order (the van der Corput sequence). An element reads the table at
// its index in the block, shifted by a hash of step and block. Over the steps it gets all fractions
// equally often, and every thread, ISA and device gets the same ones.
inline constexpr int32_t kDitherBits = 10;
inline constexpr int32_t kDitherLevels = 1 << kDitherBits;

struct DitherTable {
  uint32_t bits[kDitherLevels + kBlockNumel];  // in units of 2^-16: the bits that bf16 drops
  float codes[kDitherLevels + kBlockNumel];    // in (-0.5, 0.5): before rounding to nearest
};

constexpr DitherTable make_dither_table() {
  DitherTable table{};
  for (uint32_t i = 0; i < kDitherLevels + kBlockNumel; ++i) {
    uint32_t reversed = 0;
    for (int32_t bit = 0; bit < kDitherBits; ++bit) {
      reversed |= ((i >> bit) & 1) << (kDitherBits - 1 - bit);
    }
    table.bits[i] = (reversed << (16 - kDitherBits)) + (1u << (15 - kDitherBits));
    table.codes[i] = static_cast<float>(table.bits[i]) / 65536.0f - 0.5f;
  }
  return table;
}

}  // namespace gemini
