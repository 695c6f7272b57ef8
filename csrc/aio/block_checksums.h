// CRC32C of the 4 KiB blocks of a file, kept in memory to detect damage in transit or on disk.
#pragma once

#include <cstdint>
#include <vector>

#include "aio/io_piece.h"

namespace gemini {

// Costs 5 bytes of memory per block. Thread-safe for pieces that do not overlap in the file.
class BlockChecksums {
 public:
  explicit BlockChecksums(int64_t file_bytes);

  // Records the checksums of the blocks that `piece` is about to write. Positions and sizes are
  // whole blocks.
  void remember(const IoPiece& piece);
  // The position of the first block of `piece`, just read, that differs from its recorded checksum;
  // -1 if there is none. Blocks never written are not compared.
  [[nodiscard]] int64_t find_damage(const IoPiece& piece) const;
  // Forgets a discarded range: it may read as anything.
  void forget(int64_t position, int64_t nbytes);

 private:
  std::vector<uint32_t> sums_;
  std::vector<uint8_t> known_;
};

}  // namespace gemini
