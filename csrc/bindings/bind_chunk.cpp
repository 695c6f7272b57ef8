// Python bindings of csrc/chunk/chunk_table.h. Lists of ids and of actions are converted by hand:
// this is called for every operator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <limits>
#include <span>
#include <vector>

#include "bindings/bind.h"
#include "bindings/chunk_table.h"
#include "chunk/prefetch.h"
#include "chunk/state.h"

namespace py = pybind11;

namespace gemini {
namespace {

Use use_of(bool dirty) { return dirty ? Use::kWritten : Use::kRead; }

// Tensor ids from a Python tuple or list, without an allocation for up to 32 of them.
class IdList {
 public:
  explicit IdList(py::handle ids) {
    const bool is_list = PyList_Check(ids.ptr()) != 0;
    if (!is_list && PyTuple_Check(ids.ptr()) == 0) {
      throw py::type_error("tensor ids must be a tuple or a list of ints");
    }
    const auto size = static_cast<size_t>(Py_SIZE(ids.ptr()));
    TensorId* out = inline_.data();
    if (size > inline_.size()) {
      heap_.resize(size);
      out = heap_.data();
    }
    for (size_t i = 0; i < size; ++i) {
      const auto at = static_cast<Py_ssize_t>(i);
      out[i] = parse(is_list ? PyList_GET_ITEM(ids.ptr(), at) : PyTuple_GET_ITEM(ids.ptr(), at));
    }
    view_ = {out, size};
  }
  IdList(const IdList&) = delete;
  IdList& operator=(const IdList&) = delete;

  [[nodiscard]] std::span<const TensorId> view() const { return view_; }

 private:
  static TensorId parse(PyObject* item) {
    const long id = PyLong_AsLong(item);
    if (id == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    // No tensor has a negative id: a number out of range becomes an unknown id.
    if (id < 0 || id > std::numeric_limits<TensorId>::max()) return -1;
    return static_cast<TensorId>(id);
  }

  std::array<TensorId, 32> inline_;
  std::vector<TensorId> heap_;
  std::span<const TensorId> view_;
};

py::tuple to_tuple(const Actions& actions) {
  py::tuple result(actions.size());  // CPython shares the empty tuple
  for (size_t i = 0; i < actions.size(); ++i) result[i] = py::cast(actions[i]);
  return result;
}

void bind_operators(BoundTable& table) {
  table.def("add_chunk", &ChunkTable::add_chunk, py::arg("nbytes"))
      .def("add_tensor", &ChunkTable::add_tensor, py::arg("chunk"))
      .def(
          "found_on_disk",
          [](ChunkTable& self, const std::vector<TensorId>& tensors) {
            self.found_on_disk(tensors);
          },
          py::arg("tensors"),
          "Hold tensors that somebody else has put on DISK, all of chunks without content.")
      .def("add_choice", &ChunkTable::add_choice, py::arg("members"), py::kw_only(),
           py::arg("certain") = false,
           "Make chunks a choice: each use takes some of its members, lists of chunks; certain: "
           "those "
           "that the last one took.")
      .def("widen_choice", &ChunkTable::widen_choice, py::arg("chunk"), py::arg("members"),
           "Give the choice that has a chunk further members.")
      .def(
          "access",
          [](ChunkTable& self, py::handle tensors, bool traced, bool on_host) -> py::object {
            const IdList ids(tensors);
            const Tier on = on_host ? Tier::kHost : Tier::kDevice;
            const Actions actions = self.access(ids.view(), {.on = on, .traced = traced});
            if (actions.empty() && !self.ready(ids.view())) return py::none();
            return to_tuple(actions);
          },
          py::arg("tensors"), py::arg("traced") = true, py::arg("on_host") = false)
      .def(
          "continues",
          [](ChunkTable& self, py::handle tensors) {
            return self.continues(IdList(tensors).view());
          },
          py::arg("tensors"), "Say whether an access of these is part of the latest moment.")
      .def(
          "leave",
          [](ChunkTable& self, py::handle tensors) {
            return to_tuple(self.leave(IdList(tensors).view()));
          },
          py::arg("tensors"),
          "Start to take what is not used soon off DEVICE, if that is nearly full.")
      .def(
          "expect",
          [](ChunkTable& self, py::handle tensors) { self.expect(IdList(tensors).view()); },
          py::arg("tensors"),
          "Bring those of these that are in a choice ahead of an untraced access.")
      .def(
          "can_access_on_host",
          [](ChunkTable& self, py::handle tensors) {
            return self.can_access_on_host(IdList(tensors).view());
          },
          py::arg("tensors"))
      .def(
          "ensure",
          [](ChunkTable& self, py::handle tensors) {
            return to_tuple(self.ensure(IdList(tensors).view()));
          },
          py::arg("tensors"))
      .def(
          "ready",
          [](const ChunkTable& self, py::handle tensors) {
            return self.ready(IdList(tensors).view());
          },
          py::arg("tensors"))
      .def(
          "release",
          [](ChunkTable& self, py::handle tensors, bool dirty) {
            return to_tuple(self.release(IdList(tensors).view(), use_of(dirty)));
          },
          py::arg("tensors"), py::arg("dirty"))
      .def(
          "release_all",
          [](ChunkTable& self, bool dirty) { return to_tuple(self.release_all(use_of(dirty))); },
          py::kw_only(), py::arg("dirty") = false)
      .def(
          "free",
          [](ChunkTable& self, py::handle tensors) {
            return to_tuple(self.free(IdList(tensors).view()));
          },
          py::arg("tensors"))
      .def(
          "prefetch",
          [](ChunkTable& self, int32_t max_in_flight) {
            return to_tuple(self.prefetch(max_in_flight));
          },
          py::arg("max_in_flight") = kPrefetchesInFlight)
      .def("complete", &ChunkTable::complete, py::arg("action_id"))
      .def("abort", &ChunkTable::abort, py::arg("action_id"));
}

}  // namespace

void bind_chunk(py::module_& m) {
  BoundTable table(m, "ChunkTable");
  table.def(py::init<int64_t, int64_t, int64_t>(), py::arg("device_bytes"), py::arg("host_bytes"),
            py::arg("disk_bytes"));
  bind_operators(table);
  bind_chunk_steps(table);
  bind_chunk_queries(table);
}

}  // namespace gemini
