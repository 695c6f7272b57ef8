// Python bindings for queries of one chunk or one tensor of the chunk table.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <vector>

#include "bindings/chunk_table.h"
#include "chunk/state.h"

namespace py = pybind11;

namespace gemini {
namespace {

template <typename Holds>
std::vector<Tier> tiers_where(Holds holds) {
  std::vector<Tier> tiers;
  for (const Tier tier : kTiers) {
    if (holds(tier)) tiers.push_back(tier);
  }
  return tiers;
}

}  // namespace

void bind_chunk_queries(BoundTable& table) {
  table
      .def(
          "valid_tiers",
          [](const ChunkTable& self, ChunkId chunk) {
            const TierSet valid = self.chunk(chunk).valid;
            return tiers_where([valid](Tier tier) { return valid.has(tier); });
          },
          py::arg("chunk"))
      .def(
          "held_tiers",
          [](const ChunkTable& self, ChunkId id) {
            const Chunk& chunk = self.chunk(id);
            return tiers_where([&chunk](Tier tier) { return chunk.holds(tier); });
          },
          py::arg("chunk"))
      .def("moments_passed_by", &ChunkTable::moments_passed_by, py::arg("chunk"),
           "Return the expected moments between the next one of a chunk's choice and its next use.")
      .def(
          "is_dirty",
          [](const ChunkTable& self, ChunkId chunk) { return self.chunk(chunk).dirty(); },
          py::arg("chunk"))
      .def(
          "pins",
          [](const ChunkTable& self, ChunkId chunk) {
            return self.chunk(chunk).pins[index(Tier::kDevice)];
          },
          py::arg("chunk"))
      .def(
          "nbytes", [](const ChunkTable& self, ChunkId chunk) { return self.chunk(chunk).nbytes; },
          py::arg("chunk"))
      .def(
          "in_flight",
          [](const ChunkTable& self, ChunkId chunk) {
            return self.chunk(chunk).flight.has_value();
          },
          py::arg("chunk"))
      .def(
          "flight_id",
          [](const ChunkTable& self, ChunkId id) {
            const std::optional<Flight>& flight = self.chunk(id).flight;
            return flight ? flight->id : ActionId{0};
          },
          py::arg("chunk"))
      .def("chunk_of", &ChunkTable::chunk_of, py::arg("tensor"))
      .def("tensor_state", &ChunkTable::tensor_state, py::arg("tensor"))
      .def("num_chunks", &ChunkTable::num_chunks)
      .def("num_tensors", &ChunkTable::num_tensors)
      .def("num_in_flight", &ChunkTable::num_in_flight)
      .def("check_invariants", &ChunkTable::check_invariants)
      .def_static("is_legal", &is_legal, py::arg("from_state"), py::arg("to_state"));
}

}  // namespace gemini
