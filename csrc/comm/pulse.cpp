#include "comm/pulse.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "common/error.h"
#include "common/steady_clock.h"
#include "common/worker_thread.h"

namespace gemini {
namespace {

constexpr int kPollMs = 100;  // the longest that the destructor may wait

int64_t now_ns() { return std::chrono::nanoseconds(SteadyClock::now().time_since_epoch()).count(); }

// A socket bound to `address` and a free port.
int bound_socket(const std::string& address) {
  sockaddr_storage where{};
  auto* v4 = reinterpret_cast<sockaddr_in*>(&where);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&where);
  socklen_t size = sizeof(*v4);
  if (inet_pton(AF_INET, address.c_str(), &v4->sin_addr) == 1) {
    where.ss_family = AF_INET;
  } else if (inet_pton(AF_INET6, address.c_str(), &v6->sin6_addr) == 1) {
    where.ss_family = AF_INET6;
    size = sizeof(*v6);
  } else {
    throw SystemError(EINVAL, "answering for this rank at " + address);
  }
  const int fd = ::socket(where.ss_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) throw SystemError(errno, "making the socket that answers for this rank");
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&where), size) != 0) {
    const int code = errno;
    ::close(fd);
    throw SystemError(code, "answering for this rank at " + address);
  }
  return fd;
}

uint16_t port_of(int fd) {
  sockaddr_storage where{};
  socklen_t size = sizeof(where);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&where), &size) != 0) {
    throw SystemError(errno, "reading the port that answers for this rank");
  }
  // The port has the same offset in both families.
  return ntohs(reinterpret_cast<const sockaddr_in*>(&where)->sin_port);
}

void put_little_endian(uint64_t value, unsigned char* into) {
  for (int byte = 0; byte < 8; ++byte) into[byte] = static_cast<unsigned char>(value >> 8 * byte);
}

}  // namespace

Pulse::Pulse(const std::string& address, const Token& token)
    : token_(token),
      socket_(bound_socket(address)),
      port_(port_of(socket_.get())),
      beat_ns_(now_ns()),
      thread_(start_worker("answering whether this rank is alive", [this] { serve(); })) {}

Pulse::~Pulse() {
  if (!process_.is_owner()) {
    thread_.detach();  // of the parent; joining it would wait indefinitely
    return;
  }
  stop_ = true;
  thread_.join();
}

void Pulse::beat() noexcept { beat_ns_ = now_ns(); }

void Pulse::serve() const {
  pollfd ready{.fd = socket_.get(), .events = POLLIN, .revents = 0};
  while (!stop_) {
    if (::poll(&ready, 1, kPollMs) <= 0) continue;
    std::array<unsigned char, kDatagramBytes + 1>
        datagram{};  // one more: a longer one is no question
    sockaddr_storage from{};
    socklen_t size = sizeof(from);
    const ssize_t got = ::recvfrom(socket_.get(), datagram.data(), datagram.size(), 0,
                                   reinterpret_cast<sockaddr*>(&from), &size);
    if (got != static_cast<ssize_t>(kDatagramBytes)) continue;
    if (std::memcmp(datagram.data(), token_.data(), kTokenBytes) != 0) continue;
    std::array<unsigned char, kDatagramBytes> answer{};
    std::memcpy(answer.data(), datagram.data() + kTokenBytes, 8);
    const int64_t since_ms = (now_ns() - beat_ns_) / 1'000'000;
    put_little_endian(static_cast<uint64_t>(since_ms), answer.data() + 8);
    // The asker repeats its question if the answer is lost.
    (void)::sendto(socket_.get(), answer.data(), answer.size(), 0,
                   reinterpret_cast<const sockaddr*>(&from), size);
  }
}

}  // namespace gemini
