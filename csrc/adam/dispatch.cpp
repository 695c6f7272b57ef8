#include "adam/dispatch.h"

#include <cstdlib>

#include "common/error.h"

namespace gemini {
namespace {

struct Candidate {
  const char* name;
  AdamKernel kernel;
  bool runs_here;
};

bool cpu_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool cpu_has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && cpu_has_avx2();
#else
  return false;
#endif
}

const std::vector<Candidate>& usable() {
  static const std::vector<Candidate> kernels = [] {
    std::vector<Candidate> found;
    for (const Candidate& candidate :
         {Candidate{"scalar", adam_kernel_scalar(), true},
          Candidate{"avx2", adam_kernel_avx2(), cpu_has_avx2()},
          Candidate{"avx512", adam_kernel_avx512(), cpu_has_avx512()}}) {
      if (candidate.kernel != nullptr && candidate.runs_here) found.push_back(candidate);
    }
    return found;
  }();
  return kernels;
}

}  // namespace

std::vector<std::string> adam_isas() {
  std::vector<std::string> names;
  for (const Candidate& candidate : usable()) names.emplace_back(candidate.name);
  return names;
}

const std::string& adam_isa() {
  static const std::string chosen = [] {
    const char* wanted = std::getenv("GEMINI_ISA");
    if (wanted == nullptr || *wanted == '\0') return adam_isas().back();
    (void)adam_kernel(wanted);  // refuses an unknown name
    return std::string(wanted);
  }();
  return chosen;
}

AdamKernel adam_kernel(std::string_view isa) {
  std::string names;
  for (const Candidate& candidate : usable()) {
    if (isa == candidate.name) return candidate.kernel;
    names += names.empty() ? candidate.name : std::string(", ") + candidate.name;
  }
  throw Error("instruction set '" + std::string(isa) +
              "' is not usable here; GEMINI_ISA can be: " + names);
}

}  // namespace gemini
