// gemini._C: transfers between the tiers of a GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>

#include "aio/async_file.h"
#include "bindings/gpu.h"
#include "gpu/gpu_engine.h"

namespace py = pybind11;

namespace gemini {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

}  // namespace

void bind_gpu_engine(py::module_& m) {
  using Engine = GpuEngine;
  py::class_<Engine>(m, "GpuEngine",
                     "Transfers between the tiers of a GPU. Memory must stay mapped until poll has "
                     "reported its transfer.")
      .def(py::init([](const Gpu& gpu, AsyncFile* file) {
             return std::make_unique<Engine>(gpu.lanes, file);
           }),
           py::arg("gpu"), py::arg("file") = py::none(), py::keep_alive<1, 3>())
      .def("copy", py::overload_cast<GpuWindow&, HostPlace&, int64_t>(&Engine::copy),
           py::arg("dst"), py::arg("src"), py::arg("nbytes"), "Start a copy; return its ticket.")
      .def("copy", py::overload_cast<HostPlace&, GpuWindow&, int64_t>(&Engine::copy),
           py::arg("dst"), py::arg("src"), py::arg("nbytes"), "Start a copy; return its ticket.")
      .def("read", &Engine::read, py::arg("dst"), py::arg("nbytes"), py::arg("offset"),
           "Start reading from the file; return the ticket.")
      .def("write", py::overload_cast<GpuWindow&, int64_t, int64_t>(&Engine::write), py::arg("src"),
           py::arg("nbytes"), py::arg("offset"), "Start writing to the file; return the ticket.")
      .def("write", py::overload_cast<HostPlace&, int64_t, int64_t>(&Engine::write), py::arg("src"),
           py::arg("nbytes"), py::arg("offset"), "Start writing to the file; return the ticket.")
      .def("poll", &Engine::poll,
           "Return what ended, or was handed to the order of streams, since the last call.")
      .def("wait_any", &Engine::wait_any, ReleaseGil(), py::arg("timeout_s") = -1.0,
           "Have operators wait for a copy, or block until a disk transfer ended; return whether "
           "poll would return something.")
      .def("drain", &Engine::drain, ReleaseGil(), "Block until nothing is in flight.")
      .def("close", &Engine::close, ReleaseGil(),
           "Complete all transfers and stop the threads. Idempotent.")
      .def_property_readonly("num_in_flight", &Engine::num_in_flight)
      .def("stall_seconds", &Engine::stall_seconds,
           "Return for how long operators have waited for copies, as far as that is over.")
      .def(
          "stats",
          [](Engine& self, Link link) {
            const LinkStats stats = self.stats(link);
            return py::dict(py::arg("bytes") = stats.bytes, py::arg("seconds") = stats.seconds,
                            py::arg("shared_seconds") = stats.shared_seconds,
                            py::arg("transfers") = stats.transfers);
          },
          py::arg("link"), "Return what a link has moved, and for how long it was busy.");
}

}  // namespace gemini
