// gemini._C: the asynchronous file.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "aio/async_file.h"
#include "aio/source_files.h"
#include "bindings/bind.h"
#include "bindings/paths.h"
#include "common/error.h"

namespace py = pybind11;

namespace gemini {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

BackendKind backend_kind(const std::string& name) {
  for (const BackendKind kind : {BackendKind::kAuto, BackendKind::kUring, BackendKind::kThreads}) {
    if (name == backend_name(kind)) return kind;
  }
  throw StateError("backend '" + name + "' is unknown; it is 'auto', 'uring' or 'threads'");
}

std::unique_ptr<AsyncFile> make_async_file(const std::vector<py::object>& dirs, int64_t nbytes,
                                           const std::string& backend, int depth,
                                           int64_t request_bytes, bool direct, bool reserve,
                                           bool checksums) {
  const AsyncFileOptions options{
      backend_kind(backend), depth, request_bytes, direct, reserve, checksums};
  std::vector<std::string> names;
  for (const py::object& dir : dirs) names.push_back(encode_path(dir));
  // Released here, not by a call guard: pybind11 registers the new object after this returns.
  const py::gil_scoped_release release;  // reserving space on disk may take long
  return std::make_unique<AsyncFile>(names, nbytes, options);
}

std::vector<iovec> memory_areas(const std::vector<std::pair<uintptr_t, int64_t>>& areas) {
  std::vector<iovec> found;
  for (const auto& [address, nbytes] : areas) {
    if (nbytes < 0) throw StateError("an area of " + std::to_string(nbytes) + " bytes");
    found.push_back({pointer(address), static_cast<size_t>(nbytes)});
  }
  return found;
}

py::dict stats_of(const AsyncFile& file) {
  const AsyncFileStats found = file.stats();
  py::dict stats;
  stats["requests"] = found.queue.requests;
  stats["bytes_read"] = found.queue.bytes_read;
  stats["bytes_written"] = found.queue.bytes_written;
  stats["mean_depth"] = found.backend.mean_depth;
  stats["system_calls"] = found.backend.system_calls;
  stats["batches"] = found.backend.batches;
  stats["cpu_seconds"] = found.backend.cpu_seconds;
  return stats;
}

std::unique_ptr<SourceFiles> open_source(const std::vector<py::object>& paths, int num_threads) {
  std::vector<std::string> names;
  for (const py::object& path : paths) names.push_back(encode_path(path));
  const py::gil_scoped_release released;
  return std::make_unique<SourceFiles>(std::move(names), num_threads);
}

void bind_source(py::module_& m) {
  py::class_<SourceFiles>(m, "SourceFiles",
                          "Files of others, read in the background past the page cache and never "
                          "written to. One that was changed since it was opened is refused.")
      .def(py::init(&open_source), py::arg("paths"), py::kw_only(), py::arg("num_threads") = 4,
           "Open regular files. Raises IoError, StateError, ThreadError.")
      .def("close", &SourceFiles::close, ReleaseGil(),
           "Wait for what has started and close the files. Idempotent.")
      .def_property_readonly("paths",
                             [](const SourceFiles& self) {
                               py::list found;
                               for (const std::string& path : self.paths()) {
                                 found.append(decode_path(path));
                               }
                               return found;
                             })
      .def_property_readonly("direct", &SourceFiles::direct,
                             "Whether all of them are read with O_DIRECT.");
}

}  // namespace

void bind_aio(py::module_& m) {
  bind_source(m);
  py::class_<AsyncFile>(m, "AsyncFile",
                        "A preallocated private file without a name, or one in each of several "
                        "directories, read and written in the background. Sizes and offsets are "
                        "bytes.")
      .def(py::init(&make_async_file), py::arg("dirs"), py::arg("nbytes"), py::kw_only(),
           py::arg("backend") = "auto", py::arg("depth") = 8, py::arg("request_bytes") = 1 << 20,
           py::arg("direct") = true, py::arg("reserve") = true, py::arg("checksums") = false,
           "Make files of nbytes together (rounded up to 4 KiB); with reserve the disk space is "
           "taken at once. Raises IoError, ThreadError.")
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
      .def(
          "readv",
          [](AsyncFile& self, const std::vector<std::pair<uintptr_t, int64_t>>& areas,
             int64_t offset) { return self.readv(memory_areas(areas), offset); },
          py::arg("areas"), py::arg("offset"),
          "Start reading consecutive bytes into several areas, (address, nbytes) each.")
      .def(
          "writev",
          [](AsyncFile& self, const std::vector<std::pair<uintptr_t, int64_t>>& areas,
             int64_t offset) { return self.writev(memory_areas(areas), offset); },
          py::arg("areas"), py::arg("offset"),
          "Start writing several areas, (address, nbytes) each, as consecutive bytes.")
      .def(
          "pin",
          [](AsyncFile& self, uintptr_t address, int64_t nbytes) {
            return self.pin(pointer(address), nbytes);
          },
          py::arg("address"), py::arg("nbytes"),
          "Keep memory pinned for cheaper transfers until forget or close; False where refused.")
      .def(
          "forget", [](AsyncFile& self, uintptr_t address) { self.forget(pointer(address)); },
          py::arg("address"), "Let pinned memory go; no transfer on it may be under way.")
      .def("stats", &stats_of, "Return counts since the file was made; times are seconds.")
      .def("done", &AsyncFile::done, py::arg("ticket"),
           "Return whether the transfer has ended, well or not.")
      .def("wait", &AsyncFile::wait, ReleaseGil(), py::arg("ticket"),
           "Block until the transfer has ended. Raises its first IoError.")
      .def("wait_all", &AsyncFile::wait_all, ReleaseGil(),
           "Block until all transfers have ended. Raises the first IoError not raised yet.")
      .def("discard", &AsyncFile::discard, ReleaseGil(), py::arg("offset"), py::arg("nbytes"),
           "Give the disk space of a range back, in a file made without reserve. Raises IoError.")
      .def("grow", &AsyncFile::grow, ReleaseGil(), py::arg("nbytes"),
           "Make the file longer; what is added takes space where it is written. Raises IoError.")
      .def("close", &AsyncFile::close, ReleaseGil(),
           "Complete all transfers and free the disk space. Idempotent.")
      .def_property_readonly("direct", &AsyncFile::direct,
                             "Whether the page cache is bypassed: addresses, sizes and offsets "
                             "must then be multiples of 4096.")
      .def_property_readonly("can_discard", &AsyncFile::can_discard,
                             "Whether the file system can give space back; False with reserve.")
      .def_property_readonly(
          "backend", [](const AsyncFile& self) { return backend_name(self.backend()); },
          "'uring' or 'threads'.")
      .def_property_readonly("depth", &AsyncFile::depth, "Requests at the device at one time.")
      .def_property_readonly("size", &AsyncFile::size, "Bytes reserved on disk.")
      .def_property_readonly(
          "path", [](const AsyncFile& self) { return decode_path(self.path()); },
          "For messages; the file has no name.");
  m.def("uring_refusal", &uring_refusal,
        "Why io_uring cannot be used in this process; '' when it can.");
}

}  // namespace gemini
