// gemini._C: where a thread is.
#include <Python.h>
#include <frameobject.h>
#include <pybind11/pybind11.h>

#include "bindings/bind.h"

namespace py = pybind11;

namespace gemini {

namespace {

// Python's collector of garbage rests as long as this lives.
class PausedCollector {
 public:
  PausedCollector() : was_enabled_(PyGC_Disable() != 0) {}
  ~PausedCollector() {
    if (was_enabled_) PyGC_Enable();
  }
  PausedCollector(const PausedCollector&) = delete;
  PausedCollector& operator=(const PausedCollector&) = delete;

 private:
  bool was_enabled_;
};

// Before CPython 3.12, making the object of a frame may collect garbage, and a finalizer give up
// the interpreter's lock: the thread returns from the very frame, and memory that is something else
// by then is taken for its object. So the collector rests, and no bytecode runs, after which
// another thread might.
py::list thread_frames(unsigned long thread) {
  const py::object current_frames = py::module_::import("sys").attr("_current_frames");
  const py::int_ key(thread);
  const PausedCollector paused;
  const py::dict every = current_frames();
  py::list found;
  auto frame = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(every.ptr(), key.ptr()));
  while (frame) {
    auto* at = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(at)));
    const auto* names = reinterpret_cast<PyCodeObject*>(code.ptr());
    found.append(py::make_tuple(py::handle(names->co_filename), PyFrame_GetLineNumber(at),
                                py::handle(names->co_name)));
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(at)));
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found;
}

}  // namespace

void bind_frames(py::module_& m) {
  m.def("thread_frames", &thread_frames, py::arg("thread"),
        "Return (file, line, function) of each frame of a thread, by its threading.get_ident(), "
        "the innermost first; "
        "nothing for one that is none.");
}

}  // namespace gemini
