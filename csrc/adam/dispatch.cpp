#include "adam/dispatch.h"

#include <cstdlib>

#include "common/error.h"

namespace gemini {
namespace {

struct Candidate {
  const char* name;
  IsaKernels kernels;
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
  static const std::vector<Candidate> found = [] {
    std::vector<Candidate> all;
    for (const Candidate& candidate :
         {Candidate{"scalar", scalar_kernels(), true}, Candidate{"neon", neon_kernels(), true},
          Candidate{"avx2", avx2_kernels(), cpu_has_avx2()},
          Candidate{"avx512", avx512_kernels(), cpu_has_avx512()}}) {
      if (candidate.kernels.adam != nullptr && candidate.runs_here) all.push_back(candidate);
    }
    return all;
  }();
  return found;
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
    (void)isa_kernels(wanted);  // throws for an unknown name
    return std::string(wanted);
  }();
  return chosen;
}

const IsaKernels& isa_kernels(std::string_view isa) {
  std::string names;
  for (const Candidate& candidate : usable()) {
    if (isa == candidate.name) return candidate.kernels;
    names += names.empty() ? candidate.name : std::string(", ") + candidate.name;
  }
  throw Error("instruction set '" + std::string(isa) +
              "' is not usable here; GEMINI_ISA can be: " + names);
}

const IsaKernels& isa_kernels() {
  static const IsaKernels& chosen = isa_kernels(adam_isa());
  return chosen;
}

}  // namespace gemini
