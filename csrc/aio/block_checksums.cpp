#include "aio/block_checksums.h"

#include <algorithm>

#include "common/bytes.h"
#include "common/crc32c.h"

namespace gemini {
namespace {

// Calls visit(index of the block, its bytes) for all blocks of `piece`, until it returns false.
template <class Visit>
void for_each_block(const IoPiece& piece, Visit visit) {
  auto block = static_cast<size_t>(piece.position / kPageBytes);
  for (const iovec& area : piece.areas) {
    const char* bytes = static_cast<const char*>(area.iov_base);
    for (size_t done = 0; done < area.iov_len; done += kPageBytes, ++block) {
      if (!visit(block, bytes + done)) return;
    }
  }
}

}  // namespace

BlockChecksums::BlockChecksums(int64_t file_bytes)
    : sums_(static_cast<size_t>(file_bytes / kPageBytes)), known_(sums_.size()) {}

void BlockChecksums::remember(const IoPiece& piece) {
  for_each_block(piece, [&](size_t block, const char* bytes) {
    sums_[block] = crc32c(bytes, kPageBytes);
    known_[block] = 1;
    return true;
  });
}

int64_t BlockChecksums::find_damage(const IoPiece& piece) const {
  int64_t damaged = -1;
  for_each_block(piece, [&](size_t block, const char* bytes) {
    if (known_[block] == 0 || sums_[block] == crc32c(bytes, kPageBytes)) return true;
    damaged = static_cast<int64_t>(block) * kPageBytes;
    return false;
  });
  return damaged;
}

void BlockChecksums::forget(int64_t position, int64_t nbytes) {
  const auto first = known_.begin() + position / kPageBytes;
  std::fill(first, first + nbytes / kPageBytes, uint8_t{0});
}

}  // namespace gemini
