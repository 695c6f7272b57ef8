// Python bindings for the chunk table's steps: schedule, record and budgets.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings/chunk_table.h"
#include "chunk/schedule.h"
#include "chunk/state.h"

namespace py = pybind11;

namespace gemini {
namespace {

// Uses one tuple for all equal moments, and most moments equal another: a step may have hundreds of
// thousands, and the garbage collector visits every tuple.
py::tuple to_shared_tuples(const std::vector<std::vector<ChunkId>>& moments) {
  py::tuple result(moments.size());
  py::dict shared;
  for (size_t i = 0; i < moments.size(); ++i) {
    py::tuple moment(moments[i].size());
    for (size_t j = 0; j < moments[i].size(); ++j) moment[j] = moments[i][j];
    result[i] = shared.attr("setdefault")(moment, moment);
  }
  return result;
}

}  // namespace

void bind_chunk_steps(BoundTable& table) {
  table.def("begin_step", &ChunkTable::begin_step)
      .def("end_step", &ChunkTable::end_step)
      .def(
          "set_schedule",
          [](ChunkTable& self, std::shared_ptr<Schedule> schedule) {
            self.set_schedule(std::move(schedule));
          },
          py::arg("schedule").none(true))
      .def("record",
           [](const ChunkTable& self) { return to_shared_tuples(self.record().accesses()); })
      .def("record_modes", [](const ChunkTable& self) { return self.record().modes(); })
      .def("record_frees",
           [](const ChunkTable& self) { return to_shared_tuples(self.record().frees()); })
      .def("moment", &ChunkTable::moment)
      .def("diverged", &ChunkTable::diverged)
      .def("set_limit", &ChunkTable::set_limit, py::arg("nbytes"))
      .def("limit", &ChunkTable::limit)
      .def("usage", &ChunkTable::usage, py::arg("tier"))
      .def(
          "usages",
          [](const ChunkTable& self) {
            return py::make_tuple(self.usage(Tier::kDevice), self.usage(Tier::kHost),
                                  self.usage(Tier::kDisk));
          },
          "Return the bytes reserved on (DEVICE, HOST, DISK).")
      .def("peak", &ChunkTable::peak, py::arg("tier"))
      .def("reset_peak", &ChunkTable::reset_peak)
      .def("raise_disk_budget", &ChunkTable::raise_disk_budget, py::arg("nbytes"))
      .def("budget", &ChunkTable::budget, py::arg("tier"));
}

}  // namespace gemini
