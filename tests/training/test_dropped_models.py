"""A model that nobody uses any longer goes as others do: one collection of Python's is enough."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_harness import Net, net_loss, offloaded
from pairs import pairs
from torch import Tensor, nn
from training_harness import KIB, seeded, tight

import gemini
from gemini import GeminiDDP, GeminiOptimizer

Use = Callable[[nn.Module], None]


def in_place(module: nn.Module, **options: Any) -> nn.Module:
    gemini.manage(module, **options)
    return module


def resident(_tmp_path: Path, _device_bytes: int) -> dict[str, Any]:
    return {}


def nothing(_model: nn.Module) -> None:
    pass


def training(model: nn.Module) -> None:
    optimizer = GeminiOptimizer(torch.optim.AdamW(model.parameters()), model)
    for index in range(3):
        optimizer.backward(net_loss(model, index))
        optimizer.step()
    with torch.no_grad():
        net_loss(model, 0)


def a_step_that_fails(model: nn.Module) -> None:
    def fail(_grad: Tensor) -> None:
        raise ValueError("a bad gradient")

    loss = net_loss(model, 0)
    loss.register_hook(fail)
    with pytest.raises(ValueError, match="a bad gradient"):
        loss.backward()


def hooks_of_the_user(model: nn.Module) -> None:
    for param in model.parameters():
        param.register_hook(lambda _grad: None)
        param.register_post_accumulate_grad_hook(lambda _param: None)
    training(model)


@pairs(
    wrap=[GeminiDDP, in_place],
    within=[resident, tight, offloaded],
    use=[nothing, training, a_step_that_fails, hooks_of_the_user],
)
def test_a_dropped_model_goes_in_one_collection(
    wrap: Callable[..., Any], within: Callable[..., dict[str, Any]], use: Use, tmp_path: Path
) -> None:
    model = wrap(seeded(Net), **within(tmp_path, 160 * KIB))
    use(model)
    handle = gemini.handle_of(model)
    gone = [weakref.ref(each) for each in (model, handle, handle.manager, handle.manager.chunks)]
    del model, handle
    gc.collect()
    assert [each() for each in gone] == [None] * 4
