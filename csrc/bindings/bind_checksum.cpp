// gemini._C: the checksum of memory.
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "bindings/bind.h"
#include "common/crc32c.h"

namespace py = pybind11;

namespace gemini {

void bind_checksum(py::module_& m) {
  m.def(
      "crc32c",
      [](uintptr_t address, size_t nbytes) {
        return crc32c(reinterpret_cast<const void*>(address), nbytes);
      },
      py::arg("address"), py::arg("nbytes"), py::call_guard<py::gil_scoped_release>(),
      "Return the CRC32C of a range of memory, which the caller keeps alive.");
}

}  // namespace gemini
