#include <ATen/CPUGeneratorImpl.h>

#include "torch_cuda.h"

namespace standin {
namespace {

// The CPU's, by another name.
class GpuGenerator final : public at::CPUGeneratorImpl {
 public:
  GpuGenerator() { rename(kGpu); }

  void rename(c10::DeviceType type) {
    device_ = type == kGpu ? c10::Device(kGpu, 0) : c10::Device(type);
    key_set_ = c10::DispatchKeySet(type == kGpu ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  }
};

void rename(const at::Generator& generator, c10::DeviceType type) {
  auto* const own = dynamic_cast<GpuGenerator*>(generator.unsafeGetGeneratorImpl());
  if (own != nullptr) own->rename(type);
}

}  // namespace

at::Generator make_generator() { return at::make_generator<GpuGenerator>(); }

OnCpu::OnCpu(const at::Generator& generator) : generator_(generator) {
  rename(generator_, c10::DeviceType::CPU);
}

OnCpu::~OnCpu() { rename(generator_, kGpu); }

}  // namespace standin
