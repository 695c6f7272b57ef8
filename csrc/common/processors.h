// Which processors are near a device, and threads that keep to them. On a machine with several
// memory nodes (NUMA) what a processor touches first lies in its node, and a copy from the device's
// own node is faster.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gemini {

// Their numbers, in rising order; empty: not known.
using Processors = std::vector<int>;

// Reads a list as the kernel writes it ("0-3,8"); empty where it is none.
[[nodiscard]] Processors parse_processors(std::string_view list);

// Those in the memory node of a PCI device ("0000:3B:00.0"), as sysfs has it.
[[nodiscard]] Processors processors_near_pci(std::string bus_id, const std::string& sysfs = "/sys");

// While it lives the calling thread, and threads that it starts, run on `processors` alone. Of
// those that the thread may not use none is taken; where none is left it runs where it did. The
// thread that made it ends it.
class KeepsTo {
 public:
  explicit KeepsTo(const Processors& processors);
  ~KeepsTo();
  KeepsTo(const KeepsTo&) = delete;
  KeepsTo& operator=(const KeepsTo&) = delete;

  // Whether that changes where the thread may run.
  [[nodiscard]] bool restricts() const noexcept { return before_ != nullptr; }

 private:
  struct Mask;
  std::unique_ptr<const Mask> before_;  // null: nothing to give back
};

}  // namespace gemini
