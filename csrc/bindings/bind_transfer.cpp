// gemini._C: windows, arenas and the transfer engine.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "aio/async_file.h"
#include "aio/source_files.h"
#include "bindings/bind.h"
#include "bindings/paths.h"
#include "common/error.h"
#include "transfer/arena.h"
#include "transfer/fault_guard.h"
#include "transfer/transfer_engine.h"
#include "transfer/window.h"
#include "transfer/window_space.h"

namespace py = pybind11;

namespace gemini {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }
uintptr_t number(const char* address) { return reinterpret_cast<uintptr_t>(address); }

bool trim_heap() {
#ifdef __GLIBC__
  return ::malloc_trim(0) == 1;
#else
  return false;
#endif
}

py::dict stats_of(const TransferEngine& engine) {
  py::dict result;
  for (const Link link :
       {Link::kHostToDevice, Link::kDeviceToHost, Link::kDiskRead, Link::kDiskWrite}) {
    const LinkStats stats = engine.stats(link);
    result[link_name(link)] = py::dict(
        py::arg("bytes") = stats.bytes, py::arg("seconds") = stats.seconds,
        py::arg("shared_seconds") = stats.shared_seconds, py::arg("transfers") = stats.transfers);
  }
  return result;
}

// Contiguous windows as one range of bytes.
struct WindowSpan {
  char* address = nullptr;
  int64_t nbytes = 0;
};

WindowSpan span_of(const WindowSpace& space, const Window& first, int64_t nbytes) {
  const int64_t offset = first.address() - space.address();
  if (nbytes <= 0 || offset < 0 || nbytes > space.reserved_bytes() - offset) {
    throw StateError("a span of " + std::to_string(nbytes) +
                     " bytes leaves the reserved addresses");
  }
  return {first.address(), nbytes};
}

void bind_spans(py::module_& m) {
  py::class_<WindowSpan>(m, "WindowSpan", py::buffer_protocol(),
                         "The addresses of windows behind each other; the buffer protocol as a "
                         "Window.")
      .def_buffer([](WindowSpan& self) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(self.address), self.nbytes);
      });
}

void bind_windows(py::module_& m) {
  py::class_<Window, std::unique_ptr<Window, py::nodelete>>(
      m, "Window", py::buffer_protocol(),
      "An address range that never changes, with or without memory behind it. Supports the "
      "buffer protocol (writable bytes); a buffer keeps the window space alive.")
      .def_property_readonly("address", [](const Window& self) { return number(self.address()); })
      .def_property_readonly("nbytes", &Window::nbytes, "Bytes, as asked for.")
      .def_property_readonly("span_bytes", &Window::span_bytes, "Bytes in whole pages.")
      .def_property_readonly("mapped", &Window::mapped, "Whether there is memory behind it.")
      .def_buffer([](Window& self) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(self.address()), self.nbytes());
      });
  py::class_<WindowSpace>(m, "WindowSpace",
                          "A reservation of addresses, cut into windows. Costs no memory.")
      .def(py::init<int64_t>(), py::arg("total_bytes"),
           "Reserve addresses for windows of total_bytes, each counted in whole 4 KiB pages.")
      .def(
          "create",
          [](WindowSpace& self, int64_t nbytes, bool behind_last) {
            return self.create(nbytes, behind_last ? Begin::kBehindLast : Begin::kAligned);
          },
          py::arg("nbytes"), py::kw_only(), py::arg("behind_last") = false,
          py::return_value_policy::reference_internal,
          "Cut off the next window; behind_last: without a gap to the one before.")
      .def("span", &span_of, py::arg("first"), py::arg("nbytes"), py::keep_alive<0, 1>(),
           "Return nbytes from the beginning of a window on, over the windows behind it.")
      .def("find", &WindowSpace::find, py::arg("address"),
           "Return the index of the window that contains the address, -1 if none does.")
      .def("heal", &WindowSpace::heal,
           "Remove the poison of stray accesses from unmapped windows; return how many had some.")
      .def_property_readonly("address",
                             [](const WindowSpace& self) { return number(self.address()); })
      .def_property_readonly("reserved_bytes", &WindowSpace::reserved_bytes)
      .def("__len__", &WindowSpace::num_windows);
  m.def("stray_count", &stray_count,
        "Return how many faults of stray accesses to unmapped windows were answered with poison.");
  m.def("take_stray", &take_stray,
        "Return the address of the first stray access since the last call, or None.");
}

void bind_arena(py::module_& m) {
  py::class_<Arena>(m, "Arena", "The memory of one tier: a hard limit, recycled between windows.")
      .def(py::init<int64_t>(), py::arg("capacity_bytes"))
      .def(
          "map",
          [](Arena& self, Window& window, bool zero) {
            self.map(window, zero ? Content::kZeros : Content::kAny);
          },
          ReleaseGil(), py::arg("window"), py::kw_only(), py::arg("zero") = false,
          "Put memory under a window, any content unless zero. Raises OutOfBudgetError.")
      .def(
          "unmap",
          [](Arena& self, Window& window, bool park) {
            self.unmap(window, park ? Spare::kParked : Spare::kReturned);
          },
          ReleaseGil(), py::arg("window"), py::kw_only(), py::arg("park") = true,
          "Take the memory from a window; park keeps it for the next windows.")
      .def("leave", &Arena::leave, ReleaseGil(), py::arg("window"),
           "Unmap a window but park its pages in place, until another window or settle() takes "
           "them.")
      .def("settle", &Arena::settle, ReleaseGil(),
           "Take the pages from the windows that were left.")
      .def("trim", &Arena::trim, ReleaseGil(), py::arg("parked_limit_bytes") = 0,
           "Return parked memory to the system until at most this much is left.")
      .def_property_readonly("mapped_bytes", &Arena::mapped_bytes)
      .def_property_readonly("parked_bytes", &Arena::parked_bytes)
      .def_property_readonly("peak_bytes", &Arena::peak_bytes,
                             "Highest sum of mapped and parked bytes so far.")
      .def_property_readonly("capacity", &Arena::capacity, "Bytes never exceeded.");
  m.def("arena_process_bytes", &Arena::process_bytes,
        "Return the mapped and parked bytes of all arenas of this process.");
  m.def("malloc_trim", &trim_heap, ReleaseGil(),
        "Return free heap memory to the system; return whether there was some.");
}

void bind_engine(py::module_& m) {
  py::enum_<Link>(m, "Link", "A connection between two tiers, in one direction.")
      .value("H2D", Link::kHostToDevice)
      .value("D2H", Link::kDeviceToHost)
      .value("DISK_READ", Link::kDiskRead)
      .value("DISK_WRITE", Link::kDiskWrite);
  py::class_<TransferResult>(m, "TransferResult", "The outcome of one transfer.")
      .def_readonly("ticket", &TransferResult::ticket)
      .def_readonly("ok", &TransferResult::ok)
      .def_readonly("errno", &TransferResult::error_code)
      .def_property_readonly("path",
                             [](const TransferResult& self) { return decode_path(self.path); })
      .def_readonly("offset", &TransferResult::offset)
      .def_property_readonly("message",
                             [](const TransferResult& self) { return decode_path(self.message); })
      .def_readonly("begin_s", &TransferResult::begin_s,
                    "When the link began to work on it, on the clock of time.perf_counter().")
      .def_readonly("end_s", &TransferResult::end_s, "When it was seen to have ended.");
  py::class_<TransferEngine>(m, "TransferEngine",
                             "Transfers in the background, in order per link. A buffer must stay "
                             "mapped until poll has reported its transfer.")
      .def(py::init<AsyncFile*>(), py::arg("file") = py::none(), py::keep_alive<1, 2>())
      .def(
          "copy",
          [](TransferEngine& self, uintptr_t dst, uintptr_t src, int64_t nbytes, Link link) {
            return self.copy(pointer(dst), pointer(src), nbytes, link);
          },
          py::arg("dst"), py::arg("src"), py::arg("nbytes"), py::arg("link"),
          "Start a copy between addresses on H2D or D2H; return its ticket.")
      .def(
          "read",
          [](TransferEngine& self, uintptr_t dst, int64_t nbytes, int64_t offset, Link link) {
            return self.read(pointer(dst), nbytes, offset, link);
          },
          py::arg("dst"), py::arg("nbytes"), py::arg("offset"), py::arg("link") = Link::kDiskRead,
          "Start reading from the file; return the ticket.")
      .def(
          "write",
          [](TransferEngine& self, uintptr_t src, int64_t nbytes, int64_t offset, Link link) {
            return self.write(pointer(src), nbytes, offset, link);
          },
          py::arg("src"), py::arg("nbytes"), py::arg("offset"), py::arg("link") = Link::kDiskWrite,
          "Start writing to the file; return the ticket.")
      .def(
          "read_source",
          [](TransferEngine& self, SourceFiles& source,
             const std::vector<std::tuple<int32_t, int64_t, uintptr_t, int64_t>>& parts) {
            std::vector<SourcePart> found;
            found.reserve(parts.size());
            for (const auto& [file, offset, address, nbytes] : parts) {
              found.push_back({file, offset, pointer(address), nbytes});
            }
            return self.read_source(source, std::move(found));
          },
          py::arg("source"), py::arg("parts"),
          "Start to read parts of source files, each (file, offset, address, nbytes), over the "
          "disk's link; return the ticket. The files must stay open until it is reported.")
      .def("poll", &TransferEngine::poll, "Return what finished since the last call, each once.")
      .def("wait_any", &TransferEngine::wait_any, ReleaseGil(), py::arg("timeout_s") = -1.0,
           "Block until poll would return something or nothing is in flight; return the former.")
      .def("drain", &TransferEngine::drain, ReleaseGil(), "Block until nothing is in flight.")
      .def("close", &TransferEngine::close, ReleaseGil(),
           "Complete all transfers and stop the threads. Idempotent.")
      .def_property_readonly("num_in_flight", &TransferEngine::num_in_flight)
      .def("stats", &stats_of,
           "Return {link: {bytes, seconds, shared_seconds, transfers}} since the start.");
}

}  // namespace

void bind_transfer(py::module_& m) {
  bind_spans(m);
  bind_windows(m);
  bind_arena(m);
  bind_engine(m);
}

}  // namespace gemini
