// IoPiece: one request to the device, a part of a transfer.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace gemini {

enum class IoKind : bool { kRead, kWrite };

struct IoPiece {
  uint64_t ticket = 0;
  IoKind kind = IoKind::kRead;
  int file = 0;              // index among the backend's descriptors
  int64_t offset = 0;        // in that file
  int64_t position = 0;      // in the AsyncFile, which may be striped over several files
  int64_t nbytes = 0;        // of all areas together
  std::vector<iovec> areas;  // memory, in file order; at least one
  int64_t done_bytes = 0;    // transferred already
  int retries = 0;           // without progress since done_bytes changed

  [[nodiscard]] bool is_write() const { return kind == IoKind::kWrite; }

  // The memory that remains to be transferred, at most `most` bytes of it.
  [[nodiscard]] std::vector<iovec> rest(int64_t most) const {
    std::vector<iovec> left;
    int64_t skip = done_bytes;
    for (const iovec& area : areas) {
      const auto length = static_cast<int64_t>(area.iov_len);
      if (const int64_t use = std::min(length - skip, most); use > 0) {
        left.push_back({static_cast<char*>(area.iov_base) + skip, static_cast<size_t>(use)});
        most -= use;
      }
      skip = std::max<int64_t>(skip - length, 0);
    }
    return left;
  }
};

}  // namespace gemini
