#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "torch_cuda.h"

namespace standin {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Visit = std::function<void(Tensor&)>;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

// -- tensors --

// The same memory as the CPU sees it. Keeps nothing: memory is given back in the order of streams.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::DeviceType::CPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  void* const data = tensor.unsafeGetTensorImpl()->mutable_data();
  return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

// A copy with memory of the GPU.
Tensor on_gpu(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  const Tensor made = at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), &gpu_allocator(), kKeys, tensor.scalar_type());
  on_cpu(made).copy_(tensor);
  return made;
}

void add_range(const Tensor& tensor, Ranges& ranges) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.numel() == 0) return;
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  ranges.emplace_back(tensor.unsafeGetTensorImpl()->data(),
                      static_cast<size_t>(last + 1) * tensor.element_size());
}

// Has `visit` replace each tensor in `value`.
void replace_tensors(IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    Tensor tensor = value.toTensor();
    visit(tensor);
    value = tensor;
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (Tensor tensor : value.toTensorVector()) {
      visit(tensor);
      list.push_back(tensor);
    }
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> tensor : value.toOptionalTensorVector()) {
      if (tensor.has_value()) visit(*tensor);
      list.push_back(tensor);
    }
    value = list;
  }
}

// -- any operator --

bool writes(const c10::AliasInfo* alias) { return alias != nullptr && alias->isWrite(); }

// CUDA's operators take a number from the CPU, and indices; `equal` is how tests compare.
void refuse_other_device(const Tensor& tensor, const std::string& name) {
  const bool may_be = tensor.is_cuda() || tensor.dim() == 0 || name == "aten::equal" ||
                      name.find("index") != std::string::npos;
  TORCH_CHECK(
      may_be,
      "Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
      "and cpu! (when calling ",
      name, ")");
}

// Whether the CPU's operator makes `out` larger for a while.
bool resizes_out(const c10::OperatorHandle& op) {
  return op.operator_name().overload_name == "out" && op.operator_name().name == "aten::mse_loss";
}

// Whether all it returns are arguments that it writes into and whose memory is there.
bool can_be_late(const c10::OperatorHandle& op, const Stack& arguments) {
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return false;  // who draws first must stay so
  if (resizes_out(op)) return false;
  const c10::FunctionSchema& schema = op.schema();
  for (const auto& each : schema.returns()) {
    if (!writes(each.alias_info())) return false;
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!writes(schema.arguments()[i].alias_info())) continue;
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) return false;
    if (arguments[i].toTensor().numel() == 0) return false;
  }
  return !schema.returns().empty();
}

void call_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&stack);
}

// Sums depend on how they are shared out: as many threads as the caller's.
void call_late(const c10::OperatorHandle& op, const Stack& arguments, const Ranges& ranges) {
  launch(ranges, [op, stack = arguments, threads = at::get_num_threads()]() mutable {
    thread_local int set = 0;
    if (std::exchange(set, threads) != threads) at::set_num_threads(threads);
    call_on_cpu(op, stack);
  });
}

// The argument that return value `index` is.
const Tensor& written_argument(const c10::FunctionSchema& schema, const Stack& given,
                               size_t index) {
  const auto* const alias = schema.returns()[index].alias_info();
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* const own = schema.arguments()[i].alias_info();
    if (writes(own) && own->beforeSets() == alias->beforeSets()) return given[i].toTensor();
  }
  TORCH_CHECK(false, "the stand-in does not know what ", schema.name(), " returns");
}

void return_results(const c10::FunctionSchema& schema, const Stack& given, Stack results,
                    Stack& stack) {
  for (size_t i = 0; i < results.size(); ++i) {
    const auto* const alias = schema.returns()[i].alias_info();
    TORCH_CHECK(alias == nullptr || writes(alias), "the stand-in has no view ", schema.name());
    if (alias == nullptr) {
      replace_tensors(results[i], [](Tensor& tensor) { tensor = on_gpu(tensor); });
    } else if (results[i].isTensor()) {
      const Tensor out = written_argument(schema, given, i);
      const Tensor result = results[i].toTensor();
      if (result.sizes() != out.sizes()) out.resize_(result.sizes());
      if (result.const_data_ptr() != out.const_data_ptr()) on_cpu(out).copy_(result);
      results[i] = out;
    }
    stack.push_back(std::move(results[i]));
  }
}

void call(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const Stack given = torch::jit::pop(*stack, schema.arguments().size());
  c10::OptionalDeviceGuard guard;  // results are where the operands are
  Stack arguments = given;
  Ranges ranges;
  bool from_cpu = false;
  for (IValue& value : arguments) {
    replace_tensors(value, [&](Tensor& tensor) {
      if (!tensor.defined()) return;
      refuse_other_device(tensor, schema.name());
      from_cpu |= tensor.is_cpu();
      add_range(tensor, ranges);
      if (tensor.is_cuda()) guard.reset_device(tensor.device());
      tensor = on_cpu(tensor);
    });
    if (value.isDevice() && value.toDevice().is_cuda()) guard.reset_device(value.toDevice());
    if (value.isDevice()) value = c10::Device(c10::DeviceType::CPU);
  }
  if (!from_cpu && can_be_late(op, given)) {
    call_late(op, arguments, ranges);
    for (size_t i = 0; i < schema.returns().size(); ++i) {
      stack->emplace_back(written_argument(schema, given, i));
    }
    return;
  }
  synchronize(current_stream());
  std::optional<OnCpu> generator;
  for (const IValue& value : arguments) {
    if (value.isGenerator()) generator.emplace(value.toGenerator());
  }
  if (resizes_out(op)) arguments.back() = at::empty({0}, arguments.back().toTensor().options());
  call_on_cpu(op, arguments);
  return_results(schema, given, std::move(arguments), *stack);
}

// -- what makes memory or views --

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &gpu_allocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &gpu_allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

// NOLINTBEGIN(bugprone-return-const-ref-from-parameter): torch's signature
const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const auto wanted =
      static_cast<size_t>(self.numel() + self.storage_offset()) * self.element_size();
  const c10::Storage& storage = self.storage();
  if (storage.nbytes() >= wanted) return self;
  synchronize(current_stream());
  c10::DataPtr more = gpu_allocator().allocate(wanted);
  if (storage.nbytes() > 0) std::memcpy(more.get(), storage.data(), storage.nbytes());
  storage.set_data_ptr_noswap(std::move(more));
  storage.set_nbytes(wanted);
  return self;
}
// NOLINTEND(bugprone-return-const-ref-from-parameter)

Tensor& set_place(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size,
                  at::IntArrayRef stride) {
  auto* const own = self.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(std::move(source));
  own->set_storage_offset(offset);
  if (stride.size() == size.size()) {
    own->set_sizes_and_strides(size, stride);
  } else {
    own->set_sizes_contiguous(size);
  }
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_place(self, std::move(source), 0, {numel}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_place(self, source.storage(), source.storage_offset(), source.sizes(),
                   source.strides());
}

Tensor& set_nothing(Tensor& self) {
  const c10::Storage none(c10::Storage::use_byte_size_t(), 0, &gpu_allocator(), /*resizable=*/true);
  return set_place(self, none, 0, {0}, {});
}

// -- between host and GPU --

// Without waiting where all memory is the GPU's or pinned.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  Ranges ranges;
  bool waits = false;
  for (const Tensor* const each : {static_cast<const Tensor*>(&self), &source}) {
    add_range(*each, ranges);
    if (!each->is_cuda()) waits |= !non_blocking || !is_pinned(each->const_data_ptr());
  }
  const Tensor to = on_cpu(self), from = on_cpu(source);
  const auto copy = [to, from] {
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  };
  if (waits) {
    synchronize(current_stream());
    copy();
  } else {
    launch(ranges, copy);
  }
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  synchronize(current_stream());
  return on_cpu(self).item();
}

// Attention as operators of its own: the CPU's fused ones have other names than CUDA's.
int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;  // SDPBackend::math
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&call>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize_);
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("set_.source_Storage_storage_offset", &set_place);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("copy_", &copy_);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("_fused_sdp_choice", &choose_attention);
}

}  // namespace
}  // namespace standin
