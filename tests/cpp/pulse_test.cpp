// What answers for a process whose interpreter is busy.
#include "comm/pulse.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "common/unique_fd.h"

namespace gemini {
namespace {

constexpr Pulse::Token kToken = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
constexpr int kSoonMs = 5000;
constexpr int kNeverMs = 300;

// Asks a pulse at 127.0.0.1.
class Asker {
 public:
  explicit Asker(uint16_t port) : socket_(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in there{};
    there.sin_family = AF_INET;
    there.sin_port = htons(port);
    there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(socket_.get(), reinterpret_cast<sockaddr*>(&there), sizeof(there)), 0);
  }

  // The answer to `question`, none where it does not come.
  [[nodiscard]] std::optional<std::string> ask(const std::string& question, int wait_ms) const {
    EXPECT_EQ(::send(socket_.get(), question.data(), question.size(), 0),
              static_cast<ssize_t>(question.size()));
    pollfd ready{.fd = socket_.get(), .events = POLLIN, .revents = 0};
    if (::poll(&ready, 1, wait_ms) != 1) return std::nullopt;
    std::string answer(100, '\0');
    const ssize_t got = ::recv(socket_.get(), answer.data(), answer.size(), 0);
    if (got < 0) return std::nullopt;
    answer.resize(static_cast<size_t>(got));
    return answer;
  }

 private:
  UniqueFd socket_;
};

std::string question(const Pulse::Token& token, const std::string& nonce) {
  return std::string(token.begin(), token.end()) + nonce;
}

uint64_t milliseconds_in(const std::string& answer) {
  uint64_t found = 0;
  for (size_t place = 15; place >= 8; --place) {
    found = found << 8 | static_cast<unsigned char>(answer.at(place));
  }
  return found;
}

TEST(Pulse, AnswersWithTheNonceAndTheTimeSinceTheLastBeat) {
  Pulse pulse("127.0.0.1", kToken);
  const Asker asker(pulse.port());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto late = asker.ask(question(kToken, "nonce..1"), kSoonMs);
  ASSERT_TRUE(late.has_value());
  EXPECT_EQ(late->size(), Pulse::kDatagramBytes);
  EXPECT_EQ(late->substr(0, 8), "nonce..1");
  EXPECT_GE(milliseconds_in(*late), 50u);
  EXPECT_LT(milliseconds_in(*late), 60'000u);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const auto before = asker.ask(question(kToken, "nonce..2"), kSoonMs);
  pulse.beat();
  const auto after = asker.ask(question(kToken, "nonce..3"), kSoonMs);
  ASSERT_TRUE(before.has_value() && after.has_value());
  EXPECT_LT(milliseconds_in(*after), milliseconds_in(*before));
}

TEST(Pulse, SaysNothingToWhoDoesNotKnowTheToken) {
  const Pulse pulse("127.0.0.1", kToken);
  const Asker asker(pulse.port());
  Pulse::Token other = kToken;
  other.back() ^= 1;
  EXPECT_FALSE(asker.ask(question(other, "nonce..1"), kNeverMs).has_value());
  EXPECT_FALSE(asker.ask(question(kToken, "nonce"), kNeverMs).has_value());
  EXPECT_FALSE(asker.ask(question(kToken, "a longer nonce"), kNeverMs).has_value());
  EXPECT_FALSE(asker.ask("", kNeverMs).has_value());
  EXPECT_TRUE(asker.ask(question(kToken, "nonce..2"), kSoonMs).has_value());
}

TEST(Pulse, OfAnAddressThatIsNotHereIsRefused) {
  EXPECT_THROW(Pulse("localhost", kToken), SystemError);
  EXPECT_THROW(Pulse("192.0.2.1", kToken), SystemError);  // for documents alone
}

TEST(Pulse, IsLeftAloneByAForkedChild) {
  auto* pulse = new Pulse("127.0.0.1", kToken);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    delete pulse;
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  const Asker asker(pulse->port());
  EXPECT_TRUE(asker.ask(question(kToken, "nonce..1"), kSoonMs).has_value());
  delete pulse;
}

}  // namespace
}  // namespace gemini
