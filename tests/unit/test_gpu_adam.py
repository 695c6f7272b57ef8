"""The CUDA kernel: the bits of the CPU's, for every layout, size and address."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from pairs import pairs

from gemini.chunk.chunk import BLOCK_NUMEL
from gemini.errors import GeminiError, StateError
from gemini.optim import CPUAdam, FusedAdam
from gemini.optim.kernels import AdamHyper, AdamRow, AdamStep, AdamTable, GradScale, has_cuda_kernel, run_rows

GRAD_TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Type of the parameter, type of its 16-bit copy, whether its fp32 remainder is kept; in the kernel's order.
FORMS = (
    (torch.float32, None, False),
    (torch.float32, torch.bfloat16, False),
    (torch.float32, torch.float16, False),
    (torch.bfloat16, None, True),
    (torch.bfloat16, None, False),
    (torch.float16, None, False),
)
MOMENTS = ("fp32", "bf16", "int8")
SIZES = (1, 37, 256, 300, 1000, 100_003)
SPECIALS = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.4e38, 1e-40, -1e-45)

PLAIN = AdamStep(AdamHyper(lr=3e-3, weight_decay=0.1), 7)
OTHER = AdamStep(
    AdamHyper(lr=3e-3, betas=(0.3, 0.99), weight_decay=0.1, adamw_mode=False), 3, GradScale(0.7, 1.1, 0.9)
)


@dataclass
class Arrays:
    """The arrays of one tensor, each ``skew`` elements into its memory."""

    grad_type: int
    form: int
    moments: int
    numel: int
    skew: int
    memory: dict[str, torch.Tensor]

    def to(self, device: str) -> Arrays:
        memory = {name: array.to(device, copy=True) for name, array in self.memory.items()}
        return Arrays(self.grad_type, self.form, self.moments, self.numel, self.skew, memory)

    def row(self, step_index: int = 0) -> AdamRow:
        arrays = {name: array[self.skew :] for name, array in self.memory.items()}
        param, grad, half_out = arrays.pop("param"), arrays.pop("grad"), arrays.pop("half_out", None)
        options = {"state_dtype": MOMENTS[self.moments], "half_out": half_out, "step_index": step_index}
        return AdamRow(param, grad, arrays, first=5 * BLOCK_NUMEL, **options)


def make_arrays(grad_type: int, form: int, moments: int, numel: int, skew: int = 0) -> Arrays:
    """Return arrays on the CPU as some step might find them, special values among them."""
    source = torch.Generator().manual_seed(numel)
    size = numel + skew

    def values(scale: float, shift: int) -> torch.Tensor:
        array = torch.randn(size, generator=source) * scale
        for place, special in enumerate(SPECIALS):
            array[(97 * place + shift) % size :: 1009] = special
        return array

    param_type, half_type, has_remainder = FORMS[form]
    memory = {
        "param": values(1.0, 0).to(param_type),
        "grad": values(1.0, 11).to(GRAD_TYPES[grad_type]),
    }
    if half_type is not None:
        memory["half_out"] = torch.zeros(size, dtype=half_type)
    if has_remainder:
        memory["remainder"] = torch.randint(-(2**15), 2**15, (size,), generator=source).to(torch.int16)
    if MOMENTS[moments] == "int8":
        blocks = -(-numel // BLOCK_NUMEL) + skew
        memory["exp_avg"] = torch.randint(-127, 128, (size,), generator=source).to(torch.int8)
        memory["exp_avg_sq"] = torch.randint(0, 256, (size,), generator=source).to(torch.uint8)
        memory["exp_avg_scale"] = torch.rand(blocks, generator=source) * 1e-3
        memory["exp_avg_sq_scale"] = torch.rand(blocks, generator=source) * 1e-2
    else:
        dtype = torch.float32 if MOMENTS[moments] == "fp32" else torch.bfloat16
        memory["exp_avg"] = values(0.1, 23).to(dtype)
        memory["exp_avg_sq"] = values(1.0, 31).abs().to(dtype)
    return Arrays(grad_type, form, moments, numel, skew, memory)


def assert_same_bits(got: Arrays, want: Arrays) -> None:
    for name, array in want.memory.items():
        assert torch.equal(got.memory[name].cpu().view(torch.uint8), array.view(torch.uint8)), name


@pytest.mark.cuda
@pairs(
    grad_type=range(3),
    form=range(6),
    moments=[pytest.param(place, id=name) for place, name in enumerate(MOMENTS)],
    skew=[0, 1],
)
def test_gpu_gives_the_bits_of_the_cpu(grad_type: int, form: int, moments: int, skew: int) -> None:
    want = [make_arrays(grad_type, form, moments, numel, skew) for numel in SIZES]
    got = [arrays.to("cuda") for arrays in want]
    for steps in ([PLAIN, OTHER], [OTHER, PLAIN]):
        run_rows([arrays.row(place % 2) for place, arrays in enumerate(want)], steps)
        run_rows([arrays.row(place % 2) for place, arrays in enumerate(got)], steps, "cuda")
    for gpu, cpu in zip(got, want, strict=True):
        assert_same_bits(gpu, cpu)


@pytest.mark.cuda
def test_one_call_takes_every_layout() -> None:
    layouts = [(grad, form, moments) for moments in range(3) for grad in range(3) for form in range(6)]
    want = [make_arrays(*layout, 50 * place + 1) for place, layout in enumerate(layouts * 3)]
    got = [arrays.to("cuda") for arrays in want]
    run_rows([arrays.row() for arrays in want], [PLAIN])
    run_rows([arrays.row() for arrays in got], [PLAIN], "cuda")
    for gpu, cpu in zip(got, want, strict=True):
        assert_same_bits(gpu, cpu)


@pytest.mark.cuda
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_check_finite_sees_one_bad_gradient(value: float) -> None:
    step = AdamStep(AdamHyper(), 1, check_finite=True)
    arrays = make_arrays(0, 0, 0, 100_003).to("cuda")
    arrays.memory["grad"].fill_(1.0)
    assert run_rows([arrays.row()], [step], "cuda")
    arrays.memory["grad"][70_001] = value
    assert not run_rows([arrays.row()], [step], "cuda")
    assert run_rows([arrays.row()], [PLAIN], "cuda")  # does not ask


@pytest.mark.cuda
def test_the_current_stream_orders_the_step() -> None:
    want = make_arrays(1, 3, 2, 100_003)
    got = want.to("cuda")
    grad = got.memory["grad"].clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got.memory["grad"].zero_()
        got.memory["grad"].copy_(grad)
        run_rows([got.row()], [PLAIN], "cuda")
        param = got.memory["param"].clone()
        torch.cuda.current_stream().synchronize()
    run_rows([want.row()], [PLAIN])
    assert torch.equal(param.cpu().view(torch.int16), want.memory["param"].view(torch.int16))


@pytest.mark.cuda
def test_memory_of_the_cpu_is_refused() -> None:
    arrays = make_arrays(0, 0, 0, 300)
    before = arrays.to("cpu")
    with pytest.raises(StateError, match="not memory of a GPU"):
        run_rows([arrays.row()], [PLAIN], "cuda")
    assert_same_bits(arrays, before)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", MOMENTS)
def test_fused_adam_trains_like_cpu_adam(dtype: torch.dtype, state_dtype: str) -> None:
    source = torch.Generator().manual_seed(0)
    cpu = [torch.randn(numel, generator=source).to(dtype).requires_grad_() for numel in SIZES]
    gpu = [param.detach().cuda().requires_grad_() for param in cpu]
    options = {"lr": 1e-2, "weight_decay": 0.1, "state_dtype": state_dtype}
    options["master_remainders"] = dtype is torch.bfloat16
    optimizers = [CPUAdam(cpu, **options), FusedAdam(gpu, **options)]
    for _ in range(5):
        for one, other in zip(cpu, gpu, strict=True):
            one.grad = torch.randn(one.shape, generator=source).to(dtype)
            other.grad = one.grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(cpu, gpu, strict=True):
        assert torch.equal(other.detach().cpu(), one.detach())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_call_says_what_is_missing() -> None:
    arrays = make_arrays(0, 0, 0, 300)
    before = arrays.to("cpu")
    missing = "NVIDIA driver" if has_cuda_kernel() else "GEMINI_CUDA=ON"
    with pytest.raises(GeminiError, match=missing):
        AdamTable([arrays.row()]).launch([PLAIN.options()], stream=0)
    assert_same_bits(arrays, before)
