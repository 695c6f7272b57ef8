// CRC32C (Castagnoli), the checksum of iSCSI and of most storage: one value per block of a file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gemini {

// The checksum of a range, with the usual inversion before and after: "123456789" gives 0xe3069283.
// Any address and size. Uses the processor's instruction where it has one, chosen on the first
// call.
[[nodiscard]] uint32_t crc32c(const void* data, size_t nbytes) noexcept;

// The same value without the instruction: the reference, about ten times slower.
[[nodiscard]] uint32_t crc32c_table(const void* data, size_t nbytes) noexcept;

}  // namespace gemini
