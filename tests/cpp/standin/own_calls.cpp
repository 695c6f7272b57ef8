#include "own_calls.h"

#include <iterator>
#include <utility>
#include <vector>

#include "library.h"

namespace {

using gemini::cuda_abi::Result;
using namespace gemini::standin;

}  // namespace

extern "C" {

EXPORTED Result standin_launch(gemini::cuda_abi::Stream stream, const uint64_t* ranges,
                               size_t num_ranges, void (*work)(void*), void* data) {
  return in_context([&](Library& own) -> Result {
    std::vector<gemini::GpuRange> used;
    for (size_t i = 0; i < num_ranges; ++i) {
      used.push_back({ranges[2 * i], static_cast<int64_t>(ranges[2 * i + 1])});
    }
    own.gpu.launch(number(stream), std::move(used), [=] { work(data); });
    return gemini::cuda_abi::kSuccess;
  });
}

EXPORTED Result standin_take(int64_t nbytes) {
  return in_context([&](Library& own) -> Result {
    const std::lock_guard lock(own.mutex);
    if (nbytes > 0 && free_bytes_of(own) < nbytes) return gemini::cuda_abi::kOutOfMemory;
    own.taken_bytes += nbytes;
    return gemini::cuda_abi::kSuccess;
  });
}

EXPORTED void standin_bring(const void* memory, size_t nbytes) {
  const std::lock_guard lock(library().mutex);
  library().brought[reinterpret_cast<uint64_t>(memory)] = nbytes;
}

EXPORTED void standin_remove(const void* memory) {
  const std::lock_guard lock(library().mutex);
  library().brought.erase(reinterpret_cast<uint64_t>(memory));
}

EXPORTED void standin_find(uint64_t address, uint64_t* begin, uint64_t* end) {
  Library& own = library();
  const std::lock_guard lock(own.mutex);
  *begin = *end = 0;
  const auto take = [&](uint64_t first, size_t nbytes) {
    if (address - first < nbytes) std::tie(*begin, *end) = std::pair(first, first + nbytes);
  };
  const auto brought = own.brought.upper_bound(address);
  if (brought != own.brought.begin()) take(std::prev(brought)->first, std::prev(brought)->second);
  const auto mapped = own.mappings.upper_bound(address);
  if (mapped == own.mappings.begin() || !std::prev(mapped)->second.accessible) return;
  take(std::prev(mapped)->first, std::prev(mapped)->second.nbytes);
}

}  // extern "C"
