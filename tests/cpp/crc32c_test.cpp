// Laws of the checksum: the published values, the same from every implementation, no flip unseen.
#include "common/crc32c.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace gemini {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes random_bytes(size_t nbytes) {
  std::mt19937 engine(7);
  Bytes bytes(nbytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(engine());
  return bytes;
}

// One bit at a time, from the definition.
uint32_t crc_by_bits(const uint8_t* data, size_t nbytes) {
  uint32_t crc = ~0U;
  for (size_t i = 0; i < nbytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78U : 0U);
  }
  return ~crc;
}

class Crc32c : public testing::TestWithParam<Crc32cVariant> {
 protected:
  [[nodiscard]] static uint32_t sum(const void* data, size_t nbytes) {
    return GetParam().sum(data, nbytes);
  }
  [[nodiscard]] static uint32_t sum(const Bytes& bytes) { return sum(bytes.data(), bytes.size()); }
};

INSTANTIATE_TEST_SUITE_P(, Crc32c, testing::ValuesIn(crc32c_variants()),
                         [](const auto& info) { return std::string(info.param.name); });

// RFC 3720, B.4.
TEST_P(Crc32c, GivesThePublishedValues) {
  Bytes rising(32);
  std::iota(rising.begin(), rising.end(), uint8_t{0});
  const Bytes falling(rising.rbegin(), rising.rend());
  EXPECT_EQ(sum(Bytes(32, 0x00)), 0x8a9136aaU);
  EXPECT_EQ(sum(Bytes(32, 0xff)), 0x62a8ab43U);
  EXPECT_EQ(sum(rising), 0x46dd794eU);
  EXPECT_EQ(sum(falling), 0x113fdb5cU);
  Bytes command(48, 0);  // an iSCSI Read (10) PDU: few of its bytes are not zero
  command[0] = 0x01;
  command[1] = 0xc0;
  command[16] = command[27] = 0x14;
  command[22] = 0x04;
  command[31] = 0x18;
  command[32] = 0x28;
  command[40] = 0x02;
  EXPECT_EQ(sum(command), 0xd9963a56U);
  const std::string_view digits = "123456789";
  EXPECT_EQ(sum(digits.data(), digits.size()), 0xe3069283U);
  EXPECT_EQ(sum(nullptr, 0), 0U);
}

TEST_P(Crc32c, EverySizeGivesTheValueOfTheDefinition) {
  const Bytes bytes = random_bytes(3 * 4096);
  std::vector<size_t> sizes{4079, 4080, 4081, 4095, 4096, 4097, 5440, 8159, 8160, 8192, 3 * 4096};
  for (size_t nbytes = 0; nbytes < 1100; ++nbytes) sizes.push_back(nbytes);
  for (const size_t nbytes : sizes) {
    ASSERT_EQ(sum(bytes.data(), nbytes), crc_by_bits(bytes.data(), nbytes)) << nbytes;
  }
}

TEST_P(Crc32c, AddressDoesNotMatter) {
  const Bytes bytes = random_bytes(4096);
  for (size_t skew = 0; skew < 64; ++skew) {
    Bytes moved(skew, 0xaa);
    moved.insert(moved.end(), bytes.begin(), bytes.end());
    ASSERT_EQ(sum(moved.data() + skew, 4096), sum(bytes)) << skew;
  }
}

// A checksum of 32 bits sees every single flip; streams joined wrongly would miss some.
TEST_P(Crc32c, EveryFlippedBitOfABlockChangesTheValue) {
  Bytes bytes = random_bytes(4096);
  const uint32_t want = sum(bytes);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    const auto mask = static_cast<uint8_t>(1U << (bit % 8));
    bytes[bit / 8] ^= mask;
    ASSERT_NE(sum(bytes), want) << bit;
    bytes[bit / 8] ^= mask;
  }
  EXPECT_EQ(sum(bytes), want);
}

TEST(Crc32cVariants, OneOfThemIsTaken) {
  const Bytes bytes = random_bytes(100'000);
  for (const Crc32cVariant& variant : crc32c_variants()) {
    EXPECT_EQ(variant.sum(bytes.data(), bytes.size()), crc32c(bytes.data(), bytes.size()))
        << variant.name;
  }
}

TEST(Crc32cBlocks, SwappedBlocksAndZerosAreSeen) {
  const Bytes bytes = random_bytes(8192);
  Bytes swapped(bytes.begin() + 4096, bytes.end());
  swapped.insert(swapped.end(), bytes.begin(), bytes.begin() + 4096);
  EXPECT_NE(crc32c(bytes.data(), 8192), crc32c(swapped.data(), 8192));
  EXPECT_NE(crc32c(Bytes(4096, 0).data(), 4096),
            0U);  // a lost block does not look like a sound one
  EXPECT_NE(crc32c(Bytes(4096, 0).data(), 4096), crc32c(Bytes(8192, 0).data(), 8192));
}

}  // namespace
}  // namespace gemini
