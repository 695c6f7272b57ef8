// The extension gemini._C: every part of the core, and the translation of its errors.
#include <pybind11/pybind11.h>

#include <exception>
#include <string>
#include <system_error>
#include <utility>

#include "bindings/bind.h"
#include "bindings/paths.h"
#include "common/error.h"

namespace py = pybind11;

namespace gemini {
namespace {

// Raises the class `name` of gemini.errors. It is looked up when it is raised: gemini.errors does
// not import this module, but the package may still be importing itself when it loads this one.
template <typename... Args>
void raise_as(const char* name, Args&&... args) {
  const py::object type = py::module_::import("gemini.errors").attr(name);
  py::set_error(type, type(std::forward<Args>(args)...));
}

// The message of an error; bytes of file names that are no text are escaped.
py::str printable(const Error& error) {
  const std::string message = error.what();
  PyObject* const text = PyUnicode_DecodeUTF8(
      message.data(), static_cast<Py_ssize_t>(message.size()), "backslashreplace");
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(text);
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): as pybind11 calls it
void translate(std::exception_ptr thrown) {
  if (!thrown) return;
  try {
    std::rethrow_exception(thrown);
  } catch (const ChecksumError& error) {
    raise_as("ChecksumError", error.code(), decode_path(error.what()), decode_path(error.path()),
             error.offset());
  } catch (const IoError& error) {
    raise_as("IoError", error.code(), decode_path(error.what()), decode_path(error.path()),
             error.offset());
  } catch (const ThreadError& error) {
    raise_as("ThreadError", error.code(), std::string(error.what()));
  } catch (const SystemError& error) {
    raise_as("IoError", error.code(), std::string(error.what()));
  } catch (const OutOfBudget& error) {
    raise_as("OutOfBudgetError", error.what());
  } catch (const StateError& error) {
    raise_as("StateError", printable(error));
  } catch (const Error& error) {
    raise_as("GeminiError", printable(error));
  } catch (const std::system_error& error) {
    raise_as("IoError", error.code().value(), std::string(error.what()));
  }
}

}  // namespace
}  // namespace gemini

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native core of gemini: chunk table, transfers, file I/O, Adam kernels.";
  py::register_exception_translator(&gemini::translate);
  gemini::bind_build_info(m);
  gemini::bind_checksum(m);
  gemini::bind_actions(m);
  gemini::bind_schedule(m);
  gemini::bind_chunk(m);
  gemini::bind_simulate(m);
  gemini::bind_transfer(m);
  gemini::bind_pulse(m);
  gemini::bind_gpu(m);
  gemini::bind_aio(m);
  gemini::bind_adam(m);
  gemini::bind_tensors(m);
}
