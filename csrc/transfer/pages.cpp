#include "transfer/pages.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "common/bytes.h"
#include "common/error.h"
#include "common/size_text.h"

#if defined(__linux__) && !defined(MREMAP_DONTUNMAP)
#define MREMAP_DONTUNMAP 4  // Linux 5.7; older kernels return EINVAL, which counts as a refusal
#endif

namespace gemini::pages {
namespace {

constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

[[noreturn]] void fail(const char* doing, int64_t nbytes, int code) {
  throw Error(std::string(doing) + " " + format_bytes(nbytes) + ": " + std::strerror(code) +
              " (errno " + std::to_string(code) + ")" +
              (code == ENOMEM ? "; see vm.max_map_count, vm.overcommit_memory and ulimit -v" : ""));
}

size_t length(int64_t nbytes) { return static_cast<size_t>(nbytes); }

}  // namespace

char* reserve(int64_t nbytes, int64_t alignment) {
  const int64_t slack = alignment > kPageBytes ? alignment : 0;
  void* const start = ::mmap(nullptr, length(nbytes + slack), PROT_NONE, kReserved, -1, 0);
  if (start == MAP_FAILED) fail("cannot reserve addresses for", nbytes + slack, errno);
  auto* const low = static_cast<char*>(start);
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(low));
  char* const aligned = low + (round_up(address, alignment) - address);
  if (aligned > low) release(low, aligned - low);
  const int64_t tail = slack - (aligned - low);
  if (tail > 0) release(aligned + nbytes, tail);
  return aligned;
}

void reserve_at(char* address, int64_t nbytes) {
  if (::mmap(address, length(nbytes), PROT_NONE, kReserved | MAP_FIXED, -1, 0) == MAP_FAILED) {
    fail("cannot take the memory from", nbytes, errno);
  }
}

void commit_at(char* address, int64_t nbytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  if (::mmap(address, length(nbytes), PROT_READ | PROT_WRITE, kFlags, -1, 0) == MAP_FAILED) {
    fail("cannot map", nbytes, errno);
  }
#ifdef __linux__
  // Advice: a kernel without huge pages refuses it, which does no harm.
  if (nbytes >= kHugePageBytes) (void)::madvise(address, length(nbytes), MADV_HUGEPAGE);
  if (::madvise(address, length(nbytes), MADV_DONTFORK) != 0) {
    const int code = errno;
    reserve_at(address, nbytes);
    fail("cannot keep from forked children", nbytes, code);
  }
#endif
}

void release(char* address, int64_t nbytes) {
  if (::munmap(address, length(nbytes)) != 0) fail("cannot unmap", nbytes, errno);
}

void discard(char* address, int64_t nbytes) noexcept { (void)::munmap(address, length(nbytes)); }

bool move(char* from, char* to, int64_t nbytes, Source source) noexcept {
#ifdef __linux__
  const int flags =
      MREMAP_MAYMOVE | MREMAP_FIXED | (source == Source::kKept ? MREMAP_DONTUNMAP : 0);
  return ::mremap(from, length(nbytes), length(nbytes), flags, to) != MAP_FAILED;
#else
  (void)from, (void)to, (void)nbytes, (void)source;
  return false;
#endif
}

}  // namespace gemini::pages
