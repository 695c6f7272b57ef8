// What tests of the asynchronous file share: memory with a pattern, and the modes to run in.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "aio/async_file.h"
#include "common/error.h"

namespace gemini {

constexpr int64_t kKib = 1 << 10;
constexpr int64_t kMib = 1 << 20;

// Page-aligned memory with a pattern that differs from page to page.
class Buffer {
 public:
  explicit Buffer(int64_t nbytes, uint32_t seed = 0)
      : data_(static_cast<char*>(std::aligned_alloc(4096, static_cast<size_t>(nbytes))), std::free),
        nbytes_(nbytes) {
    std::mt19937 random(seed);
    for (int64_t i = 0; i < nbytes; ++i) data_.get()[i] = static_cast<char>(random());
  }
  char* data() const { return data_.get(); }
  int64_t nbytes() const { return nbytes_; }
  bool operator==(const Buffer& other) const {
    return std::memcmp(data(), other.data(), static_cast<size_t>(nbytes_)) == 0;
  }

 private:
  std::unique_ptr<char, void (*)(void*)> data_;
  int64_t nbytes_;
};

struct Mode {
  BackendKind backend;
  bool direct;
};

inline std::vector<Mode> modes() {
  std::vector<Mode> found;
  for (const bool direct : {true, false}) {
    found.push_back({BackendKind::kThreads, direct});
    if (uring_refusal().empty()) found.push_back({BackendKind::kUring, direct});
  }
  return found;
}

inline std::string mode_name(const testing::TestParamInfo<Mode>& info) {
  return std::string(backend_name(info.param.backend)) +
         (info.param.direct ? "Direct" : "Buffered");
}

inline AsyncFileOptions small_pieces(Mode mode) {
  AsyncFileOptions options;
  options.backend = mode.backend;
  options.direct = mode.direct;
  options.request_bytes = 16 * kKib;
  return options;
}

template <class Call>
IoError io_error_of(Call call) {
  try {
    call();
  } catch (const IoError& error) {
    return error;
  }
  ADD_FAILURE() << "no IoError";
  return IoError(0, "", 0, "");
}

}  // namespace gemini
