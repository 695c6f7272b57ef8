// gemini._C: the thread that answers liveness questions for a rank.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>

#include "bindings/bind.h"
#include "comm/pulse.h"

namespace py = pybind11;

namespace gemini {

void bind_pulse(py::module_& m) {
  py::class_<Pulse>(
      m, "Pulse",
      "Answers datagrams of those who ask whether this process is alive, from a thread that needs "
      "no "
      "interpreter: its token (16 bytes) and a nonce (8) get the nonce, the milliseconds since the "
      "last beat() (little-endian, 8) and 8 zeros.")
      .def(py::init([](const std::string& address, const py::bytes& token) {
             const std::string_view bytes = token;
             Pulse::Token given{};
             if (bytes.size() != given.size()) throw py::value_error("a token has 16 bytes");
             std::copy(bytes.begin(), bytes.end(), given.begin());
             return std::make_unique<Pulse>(address, given);
           }),
           py::arg("address"), py::arg("token"))
      .def_property_readonly("port", &Pulse::port)
      .def("beat", &Pulse::beat, "Say that the interpreter runs.");
}

}  // namespace gemini
