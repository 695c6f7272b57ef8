// CRC32C (Castagnoli), the checksum of iSCSI and of most storage: one value per block of a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gemini {

// The checksum of a range, with the usual inversion before and after: "123456789" gives 0xe3069283.
// Any address and size. Uses the fastest variant that the processor has, chosen on the first call.
[[nodiscard]] uint32_t crc32c(const void* data, size_t nbytes) noexcept;

struct Crc32cVariant {
  const char* name;
  uint32_t (*sum)(const void* data, size_t nbytes) noexcept;
};

// The variants that this processor has, fastest first; the last one, a table, works everywhere.
[[nodiscard]] std::vector<Crc32cVariant> crc32c_variants();

}  // namespace gemini
