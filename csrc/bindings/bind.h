// One function per part, each in its own bind_<part>.cpp, called once by module.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace gemini {

void bind_actions(pybind11::module_& m);
void bind_adam(pybind11::module_& m);
void bind_tensors(pybind11::module_& m);
void bind_aio(pybind11::module_& m);
void bind_build_info(pybind11::module_& m);
void bind_checksum(pybind11::module_& m);
void bind_chunk(pybind11::module_& m);
void bind_gpu(pybind11::module_& m);
void bind_pulse(pybind11::module_& m);
void bind_schedule(pybind11::module_& m);
void bind_simulate(pybind11::module_& m);
void bind_transfer(pybind11::module_& m);

}  // namespace gemini
