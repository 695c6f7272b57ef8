#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "own_calls.h"
#include "torch_cuda.h"

namespace standin {
namespace {

constexpr size_t kAlignBytes = 512;  // torch's
constexpr int kUnwritten = 0xFF;     // NaN in every float type

std::mutex mutex;
MemoryUse use;                         // guarded by mutex
std::map<const char*, size_t> pinned;  // guarded by mutex: by where it begins
std::vector<char*> released;           // guarded by mutex: of these

size_t rounded(size_t nbytes) { return (nbytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes; }

struct Piece {
  void* memory;
  size_t nbytes;
  c10::StreamId stream;
  std::set<c10::StreamId> others{};  // guarded by mutex: that use it, too
};

std::map<const void*, Piece*> pieces;  // guarded by mutex: by where they begin

void free_piece(void* context) {
  const std::unique_ptr<Piece> piece(static_cast<Piece*>(context));
  {
    const std::lock_guard lock(mutex);
    use.allocated -= static_cast<int64_t>(piece->nbytes);
    pieces.erase(piece->memory);
  }
  for (const c10::StreamId other : piece->others) come_after(piece->stream, other);
  const c10::StreamId before = exchange_stream(piece->stream);
  launch({}, [memory = piece->memory, nbytes = piece->nbytes] {
    standin_remove(memory);
    std::memset(memory, kUnwritten, nbytes);
    std::free(memory);
  });
  (void)exchange_stream(before);
}

class GpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device = current_device();
    if (nbytes == 0) return {nullptr, nullptr, &free_piece, device};
    reserve(static_cast<int64_t>(rounded(nbytes)));
    void* const memory = std::aligned_alloc(kAlignBytes, rounded(nbytes));
    std::memset(memory, kUnwritten, rounded(nbytes));
    standin_bring(memory, rounded(nbytes));
    auto* const piece = new Piece{memory, rounded(nbytes), current_stream()};
    const std::lock_guard lock(mutex);
    pieces[memory] = piece;
    return {memory, piece, &free_piece, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    synchronize(current_stream());
    std::memcpy(dest, src, count);
  }

 private:
  static void reserve(int64_t nbytes) {
    const std::lock_guard lock(mutex);
    const int64_t more = std::max<int64_t>(use.allocated + nbytes - use.reserved, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, take(more), "CUDA out of memory. Tried to allocate ", nbytes,
                     " bytes.");
    use.reserved += more;
    use.allocated += nbytes;
    use.peak_allocated = std::max(use.peak_allocated, use.allocated);
    use.peak_reserved = std::max(use.peak_reserved, use.reserved);
  }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    free_released();
    const size_t size = rounded(std::max<size_t>(nbytes, 1));
    auto* const memory = static_cast<char*>(std::aligned_alloc(kAlignBytes, size));
    const std::lock_guard lock(mutex);
    pinned[memory] = size;
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    std::memcpy(dest, src, count);
  }

 private:
  // Not freed yet: copies may be under way, and who holds Python's lock must not wait for streams.
  static void release(void* memory) {
    const std::lock_guard lock(mutex);
    released.push_back(static_cast<char*>(memory));
  }

  static void free_released() {
    std::vector<char*> all;
    {
      const std::lock_guard lock(mutex);
      all.swap(released);
    }
    if (!all.empty()) synchronize_all();
    const std::lock_guard lock(mutex);
    for (char* const memory : all) {
      pinned.erase(memory);
      std::free(memory);
    }
  }
};

GpuAllocator the_gpu_allocator;
PinnedAllocator the_pinned_allocator;
REGISTER_ALLOCATOR(kGpu, &the_gpu_allocator);

}  // namespace

c10::Allocator& gpu_allocator() { return the_gpu_allocator; }
c10::Allocator& pinned_allocator() { return the_pinned_allocator; }

bool is_pinned(const void* data) {
  const auto* const address = static_cast<const char*>(data);
  const std::lock_guard lock(mutex);
  const auto after = pinned.upper_bound(address);
  return after != pinned.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

void use_on_stream(const void* memory, c10::StreamId stream) {
  const std::lock_guard lock(mutex);
  const auto found = pieces.find(memory);
  if (found == pieces.end() || found->second->stream == stream) return;
  found->second->others.insert(stream);
}

MemoryUse memory_use() {
  const std::lock_guard lock(mutex);
  return use;
}

void reset_peaks() {
  const std::lock_guard lock(mutex);
  use.peak_allocated = use.allocated;
  use.peak_reserved = use.reserved;
}

void release_cache() {
  synchronize(current_stream());
  const std::lock_guard lock(mutex);
  (void)take(use.allocated - use.reserved);
  use.reserved = use.allocated;
}

}  // namespace standin
