// The instruction set of the kernels.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "adam/kernel.h"

namespace gemini {

// The instruction sets that this build has and this machine can run, slowest first; "scalar" is
// always among them.
[[nodiscard]] std::vector<std::string> adam_isas();

// The instruction set in use: the last of adam_isas(), or the value of GEMINI_ISA. Chosen once, at
// the first call. Throws Error if GEMINI_ISA is not in adam_isas().
[[nodiscard]] const std::string& adam_isa();

// The kernels of an instruction set. Throws Error if it is not in adam_isas().
[[nodiscard]] const IsaKernels& isa_kernels(std::string_view isa);

// The kernels in use.
[[nodiscard]] const IsaKernels& isa_kernels();

}  // namespace gemini
