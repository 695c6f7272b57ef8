// The io_uring backend: one thread submits requests in batches and collects them, without blocking
// on any.
#pragma once

#include <memory>
#include <vector>

#include "aio/io_backend.h"

namespace gemini {

// Throws Error if the system refuses; check uring_refusal() first.
[[nodiscard]] std::unique_ptr<IoBackend> make_uring_backend(RequestQueue& queue,
                                                            std::vector<int> descriptors,
                                                            int depth);

}  // namespace gemini
