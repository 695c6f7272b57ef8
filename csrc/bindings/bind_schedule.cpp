// Python bindings of csrc/chunk/schedule.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "chunk/schedule.h"

namespace py = pybind11;

namespace gemini {
namespace {

// Schedule accepts any moment >= 0.
int64_t checked_moment(int64_t moment) {
  if (moment < 0) throw py::value_error("a moment is at least 0");
  return moment;
}

}  // namespace

void bind_schedule(py::module_& m) {
  py::class_<Schedule, std::shared_ptr<Schedule>>(m, "Schedule")
      .def(py::init([](const std::vector<std::vector<ChunkId>>& accesses,
                       std::vector<int64_t> reserve_bytes, int32_t num_chunks,
                       const std::vector<int64_t>& host_moments) {
             return std::make_shared<Schedule>(accesses, std::move(reserve_bytes), num_chunks,
                                               host_moments);
           }),
           py::arg("accesses"), py::arg("reserve_bytes"), py::arg("num_chunks"),
           py::arg("host_moments") = std::vector<int64_t>())
      .def(
          "with_plan",
          [](const Schedule& schedule, const std::string& intervals,
             std::vector<int64_t> planned_bytes) {
            return std::make_shared<Schedule>(schedule.with_plan(
                {{intervals.begin(), intervals.end()}, std::move(planned_bytes)}));
          },
          py::arg("intervals"), py::arg("planned_bytes"))
      .def("planned", &Schedule::planned)
      .def("num_moments", &Schedule::num_moments)
      .def("num_chunks", &Schedule::num_chunks)
      .def(
          "access_at",
          [](const Schedule& schedule, int64_t moment) {
            const auto chunks = schedule.access_at(checked_moment(moment));
            return std::vector<ChunkId>(chunks.begin(), chunks.end());
          },
          py::arg("moment"))
      .def(
          "next_use",
          [](const Schedule& schedule, ChunkId chunk, int64_t moment) -> py::object {
            const int64_t use = schedule.next_use(chunk, checked_moment(moment));
            return use == kNever ? py::none() : py::object(py::int_(use));
          },
          py::arg("chunk"), py::arg("moment"))
      .def(
          "reserve_bytes",
          [](const Schedule& schedule, int64_t moment) {
            return schedule.reserve_bytes(checked_moment(moment));
          },
          py::arg("moment"))
      .def("max_reserve", &Schedule::max_reserve);
}

}  // namespace gemini
