// Information about this build, and the GPUs that it sees.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "bindings/bind.h"
#include "common/cuda_info.h"

namespace py = pybind11;

namespace gemini {
namespace {

std::string compiler() {
#if defined(__clang__)
  return std::string("clang ") + __clang_version__;
#elif defined(__GNUC__)
  return std::string("gcc ") + __VERSION__;
#else
  return "unknown";
#endif
}

py::dict build_info() {
  py::dict info;
  info["version"] = GEMINI_VERSION;
  info["compiler"] = compiler();
#ifdef GEMINI_HAVE_CUDA
  info["cuda"] = GEMINI_CUDA_VERSION;
#else
  info["cuda"] = py::none();
#endif
#ifdef GEMINI_HAVE_URING
  info["uring"] = true;
#else
  info["uring"] = false;
#endif
  info["sanitize"] = GEMINI_SANITIZE;
  return info;
}

py::list cuda_devices() {
  py::list devices;
  for (const CudaDevice& device : cuda_info().devices) {
    py::dict entry;
    entry["index"] = device.index;
    entry["name"] = device.name;
    entry["total_bytes"] = device.total_bytes;
    entry["capability"] = py::make_tuple(device.major, device.minor);
    devices.append(entry);
  }
  return devices;
}

}  // namespace

void bind_build_info(py::module_& m) {
  m.def("build_info", &build_info,
        "Return version, compiler, cuda (toolkit version or None), uring, sanitize.");
  m.def("cuda_devices", &cuda_devices,
        "Return index, name, total_bytes and capability of every GPU; empty without CUDA.");
  m.def(
      "cuda_problem", [] { return cuda_info().problem; },
      "Return why the CUDA runtime sees no GPU; empty when it does or was not compiled in.");
}

}  // namespace gemini
