// Makes reads and writes of unlinked files fail on request; loaded with LD_PRELOAD by the tests.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { kShort = -1, kEndOfFile = -2 };  // in place of an errno

static atomic_long g_before[2];  // calls that pass before the fault; [0] reads, [1] writes
static atomic_long g_times[2];   // faults left
static atomic_long g_hits;
static atomic_int g_what[2];

void fault_arm(int is_write, long before, long times, int what) {
  atomic_store(&g_hits, 0);
  atomic_store(&g_before[is_write], before);
  atomic_store(&g_what[is_write], what);
  atomic_store(&g_times[is_write], times);
}

long fault_hits(void) { return atomic_load(&g_hits); }

static int strikes(int fd, int is_write) {
  struct stat status;
  if (atomic_load(&g_times[is_write]) <= 0) return 0;
  if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || status.st_nlink != 0) return 0;
  if (atomic_fetch_sub(&g_before[is_write], 1) > 0) return 0;
  if (atomic_fetch_sub(&g_times[is_write], 1) <= 0) return 0;
  atomic_fetch_add(&g_hits, 1);
  return 1;
}

// Whether the call ends here with *result; a short one goes on with fewer bytes.
static int intercept(int fd, int is_write, size_t* nbytes, ssize_t* result) {
  if (!strikes(fd, is_write)) return 0;
  const int what = atomic_load(&g_what[is_write]);
  if (what == kShort) {
    *nbytes = *nbytes > 4096 ? *nbytes / 2 / 4096 * 4096 : *nbytes;
    return 0;
  }
  if (what != kEndOfFile) errno = what;
  *result = what == kEndOfFile ? 0 : -1;
  return 1;
}

// The same for several areas: `kept` gets those, or the part of them, that a short call goes on with.
static int intercept_vector(int fd, int is_write, const struct iovec** areas, int* count,
                            struct iovec* kept, ssize_t* result) {
  if (*count > IOV_MAX) return 0;  // the kernel refuses it
  size_t total = 0;
  for (int i = 0; i < *count; ++i) total += (*areas)[i].iov_len;
  size_t left = total;
  if (intercept(fd, is_write, &left, result)) return 1;
  if (left == total) return 0;
  int used = 0;
  for (; left > 0; ++used) {
    kept[used] = (*areas)[used];
    if (kept[used].iov_len > left) kept[used].iov_len = left;
    left -= kept[used].iov_len;
  }
  *areas = kept;
  *count = used;
  return 0;
}

#define READ(name, offset_type)                                             \
  ssize_t name(int fd, void* buffer, size_t nbytes, offset_type offset) {   \
    ssize_t result;                                                         \
    ssize_t (*next)(int, void*, size_t, offset_type) = dlsym(RTLD_NEXT, #name); \
    if (intercept(fd, 0, &nbytes, &result)) return result;                  \
    return next(fd, buffer, nbytes, offset);                                \
  }
#define WRITE(name, offset_type)                                                  \
  ssize_t name(int fd, const void* buffer, size_t nbytes, offset_type offset) {   \
    ssize_t result;                                                               \
    ssize_t (*next)(int, const void*, size_t, offset_type) = dlsym(RTLD_NEXT, #name); \
    if (intercept(fd, 1, &nbytes, &result)) return result;                        \
    return next(fd, buffer, nbytes, offset);                                      \
  }

READ(pread, off_t)
READ(pread64, off64_t)
WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)

#define VECTOR(name, is_write, offset_type)                                                \
  ssize_t name(int fd, const struct iovec* areas, int count, offset_type offset) {         \
    ssize_t result;                                                                        \
    struct iovec kept[IOV_MAX];                                                            \
    ssize_t (*next)(int, const struct iovec*, int, offset_type) = dlsym(RTLD_NEXT, #name); \
    if (intercept_vector(fd, is_write, &areas, &count, kept, &result)) return result;      \
    return next(fd, areas, count, offset);                                                 \
  }

VECTOR(preadv, 0, off_t)
VECTOR(preadv64, 0, off64_t)
VECTOR(pwritev, 1, off_t)
VECTOR(pwritev64, 1, off64_t)
