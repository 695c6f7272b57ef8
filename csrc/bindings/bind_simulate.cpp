// Python bindings of csrc/simulate.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "simulate/simulator.h"

namespace py = pybind11;

namespace gemini {

namespace {

LinkModels models_of(const std::vector<std::pair<double, double>>& links) {
  if (links.size() != kNumSimulatedLinks) {
    throw py::value_error("links are h2d, d2h, disk_read and disk_write, in this order");
  }
  LinkModels models;
  for (size_t l = 0; l < kNumSimulatedLinks; ++l) models[l] = {links[l].first, links[l].second};
  return models;
}

}  // namespace

void bind_simulate(py::module_& m) {
  py::class_<SimulatedStep>(m, "SimulatedStep")
      .def_readonly("seconds", &SimulatedStep::seconds)
      .def_readonly("stall_seconds", &SimulatedStep::stall_seconds)
      .def_readonly("peak_bytes", &SimulatedStep::peak_bytes)
      .def_readonly("link_bytes", &SimulatedStep::link_bytes)
      .def_readonly("link_seconds", &SimulatedStep::link_seconds);
  py::class_<SimulatedRun>(m, "SimulatedRun")
      .def("branch", &SimulatedRun::branch, py::arg("schedule"))
      .def(
          "step",
          [](SimulatedRun& run, double at_most) {
            const py::gil_scoped_release release;
            std::vector<double> stall_seconds(static_cast<size_t>(run.num_moments()), 0.0);
            const double begin = run.clock().now();
            const int64_t walked = run.step(stall_seconds, at_most);
            return std::tuple(run.clock().now() - begin, std::move(stall_seconds), walked);
          },
          py::arg("at_most") = std::numeric_limits<double>::infinity());
  py::class_<Simulator>(m, "Simulator")
      .def(py::init([](std::vector<int64_t> chunk_bytes, std::vector<std::string> modes,
                       std::vector<std::vector<ChunkId>> frees, std::vector<double> seconds,
                       std::array<int64_t, kNumTiers> budgets,
                       const std::vector<std::pair<double, double>>& links, bool disk_shared) {
             Workload workload{std::move(chunk_bytes), std::move(modes), std::move(frees),
                               std::move(seconds)};
             const SimulatedMachine machine{
                 .budgets = budgets, .links = models_of(links), .disk_shared = disk_shared};
             return std::make_unique<Simulator>(std::move(workload), machine);
           }),
           py::kw_only(), py::arg("chunk_bytes"), py::arg("modes"), py::arg("frees"),
           py::arg("seconds"), py::arg("budgets"), py::arg("links"), py::arg("disk_shared"))
      .def("run", &Simulator::run, py::arg("schedule"), py::arg("steps"), py::arg("measured"),
           py::arg("told") = true, py::call_guard<py::gil_scoped_release>())
      .def("begin", &Simulator::begin, py::arg("schedule"),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace gemini
