#include <string>

#include "aio/io_backend.h"

#ifdef GEMINI_HAVE_URING

#include <liburing.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace gemini {
namespace {

constexpr int kMaxAttempts = 1000;        // of an interrupted call
constexpr unsigned kMaxOperations = 256;  // number of operations to probe

// Returns why required operations are missing or cannot be probed; "" if all are supported.
std::string lacking_operations(io_uring& ring) {
  const size_t nbytes = sizeof(io_uring_probe) + kMaxOperations * sizeof(io_uring_probe_op);
  const std::unique_ptr<io_uring_probe, decltype(&std::free)> probe(
      static_cast<io_uring_probe*>(std::calloc(1, nbytes)), &std::free);
  if (!probe) return std::string("io_uring_register: ") + std::strerror(ENOMEM);
  const int code = ::io_uring_register_probe(&ring, probe.get(), kMaxOperations);
  // A kernel that does not support probing has none of the operations either.
  if (code < 0 && code != -EINVAL) {
    return std::string("io_uring_register: ") + std::strerror(-code);
  }
  bool all = code >= 0;
  for (const int operation : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READV, IORING_OP_WRITEV,
                              IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED}) {
    all = all && ::io_uring_opcode_supported(probe.get(), operation) != 0;
  }
  return all ? "" : "the kernel is older than Linux 5.6";
}

// Submits a no-op and waits for it: a system call filter may allow setting up a ring but not using
// it. Returns 0 or a negated errno.
int try_request(io_uring& ring) {
  ::io_uring_prep_nop(::io_uring_get_sqe(&ring));
  int code = 0;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    code = ::io_uring_submit_and_wait(&ring, 1);
    io_uring_cqe* cqe = nullptr;
    if (::io_uring_peek_cqe(&ring, &cqe) == 0) return cqe->res;
    if (code < 0 && code != -EINTR && code != -EAGAIN) return code;
  }
  return code < 0 ? code : -EIO;
}

std::string find_refusal() {
  io_uring ring{};
  const int code = ::io_uring_queue_init(2, &ring, 0);
  if (code < 0) return std::string("io_uring_setup: ") + std::strerror(-code);
  std::string refusal = lacking_operations(ring);
  if (refusal.empty()) {
    const int result = try_request(ring);
    if (result < 0) refusal = std::string("io_uring_enter: ") + std::strerror(-result);
  }
  ::io_uring_queue_exit(&ring);
  return refusal;
}

}  // namespace

const std::string& uring_refusal() {
  static const std::string refusal = find_refusal();
  return refusal;
}

}  // namespace gemini

#else

namespace gemini {

const std::string& uring_refusal() {
  static const std::string refusal = "this build has no io_uring: liburing was not found";
  return refusal;
}

}  // namespace gemini

#endif
