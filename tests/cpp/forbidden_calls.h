// System calls that a filter refuses, as that of a container does. For good: in a process that ends
// with the test.
#pragma once

#if defined(__linux__) && __has_include(<linux/seccomp.h>)
#define GEMINI_CAN_FORBID_CALLS 1

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace gemini {

inline constexpr int kSkipped = 77;  // what a process exits with where no filter can be had

// Has two system calls fail with `error` in all threads of this process.
inline bool forbid(uint32_t call, uint32_t other, uint32_t error) {
  sock_filter steps[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, other, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{5, steps};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
}

inline bool forbid(uint32_t call, uint32_t error) { return forbid(call, call, error); }

}  // namespace gemini

#endif
