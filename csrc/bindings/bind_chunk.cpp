// Python's view of csrc/chunk. Lists of ids and of actions cross by hand: this is called per
// operator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "chunk/chunk_table.h"
#include "chunk/prefetch.h"
#include "chunk/schedule.h"
#include "chunk/state.h"

namespace py = pybind11;

namespace gemini {

namespace {

Use use_of(bool dirty) { return dirty ? Use::kWritten : Use::kRead; }

// Tensor ids from a Python tuple or list, without an allocation for up to 32 of them.
class IdList {
 public:
  explicit IdList(py::handle ids) {
    const bool is_list = PyList_Check(ids.ptr()) != 0;
    if (!is_list && PyTuple_Check(ids.ptr()) == 0) {
      throw py::type_error("tensor ids must be a tuple or a list of ints");
    }
    const auto size = static_cast<size_t>(Py_SIZE(ids.ptr()));
    TensorId* out = inline_.data();
    if (size > inline_.size()) {
      heap_.resize(size);
      out = heap_.data();
    }
    for (size_t i = 0; i < size; ++i) {
      const auto at = static_cast<Py_ssize_t>(i);
      out[i] = parse(is_list ? PyList_GET_ITEM(ids.ptr(), at) : PyTuple_GET_ITEM(ids.ptr(), at));
    }
    view_ = {out, size};
  }
  IdList(const IdList&) = delete;
  IdList& operator=(const IdList&) = delete;

  [[nodiscard]] std::span<const TensorId> view() const { return view_; }

 private:
  static TensorId parse(PyObject* item) {
    const long id = PyLong_AsLong(item);
    if (id == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    // No tensor has a negative id: what does not fit becomes an unknown one.
    if (id < 0 || id > std::numeric_limits<TensorId>::max()) return -1;
    return static_cast<TensorId>(id);
  }

  std::array<TensorId, 32> inline_;
  std::vector<TensorId> heap_;
  std::span<const TensorId> view_;
};

py::tuple to_tuple(const Actions& actions) {
  py::tuple result(actions.size());  // CPython shares the empty one
  for (size_t i = 0; i < actions.size(); ++i) result[i] = py::cast(actions[i]);
  return result;
}

// One tuple for all moments that are equal, as most are to another: a step may have hundreds of
// thousands, and the garbage collector looks at every tuple.
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

std::string repr(const Action& action) {
  return "Action(id=" + std::to_string(action.id) + ", " + name(action.kind) +
         " chunk=" + std::to_string(action.chunk) + " " + name(action.from) + "->" +
         name(action.to) + " nbytes=" + std::to_string(action.nbytes) + ")";
}

std::string repr(const Completion& completion) {
  const auto text = [](bool value) { return value ? "True" : "False"; };
  return std::string("Completion(source_freed=") + text(completion.source_freed) +
         ", destination_freed=" + text(completion.destination_freed) +
         ", doomed=" + text(completion.doomed) + ")";
}

// Schedule accepts any moment from 0 on.
int64_t checked_moment(int64_t moment) {
  if (moment < 0) throw py::value_error("a moment is at least 0");
  return moment;
}

template <typename Holds>
std::vector<Tier> tiers_where(Holds holds) {
  std::vector<Tier> tiers;
  for (const Tier tier : kTiers) {
    if (holds(tier)) tiers.push_back(tier);
  }
  return tiers;
}

void bind_words(py::module_& m) {
  py::enum_<Tier>(m, "Tier")
      .value("DEVICE", Tier::kDevice)
      .value("HOST", Tier::kHost)
      .value("DISK", Tier::kDisk);
  py::enum_<TensorState>(m, "TensorState")
      .value("FREE", TensorState::kFree)
      .value("HOLD", TensorState::kHold)
      .value("COMPUTE", TensorState::kCompute);
  py::enum_<ActionKind>(m, "ActionKind")
      .value("ALLOCATE", ActionKind::kAllocate)
      .value("FETCH", ActionKind::kFetch)
      .value("LOAD", ActionKind::kLoad)
      .value("EVICT", ActionKind::kEvict)
      .value("SPILL", ActionKind::kSpill)
      .value("DROP", ActionKind::kDrop);
  py::class_<Action>(m, "Action")
      .def_readonly("id", &Action::id)
      .def_readonly("kind", &Action::kind)
      .def_readonly("chunk", &Action::chunk)
      .def_readonly("from_tier", &Action::from)
      .def_readonly("to_tier", &Action::to)
      .def_readonly("nbytes", &Action::nbytes)
      .def("__repr__", [](const Action& action) { return repr(action); });
  py::class_<Completion>(m, "Completion")
      .def_readonly("source_freed", &Completion::source_freed)
      .def_readonly("destination_freed", &Completion::destination_freed)
      .def_readonly("doomed", &Completion::doomed)
      .def("__repr__", [](const Completion& completion) { return repr(completion); });
}

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

using Table = py::class_<ChunkTable>;

void bind_operators(Table& table) {
  table.def("add_chunk", &ChunkTable::add_chunk, py::arg("nbytes"))
      .def("add_tensor", &ChunkTable::add_tensor, py::arg("chunk"))
      .def(
          "access",
          [](ChunkTable& self, py::handle tensors, bool traced, bool on_host) -> py::object {
            const IdList ids(tensors);
            const Tier on = on_host ? Tier::kHost : Tier::kDevice;
            const Actions actions = self.access(ids.view(), {.on = on, .traced = traced});
            if (actions.empty() && !self.ready(ids.view())) return py::none();
            return to_tuple(actions);
          },
          py::arg("tensors"), py::arg("traced") = true, py::arg("on_host") = false)
      .def(
          "can_access_on_host",
          [](ChunkTable& self, py::handle tensors) {
            return self.can_access_on_host(IdList(tensors).view());
          },
          py::arg("tensors"))
      .def(
          "ensure",
          [](ChunkTable& self, py::handle tensors) {
            return to_tuple(self.ensure(IdList(tensors).view()));
          },
          py::arg("tensors"))
      .def(
          "ready",
          [](const ChunkTable& self, py::handle tensors) {
            return self.ready(IdList(tensors).view());
          },
          py::arg("tensors"))
      .def(
          "release",
          [](ChunkTable& self, py::handle tensors, bool dirty) {
            return to_tuple(self.release(IdList(tensors).view(), use_of(dirty)));
          },
          py::arg("tensors"), py::arg("dirty"))
      .def(
          "release_all",
          [](ChunkTable& self, bool dirty) { return to_tuple(self.release_all(use_of(dirty))); },
          py::kw_only(), py::arg("dirty") = false)
      .def(
          "free",
          [](ChunkTable& self, py::handle tensors) {
            return to_tuple(self.free(IdList(tensors).view()));
          },
          py::arg("tensors"))
      .def(
          "prefetch",
          [](ChunkTable& self, int32_t max_in_flight) {
            return to_tuple(self.prefetch(max_in_flight));
          },
          py::arg("max_in_flight") = kPrefetchesInFlight)
      .def("complete", &ChunkTable::complete, py::arg("action_id"))
      .def("abort", &ChunkTable::abort, py::arg("action_id"));
}

void bind_step(Table& table) {
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

void bind_queries(Table& table) {
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

}  // namespace

void bind_chunk(py::module_& m) {
  bind_words(m);
  bind_schedule(m);
  Table table(m, "ChunkTable");
  table.def(py::init<int64_t, int64_t, int64_t>(), py::arg("device_bytes"), py::arg("host_bytes"),
            py::arg("disk_bytes"));
  bind_operators(table);
  bind_step(table);
  bind_queries(table);
}

}  // namespace gemini
