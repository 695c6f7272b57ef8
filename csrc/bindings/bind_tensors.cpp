// gemini._C: looking at many torch tensors quickly. They are Python objects here: the extension
// knows nothing of torch but the names of a few attributes. This is more than a conversion, and
// here because what it looks at is Python's.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/bind.h"

namespace py = pybind11;

namespace gemini {
namespace {

py::object attribute(py::handle object, const py::str& name) {
  PyObject* const found = PyObject_GetAttr(object.ptr(), name.ptr());
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

py::object called(py::handle object, const py::str& method) {
  PyObject* const result = PyObject_CallMethodNoArgs(object.ptr(), method.ptr());
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

bool equal(const py::object& one, py::handle other) {
  const int result = PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ);
  if (result < 0) throw py::error_already_set();
  return result == 1;
}

// The names of the attributes that are asked for.
struct Names {
  py::str grad{"grad"}, data_ptr{"data_ptr"}, dtype{"dtype"}, stride{"stride"}, numel{"numel"},
      is_neg{"is_neg"}, is_contiguous{"is_contiguous"};
};

// A tensor as it was: which it is, where it is, and the type, number and order of its elements.
class Watched {
 public:
  Watched() = default;
  Watched(py::handle tensor, const Names& names)
      : tensor_(tensor.ptr()),
        address_(called(tensor, names.data_ptr).cast<int64_t>()),
        numel_(called(tensor, names.numel).cast<int64_t>()),
        dtype_(attribute(tensor, names.dtype).ptr()) {
    const bool contiguous = called(tensor, names.is_contiguous).ptr() == Py_True;
    if (!contiguous) strides_ = called(tensor, names.stride);
  }
  [[nodiscard]] bool is_nothing() const { return tensor_ == nullptr; }

  // The same tensor, unchanged but for its values.
  [[nodiscard]] bool same(py::handle tensor, const Names& names) const {
    return tensor.ptr() == tensor_ && called(tensor, names.data_ptr).cast<int64_t>() == address_ &&
           like(tensor, names);
  }
  // A tensor of the same type, number and order of elements.
  [[nodiscard]] bool like(py::handle tensor, const Names& names) const {
    if (attribute(tensor, names.dtype).ptr() != dtype_) return false;
    if (called(tensor, names.numel).cast<int64_t>() != numel_) return false;
    // Asking for contiguity is cheaper than making a tuple.
    return strides_.is_none() ? called(tensor, names.is_contiguous).ptr() == Py_True
                              : equal(called(tensor, names.stride), strides_);
  }

 private:
  PyObject* tensor_ = nullptr;
  int64_t address_ = 0;
  int64_t numel_ = 0;
  PyObject* dtype_ = nullptr;  // torch's types live as long as the process
  py::object strides_ = py::none();
};

// What the rows of a table rely on, and whether it still holds. Holds no reference: whoever made it
// keeps the parameters, the state dicts and their values alive, where the garbage collector sees
// them.
class TensorWatch {
 public:
  TensorWatch(const py::list& params, const py::list& states, py::list names, const py::list& grads,
              const py::list& all_states)
      : names_(std::move(names)) {
    for (size_t i = 0; i < params.size(); ++i) {
      params_.emplace_back(params[i], attributes_);
      grads_.emplace_back(grads[i], attributes_);
      states_.push_back(item(states, i).ptr());
      for (const py::handle name : names_) {
        PyObject* const value = PyDict_GetItemWithError(states_.back(), name.ptr());
        values_.push_back(value == nullptr ? Watched() : Watched(value, attributes_));
      }
    }
    for (const py::handle state : all_states) all_states_.push_back(state.ptr());
  }

  // Writes the addresses of the gradients of `params` to `column`, `step` int64s apart. False when
  // a parameter, a state, a tensor of one or its memory was replaced, or a gradient has another
  // type or order.
  [[nodiscard]] bool take_gradients(const py::list& params, const py::dict& all_states,
                                    uintptr_t column, int64_t step) const {
    if (params.size() != params_.size() || !same_dicts(all_states)) return false;
    auto* const to = reinterpret_cast<int64_t*>(column);
    try {
      for (size_t i = 0; i < params.size(); ++i) {
        const py::handle param = item(params, i);
        if (!params_[i].same(param, attributes_) || !same_state(i)) return false;
        const py::object grad = attribute(param, attributes_.grad);
        if (!grads_[i].like(grad, attributes_)) return false;
        if (called(grad, attributes_.is_neg).ptr() == Py_True) return false;
        to[static_cast<int64_t>(i) * step] = called(grad, attributes_.data_ptr).cast<int64_t>();
      }
    } catch (const py::error_already_set& error) {
      // No gradient, or one without strides or an address.
      if (error.matches(PyExc_AttributeError) || error.matches(PyExc_RuntimeError)) return false;
      throw;
    }
    return true;
  }

 private:
  static py::handle item(const py::list& list, size_t index) {
    return PyList_GET_ITEM(list.ptr(), static_cast<py::ssize_t>(index));
  }

  [[nodiscard]] bool same_dicts(const py::dict& all_states) const {
    if (all_states.size() != all_states_.size()) return false;
    PyObject *key = nullptr, *value = nullptr;
    py::ssize_t place = 0;
    for (size_t i = 0; PyDict_Next(all_states.ptr(), &place, &key, &value) != 0; ++i) {
      if (value != all_states_[i]) return false;
    }
    return true;
  }

  [[nodiscard]] bool same_state(size_t row) const {
    for (size_t i = 0; i < names_.size(); ++i) {
      const Watched& expected = values_[row * names_.size() + i];
      PyObject* const found = PyDict_GetItemWithError(states_[row], item(names_, i).ptr());
      if (found == nullptr ? !expected.is_nothing() : !expected.same(found, attributes_)) {
        return false;
      }
    }
    return true;
  }

  Names attributes_;
  py::list names_;
  std::vector<Watched> params_, grads_, values_;
  std::vector<PyObject*> states_, all_states_;
};

}  // namespace

void bind_tensors(py::module_& m) {
  py::class_<TensorWatch>(
      m, "TensorWatch",
      "Parameters and the tensors `names` of their state dicts, remembered with "
      "their addresses, and the type and order of their gradients. The caller keeps "
      "them alive.")
      .def(py::init<const py::list&, const py::list&, py::list, const py::list&, const py::list&>(),
           py::arg("params"), py::arg("states"), py::arg("names"), py::arg("grads"),
           py::arg("all_states"))
      .def("take_gradients", &TensorWatch::take_gradients, py::arg("params"), py::arg("all_states"),
           py::arg("column"), py::arg("step"),
           "Write the addresses of the gradients of `params` to int64s `step` apart; False when "
           "something remembered was replaced.");
}

}  // namespace gemini
