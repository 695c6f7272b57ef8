"""What operators write to without moving a version counter is trained on, whatever moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_harness import KIB, moved_bytes

from gemini import GeminiDDP

WIDTH = 64
FOREACH_AND_FUSED = [{"foreach": False}, {"foreach": True}, {"fused": True}]
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], list[dict[str, Any]]]] = {
    "AdamW": (torch.optim.AdamW, {}, FOREACH_AND_FUSED),
    "Adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}, FOREACH_AND_FUSED),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, FOREACH_AND_FUSED),
    "Adagrad": (torch.optim.Adagrad, {}, FOREACH_AND_FUSED),
    "Adadelta": (torch.optim.Adadelta, {}, FOREACH_AND_FUSED[:2]),
    "Adamax": (torch.optim.Adamax, {}, FOREACH_AND_FUSED[:2]),
    "NAdam": (torch.optim.NAdam, {}, FOREACH_AND_FUSED[:2]),
    "RAdam": (torch.optim.RAdam, {}, FOREACH_AND_FUSED[:2]),
    "RMSprop": (torch.optim.RMSprop, {}, FOREACH_AND_FUSED[:2]),
    "Rprop": (torch.optim.Rprop, {}, FOREACH_AND_FUSED[:2]),
    "ASGD": (torch.optim.ASGD, {}, FOREACH_AND_FUSED[:2]),
    "Adafactor": (torch.optim.Adafactor, {}, FOREACH_AND_FUSED[:2]),
}
CASES = [
    pytest.param(make, {**options, **way}, id=f"{name}-{next(iter(way))}={next(iter(way.values()))}")
    for name, (make, options, ways) in OPTIMIZERS.items()
    for way in ways
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))


@pytest.fixture
def managed(tmp_path: Path) -> Iterator[GeminiDDP]:
    """Yield the network in a third of the memory of its parameters and gradients."""
    sizes = {"min_chunk_size_mb": 1 / 64, "search_range_mb": 1 / 16, "non_model_bytes": 0}
    with GeminiDDP(network(), device_bytes=96 * KIB, disk_dir=str(tmp_path), **sizes) as model:
        yield model


def groups(module: nn.Sequential) -> list[dict[str, Any]]:
    """Return a group per layer: an optimizer takes all of a group at once, and not more has to fit."""
    return [{"params": list(layer.parameters())} for layer in module]


def train(model: nn.Module, update: Callable[[], object], steps: int = 5) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        loss.backward()
        update()
        model.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("make", "options"), CASES)
def test_every_optimizer_of_torch_updates_weights_that_move(
    make: Any, options: dict[str, Any], managed: GeminiDDP
) -> None:
    plain = network()
    want = train(plain, make(groups(plain), lr=1e-2, **options).step)
    assert train(managed, make(groups(managed.module), lr=1e-2, **options).step) == want
    assert moved_bytes(managed.stats()) > 0


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    """Yield operators of a library that declare what they write to, and move no counter."""
    defined = torch.library.Library("gemini_tests", "DEF")
    defined.define("halve(Tensor(a!) weight) -> ()")
    defined.define("halve_all(Tensor(a!)[] weights, *, Tensor(b!)? also=None) -> ()")

    def halve(weight: Tensor) -> None:
        weight.detach().numpy()[:] *= 0.5

    def halve_all(weights: list[Tensor], *, also: Tensor | None = None) -> None:
        for weight in [*weights, *([] if also is None else [also])]:
            halve(weight)

    defined.impl("halve", halve, "CPU")
    defined.impl("halve_all", halve_all, "CPU")
    yield torch.ops.gemini_tests
    defined._destroy()


WAYS: dict[str, Callable[[Any, list[Tensor]], object]] = {
    "one by one": lambda ops, params: [ops.halve(param) for param in params],
    "by overload": lambda ops, params: [ops.halve.default(param) for param in params],
    "as a list": lambda ops, params: ops.halve_all(params[:1], also=params[1]),
    "by keyword": lambda ops, params: [ops.halve(weight=param) for param in params],
}


@pytest.mark.parametrize("way", WAYS)
def test_declared_writes_of_a_library_are_seen(way: str, library: Any, managed: GeminiDDP) -> None:
    plain = network()

    def halve(module: Any) -> None:
        for group in groups(module):
            with torch.no_grad():
                WAYS[way](library, group["params"])

    want = train(plain, lambda: halve(plain))
    assert train(managed, lambda: halve(managed.module)) == want
    assert moved_bytes(managed.stats()) > 0
