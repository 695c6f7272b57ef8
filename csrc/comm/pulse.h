// Answers the question whether this process is alive, whatever the interpreter does.
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

// A thread that answers datagrams. Python's own threads cannot answer while one of them is in a
// call that keeps the interpreter's lock; this one needs no lock of anybody.
//
// A question is a token and a nonce, the answer is the nonce and how long ago `beat` was called:
// kTokenBytes + 8 bytes each way, so that nobody has more sent to a third party than he sends.
// What has another size or token gets no answer. Integers are little-endian.
class Pulse {
 public:
  static constexpr size_t kTokenBytes = 16;
  static constexpr size_t kDatagramBytes = kTokenBytes + 8;
  using Token = std::array<unsigned char, kTokenBytes>;

  // Listens at `address`, a number of IPv4 or IPv6, on a port that is free. Throws SystemError,
  // and ThreadError where no thread can be started.
  Pulse(const std::string& address, const Token& token);
  // Ends within a tenth of a second. In a forked child, which has no such thread, it does nothing.
  ~Pulse();
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

  [[nodiscard]] uint16_t port() const noexcept { return port_; }
  // The interpreter runs: another thread than that of a long call has come to its turn.
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
