// gemini._C: windows, arenas and transfers of a GPU, real or simulated.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/dlpack.h"
#include "common/error.h"
#include "common/processors.h"
#include "gpu/cuda_driver.h"
#include "gpu/gpu_engine.h"
#include "gpu/simulated_gpu.h"
#include "gpu/simulated_turn.h"

namespace py = pybind11;

namespace gemini {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// One GPU as Python holds it: its driver, the lanes over it, and where torch finds its memory.
struct Gpu {
  std::shared_ptr<GpuDriver> driver;
  std::shared_ptr<GpuLanes> lanes;
  int32_t dl_device_type;
  int32_t dl_device_id;
};

Gpu cuda_gpu(int device) {
  const auto driver = make_cuda_driver(device);
  return {driver, std::make_shared<GpuLanes>(driver), kDlCuda, device};
}

Gpu simulated_gpu(int64_t total_bytes, int64_t granularity, int64_t max_delay_us, uint32_t seed,
                  Processors processors) {
  const auto driver = std::make_shared<SimulatedGpu>(
      SimulatedGpuOptions{total_bytes, granularity, max_delay_us, seed, std::move(processors)});
  return {driver, std::make_shared<GpuLanes>(driver), kDlCpu, 0};
}

// A stream of a simulated GPU, which does what Python threads do in their turns.
class SimulatedStream {
 public:
  explicit SimulatedStream(const Gpu& gpu)
      : gpu_(std::dynamic_pointer_cast<SimulatedGpu>(gpu.driver)) {
    if (!gpu_) throw StateError("only a simulated GPU has streams whose work Python does");
    handle_ = gpu_->create_stream();
  }
  ~SimulatedStream() { gpu_->destroy_stream(handle_); }
  SimulatedStream(const SimulatedStream&) = delete;
  SimulatedStream& operator=(const SimulatedStream&) = delete;

  [[nodiscard]] GpuDriver::Stream handle() const { return handle_; }
  [[nodiscard]] std::unique_ptr<SimulatedTurn> turn(
      const std::vector<std::pair<GpuAddress, int64_t>>& used) {
    std::vector<GpuRange> ranges;
    for (const auto& [address, nbytes] : used) ranges.push_back({address, nbytes});
    return std::make_unique<SimulatedTurn>(*gpu_, handle_, std::move(ranges));
  }

 private:
  std::shared_ptr<SimulatedGpu> gpu_;
  GpuDriver::Stream handle_ = 0;
};

// What a tensor over a window keeps until nobody has it any more.
struct Held {
  DlManagedTensor managed;
  int64_t numel;
  int64_t stride;
  py::tuple kept;  // the window, and what its user wants to live as long
};

void release(DlManagedTensor* managed) {
  auto* const held = static_cast<Held*>(managed->owner);
  if (Py_IsInitialized() == 0) return;  // at exit: nobody is left to be told
  const py::gil_scoped_acquire gil;
  delete held;
}

void drop_unused(PyObject* capsule) {
  // Renamed once a tensor was made of it.
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  auto* const managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->release(managed);
}

py::object dlpack(const Gpu& gpu, const py::object& window, uint8_t code, uint8_t bits,
                  int64_t numel, const py::object& kept) {
  const auto& range = window.cast<const GpuWindow&>();
  if (numel < 0 || numel * bits / 8 > range.nbytes()) {
    throw StateError("the window is too small for " + std::to_string(numel) + " elements");
  }
  auto held = std::make_unique<Held>();
  held->numel = numel;
  held->stride = 1;
  held->kept = py::make_tuple(window, kept);
  held->managed.tensor = {reinterpret_cast<void*>(range.address()),
                          gpu.dl_device_type,
                          gpu.dl_device_id,
                          1,
                          {code, bits, 1},
                          &held->numel,
                          &held->stride,
                          0};
  held->managed.owner = held.get();
  held->managed.release = release;
  PyObject* const capsule = PyCapsule_New(&held->managed, "dltensor", drop_unused);
  if (capsule == nullptr) throw py::error_already_set();
  (void)held.release();
  return py::reinterpret_steal<py::object>(capsule);
}

void bind_gpu_memory(py::module_& m) {
  py::class_<GpuWindow, std::unique_ptr<GpuWindow, py::nodelete>>(
      m, "GpuWindow", "Where a chunk's memory is seen on a GPU, with or without memory.")
      .def_property_readonly("address", &GpuWindow::address, "Of a floating one: for now.")
      .def_property_readonly("nbytes", &GpuWindow::nbytes, "Bytes, as asked for.")
      .def_property_readonly("span_bytes", &GpuWindow::span_bytes, "Bytes that it costs.")
      .def_property_readonly("mapped", &GpuWindow::mapped, "Whether there is memory behind it.");
  py::class_<GpuSpace>(m, "GpuSpace", "A reservation of a GPU's addresses, cut into windows.")
      .def(py::init([](const Gpu& gpu, int64_t total_bytes, int64_t num_windows) {
             return std::make_unique<GpuSpace>(gpu.lanes, total_bytes, num_windows);
           }),
           py::arg("gpu"), py::arg("total_bytes"), py::arg("num_windows"))
      .def(
          "create",
          [](GpuSpace& self, int64_t nbytes, bool floats) {
            return self.create(nbytes, floats ? Addresses::kFloating : Addresses::kFixed);
          },
          py::arg("nbytes"), py::kw_only(), py::arg("floats") = false,
          py::return_value_policy::reference_internal,
          "Cut off the next window; one that floats has other addresses each time it is given "
          "memory.")
      .def("poison", &GpuSpace::poison, ReleaseGil(), py::arg("window"),
           "Have a window without memory read as NaN, and take what is written to it.")
      .def("find", &GpuSpace::find, py::arg("address"),
           "Return the index of the window that contains the address for good, -1 if none does.")
      .def_property_readonly("address", &GpuSpace::address)
      .def_property_readonly("reserved_bytes", &GpuSpace::reserved_bytes);
  py::class_<GpuArena>(m, "GpuArena", "GPU memory of one budget, recycled between windows.")
      .def_property_readonly_static(
          "most_blocks", [](const py::object&) { return GpuArena::kMostBlocks; },
          "How many blocks a window is made of at most.")
      .def(py::init([](const Gpu& gpu, int64_t capacity_bytes, int64_t unit_bytes) {
             return std::make_unique<GpuArena>(gpu.lanes, capacity_bytes, unit_bytes);
           }),
           py::arg("gpu"), py::arg("capacity_bytes"), py::arg("unit_bytes") = 0)
      .def(
          "map",
          [](GpuArena& self, GpuWindow& window, bool zero) {
            self.map(window, zero ? Content::kZeros : Content::kAny);
          },
          ReleaseGil(), py::arg("window"), py::kw_only(), py::arg("zero") = false,
          "Put memory under a window for operators.")
      .def("map_incoming", &GpuArena::map_incoming, ReleaseGil(), py::arg("window"),
           "Put memory under a window for a transfer to it.")
      .def(
          "unmap",
          [](GpuArena& self, GpuWindow& window, bool park) {
            self.unmap(window, park ? Spare::kParked : Spare::kReturned);
          },
          ReleaseGil(), py::arg("window"), py::kw_only(), py::arg("park") = true,
          "Take the memory from a window, after what uses it.")
      .def("trim", &GpuArena::trim, ReleaseGil(), py::arg("parked_limit_bytes") = 0,
           "Return parked memory to the GPU until at most this much is left.")
      .def_property_readonly("mapped_bytes", &GpuArena::mapped_bytes)
      .def_property_readonly("parked_bytes", &GpuArena::parked_bytes)
      .def_property_readonly("peak_bytes", &GpuArena::peak_bytes)
      .def_property_readonly("num_mappings", &GpuArena::num_mappings,
                             "Blocks so far that were mapped where they did not show.")
      .def_property_readonly("capacity", &GpuArena::capacity);
}

void bind_host_memory(py::module_& m) {
  py::class_<HostPlace>(m, "HostPlace", "The place of a chunk in page-locked host memory.")
      .def(py::init<int64_t>(), py::arg("nbytes"))
      .def_property_readonly(
          "address",
          [](const HostPlace& self) { return reinterpret_cast<uintptr_t>(self.address()); },
          "Where it is now; raises StateError while it is not mapped.")
      .def_property_readonly("nbytes", &HostPlace::nbytes)
      .def_property_readonly("span_bytes", &HostPlace::span_bytes)
      .def_property_readonly("mapped", &HostPlace::mapped);
  py::class_<PinnedArena>(m, "PinnedArena", "Page-locked host memory of one budget, recycled.")
      .def(py::init([](const Gpu& gpu, int64_t capacity_bytes, bool pin) {
             return std::make_unique<PinnedArena>(gpu.lanes, capacity_bytes, pin);
           }),
           py::arg("gpu"), py::arg("capacity_bytes"), py::kw_only(), py::arg("pin") = true)
      .def(
          "map",
          [](PinnedArena& self, HostPlace& window, bool zero) {
            self.map(window, zero ? Content::kZeros : Content::kAny);
          },
          ReleaseGil(), py::arg("place"), py::kw_only(), py::arg("zero") = false,
          "Give a place memory.")
      .def("wait", &PinnedArena::await, ReleaseGil(), py::arg("place"),
           "Block until nothing given to the GPU uses the place any more.")
      .def(
          "unmap",
          [](PinnedArena& self, HostPlace& window, bool park) {
            self.unmap(window, park ? Spare::kParked : Spare::kReturned);
          },
          ReleaseGil(), py::arg("place"), py::kw_only(), py::arg("park") = true,
          "Take the memory from a place, after what uses it.")
      .def("trim", &PinnedArena::trim, ReleaseGil(), py::arg("parked_limit_bytes") = 0,
           "Return parked memory to the system until at most this much is left.")
      .def_property_readonly("mapped_bytes", &PinnedArena::mapped_bytes)
      .def_property_readonly("parked_bytes", &PinnedArena::parked_bytes)
      .def_property_readonly("peak_bytes", &PinnedArena::peak_bytes)
      .def_property_readonly("unpinned_bytes", &PinnedArena::unpinned_bytes,
                             "Bytes of blocks so far that the system refused to lock.")
      .def_property_readonly("capacity", &PinnedArena::capacity);
}

void bind_gpu_engine(py::module_& m) {
  using Engine = GpuEngine;
  py::class_<Engine>(m, "GpuEngine",
                     "Transfers between the tiers of a GPU. Memory must stay mapped until poll has "
                     "reported its transfer.")
      .def(py::init([](const Gpu& gpu, AsyncFile* file) {
             return std::make_unique<Engine>(gpu.lanes, file);
           }),
           py::arg("gpu"), py::arg("file") = py::none(), py::keep_alive<1, 3>())
      .def("copy", py::overload_cast<GpuWindow&, HostPlace&, int64_t>(&Engine::copy),
           py::arg("dst"), py::arg("src"), py::arg("nbytes"), "Start a copy; return its ticket.")
      .def("copy", py::overload_cast<HostPlace&, GpuWindow&, int64_t>(&Engine::copy),
           py::arg("dst"), py::arg("src"), py::arg("nbytes"), "Start a copy; return its ticket.")
      .def("read", &Engine::read, py::arg("dst"), py::arg("nbytes"), py::arg("offset"),
           "Start reading from the file; return the ticket.")
      .def("write", py::overload_cast<GpuWindow&, int64_t, int64_t>(&Engine::write), py::arg("src"),
           py::arg("nbytes"), py::arg("offset"), "Start writing to the file; return the ticket.")
      .def("write", py::overload_cast<HostPlace&, int64_t, int64_t>(&Engine::write), py::arg("src"),
           py::arg("nbytes"), py::arg("offset"), "Start writing to the file; return the ticket.")
      .def("poll", &Engine::poll,
           "Return what ended, or was handed to the order of streams, since the last call.")
      .def("wait_any", &Engine::wait_any, ReleaseGil(), py::arg("timeout_s") = -1.0,
           "Have operators wait for a copy, or block until a disk transfer ended; return whether "
           "poll would return something.")
      .def("drain", &Engine::drain, ReleaseGil(), "Block until nothing is in flight.")
      .def("close", &Engine::close, ReleaseGil(),
           "Complete all transfers and stop the threads. Idempotent.")
      .def_property_readonly("num_in_flight", &Engine::num_in_flight)
      .def("stall_seconds", &Engine::stall_seconds,
           "Return for how long operators have waited for copies, as far as that is over.")
      .def(
          "stats",
          [](Engine& self, Link link) {
            const LinkStats stats = self.stats(link);
            return py::dict(py::arg("bytes") = stats.bytes, py::arg("seconds") = stats.seconds,
                            py::arg("shared_seconds") = stats.shared_seconds,
                            py::arg("transfers") = stats.transfers);
          },
          py::arg("link"), "Return what a link has moved, and for how long it was busy.");
}

}  // namespace

void bind_simulated_stream(py::module_& m) {
  py::class_<SimulatedTurn>(m, "SimulatedTurn", "A turn on a simulated GPU's stream.")
      .def("wait", &SimulatedTurn::await, ReleaseGil(), "Block until the stream has come to it.")
      .def("finish", &SimulatedTurn::finish, "Let the stream go on.");
  py::class_<SimulatedStream>(m, "SimulatedStream",
                              "A stream of a simulated GPU, whose work Python threads do.")
      .def(py::init<const Gpu&>(), py::arg("gpu"))
      .def_property_readonly("handle", &SimulatedStream::handle)
      .def("turn", &SimulatedStream::turn, py::arg("ranges"), py::keep_alive<0, 1>(),
           "Take the next turn, for work that uses these (address, bytes).");
}

void bind_gpu(py::module_& m) {
  py::class_<Gpu>(m, "Gpu", "A GPU: its driver and the streams of the runtime.")
      .def_static("cuda", &cuda_gpu, py::arg("device"),
                  "Open an NVIDIA GPU in the context that torch uses.")
      .def_static("simulated", &simulated_gpu, py::arg("total_bytes"),
                  py::arg("granularity") = 64 << 10, py::arg("max_delay_us") = 0,
                  py::arg("seed") = 0, py::arg("processors") = Processors(),
                  "Make one in host memory, whose copies begin up to max_delay_us late.")
      .def(
          "follow", [](Gpu& self, uintptr_t stream) { self.lanes->follow(stream); }, ReleaseGil(),
          py::arg("stream"), "Say which stream operators are given to from now on.")
      .def_property_readonly("granularity",
                             [](const Gpu& self) { return self.driver->granularity(); })
      .def_property_readonly(
          "processors", [](const Gpu& self) { return self.driver->processors(); },
          "Numbers of the processors in its memory node; empty: not known.")
      .def(
          "memory",
          [](const Gpu& self) {
            const GpuDriver::Memory memory = self.driver->memory();
            return std::pair(memory.free_bytes, memory.total_bytes);
          },
          "Return the free and the total bytes.")
      .def("dlpack", &dlpack, py::arg("window"), py::arg("code"), py::arg("bits"), py::arg("numel"),
           py::arg("kept") = py::none(),
           "Return a DLPack capsule of the window, which it keeps, and `kept` with it.");
  bind_gpu_memory(m);
  bind_host_memory(m);
  bind_gpu_engine(m);
  bind_simulated_stream(m);
}

}  // namespace gemini
