"""What users do to parameters and states between steps is refused by name or followed, never overrun."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from gemini.errors import ConfigError, StateError
from gemini.optim import CPUAdam


def stepped(param: torch.Tensor, **options: object) -> CPUAdam:
    param.grad = torch.ones_like(param)
    optimizer = CPUAdam([param], lr=0.1, **options)  # type: ignore[arg-type]
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_parameter_that_shrank_is_refused_and_its_neighbours_stay(fraction: float) -> None:
    param = torch.nn.Parameter(torch.zeros(1000))
    optimizer = stepped(param, nvme_offload_fraction=fraction)
    base = torch.ones(1000)
    param.data = base[:10]
    param.grad = torch.ones(10)
    with pytest.raises(ConfigError, match="parameter 0 of group 0"):
        optimizer.step()
    assert torch.equal(base, torch.ones(1000))


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_parameter_that_became_bf16_is_refused(fraction: float) -> None:
    param = torch.nn.Parameter(torch.zeros(300))
    optimizer = stepped(param, nvme_offload_fraction=fraction, master_remainders=True)
    param.data = torch.zeros(300, dtype=torch.bfloat16)
    param.grad = torch.ones(300, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="load state_dict"):
        optimizer.step()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch ties it to the parameter's")
def test_parameter_seen_as_another_type_in_place_is_read_as_that_type() -> None:
    param = torch.nn.Parameter(torch.zeros(16, dtype=torch.float16))
    param.grad_dtype = None
    optimizer = stepped(param)
    param.data = param.data.view(torch.bfloat16).fill_(1.0)
    twin = torch.nn.Parameter(param.detach().clone())
    twin.grad_dtype = None
    twin.grad = param.grad
    other = CPUAdam([twin], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    optimizer.step()
    other.step()
    assert torch.equal(param, twin)


def test_transposed_moment_is_followed() -> None:
    param = torch.nn.Parameter(torch.randn(6, 6))
    optimizer = stepped(param)
    moment = optimizer.state[param]["exp_avg"]
    moment.copy_(torch.randn(6, 6))
    moment.data = moment.data.t()
    twin = torch.nn.Parameter(param.detach().clone())
    twin.grad = torch.ones(6, 6)
    want = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.0, foreach=False)
    want.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    want.step()
    assert torch.allclose(param, twin, rtol=1e-6, atol=1e-7)


def test_model_that_holds_its_optimizer_is_collected() -> None:
    param = torch.nn.Parameter(torch.zeros(8))
    optimizer = stepped(param)
    param.trainer = optimizer
    gone = weakref.ref(optimizer)
    del param, optimizer
    gc.collect()
    assert gone() is None


def test_step_that_stops_between_its_parts_is_remembered() -> None:
    params = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(1000)
    optimizer = CPUAdam(params, nvme_offload_fraction=0.5)
    optimizer.step()

    def failing(*_arguments: object) -> None:
        raise RuntimeError("no memory")

    optimizer._prepare(optimizer._collect())
    optimizer._rows[0].run = failing  # type: ignore[method-assign]
    optimizer._prepare = lambda _updates: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        optimizer.step()
    with pytest.raises(StateError, match="half-way"):
        optimizer.step()


@pytest.mark.parametrize("count", [-3.0, float("nan"), float("inf")])
def test_step_counts_that_are_none_are_refused(count: float) -> None:
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = stepped(param)
    optimizer.state[param] = {**optimizer.state[param], "step": torch.tensor(count)}
    with pytest.raises(ConfigError, match="step of parameter 0"):
        optimizer.step()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-39, 1e46])
def test_grad_scale_that_the_kernel_cannot_take_is_refused(scale: float) -> None:
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = stepped(param)
    before = param.detach().clone()
    with pytest.raises(ConfigError, match="grad_scale"):
        optimizer.step(grad_scale=scale)
    assert torch.equal(param, before)


def test_settings_of_the_optimizer_are_refused_in_a_group() -> None:
    with pytest.raises(ConfigError, match="state_dtype"):
        CPUAdam([{"params": [torch.zeros(2)], "state_dtype": "int8"}])
