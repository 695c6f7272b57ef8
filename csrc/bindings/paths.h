// Conversion of file names between Python and the core, where they are bytes that need not be text.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace gemini {

// As os.fsdecode; also for messages that contain such a name.
inline pybind11::str decode_path(const std::string& path) {
  PyObject* const text =
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size()));
  if (text == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::str>(text);
}

// As os.fsencode, from text, bytes, or a path object.
inline std::string encode_path(const pybind11::object& path) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), static_cast<void*>(&bytes)) == 0) {
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_steal<pybind11::bytes>(bytes);
}

}  // namespace gemini
