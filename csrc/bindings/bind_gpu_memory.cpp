// gemini._C: memory of a GPU, and the page-locked host memory for its copies.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>

#include "bindings/gpu.h"
#include "gpu/gpu_windows.h"
#include "gpu/pinned_arena.h"

namespace py = pybind11;

namespace gemini {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void bind_device_memory(py::module_& m) {
  py::class_<GpuWindow, std::unique_ptr<GpuWindow, py::nodelete>>(
      m, "GpuWindow", "Where a chunk's memory is seen on a GPU, with or without memory.")
      .def_property_readonly("address", &GpuWindow::address, "Of a floating one: for now.")
      .def_property_readonly("nbytes", &GpuWindow::nbytes, "Bytes, as asked for.")
      .def_property_readonly("span_bytes", &GpuWindow::span_bytes, "Bytes that it costs.")
      .def_property_readonly("mapped", &GpuWindow::mapped, "Whether there is memory behind it.");
  py::class_<GpuSpace>(m, "GpuSpace", "A reservation of a GPU's addresses, cut into windows.")
      .def(py::init([](const Gpu& gpu, int64_t total_bytes, int64_t num_windows) {
             return std::make_unique<GpuSpace>(gpu.lanes, total_bytes, num_windows);
           }),
           py::arg("gpu"), py::arg("total_bytes"), py::arg("num_windows"))
      .def(
          "create",
          [](GpuSpace& self, int64_t nbytes, bool floats) {
            return self.create(nbytes, floats ? Addresses::kFloating : Addresses::kFixed);
          },
          py::arg("nbytes"), py::kw_only(), py::arg("floats") = false,
          py::return_value_policy::reference_internal,
          "Cut off the next window; one that floats has other addresses each time it is given "
          "memory.")
      .def("poison", &GpuSpace::poison, ReleaseGil(), py::arg("window"),
           "Have a window without memory read as NaN, and take what is written to it.")
      .def("find", &GpuSpace::find, py::arg("address"),
           "Return the index of the window that contains the address for good, -1 if none does.")
      .def_property_readonly("address", &GpuSpace::address)
      .def_property_readonly("reserved_bytes", &GpuSpace::reserved_bytes);
  py::class_<GpuArena>(m, "GpuArena", "GPU memory of one budget, recycled between windows.")
      .def_property_readonly_static(
          "most_blocks", [](const py::object&) { return GpuArena::kMostBlocks; },
          "How many blocks a window is made of at most.")
      .def(py::init([](const Gpu& gpu, int64_t capacity_bytes, int64_t unit_bytes) {
             return std::make_unique<GpuArena>(gpu.lanes, capacity_bytes, unit_bytes);
           }),
           py::arg("gpu"), py::arg("capacity_bytes"), py::arg("unit_bytes") = 0)
      .def(
          "map",
          [](GpuArena& self, GpuWindow& window, bool zero) {
            self.map(window, zero ? Content::kZeros : Content::kAny);
          },
          ReleaseGil(), py::arg("window"), py::kw_only(), py::arg("zero") = false,
          "Put memory under a window for operators.")
      .def("map_incoming", &GpuArena::map_incoming, ReleaseGil(), py::arg("window"),
           "Put memory under a window for a transfer to it.")
      .def(
          "unmap",
          [](GpuArena& self, GpuWindow& window, bool park) {
            self.unmap(window, park ? Spare::kParked : Spare::kReturned);
          },
          ReleaseGil(), py::arg("window"), py::kw_only(), py::arg("park") = true,
          "Take the memory from a window, after what uses it.")
      .def("trim", &GpuArena::trim, ReleaseGil(), py::arg("parked_limit_bytes") = 0,
           "Return parked memory to the GPU until at most this much is left.")
      .def_property_readonly("mapped_bytes", &GpuArena::mapped_bytes)
      .def_property_readonly("parked_bytes", &GpuArena::parked_bytes)
      .def_property_readonly("peak_bytes", &GpuArena::peak_bytes)
      .def_property_readonly("num_mappings", &GpuArena::num_mappings,
                             "Blocks so far that were mapped where they did not show.")
      .def_property_readonly("capacity", &GpuArena::capacity);
}

void bind_host_memory(py::module_& m) {
  py::class_<HostPlace>(m, "HostPlace", "The place of a chunk in page-locked host memory.")
      .def(py::init<int64_t>(), py::arg("nbytes"))
      .def_property_readonly(
          "address",
          [](const HostPlace& self) { return reinterpret_cast<uintptr_t>(self.address()); },
          "Where it is now; raises StateError while it is not mapped.")
      .def_property_readonly("nbytes", &HostPlace::nbytes)
      .def_property_readonly("span_bytes", &HostPlace::span_bytes)
      .def_property_readonly("mapped", &HostPlace::mapped);
  py::class_<PinnedArena>(m, "PinnedArena", "Page-locked host memory of one budget, recycled.")
      .def(py::init([](const Gpu& gpu, int64_t capacity_bytes, bool pin) {
             return std::make_unique<PinnedArena>(gpu.lanes, capacity_bytes, pin);
           }),
           py::arg("gpu"), py::arg("capacity_bytes"), py::kw_only(), py::arg("pin") = true)
      .def(
          "map",
          [](PinnedArena& self, HostPlace& window, bool zero) {
            self.map(window, zero ? Content::kZeros : Content::kAny);
          },
          ReleaseGil(), py::arg("place"), py::kw_only(), py::arg("zero") = false,
          "Give a place memory.")
      .def("wait", &PinnedArena::await, ReleaseGil(), py::arg("place"),
           "Block until nothing given to the GPU uses the place any more.")
      .def(
          "unmap",
          [](PinnedArena& self, HostPlace& window, bool park) {
            self.unmap(window, park ? Spare::kParked : Spare::kReturned);
          },
          ReleaseGil(), py::arg("place"), py::kw_only(), py::arg("park") = true,
          "Take the memory from a place, after what uses it.")
      .def("trim", &PinnedArena::trim, ReleaseGil(), py::arg("parked_limit_bytes") = 0,
           "Return parked memory to the system until at most this much is left.")
      .def_property_readonly("mapped_bytes", &PinnedArena::mapped_bytes)
      .def_property_readonly("parked_bytes", &PinnedArena::parked_bytes)
      .def_property_readonly("peak_bytes", &PinnedArena::peak_bytes)
      .def_property_readonly("unpinned_bytes", &PinnedArena::unpinned_bytes,
                             "Bytes of blocks so far that the system refused to lock.")
      .def_property_readonly("capacity", &PinnedArena::capacity);
}

}  // namespace

void bind_gpu_memory(py::module_& m) {
  bind_device_memory(m);
  bind_host_memory(m);
}

}  // namespace gemini
