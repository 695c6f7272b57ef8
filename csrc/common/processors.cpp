#include "common/processors.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <fstream>
#include <system_error>
#include <utility>

namespace gemini {
namespace {

constexpr int kMaxProcessors = 8192;  // the most that Linux can be built for

// Reads a number and advances past it; returns -1 if there is none.
int take_number(std::string_view& text) {
  int number = -1;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (failure != std::errc() || number < 0 || number >= kMaxProcessors) return -1;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

bool take(std::string_view& text, char mark) {
  if (text.empty() || text.front() != mark) return false;
  text.remove_prefix(1);
  return true;
}

}  // namespace

Processors parse_processors(std::string_view list) {
  while (!list.empty() && std::isspace(static_cast<unsigned char>(list.back())) != 0) {
    list.remove_suffix(1);
  }
  Processors found;
  do {
    const int first = take_number(list);
    const int last = take(list, '-') ? take_number(list) : first;
    if (first < 0 || last < first) return {};
    for (int each = first; each <= last; ++each) found.push_back(each);
  } while (take(list, ','));
  if (!list.empty()) return {};
  std::sort(found.begin(), found.end());
  return found;
}

Processors processors_near_pci(std::string bus_id, const std::string& sysfs) {
  for (char& each : bus_id) {
    each = static_cast<char>(std::tolower(static_cast<unsigned char>(each)));
  }
  std::ifstream file(sysfs + "/bus/pci/devices/" + bus_id + "/local_cpulist");
  std::string list;
  std::getline(file, list);
  return parse_processors(list);
}

#ifdef __linux__

struct KeepsTo::Mask {
  std::array<cpu_set_t, kMaxProcessors / CPU_SETSIZE> sets{};
};

KeepsTo::KeepsTo(const Processors& processors) {
  if (processors.empty()) return;
  auto before = std::make_unique<Mask>();
  constexpr size_t kBytes = sizeof(Mask);
  if (::sched_getaffinity(0, kBytes, before->sets.data()) != 0) return;
  Mask wanted;
  for (const int each : processors) {
    const auto number = static_cast<size_t>(each);
    if (CPU_ISSET_S(number, kBytes, before->sets.data()) != 0) {
      CPU_SET_S(number, kBytes, wanted.sets.data());
    }
  }
  const int count = CPU_COUNT_S(kBytes, wanted.sets.data());
  if (count == 0 || count == CPU_COUNT_S(kBytes, before->sets.data())) return;
  if (::sched_setaffinity(0, kBytes, wanted.sets.data()) == 0) before_ = std::move(before);
}

KeepsTo::~KeepsTo() {
  if (before_) (void)::sched_setaffinity(0, sizeof(Mask), before_->sets.data());
}

#else

struct KeepsTo::Mask {};

KeepsTo::KeepsTo(const Processors&) {}
KeepsTo::~KeepsTo() = default;

#endif

}  // namespace gemini
