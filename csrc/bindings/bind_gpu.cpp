// gemini._C: a GPU, real or simulated, its streams, and its windows as DLPack capsules.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/dlpack.h"
#include "bindings/gpu.h"
#include "common/error.h"
#include "common/processors.h"
#include "gpu/cuda_driver.h"
#include "gpu/gpu_windows.h"
#include "gpu/simulated_gpu.h"
#include "gpu/simulated_turn.h"

namespace py = pybind11;

namespace gemini {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

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

// A stream of a simulated GPU; Python threads execute its work in turns.
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

// The owner of a DLPack tensor over a window, until the last tensor is gone.
struct Held {
  DlManagedTensor managed;
  int64_t numel;
  int64_t stride;
  py::tuple kept;  // the window, and further objects that must live as long
};

void release(DlManagedTensor* managed) {
  auto* const held = static_cast<Held*>(managed->owner);
  if (Py_IsInitialized() == 0) return;  // at exit: no Python object remains to be released
  const py::gil_scoped_acquire gil;
  delete held;
}

void drop_unused(PyObject* capsule) {
  // The capsule is renamed after a tensor was made from it.
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
  bind_gpu_engine(m);
  bind_simulated_stream(m);
}

}  // namespace gemini
