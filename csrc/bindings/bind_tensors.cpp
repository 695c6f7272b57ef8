// gemini._C: fast checks of many torch tensors. They are Python objects here: the extension knows
// nothing of torch except the names of a few attributes, and DLPack's API. This is more than a
// conversion, and is here because it works on Python objects.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/dlpack.h"

namespace py = pybind11;

namespace gemini {
namespace {

struct DlExchangeApi {
  uint32_t major, minor;
  void *previous, *allocate, *from_object, *to_object;
  int (*look)(void* object, DlTensor* out);  // the tensor owns the memory that `out` points to
};

py::object attribute(py::handle object, const py::str& name) {
  PyObject* const found = PyObject_GetAttr(object.ptr(), name.ptr());
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

py::object called(py::handle object, const py::str& method) {
  PyObject* const self = object.ptr();
  PyObject* const result = PyObject_VectorcallMethod(method.ptr(), &self, 1, nullptr);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// The address, element type and layout of a tensor. Every type has its own number.
struct Look {
  int64_t address;
  uint64_t type;
  size_t ndim;
  const int64_t *shape, *strides;
};

// Reads tensors through torch's exchange API, or attribute by attribute if torch has none (before
// 2.10).
class Looker {
 public:
  // `exchange`: Tensor.__dlpack_c_exchange_api__ or None.
  explicit Looker(const py::object& exchange) {
    if (exchange.is_none()) return;
    const void* const found = PyCapsule_GetPointer(exchange.ptr(), "dlpack_exchange_api");
    if (found == nullptr) throw py::error_already_set();
    const auto* const api = static_cast<const DlExchangeApi*>(found);
    if (api->major == 1) look_ = api->look;
  }

  // The result points to memory of the tensor, or to memory that is valid until the next call.
  [[nodiscard]] Look at(py::handle tensor) {
    if (look_ == nullptr) return at_attributes(tensor);
    DlTensor found;
    if (look_(tensor.ptr(), &found) != 0) throw py::error_already_set();
    return {.address =
                static_cast<int64_t>(reinterpret_cast<uintptr_t>(found.data) + found.byte_offset),
            .type = std::bit_cast<uint32_t>(found.dtype),
            .ndim = static_cast<size_t>(found.ndim),
            .shape = found.shape,
            .strides = found.strides};
  }

 private:
  Look at_attributes(py::handle tensor) {
    shape_ = attribute(tensor, shape_name_).cast<std::vector<int64_t>>();
    strides_ = called(tensor, stride_name_).cast<std::vector<int64_t>>();
    return {.address = called(tensor, data_ptr_name_).cast<int64_t>(),
            // Torch's types live as long as the process.
            .type = reinterpret_cast<uintptr_t>(attribute(tensor, dtype_name_).ptr()),
            .ndim = shape_.size(),
            .shape = shape_.data(),
            .strides = strides_.data()};
  }

  int (*look_)(void*, DlTensor*) = nullptr;
  py::str data_ptr_name_{"data_ptr"}, dtype_name_{"dtype"}, shape_name_{"shape"},
      stride_name_{"stride"};
  std::vector<int64_t> shape_, strides_;
};

// The recorded state of a tensor: its identity, its address, and the type, number and order of its
// elements.
class Watched {
 public:
  Watched(py::handle tensor, const Look& look)
      : tensor_(tensor.ptr()), address_(look.address), type_(look.type), ndim_(look.ndim) {
    if (ndim_ > kInline) more_.resize(2 * ndim_);
    int64_t* const dims = more_.empty() ? dims_ : more_.data();
    std::copy_n(look.shape, ndim_, dims);
    std::copy_n(look.strides, ndim_, dims + ndim_);
  }
  [[nodiscard]] bool is(py::handle tensor) const { return tensor.ptr() == tensor_; }

  // Returns whether nothing but its values has changed.
  [[nodiscard]] bool unchanged(Looker& looker) const {
    const Look now = looker.at(tensor_);
    return now.address == address_ && like(now);
  }
  // Returns whether type, number and order of elements are equal.
  [[nodiscard]] bool like(const Look& other) const {
    if (other.type != type_ || other.ndim != ndim_) return false;
    const int64_t* const dims = more_.empty() ? dims_ : more_.data();
    for (size_t i = 0; i < ndim_; ++i) {
      if (other.shape[i] != dims[i]) return false;
      // The stride of a dimension of size 1 is never used.
      if (dims[i] != 1 && other.strides[i] != dims[ndim_ + i]) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kInline = 2;

  PyObject* tensor_;
  int64_t address_;
  uint64_t type_;
  size_t ndim_;
  int64_t dims_[2 * kInline];  // shape, then strides
  std::vector<int64_t> more_;  // the same for those with more
};

// The assumptions behind the rows of a table, and the check whether they still hold. Holds no
// references: its creator keeps the parameters, the state dicts and their values alive, where the
// garbage collector sees them. The caller owns gradients from the time when their addresses are
// taken.
class TensorWatch {
 public:
  TensorWatch(const py::list& params, std::vector<size_t> groups, const py::list& states,
              py::list names, const py::list& grads, const py::list& all_states,
              const py::object& exchange)
      : looker_(exchange), groups_(std::move(groups)), names_(std::move(names)) {
    for (size_t i = 0; i < params.size(); ++i) {
      states_.push_back(item(states, i).ptr());
      params_.push_back(watched(params[i]));
      grads_.push_back(watched(grads[i]));
      for (const py::handle name : names_) {
        PyObject* const value = PyDict_GetItemWithError(states_.back(), name.ptr());
        if (value != nullptr) values_.push_back({name.ptr(), watched(value)});
      }
      value_ends_.push_back(values_.size());
    }
    for (const py::handle state : all_states) all_states_.push_back(state.ptr());
  }

  // Returns the gradients of the parameters that have one, listed by group, and writes their
  // addresses to `column`, `step` int64s apart. Returns None if other parameters have gradients; if
  // one is in another group; if it, its state, a tensor of the state or its memory was replaced; or
  // if a gradient has another type or order.
  [[nodiscard]] std::optional<py::list> take_gradients(const py::list& groups,
                                                       const py::dict& all_states, uintptr_t column,
                                                       int64_t step) {
    if (!same_dicts(all_states)) return std::nullopt;
    auto* to = reinterpret_cast<int64_t*>(column);
    py::list found(params_.size());
    size_t row = 0;
    try {
      for (size_t group = 0; group < groups.size(); ++group) {
        const auto params = py::reinterpret_borrow<py::list>(item(groups, group));
        for (size_t i = 0; i < params.size(); ++i) {
          py::object grad = attribute(item(params, i), grad_name_);
          if (grad.is_none()) continue;
          if (row == params_.size() || groups_[row] != group || !params_[row].is(item(params, i))) {
            return std::nullopt;
          }
          if (!params_[row].unchanged(looker_) || !same_state(row)) return std::nullopt;
          const Look look = looker_.at(grad);
          if (!grads_[row].like(look) || !has_own_values(grad, look)) return std::nullopt;
          *to = look.address;
          to += step;
          PyList_SET_ITEM(found.ptr(), static_cast<py::ssize_t>(row), grad.release().ptr());
          ++row;
        }
      }
    } catch (const py::error_already_set& error) {
      // A gradient without strides or an address.
      if (error.matches(PyExc_AttributeError) || error.matches(PyExc_RuntimeError)) {
        return std::nullopt;
      }
      throw;
    }
    if (row != params_.size()) return std::nullopt;
    return found;
  }

 private:
  struct Value {
    PyObject* name;
    Watched tensor;
  };

  static py::handle item(const py::list& list, size_t index) {
    return PyList_GET_ITEM(list.ptr(), static_cast<py::ssize_t>(index));
  }

  // Whether the memory has the tensor's values: torch has tensors with a lazy negation, and zero
  // tensors without memory.
  [[nodiscard]] bool has_own_values(py::handle tensor, const Look& look) const {
    const int64_t* const end = look.shape + look.ndim;
    if (look.address == 0 && std::find(look.shape, end, 0) == end) return false;
    return called(tensor, is_neg_name_).ptr() != Py_True;
  }

  Watched watched(py::handle tensor) { return {tensor, looker_.at(tensor)}; }

  [[nodiscard]] bool same_dicts(const py::dict& all_states) const {
    if (all_states.size() != all_states_.size()) return false;
    PyObject *key = nullptr, *value = nullptr;
    py::ssize_t place = 0;
    for (size_t i = 0; PyDict_Next(all_states.ptr(), &place, &key, &value) != 0; ++i) {
      if (value != all_states_[i]) return false;
    }
    return true;
  }

  [[nodiscard]] bool same_state(size_t row) {
    for (size_t i = row == 0 ? 0 : value_ends_[row - 1]; i < value_ends_[row]; ++i) {
      const auto& [name, tensor] = values_[i];
      PyObject* const found = PyDict_GetItemWithError(states_[row], name);
      if (found == nullptr || !tensor.is(found) || !tensor.unchanged(looker_)) return false;
    }
    return true;
  }

  Looker looker_;
  py::str grad_name_{"grad"}, is_neg_name_{"is_neg"};
  std::vector<size_t> groups_;
  py::list names_;
  std::vector<Watched> params_, grads_;
  std::vector<Value> values_;
  std::vector<size_t> value_ends_;  // by row
  std::vector<PyObject*> states_, all_states_;
};

}  // namespace

void bind_tensors(py::module_& m) {
  py::class_<TensorWatch>(
      m, "TensorWatch",
      "Parameters, by group, and the tensors `names` of their state dicts, remembered with their "
      "addresses, and the type and order of their gradients. The caller keeps them alive. "
      "`exchange` is torch's DLPack C exchange API, None where it has none: that is slower.")
      .def(py::init<const py::list&, std::vector<size_t>, const py::list&, py::list,
                    const py::list&, const py::list&, const py::object&>(),
           py::arg("params"), py::arg("groups"), py::arg("states"), py::arg("names"),
           py::arg("grads"), py::arg("all_states"), py::arg("exchange"))
      .def("take_gradients", &TensorWatch::take_gradients, py::arg("groups"), py::arg("all_states"),
           py::arg("column"), py::arg("step"),
           "Return the gradients of the parameters that have one, of lists by group, and write "
           "their addresses, which are valid as long as these are kept, to int64s `step` apart; "
           "None when something remembered was replaced.");
}

}  // namespace gemini
