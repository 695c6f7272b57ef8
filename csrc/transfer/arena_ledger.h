// ArenaLedger: the bytes that an arena has under windows and parked.
#pragma once

#include <atomic>
#include <cstdint>

namespace gemini {

// Shared by an arena and the windows it has mapped, so that the counts stay correct whichever is
// destroyed first. May be read from any thread; `mapped + parked` is never overstated.
class ArenaLedger {
 public:
  explicit ArenaLedger(int64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}
  ArenaLedger(const ArenaLedger&) = delete;
  ArenaLedger& operator=(const ArenaLedger&) = delete;

  [[nodiscard]] int64_t capacity() const noexcept { return capacity_bytes_; }
  [[nodiscard]] int64_t mapped() const noexcept { return mapped_bytes_.load(); }
  [[nodiscard]] int64_t parked() const noexcept { return parked_bytes_.load(); }
  [[nodiscard]] int64_t peak() const noexcept { return peak_bytes_.load(); }

  // Sum of mapped and parked bytes of all arenas of the process.
  [[nodiscard]] static int64_t process_bytes() noexcept { return process_bytes_.load(); }

  void add_mapped(int64_t nbytes) noexcept {
    mapped_bytes_ += nbytes;
    process_bytes_ += nbytes;
    const int64_t used_bytes = mapped() + parked();
    int64_t peak_bytes = peak_bytes_.load();
    while (used_bytes > peak_bytes && !peak_bytes_.compare_exchange_weak(peak_bytes, used_bytes)) {
    }
  }
  void drop_mapped(int64_t nbytes) noexcept {
    mapped_bytes_ -= nbytes;
    process_bytes_ -= nbytes;
  }
  void drop_parked(int64_t nbytes) noexcept {
    parked_bytes_ -= nbytes;
    process_bytes_ -= nbytes;
  }
  void park(int64_t nbytes) noexcept {
    mapped_bytes_ -= nbytes;
    parked_bytes_ += nbytes;
  }
  void unpark(int64_t nbytes) noexcept {
    parked_bytes_ -= nbytes;
    mapped_bytes_ += nbytes;
  }

 private:
  const int64_t capacity_bytes_;
  std::atomic<int64_t> mapped_bytes_{0};
  std::atomic<int64_t> parked_bytes_{0};
  std::atomic<int64_t> peak_bytes_{0};
  static inline std::atomic<int64_t> process_bytes_{0};
};

}  // namespace gemini
