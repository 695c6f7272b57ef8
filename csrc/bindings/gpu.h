// The class Gpu, shared by the units that bind the memory and transfers of a GPU.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "gpu/gpu_driver.h"
#include "gpu/gpu_lanes.h"

namespace gemini {

// One GPU as Python holds it: its driver, its lanes, and the device under which torch finds its
// memory.
struct Gpu {
  std::shared_ptr<GpuDriver> driver;
  std::shared_ptr<GpuLanes> lanes;
  int32_t dl_device_type;
  int32_t dl_device_id;
};

void bind_gpu_memory(pybind11::module_& m);
void bind_gpu_engine(pybind11::module_& m);

}  // namespace gemini
