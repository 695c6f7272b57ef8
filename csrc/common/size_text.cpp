#include "common/size_text.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <iomanip>
#include <locale>
#include <sstream>

namespace gemini {

namespace {

constexpr std::array kUnits{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
constexpr size_t kLast = kUnits.size() - 1;
constexpr double kRoundsToNextUnit = 1023.95;  // printed with one digit it becomes 1024.0

}  // namespace

std::string format_bytes(int64_t nbytes) {
  if (nbytes > -1024 && nbytes < 1024) return std::to_string(nbytes) + " B";
  auto scaled = static_cast<double>(nbytes);
  size_t unit = 0;
  do {
    scaled /= 1024;
    ++unit;
  } while (std::abs(scaled) >= kRoundsToNextUnit && unit < kLast);
  std::ostringstream text;
  text.imbue(std::locale::classic());  // a decimal point, whatever the process's locale
  text << std::fixed << std::setprecision(1) << scaled << " " << kUnits[unit];
  return text.str();
}

std::string format_enough(int64_t nbytes) {
  const auto size = static_cast<uint64_t>(std::max<int64_t>(nbytes, 0));
  const size_t unit =
      size == 0 ? 0 : std::min(static_cast<size_t>(std::bit_width(size) - 1) / 10, kLast);
  if (unit == 0) return std::to_string(size) + "B";
  const uint64_t factor = uint64_t{1} << (10 * unit);
  const uint64_t rest = size % factor * 100;  // below 2**57
  const uint64_t hundredths = size / factor * 100 + rest / factor + (rest % factor > 0 ? 1 : 0);
  std::string digits = std::to_string(hundredths % 100);
  digits.insert(0, 2 - digits.size(), '0');
  if (digits.back() == '0') digits.pop_back();
  return std::to_string(hundredths / 100) + "." + digits + kUnits[unit];
}

}  // namespace gemini
