// IoHook: lets tests interfere with every request and reservation of an AsyncFile.
#pragma once

#include <cstdint>

#include "aio/io_piece.h"

namespace gemini {

// Does nothing by default. Called by the threads of a backend, several at a time.
class IoHook {
 public:
  virtual ~IoHook() = default;

  // Before a request. Returns the most bytes it may move, or a negated errno to fail with
  // unexecuted. `position` is in the AsyncFile. May block.
  [[nodiscard]] virtual int64_t before(IoKind kind, int64_t nbytes, int64_t position) {
    (void)kind, (void)position;
    return nbytes;
  }
  // After a request. Returns the result to use instead of `result`: the bytes moved or a negated
  // errno.
  [[nodiscard]] virtual int64_t after(IoKind kind, int64_t result, int64_t position) {
    (void)kind, (void)position;
    return result;
  }
  // Before disk space is reserved. Returns an errno to fail with, or 0.
  [[nodiscard]] virtual int allocate(int64_t nbytes) {
    (void)nbytes;
    return 0;
  }
};

}  // namespace gemini
