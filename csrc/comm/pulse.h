// Pulse: answers whether this process is alive, whatever the interpreter does.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>

#include "common/process_guard.h"
#include "common/unique_fd.h"

namespace gemini {

// A thread that answers datagrams. Python threads cannot answer while one of them is in a call that
// holds the interpreter's lock; this thread needs no lock.
//
// A question is a token and a nonce; the answer is the nonce and the time since the last call of
// `beat`: kTokenBytes + 8 bytes each way, so a forged sender cannot use this to amplify traffic to
// a third party. Datagrams of another size or token get no answer. Integers are little-endian.
class Pulse {
 public:
  static constexpr size_t kTokenBytes = 16;
  static constexpr size_t kDatagramBytes = kTokenBytes + 8;
  using Token = std::array<unsigned char, kTokenBytes>;

  // Listens at `address`, a numeric IPv4 or IPv6 address, on a free port. Throws SystemError, and
  // ThreadError if the thread cannot be started.
  Pulse(const std::string& address, const Token& token);
  // Ends within a tenth of a second. In a forked child, which has no such thread, it does nothing.
  ~Pulse();
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

  [[nodiscard]] uint16_t port() const noexcept { return port_; }
  // The interpreter runs: a thread other than that of a long call got its turn.
  void beat() noexcept;

 private:
  void serve() const;

  ProcessGuard process_;
  const Token token_;
  UniqueFd socket_;
  uint16_t port_ = 0;
  std::atomic<int64_t> beat_ns_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace gemini
