// Python bindings of the vocabulary of csrc/chunk, and of the actions of the chunk table.
#include <pybind11/pybind11.h>

#include <string>

#include "bindings/bind.h"
#include "chunk/chunk_table.h"
#include "chunk/state.h"

namespace py = pybind11;

namespace gemini {
namespace {

std::string repr(const Action& action) {
  return "Action(id=" + std::to_string(action.id) + ", " + name(action.kind) +
         " chunk=" + std::to_string(action.chunk) + " " + name(action.from) + "->" +
         name(action.to) + " nbytes=" + std::to_string(action.nbytes) + ")";
}

std::string repr(const Completion& completion) {
  const auto text = [](bool value) { return value ? "True" : "False"; };
  return std::string("Completion(source_freed=") + text(completion.source_freed) +
         ", destination_freed=" + text(completion.destination_freed) +
         ", doomed=" + text(completion.doomed) + ")";
}

}  // namespace

void bind_actions(py::module_& m) {
  py::enum_<Tier>(m, "Tier")
      .value("DEVICE", Tier::kDevice)
      .value("HOST", Tier::kHost)
      .value("DISK", Tier::kDisk);
  py::enum_<TensorState>(m, "TensorState")
      .value("FREE", TensorState::kFree)
      .value("HOLD", TensorState::kHold)
      .value("COMPUTE", TensorState::kCompute);
  py::enum_<ActionKind>(m, "ActionKind")
      .value("ALLOCATE", ActionKind::kAllocate)
      .value("FETCH", ActionKind::kFetch)
      .value("LOAD", ActionKind::kLoad)
      .value("EVICT", ActionKind::kEvict)
      .value("SPILL", ActionKind::kSpill)
      .value("DROP", ActionKind::kDrop);
  py::class_<Action>(m, "Action")
      .def_readonly("id", &Action::id)
      .def_readonly("kind", &Action::kind)
      .def_readonly("chunk", &Action::chunk)
      .def_readonly("from_tier", &Action::from)
      .def_readonly("to_tier", &Action::to)
      .def_readonly("nbytes", &Action::nbytes)
      .def("__repr__", [](const Action& action) { return repr(action); });
  py::class_<Completion>(m, "Completion")
      .def_readonly("source_freed", &Completion::source_freed)
      .def_readonly("destination_freed", &Completion::destination_freed)
      .def_readonly("doomed", &Completion::doomed)
      .def("__repr__", [](const Completion& completion) { return repr(completion); });
}

}  // namespace gemini
