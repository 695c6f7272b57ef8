// gemini._C: the Adam kernel.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <string>

#include "adam/adam.h"
#include "adam/dispatch.h"
#include "bindings/bind.h"

namespace py = pybind11;

namespace gemini {
namespace {

FloatType float_type(const std::string& name, bool allow_fp32) {
  if (name == "bf16") return FloatType::kBf16;
  if (name == "fp16") return FloatType::kFp16;
  if (name == "fp32" && allow_fp32) return FloatType::kFp32;
  throw py::value_error("unknown element type '" + name + "': " + (allow_fp32 ? "fp32, " : "") +
                        "bf16 or fp16");
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_adam(py::module_& m) {
  m.def(
      "adam_step",
      [](uintptr_t param, uintptr_t grad, uintptr_t exp_avg, uintptr_t exp_avg_sq, int64_t numel,
         const std::string& grad_dtype, uintptr_t half_out, const std::string& half_dtype,
         double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step,
         bool bias_correction, bool adamw_mode, double pre_scale, double clip_value,
         double post_scale, int threads) {
        const AdamRange range{.param = pointer<float>(param),
                              .grad = pointer<const void>(grad),
                              .exp_avg = pointer<float>(exp_avg),
                              .exp_avg_sq = pointer<float>(exp_avg_sq),
                              .half_out = pointer<uint16_t>(half_out),
                              .numel = numel,
                              .grad_type = float_type(grad_dtype, true),
                              .half_type = float_type(half_dtype, false)};
        const AdamOptions options{.lr = lr,
                                  .beta1 = beta1,
                                  .beta2 = beta2,
                                  .eps = eps,
                                  .weight_decay = weight_decay,
                                  .step = step,
                                  .bias_correction = bias_correction,
                                  .adamw_mode = adamw_mode,
                                  .pre_scale = pre_scale,
                                  .clip_value = clip_value,
                                  .post_scale = post_scale};
        py::gil_scoped_release unlocked;
        adam_step(range, options, threads);
      },
      py::arg("param"), py::arg("grad"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
      py::arg("numel"), py::kw_only(), py::arg("grad_dtype"), py::arg("half_out") = 0,
      py::arg("half_dtype") = "bf16", py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
      py::arg("eps"), py::arg("weight_decay"), py::arg("step"), py::arg("bias_correction"),
      py::arg("adamw_mode"), py::arg("pre_scale") = 1.0,
      py::arg("clip_value") = std::numeric_limits<double>::infinity(), py::arg("post_scale") = 1.0,
      py::arg("threads") = 0,
      "Update numel elements in place; addresses of fp32 arrays, the gradient's type is "
      "grad_dtype.");
  m.def("adam_isa", &adam_isa, "The instruction set the kernel uses.");
  m.def("adam_isas", &adam_isas, "Those usable on this machine, slowest first.");
}

}  // namespace gemini
