// RAII owner of a stream.
#pragma once

#include "gpu/gpu_driver.h"

namespace gemini {

// The constructor creates the stream and throws Error; the destructor destroys it. The driver must
// outlive it.
class GpuStream {
 public:
  explicit GpuStream(GpuDriver& driver) : driver_(driver), handle_(driver.create_stream()) {}
  ~GpuStream() { driver_.destroy_stream(handle_); }
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  [[nodiscard]] GpuDriver::Stream get() const noexcept { return handle_; }

 private:
  GpuDriver& driver_;
  const GpuDriver::Stream handle_;
};

}  // namespace gemini
