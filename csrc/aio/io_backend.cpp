#include "aio/io_backend.h"

#include <utility>

#include "aio/thread_backend.h"
#include "aio/uring_backend.h"
#include "common/error.h"

namespace gemini {

const char* backend_name(BackendKind kind) noexcept {
  switch (kind) {
    case BackendKind::kAuto:
      return "auto";
    case BackendKind::kUring:
      return "uring";
    case BackendKind::kThreads:
      return "threads";
  }
  return "unknown";
}

std::unique_ptr<IoBackend> start_backend(BackendKind kind, RequestQueue& queue,
                                         std::vector<int> descriptors, int depth, bool in_memory) {
  if (kind == BackendKind::kAuto) {
    const bool threads = in_memory || !uring_refusal().empty();
    kind = threads ? BackendKind::kThreads : BackendKind::kUring;
  }
  if (kind == BackendKind::kThreads) {
    return std::make_unique<ThreadBackend>(queue, std::move(descriptors), depth, in_memory);
  }
  if (!uring_refusal().empty()) {
    throw StateError("io_uring cannot be used (" + uring_refusal() + "); use the threads backend");
  }
  return make_uring_backend(queue, std::move(descriptors), depth);
}

}  // namespace gemini
