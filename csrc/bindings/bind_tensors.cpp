// gemini._C: looking at many torch tensors quickly. They are Python objects here: the extension
// knows nothing of torch but the names of a few attributes.
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

// The number and the order of a tensor's elements.
class Extent {
 public:
  Extent(py::handle tensor, const Names& names)
      : numel_(called(tensor, names.numel).cast<int64_t>()) {
    const bool contiguous = called(tensor, names.is_contiguous).ptr() == Py_True;
    if (!contiguous) strides_ = called(tensor, names.stride);
  }
  [[nodiscard]] bool fits(py::handle tensor, const Names& names) const {
    if (called(tensor, names.numel).cast<int64_t>() != numel_) return false;
    // Asking for contiguity is cheaper than making a tuple.
    return strides_.is_none() ? called(tensor, names.is_contiguous).ptr() == Py_True
                              : equal(called(tensor, names.stride), strides_);
  }

 private:
  int64_t numel_;
  py::object strides_ = py::none();
};

// What the rows of a table rely on, and whether it still holds.
class TensorWatch {
 public:
  TensorWatch(py::list params, py::list states, py::list names, py::list grads,
              const py::dict& all_states)
      : params_(std::move(params)),
        states_(std::move(states)),
        names_(std::move(names)),
        all_states_(all_states.attr("values")()) {
    for (size_t i = 0; i < params_.size(); ++i) {
      const py::dict state = states_[i];
      for (const py::handle name : names_) {
        const py::object value = state.attr("get")(name);
        values_.append(value);
        values_addresses_.push_back(value.is_none() ? 0 : address(value));
      }
      addresses_.push_back(address(params_[i]));
      params_extents_.emplace_back(params_[i], attributes_);
      grads_extents_.emplace_back(grads[i], attributes_);
      dtypes_.append(attribute(grads[i], attributes_.dtype));
    }
  }

  // Writes the addresses of the gradients of `params` to `column`, `step` int64s apart. False when
  // a parameter, a state's tensor or the memory of one was replaced, or a gradient has another type
  // or order.
  [[nodiscard]] bool take_gradients(const py::list& params, const py::dict& all_states,
                                    uintptr_t column, int64_t step) const {
    if (params.size() != params_.size() || !same_dicts(all_states)) return false;
    auto* const to = reinterpret_cast<int64_t*>(column);
    try {
      for (size_t i = 0; i < params.size(); ++i) {
        const py::handle param = item(params, i);
        if (param.ptr() != item(params_, i).ptr() || address(param) != addresses_[i]) return false;
        const py::object grad = attribute(param, attributes_.grad);
        if (!params_extents_[i].fits(param, attributes_) || !same_state(i)) return false;
        if (!grads_extents_[i].fits(grad, attributes_) || !same_kind(i, grad)) return false;
        to[static_cast<int64_t>(i) * step] = address(grad);
      }
    } catch (const py::error_already_set&) {
      return false;  // no gradient, or one without strides or an address
    }
    return true;
  }

 private:
  static py::handle item(const py::list& list, size_t index) {
    return PyList_GET_ITEM(list.ptr(), static_cast<py::ssize_t>(index));
  }

  [[nodiscard]] int64_t address(py::handle tensor) const {
    return called(tensor, attributes_.data_ptr).cast<int64_t>();
  }

  [[nodiscard]] bool same_kind(size_t row, const py::object& grad) const {
    return attribute(grad, attributes_.dtype).ptr() == item(dtypes_, row).ptr() &&
           called(grad, attributes_.is_neg).ptr() != Py_True;
  }

  [[nodiscard]] bool same_dicts(const py::dict& all_states) const {
    if (all_states.size() != all_states_.size()) return false;
    PyObject *key = nullptr, *value = nullptr;
    py::ssize_t place = 0;
    for (size_t i = 0; PyDict_Next(all_states.ptr(), &place, &key, &value) != 0; ++i) {
      if (value != item(all_states_, i).ptr()) return false;
    }
    return true;
  }

  [[nodiscard]] bool same_state(size_t row) const {
    const py::handle state = item(states_, row);
    for (size_t i = 0; i < names_.size(); ++i) {
      const size_t place = row * names_.size() + i;
      const py::handle expected = item(values_, place);
      PyObject* const found = PyDict_GetItemWithError(state.ptr(), item(names_, i).ptr());
      if (found == nullptr ? !expected.is_none() : found != expected.ptr()) return false;
      if (found != nullptr && address(found) != values_addresses_[place]) return false;
    }
    return true;
  }

  Names attributes_;
  py::list params_, states_, names_, all_states_, values_, dtypes_;
  std::vector<int64_t> addresses_, values_addresses_;
  std::vector<Extent> params_extents_, grads_extents_;
};

}  // namespace

void bind_tensors(py::module_& m) {
  py::class_<TensorWatch>(
      m, "TensorWatch",
      "Parameters and the tensors `names` of their state dicts, remembered with "
      "their addresses, and the type and order of their gradients.")
      .def(py::init<py::list, py::list, py::list, py::list, const py::dict&>(), py::arg("params"),
           py::arg("states"), py::arg("names"), py::arg("grads"), py::arg("all_states"))
      .def("take_gradients", &TensorWatch::take_gradients, py::arg("params"), py::arg("all_states"),
           py::arg("column"), py::arg("step"),
           "Write the addresses of the gradients of `params` to int64s `step` apart; False when "
           "something remembered was replaced.");
}

}  // namespace gemini
