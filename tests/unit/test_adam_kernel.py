"""adam_update: the numbers of torch, whatever the type, address, length or number of threads."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from programs import run_python

from gemini import _C
from gemini.errors import ConfigError, GeminiError, StateError
from gemini.optim.kernels import AdamHyper, adam_update, sum_of_squares

SIZES = [0, 1, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 67, 1023, 1025, 40_001]

# ATen without AVX2 rounds multiply-adds twice: its last bits are its own.
needs_fused_aten = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="ATen fuses multiply-adds only in its AVX2 and AVX-512 kernels",
)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tensors(numel: int, seed: int = 0) -> list[torch.Tensor]:
    """Return a parameter, a gradient and moments as some step might find them."""
    source = torch.Generator().manual_seed(seed)
    param, grad, exp_avg, exp_avg_sq = (torch.randn(numel, generator=source) for _ in range(4))
    return [param, grad, exp_avg * 0.1, exp_avg_sq.abs() * 0.01]


OPTIONS = [
    {},
    {"lr": 0.1, "weight_decay": 0.1},
    {"lr": 3e-4, "betas": (0.3, 0.5), "eps": 1e-5},
    {"weight_decay": 0.05, "adamw_mode": False},
    {"betas": (0.0, 0.0), "adamw_mode": False},
]


def torch_steps(numel: int, steps: int, *, fused: bool, **options: Any) -> list[torch.Tensor]:
    """Return parameter and moments after ``steps`` of torch."""
    kind = torch.optim.AdamW if options.pop("adamw_mode", True) else torch.optim.Adam
    leaf = tensors(numel)[0].requires_grad_()
    optimizer = kind([leaf], foreach=False, fused=fused, **{"weight_decay": 0.0, **options})
    for seed in range(steps):
        leaf.grad = tensors(numel, seed)[1]
        optimizer.step()
    return [leaf.detach(), optimizer.state[leaf]["exp_avg"], optimizer.state[leaf]["exp_avg_sq"]]


def our_steps(numel: int, steps: int, **options: Any) -> list[torch.Tensor]:
    param, exp_avg, exp_avg_sq = tensors(numel)[0], torch.zeros(numel), torch.zeros(numel)
    for seed in range(steps):
        adam_update(param, tensors(numel, seed)[1], exp_avg, exp_avg_sq, AdamHyper(**options), seed + 1)
    return [param, exp_avg, exp_avg_sq]


@needs_fused_aten
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("options", OPTIONS[:3])  # of AdamW: coupled weight decay feeds parameters back
def test_moments_have_every_bit_of_torch(numel: int, options: dict[str, Any]) -> None:
    _, *want = torch_steps(numel, 6, fused=False, **options)
    _, *got = our_steps(numel, 6, **options)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@needs_fused_aten
@pytest.mark.parametrize("numel", [16, 64, 1024, 40_000])  # whole vectors: torch treats its tail otherwise
@pytest.mark.parametrize("options", OPTIONS)
def test_everything_has_every_bit_of_fused_torch(numel: int, options: dict[str, Any]) -> None:
    want = torch_steps(numel, 6, fused=True, **options)
    got = our_steps(numel, 6, **options)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("restored_threads")
def test_a_thousand_steps_stay_within_rounding_of_torch(options: dict[str, Any], fused: bool) -> None:
    torch.set_num_threads(1)  # torch's fused step starts threads for 67 elements
    want = torch_steps(67, 1000, fused=fused, **options)[0]
    got = our_steps(67, 1000, **options)[0]
    # A last bit of torch's square root moves an update by 1 ulp; 1000 updates are at most lr * 1000 long.
    travelled = 1000 * options.get("lr", 1e-3) + want.abs().max()
    assert (got - want).abs().max() <= 8 * torch.finfo(torch.float32).eps * travelled


def test_against_float64_the_error_is_a_few_ulps() -> None:
    param, grad, exp_avg, exp_avg_sq = tensors(1000)
    wide = [tensor.double() for tensor in (param, grad, exp_avg, exp_avg_sq)]
    adam_update(param, grad, exp_avg, exp_avg_sq, AdamHyper(lr=0.01, weight_decay=0.1), 5)
    mean = 0.9 * wide[2] + 0.1 * wide[1]
    square = 0.999 * wide[3] + 0.001 * wide[1] ** 2
    denom = (square / (1 - 0.999**5)).sqrt() + 1e-8
    want = wide[0] * (1 - 0.01 * 0.1) - 0.01 / (1 - 0.9**5) * mean / denom
    ulp = torch.finfo(torch.float32).eps * torch.maximum(want.abs(), wide[0].abs())
    assert ((param.double() - want).abs() <= 4 * ulp).all()


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("half_dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradient_and_copy_are_those_of_torchs_casts(
    grad_dtype: torch.dtype, half_dtype: torch.dtype
) -> None:
    param, grad, exp_avg, exp_avg_sq = tensors(5000)
    grad = grad.to(grad_dtype)
    want, *moments = (tensor.clone() for tensor in (param, exp_avg, exp_avg_sq))
    adam_update(want, grad.float(), *moments, AdamHyper(), 1)
    half = torch.empty(5000, dtype=half_dtype)
    adam_update(param, grad, exp_avg, exp_avg_sq, AdamHyper(), 1, half_out=half)
    assert torch.equal(param, want)
    assert torch.equal(half, want.to(half_dtype))


@pytest.mark.parametrize("half_dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_torchs_for_every_class_of_float(half_dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=source, dtype=torch.int64).to(torch.int32)
    param = bits.view(torch.float32).clone()
    start = param.clone()
    half = torch.empty(param.shape, dtype=half_dtype)
    zeros = [torch.zeros_like(param) for _ in range(3)]
    adam_update(param, *zeros, AdamHyper(lr=0.0), 1, half_out=half)
    assert torch.equal(param.nan_to_num(7.0), start.nan_to_num(7.0))
    same = (half == start.to(half_dtype)) | (half.isnan() & start.isnan())
    assert same.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameter_is_updated_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    param, grad, exp_avg, exp_avg_sq = tensors(2**20 + 77)
    half = param.to(dtype)
    want, *moments = (tensor.clone() for tensor in (half.float(), exp_avg, exp_avg_sq))
    adam_update(want, grad, *moments, AdamHyper(lr=0.1), 2)
    adam_update(half, grad, exp_avg, exp_avg_sq, AdamHyper(lr=0.1), 2)
    assert torch.equal(half, want.to(dtype))
    assert torch.equal(exp_avg, moments[0])


def test_scales_and_clip_are_those_of_separate_torch_operations() -> None:
    param, grad, exp_avg, exp_avg_sq = tensors(1000)
    want, *moments = (tensor.clone() for tensor in (param, exp_avg, exp_avg_sq))
    adam_update(want, (grad * 0.37).clamp(-0.2, 0.2) * 1.7, *moments, AdamHyper(), 1)
    scaling = {"pre_scale": 0.37, "clip_value": 0.2, "post_scale": 1.7}
    adam_update(param, grad, exp_avg, exp_avg_sq, AdamHyper(), 1, **scaling)
    assert torch.equal(param, want)
    assert torch.equal(exp_avg_sq, moments[1])


def test_nan_passes_the_clip() -> None:
    param, grad, exp_avg, exp_avg_sq = tensors(3)
    grad[1] = math.nan
    adam_update(param, grad, exp_avg, exp_avg_sq, AdamHyper(), 1, clip_value=1.0)
    assert param.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("offset", [0, 1, 3, 15])
@pytest.mark.parametrize("numel", [1, 17, 67, 4097])
def test_place_in_a_larger_buffer_changes_nothing(offset: int, numel: int) -> None:
    want = tensors(numel)
    placed = [torch.cat([torch.zeros(offset), tensor, torch.zeros(5)])[offset:-5] for tensor in want]
    adam_update(*want, AdamHyper(), 3)
    adam_update(*placed, AdamHyper(), 3)
    assert all(torch.equal(got, tensor) for got, tensor in zip(placed, want, strict=True))


@pytest.mark.usefixtures("restored_threads")
def test_threads_change_nothing() -> None:
    want, got = tensors(100_003), tensors(100_003)
    torch.set_num_threads(2)
    adam_update(*got, AdamHyper(), 3)
    torch.set_num_threads(1)
    adam_update(*want, AdamHyper(), 3)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_flush_to_zero_mode_changes_nothing() -> None:
    want, got = ([tensor * 1e-39 for tensor in tensors(100)] for _ in range(2))
    adam_update(*want, AdamHyper(eps=1e-20), 3)
    torch.set_flush_denormal(True)
    try:
        adam_update(*got, AdamHyper(eps=1e-20), 3)
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert want[2].count_nonzero() > 90


def test_permuted_tensors_are_updated_element_by_element() -> None:
    want = [tensor.view(6, 20) for tensor in tensors(120)]
    permuted = [tensor.t().contiguous().t() for tensor in want]
    permuted[1] = want[1].clone()  # a gradient in another order is matched
    adam_update(*want, AdamHyper(), 1)
    adam_update(*permuted, AdamHyper(), 1)
    assert torch.equal(permuted[0], want[0])
    assert torch.equal(permuted[3], want[3])


def test_version_counters_do_not_move() -> None:
    args = tensors(10)
    before = [tensor._version for tensor in args]
    adam_update(*args, AdamHyper(), 1)
    assert [tensor._version for tensor in args] == before


@pytest.mark.parametrize(
    ("index", "bad"),
    [
        (0, torch.zeros(8, dtype=torch.float64)),
        (0, torch.zeros(16)[::2]),
        (1, torch.zeros(8, dtype=torch.int32)),
        (1, torch.zeros(7)),
        (2, torch.zeros(8, dtype=torch.bfloat16)),
        (3, torch.zeros(9)),
        (3, torch.zeros(8, device="meta")),
    ],
)
def test_unfit_tensor_is_refused_and_nothing_changes(index: int, bad: torch.Tensor) -> None:
    args = tensors(8)
    args[index] = bad
    before = [tensor.clone() for tensor in args]
    with pytest.raises(ConfigError):
        adam_update(*args, AdamHyper(), 1)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True) if a.device.type == "cpu")


def test_step_counts_from_one() -> None:
    with pytest.raises(StateError, match="counts from 1"):
        adam_update(*tensors(8), AdamHyper(), 0)


@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": math.nan}, {"weight_decay": -1.0}]
)
def test_hyper_parameter_out_of_range_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        AdamHyper(**bad)


def test_best_isa_is_used_by_default_and_scalar_is_always_there() -> None:
    assert _C.adam_isas()[0] == "scalar"
    if "GEMINI_ISA" not in os.environ:
        assert _C.adam_isa() == _C.adam_isas()[-1]


DIGEST = """
import torch, hashlib
from gemini import _C
from gemini.optim.kernels import AdamHyper, adam_update
torch.manual_seed(3)
t = [torch.randn(3001) for _ in range(3)] + [torch.rand(3001)]
t[1] = t[1].to(torch.bfloat16)
half = torch.empty(3001, dtype=torch.float16)
for step in range(1, 4):
    adam_update(*t, AdamHyper(weight_decay=0.1), step, half_out=half)
digest = hashlib.sha256(b"".join(x.view(torch.uint8).numpy().tobytes() for x in (t[0], t[2], t[3], half)))
print(_C.adam_isa(), digest.hexdigest())
"""


def run_with_isa(isa: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GEMINI_ISA": isa}
    return run_python(["-c", DIGEST], env=environment)


def test_gemini_isa_chooses_the_kernel_and_not_the_bits() -> None:
    isas = [_C.adam_isas()[0], _C.adam_isas()[-1]]
    outputs = [run_with_isa(isa).stdout.split() for isa in isas]
    assert [name for name, _ in outputs] == isas
    assert len({digest for _, digest in outputs}) == 1


def test_unusable_gemini_isa_is_refused_with_the_choices() -> None:
    failed = run_with_isa("sse9")
    assert failed.returncode != 0
    assert GeminiError.__name__ in failed.stderr
    assert "scalar" in failed.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", SIZES)
def test_sum_of_squares_is_that_of_float64(numel: int, dtype: torch.dtype) -> None:
    values = tensors(numel)[1].to(dtype)
    want = float(values.double().square().sum())
    assert sum_of_squares(values) == pytest.approx(want, rel=1e-14, abs=0.0)
    for offset in (1, 3):
        placed = torch.cat([torch.ones(offset, dtype=dtype), values, torch.ones(5, dtype=dtype)])
        assert sum_of_squares(placed[offset:-5]) == sum_of_squares(values)


def test_sum_of_squares_neither_overflows_nor_vanishes() -> None:
    largest, least = torch.finfo(torch.float32).max, 2.0**-149
    assert sum_of_squares(torch.full((1000,), largest)) == pytest.approx(1000 * largest**2, rel=1e-14)
    assert sum_of_squares(torch.full((1000,), least)) == pytest.approx(1000 * least**2, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_sum_of_squares_is_finite_exactly_when_every_element_is(dtype: torch.dtype, bad: float) -> None:
    values = torch.full((1030,), torch.finfo(dtype).max, dtype=dtype)
    assert math.isfinite(sum_of_squares(values))
    for place in (0, 7, 255, 256, 1023, 1029):
        values[place] = bad
        assert not math.isfinite(sum_of_squares(values)), place
        values[place] = 1.0


@pytest.mark.usefixtures("restored_threads")
def test_sum_of_squares_does_not_depend_on_threads_or_memory_order() -> None:
    values = torch.randn(300, 1001)
    torch.set_num_threads(1)
    want = sum_of_squares(values)
    torch.set_num_threads(2)
    assert sum_of_squares(values) == want
    assert sum_of_squares(values.t()) == want


@pytest.mark.parametrize(
    "bad", [torch.zeros(8)[::2], torch.zeros(8, dtype=torch.float64), torch.zeros(8, device="meta")]
)
def test_sum_of_squares_refuses_other_tensors(bad: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="sum_of_squares takes dense"):
        sum_of_squares(bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 40_001])
def test_check_finite_says_whether_the_gradient_was_and_changes_nothing_else(
    numel: int, dtype: torch.dtype
) -> None:
    for bad in (None, math.inf, -math.inf, math.nan):
        args = [tensors(numel)[0], tensors(numel)[1].to(dtype), *tensors(numel)[2:]]
        if bad is not None:
            args[1][numel * 2 // 3] = bad
        want = [tensor.clone() for tensor in args]
        scaling = {"pre_scale": 0.5, "clip_value": 1.0}  # looks before a clip could hide it
        assert adam_update(*args, AdamHyper(), 1, check_finite=True, **scaling) is (bad is None)
        assert adam_update(*want, AdamHyper(), 1, **scaling) is True
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(args, want, strict=True))
