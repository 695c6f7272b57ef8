// gemini._C: the Adam kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "adam/adam.h"
#include "adam/adam_cuda.h"
#include "adam/dispatch.h"
#include "adam/exact_squares.h"
#include "adam/parallel.h"
#include "bindings/bind.h"
#include "common/error.h"
#include "common/processors.h"

namespace py = pybind11;

namespace gemini {
namespace {

// One row of the table of jobs, as Python fills it (gemini/optim/kernels.py has the same fields).
struct Row {
  int64_t param, grad, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, half_out, remainder;
  int64_t numel, first_block, layout, options;
};
static_assert(sizeof(Row) == 12 * sizeof(int64_t));

template <typename T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

template <typename Enum>
Enum checked(int64_t value, Enum last) {
  if (value < 0 || value > static_cast<int64_t>(last)) {
    throw StateError("adam_step: no such layout: " + std::to_string(value));
  }
  return static_cast<Enum>(value);
}

AdamRange range_of(const Row& row) {
  return {.param = pointer<void>(row.param),
          .grad = pointer<const void>(row.grad),
          .exp_avg = pointer<void>(row.exp_avg),
          .exp_avg_sq = pointer<void>(row.exp_avg_sq),
          .exp_avg_scale = pointer<float>(row.exp_avg_scale),
          .exp_avg_sq_scale = pointer<float>(row.exp_avg_sq_scale),
          .half_out = pointer<uint16_t>(row.half_out),
          .remainder = pointer<uint16_t>(row.remainder),
          .numel = row.numel,
          .first_block = row.first_block,
          .grad_type = checked(row.layout & 15, FloatType::kFp16),
          .form = checked(row.layout >> 4 & 15, ParamForm::kFp16),
          .moments = checked(row.layout >> 8, MomentType::kInt8),
          .streams_half_out = false};
}

FloatType float_type(const std::string& name) {
  if (name == "fp32") return FloatType::kFp32;
  if (name == "bf16") return FloatType::kBf16;
  if (name == "fp16") return FloatType::kFp16;
  throw py::value_error("unknown element type '" + name + "': fp32, bf16 or fp16");
}

// The jobs of a table, and the data that they point to.
struct Jobs {
  Jobs(int64_t table, int64_t rows, const std::vector<AdamOptions>& options) {
    for (const AdamOptions& each : options) scalars.push_back(adam_scalars(each));
    list.reserve(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) {
      const Row& row = pointer<const Row>(table)[i];
      list.push_back({range_of(row), &scalars.at(static_cast<size_t>(row.options))});
    }
  }
  std::vector<AdamScalars> scalars;
  std::vector<AdamJob> list;
};

bool step(int64_t table, int64_t rows, const std::vector<AdamOptions>& options, int threads,
          Processors processors) {
  const Jobs jobs(table, rows, options);
  const py::gil_scoped_release unlocked;
  return adam_step(jobs.list, {threads, std::move(processors)});
}

bool cuda_step(int64_t table, int64_t rows, const std::vector<AdamOptions>& options,
               uintptr_t stream) {
  const Jobs jobs(table, rows, options);
  const bool asks = std::any_of(options.begin(), options.end(),
                                [](const AdamOptions& each) { return each.check_finite; });
  bool finite = true;
  const py::gil_scoped_release unlocked;
  cuda_adam_step(jobs.list, stream, asks ? &finite : nullptr);
  return finite;
}

void stream_adam_pattern(int64_t p, int64_t g, int64_t m, int64_t v, int64_t numel, int threads) {
  const auto stream = isa_kernels().stream_adam_pattern;
  const py::gil_scoped_release unlocked;
  parallel_ranges(numel, 64 * 1024, threads, [&](int64_t begin, int64_t end) {
    stream(pointer<float>(p) + begin, pointer<const float>(g) + begin, pointer<float>(m) + begin,
           pointer<float>(v) + begin, end - begin);
  });
}

void stream_read(int64_t address, int64_t nbytes, int threads) {
  const auto read = isa_kernels().stream_read;
  const py::gil_scoped_release unlocked;
  parallel_ranges(nbytes, 256 * 1024, threads, [&](int64_t begin, int64_t end) {
    (void)read(pointer<const char>(address) + begin, end - begin);
  });
}

}  // namespace

void bind_adam(py::module_& m) {
  py::class_<AdamOptions>(m, "AdamOptions", "What one step needs to know besides the tensors.")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay,
                       int64_t step, bool bias_correction, bool adamw_mode, double pre_scale,
                       double clip_value, double post_scale, bool check_finite) {
             return AdamOptions{.lr = lr,
                                .beta1 = beta1,
                                .beta2 = beta2,
                                .eps = eps,
                                .weight_decay = weight_decay,
                                .step = step,
                                .bias_correction = bias_correction,
                                .adamw_mode = adamw_mode,
                                .pre_scale = pre_scale,
                                .clip_value = clip_value,
                                .post_scale = post_scale,
                                .check_finite = check_finite};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("step"), py::arg("bias_correction"),
           py::arg("adamw_mode"), py::arg("pre_scale") = 1.0,
           py::arg("clip_value") = std::numeric_limits<double>::infinity(),
           py::arg("post_scale") = 1.0, py::arg("check_finite") = false)
      .def(
          "at",
          [](AdamOptions options, int64_t step) {
            options.step = step;
            return options;
          },
          py::arg("step"), "The same for another step.");
  m.def("adam_step", &step, py::arg("table"), py::arg("rows"), py::arg("options"), py::kw_only(),
        py::arg("threads") = 0, py::arg("processors") = Processors(),
        "Update the tensors of a table of `rows` times 12 int64 at address `table`, in place; say "
        "whether all gradients were finite (True where not asked). Threads run on `processors`, "
        "where that is not empty.");
  m.def(
      "count_steps",
      [](int64_t address, int64_t numel) {
        for (int64_t i = 0; i < numel; ++i) pointer<float>(address)[i] += 1.0f;
      },
      py::arg("address"), py::arg("numel"), "Add 1 to each of numel fp32 elements.");
  m.def("cuda_adam_step", &cuda_step, py::arg("table"), py::arg("rows"), py::arg("options"),
        py::kw_only(), py::arg("stream"),
        "The same for tensors of the current GPU, enqueued on a CUDA stream given as an integer.");
  m.def(
      "sum_squares",
      [](int64_t address, int64_t numel, const std::string& dtype, int threads) {
        const FloatType type = float_type(dtype);
        const py::gil_scoped_release unlocked;
        return sum_squares(pointer<const void>(address), type, numel, threads);
      },
      py::arg("address"), py::arg("numel"), py::arg("dtype"), py::kw_only(), py::arg("threads") = 0,
      "Add the squares of numel elements in double; NaN or infinite when an element is not "
      "finite.");
  m.def(
      "exact_squares",
      [](int64_t address, int64_t numel) {
        const py::gil_scoped_release unlocked;
        return exact_squares(pointer<const float>(address), numel);
      },
      py::arg("address"), py::arg("numel"),
      "Add the squares of fp32 elements exactly: for each exponent three limbs of 40 bits.");
  m.def("stream_adam_pattern", &stream_adam_pattern, py::arg("param"), py::arg("grad"),
        py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("numel"), py::kw_only(),
        py::arg("threads") = 0,
        "Do the memory traffic of an fp32 Adam step, 4 reads and 3 writes, for measuring.");
  m.def("stream_read", &stream_read, py::arg("address"), py::arg("nbytes"), py::kw_only(),
        py::arg("threads") = 0, "Read nbytes once, for measuring.");
  m.def("adam_isa", &adam_isa, "The instruction set the kernels use.");
  m.def("adam_isas", &adam_isas, "Those usable on this machine, slowest first.");
}

}  // namespace gemini
