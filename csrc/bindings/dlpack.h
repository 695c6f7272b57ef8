// The part of DLPack that is used here; its layout is fixed for major version 1.
#pragma once

#include <cstdint>

namespace gemini {

struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
inline constexpr int32_t kDlCpu = 1;
inline constexpr int32_t kDlCuda = 2;

// A tensor and the owner of its memory.
struct DlManagedTensor {
  DlTensor tensor;
  void* owner;
  void (*release)(DlManagedTensor* self);
};

}  // namespace gemini
