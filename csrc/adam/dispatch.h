// Which instruction set the kernels use.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "adam/kernel.h"

namespace gemini {

// Names of those this build has and this machine can run, slowest first; "scalar" is always there.
[[nodiscard]] std::vector<std::string> adam_isas();

// The name in use: the last of adam_isas(), or what GEMINI_ISA says. Chosen once, at the first
// call. Throws Error when GEMINI_ISA names something that adam_isas() does not list.
[[nodiscard]] const std::string& adam_isa();

// The kernels of that name. Throws Error when adam_isas() does not list it.
[[nodiscard]] const IsaKernels& isa_kernels(std::string_view isa);

// The kernels in use.
[[nodiscard]] const IsaKernels& isa_kernels();

}  // namespace gemini
