// io_uring: one thread hands requests over in batches and collects them, without blocking on any.
#pragma once

#include <memory>
#include <vector>

#include "aio/io_backend.h"

namespace gemini {

// Throws Error when the system refuses; ask uring_refusal() first.
[[nodiscard]] std::unique_ptr<IoBackend> make_uring_backend(RequestQueue& queue,
                                                            std::vector<int> descriptors,
                                                            int depth);

}  // namespace gemini
