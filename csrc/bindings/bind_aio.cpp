// gemini._C: the asynchronous file.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>

#include "aio/async_file.h"
#include "bindings/bind.h"

namespace py = pybind11;

namespace gemini {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

std::unique_ptr<AsyncFile> make_async_file(const std::string& dir, int64_t nbytes, int threads,
                                           bool direct, bool reserve) {
  AsyncFileOptions options;
  options.threads = threads;
  options.direct = direct;
  options.reserve = reserve;
  // Released here, not by a call guard: pybind11 registers the new object after this returns.
  const py::gil_scoped_release release;  // reserving space on disk may take long
  return std::make_unique<AsyncFile>(dir, nbytes, options);
}

}  // namespace

void bind_aio(py::module_& m) {
  py::class_<AsyncFile>(m, "AsyncFile",
                        "A preallocated private file without a name, read and written in the "
                        "background by a few threads. Sizes and offsets are bytes.")
      .def(py::init(&make_async_file), py::arg("dir"), py::arg("nbytes"), py::kw_only(),
           py::arg("threads") = 4, py::arg("direct") = true, py::arg("reserve") = true,
           "Make a file of nbytes (rounded up to 4 KiB) in dir; with reserve the disk space is "
           "taken "
           "at once. Raises IoError.")
      .def(
          "read",
          [](AsyncFile& self, uintptr_t address, int64_t nbytes, int64_t offset) {
            return self.read(pointer(address), nbytes, offset);
          },
          py::arg("address"), py::arg("nbytes"), py::arg("offset"),
          "Start reading into memory, which must stay valid until the ticket is done.")
      .def(
          "write",
          [](AsyncFile& self, uintptr_t address, int64_t nbytes, int64_t offset) {
            return self.write(pointer(address), nbytes, offset);
          },
          py::arg("address"), py::arg("nbytes"), py::arg("offset"),
          "Start writing memory, which must stay valid until the ticket is done.")
      .def("done", &AsyncFile::done, py::arg("ticket"),
           "Return whether the transfer has ended, well or not.")
      .def("wait", &AsyncFile::wait, ReleaseGil(), py::arg("ticket"),
           "Block until the transfer has ended. Raises its first IoError.")
      .def("wait_all", &AsyncFile::wait_all, ReleaseGil(),
           "Block until all transfers have ended. Raises the first IoError not raised yet.")
      .def("discard", &AsyncFile::discard, ReleaseGil(), py::arg("offset"), py::arg("nbytes"),
           "Give the disk space of a range back, in a file made without reserve. Raises IoError.")
      .def("close", &AsyncFile::close, ReleaseGil(),
           "Complete all transfers and free the disk space. Idempotent.")
      .def_property_readonly("direct", &AsyncFile::direct,
                             "Whether the page cache is bypassed: addresses, sizes and offsets "
                             "must then be multiples of 4096.")
      .def_property_readonly("size", &AsyncFile::size, "Bytes reserved on disk.")
      .def_property_readonly("path", &AsyncFile::path, "For messages; the file has no name.");
}

}  // namespace gemini
