"""States of every format, in memory and in a file: saved, copied and exchanged without losing a bit."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from gemini import GeminiDDP, GeminiOptimizer
from gemini.errors import ConfigError
from gemini.optim import disk_states as disk_states_module
from gemini.optim.disk_states import lay_out
from gemini.optim.kernel_adam import CPUAdam, HybridAdam
from gemini.optim.kernels import STATE_DTYPES

FORMATS = list(itertools.product(STATE_DTYPES, (False, True)))
EACH_FORMAT = pytest.mark.parametrize(("state_dtype", "remainders"), FORMATS)
SIZES = [(1,), (255,), (256,), (257,), (511,), (31, 33), (2049,)]
DTYPES = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a few thousand elements fill many batches: parameters span them and share them."""
    monkeypatch.setattr(disk_states_module, "lay_out", functools.partial(lay_out, batch_bytes=4096))


def make_params() -> list[torch.Tensor]:
    """Return parameters of mixed types, with lengths around multiples of 256; some are transposed."""
    source = torch.Generator().manual_seed(0)
    params = [
        torch.randn(size, generator=source).to(dtype)
        for size, dtype in zip(SIZES, itertools.cycle(DTYPES), strict=False)
    ]
    params.append(torch.randn(40, 16, generator=source).t().to(torch.bfloat16))
    params.append(torch.randn(17, 3, 20, generator=source).permute(2, 0, 1))
    return [param.requires_grad_() for param in params]


def make_adam(params: Any, fraction: float, state_dtype: str, remainders: bool) -> CPUAdam:
    return HybridAdam(
        params,
        lr=0.01,
        weight_decay=0.1,
        nvme_offload_fraction=fraction,
        state_dtype=state_dtype,
        master_remainders=remainders,
    )


def train(optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(start, stop):
        source = torch.Generator().manual_seed(100 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=source).to(param.dtype)
        optimizer.step()


def through_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_same_states(got: Any, want: Any) -> None:
    assert got.keys() == want.keys()
    for key, state in want.items():
        assert got[key].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(got[key][name], value), (key, name)
            assert got[key][name].dtype == value.dtype


def assert_identical(
    params: list[torch.Tensor], optimizer: CPUAdam, want: list[torch.Tensor], reference: CPUAdam
) -> None:
    """Compare weights, what is exported and, where they are in memory, the raw arrays (codes)."""
    for index, pair in enumerate(zip(params, want, strict=True)):
        assert torch.equal(*pair), index
    assert_same_states(optimizer.state_dict()["state"], reference.state_dict()["state"])
    for param, other in zip(params, want, strict=True):
        kept = optimizer.state[param]
        if "exp_avg" in kept:
            assert_same_states({0: kept}, {0: reference.state[other]})


@EACH_FORMAT
@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_no_fraction_changes_a_bit(state_dtype: str, remainders: bool, fraction: float) -> None:
    want, params = make_params(), make_params()
    reference = make_adam(want, 0.0, state_dtype, remainders)
    optimizer = make_adam(params, fraction, state_dtype, remainders)
    for each in (reference, optimizer):
        train(each, 0, 4)
    assert any("exp_avg" not in state for state in optimizer.state.values())
    assert_identical(params, optimizer, want, reference)


@EACH_FORMAT
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.6, 0.6)])
def test_saved_state_continues_bit_for_bit(
    state_dtype: str, remainders: bool, before: float, after: float
) -> None:
    want, params = make_params(), make_params()
    reference = make_adam(want, 0.0, state_dtype, remainders)
    train(reference, 0, 6)
    optimizer = make_adam(params, before, state_dtype, remainders)
    train(optimizer, 0, 3)
    saved_params, saved = through_file([params, optimizer.state_dict()])
    restored = [param.detach().requires_grad_() for param in saved_params]
    successor = make_adam(restored, after, state_dtype, remainders)
    successor.load_state_dict(saved)
    assert_same_states(successor.state_dict()["state"], optimizer.state_dict()["state"])
    train(successor, 3, 6)
    assert_identical(restored, successor, want, reference)


@EACH_FORMAT
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_go_on_as_the_original(state_dtype: str, remainders: bool, how: str) -> None:
    params = make_params()
    optimizer = make_adam(params, 0.4, state_dtype, remainders)
    train(optimizer, 0, 3)
    both = [params, optimizer]
    twins, twin = pickle.loads(pickle.dumps(both)) if how == "pickle" else copy.deepcopy(both)
    for each in (optimizer, twin):
        train(each, 3, 5)
    assert twin.state_format == optimizer.state_format
    assert_identical(twins, twin, params, optimizer)


@EACH_FORMAT
def test_state_dict_is_of_one_moment(state_dtype: str, remainders: bool) -> None:
    params = make_params()
    optimizer = make_adam(params, 0.0, state_dtype, remainders)
    train(optimizer, 0, 2)
    held = optimizer.state_dict()
    then = copy.deepcopy(held["state"])
    train(optimizer, 2, 4)
    now = optimizer.state_dict()["state"]
    # torch's is a view of the present, a copy is of the past; a mixture of them could not be loaded.
    aliased = torch.equal(held["state"][1]["step"], now[1]["step"])
    assert_same_states(held["state"], now if aliased else then)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("source", STATE_DTYPES)
def test_moments_pass_between_formats_with_bounded_error(source: str, state_dtype: str) -> None:
    params = make_params()
    optimizer = make_adam(params, 0.0, source, False)
    train(optimizer, 0, 5)
    saved = optimizer.state_dict()
    successor = make_adam(make_params(), 0.0, state_dtype, False)
    successor.load_state_dict(through_file(saved))
    for key, state in successor.state_dict()["state"].items():
        want = saved["state"][key]
        assert torch.equal(state["step"], want["step"])
        bounds = rounding_bounds(state_dtype if state_dtype != source else "fp32", want)
        for name, (tolerance, power) in bounds.items():
            apart = (state[name] ** power - want[name] ** power).abs()
            assert (apart <= tolerance).all(), (key, name)


def rounding_bounds(state_dtype: str, want: dict[str, Any]) -> dict[str, tuple[torch.Tensor, float]]:
    """Return how far each moment to the given power may be from ``want`` to the same power."""
    if state_dtype == "fp32":
        return {name: (torch.tensor(0.0), 1.0) for name in ("exp_avg", "exp_avg_sq")}
    if state_dtype == "bf16":
        return {name: (want[name].abs() * 2.0**-8, 1.0) for name in ("exp_avg", "exp_avg_sq")}
    # Half a code of the largest anywhere in the tensor; the least code of a root is 1.
    first, root = want["exp_avg"].abs().max() / 127, want["exp_avg_sq"].max().sqrt() / 255
    near = torch.where(want["exp_avg_sq"].sqrt() < root / 2, root, root / 2)
    return {"exp_avg": (first * 0.501, 1.0), "exp_avg_sq": (near * 1.001, 0.5)}


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_torch_continues_from_compact_moments_and_gives_them_back(state_dtype: str) -> None:
    param = torch.randn(1000).requires_grad_()
    optimizer = make_adam([param], 0.0, state_dtype, False)
    train(optimizer, 0, 3)
    theirs = torch.optim.AdamW([param], lr=0.01)
    theirs.load_state_dict(through_file(optimizer.state_dict()))
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(theirs.state[param][name], optimizer.state_dict()["state"][0][name])
    for _ in range(40):  # torch's moments outgrow the scales that lie beside them
        param.grad = torch.randn(1000) * 50.0
        theirs.step()
    back = make_adam([param], 0.0, state_dtype, False)
    back.load_state_dict(theirs.state_dict())
    state, want = back.state_dict()["state"][0], theirs.state[param]
    for name, (tolerance, power) in rounding_bounds(state_dtype, want).items():
        assert ((state[name] ** power - want[name] ** power).abs() <= tolerance).all(), name


def test_int8_state_loads_into_another_memory_order() -> None:
    sizes = torch.logspace(-6, 3, 64)[:, None]  # rows of very different size: blocks by row or by column
    rows = torch.zeros(64, 64).requires_grad_()
    columns = torch.zeros(64, 64).t().requires_grad_()
    optimizer = CPUAdam([rows], state_dtype="int8")
    rows.grad = torch.randn(64, 64) * sizes
    optimizer.step()
    saved = optimizer.state_dict()
    successor = CPUAdam([columns], state_dtype="int8")
    successor.load_state_dict(saved)
    for name, (tolerance, power) in rounding_bounds("int8", saved["state"][0]).items():
        got = successor.state_dict()["state"][0][name] ** power
        assert ((got - saved["state"][0][name] ** power).abs() <= tolerance).all(), name


def test_remainders_that_torch_has_cast_are_not_taken() -> None:
    param = torch.randn(300).to(torch.bfloat16).requires_grad_()
    optimizer = make_adam([param], 0.0, "fp32", True)
    train(optimizer, 0, 2)
    theirs = torch.optim.AdamW([param])
    theirs.load_state_dict(optimizer.state_dict())
    train(theirs, 2, 3)  # the parameter is torch's rounding now: what was left of another one is noise
    back = make_adam([param], 0.0, "fp32", True)
    back.load_state_dict(theirs.state_dict())
    assert not back.state[param]["remainder"].any()


def test_remainder_that_does_not_fit_is_refused_and_nothing_changes() -> None:
    param = torch.randn(300).to(torch.bfloat16).requires_grad_()
    optimizer = make_adam([param], 0.0, "fp32", True)
    train(optimizer, 0, 2)
    before = copy.deepcopy(optimizer.state_dict())
    misfit = copy.deepcopy(before)
    misfit["state"][0]["remainder"] = torch.zeros(5, dtype=torch.int16)
    with pytest.raises(ConfigError, match=r"\(5,\)"):
        optimizer.load_state_dict(misfit)
    assert_same_states(optimizer.state_dict()["state"], before["state"])


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_memory_order_may_change_between_steps(state_dtype: str, fraction: float) -> None:
    results = []
    for changes in (False, True):
        param = torch.randn(40, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
        optimizer = make_adam([param], fraction, state_dtype, False)
        train(optimizer, 0, 3)
        if changes:
            param.data = param.data.t().contiguous().t()  # what Module.to(memory_format=...) does
        exported = copy.deepcopy(optimizer.state_dict()["state"][0])
        results.append([param.detach().clone(), exported["exp_avg"], exported["exp_avg_sq"]])
        if state_dtype == "fp32":  # others round by the place in memory
            train(optimizer, 3, 5)
            results[-1].append(param.detach())
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_unknown_state_dtype_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'fp8'; it can be fp32, bf16, int8"):
        CPUAdam([torch.zeros(3)], state_dtype="fp8")


@pytest.mark.parametrize("options", [{"state_dtype": "int8"}, {"master_remainders": True}])
def test_managed_model_takes_compact_states(options: dict[str, Any]) -> None:
    model = GeminiDDP(nn.Linear(4, 4, dtype=torch.bfloat16))
    optimizer = GeminiOptimizer(CPUAdam(model.parameters(), **options), model)
    optimizer.backward(model(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
    optimizer.step()
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
