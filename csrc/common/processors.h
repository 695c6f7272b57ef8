// The processors near a device, and threads restricted to them. On a machine with several memory
// nodes (NUMA), memory that a processor touches first is allocated in its node, and copies from the
// device's own node are faster.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gemini {

// Processor numbers, ascending; empty: unknown.
using Processors = std::vector<int>;

// Parses a list as the kernel writes it ("0-3,8"); empty if it is invalid.
[[nodiscard]] Processors parse_processors(std::string_view list);

// The processors in the memory node of a PCI device ("0000:3B:00.0"), from sysfs.
[[nodiscard]] Processors processors_near_pci(std::string bus_id, const std::string& sysfs = "/sys");

// During its lifetime the calling thread, and threads that it starts, run only on `processors`.
// Processors that the thread may not use are left out; if none remains, nothing changes. The same
// thread must destroy it.
class KeepsTo {
 public:
  explicit KeepsTo(const Processors& processors);
  ~KeepsTo();
  KeepsTo(const KeepsTo&) = delete;
  KeepsTo& operator=(const KeepsTo&) = delete;

  // Whether it changes where the thread may run.
  [[nodiscard]] bool restricts() const noexcept { return before_ != nullptr; }

 private:
  struct Mask;
  std::unique_ptr<const Mask> before_;  // null: nothing to restore
};

}  // namespace gemini
