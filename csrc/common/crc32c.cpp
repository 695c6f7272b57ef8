#include "common/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#include "common/crc32c_fold.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define GEMINI_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#define GEMINI_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace gemini {
namespace {

// Words are read in memory order, and the lowest bit is the polynomial's lowest power.
static_assert(std::endian::native == std::endian::little);

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected

using Table = std::array<std::array<uint32_t, 256>, 8>;

constexpr uint32_t with_zero_bits(uint32_t crc, int count) {
  for (int i = 0; i < count; ++i) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
  return crc;
}

// Row k: the effect of a byte on the checksum after it and k zero bytes were processed.
constexpr Table make_byte_table() {
  Table table{};
  for (uint32_t byte = 0; byte < 256; ++byte) table[0][byte] = with_zero_bits(byte, 8);
  for (size_t k = 1; k < table.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = table[k - 1][byte];
      table[k][byte] = (before >> 8) ^ table[0][before & 0xff];
    }
  }
  return table;
}

constexpr Table kByteTable = make_byte_table();

uint64_t load_word(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

uint32_t take_word_by_table(uint32_t crc, uint64_t word) {
  word ^= crc;
  uint32_t result = 0;
  for (size_t k = 0; k < kByteTable.size(); ++k) {
    result ^= kByteTable[7 - k][(word >> (8 * k)) & 0xff];
  }
  return result;
}

#ifdef GEMINI_CRC_TARGET

// The instruction takes three cycles but one can start in every cycle, so three streams run at a
// time. Three of this length and two words are 4096 bytes, the most frequent size.
constexpr size_t kStreamBytes = 1360;
static_assert(3 * kStreamBytes + 2 * sizeof(uint64_t) == 4096);

using ShiftTable = std::array<std::array<uint32_t, 256>, 4>;

// The effect of kStreamBytes of zeros on each byte of a checksum. The checksum is linear: an entry
// that is no power of two is the sum of two entries before it.
constexpr ShiftTable make_shift_table() {
  ShiftTable table{};
  for (size_t k = 0; k < table.size(); ++k) {
    for (uint32_t byte = 1; byte < 256; ++byte) {
      if (std::has_single_bit(byte)) {
        uint32_t crc = byte << (8 * k);
        for (size_t i = 0; i < kStreamBytes; ++i) crc = (crc >> 8) ^ kByteTable[0][crc & 0xff];
        table[k][byte] = crc;
      } else {
        table[k][byte] = table[k][byte & (byte - 1)] ^ table[k][byte & -byte];
      }
    }
  }
  return table;
}

constexpr ShiftTable kShiftTable = make_shift_table();

uint32_t after_a_stream_of_zeros(uint32_t crc) {
  return kShiftTable[0][crc & 0xff] ^ kShiftTable[1][(crc >> 8) & 0xff] ^
         kShiftTable[2][(crc >> 16) & 0xff] ^ kShiftTable[3][crc >> 24];
}

GEMINI_CRC_TARGET inline uint32_t take_word(uint32_t crc, uint64_t word) {
#if defined(__x86_64__)
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
#else
  return __crc32cd(crc, word);
#endif
}

GEMINI_CRC_TARGET inline uint32_t take_byte(uint32_t crc, uint8_t byte) {
#if defined(__x86_64__)
  return _mm_crc32_u8(crc, byte);
#else
  return __crc32cb(crc, byte);
#endif
}

GEMINI_CRC_TARGET uint32_t crc32c_instruction(const void* data, size_t nbytes) noexcept {
  const auto* at = static_cast<const uint8_t*>(data);
  uint32_t crc = ~0U;
  for (; nbytes >= 3 * kStreamBytes; at += 3 * kStreamBytes, nbytes -= 3 * kStreamBytes) {
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < kStreamBytes; i += sizeof(uint64_t)) {
      crc = take_word(crc, load_word(at + i));
      second = take_word(second, load_word(at + kStreamBytes + i));
      third = take_word(third, load_word(at + 2 * kStreamBytes + i));
    }
    crc = after_a_stream_of_zeros(after_a_stream_of_zeros(crc) ^ second) ^ third;
  }
  for (; nbytes >= sizeof(uint64_t); at += sizeof(uint64_t), nbytes -= sizeof(uint64_t)) {
    crc = take_word(crc, load_word(at));
  }
  for (; nbytes > 0; ++at, --nbytes) crc = take_byte(crc, *at);
  return ~crc;
}

bool cpu_has_instruction() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2");
#elif defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#else
  return true;  // Apple: all processors have it
#endif
}

#endif  // GEMINI_CRC_TARGET

uint32_t crc32c_table(const void* data, size_t nbytes) noexcept {
  const auto* at = static_cast<const uint8_t*>(data);
  uint32_t crc = ~0U;
  for (; nbytes >= sizeof(uint64_t); at += sizeof(uint64_t), nbytes -= sizeof(uint64_t)) {
    crc = take_word_by_table(crc, load_word(at));
  }
  for (; nbytes > 0; ++at, --nbytes) crc = (crc >> 8) ^ kByteTable[0][(crc ^ *at) & 0xff];
  return ~crc;
}

}  // namespace

uint32_t crc32c(const void* data, size_t nbytes) noexcept {
  static const auto fastest = crc32c_variants().front().sum;
  return fastest(data, nbytes);
}

std::vector<Crc32cVariant> crc32c_variants() {
  std::vector<Crc32cVariant> found;
  if (can_fold_crc32c()) found.push_back({"fold", crc32c_fold});
#ifdef GEMINI_CRC_TARGET
  if (cpu_has_instruction()) found.push_back({"instruction", crc32c_instruction});
#endif
  found.push_back({"table", crc32c_table});
  return found;
}

}  // namespace gemini
