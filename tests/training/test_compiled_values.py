"""What compiled blocks are given, what they return and leave behind is what it is without a manager."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from device_thread import advance_node_number, on_a_thread_of_its_own
from test_graphs import num_hooked
from torch import Tensor, nn
from training_harness import (
    KIB,
    Outcome,
    Recipe,
    assert_identical,
    moved_bytes,
    random_batch,
    seeded,
    tight,
    train_managed,
    train_plain,
)

from gemini import GeminiDDP
from gemini.runtime.intercept.tensors import ManagedParameter

pytestmark = pytest.mark.usefixtures("fresh_compiler")

TRACED = {"backend": "aot_eager"}
TIGHT = 120 * KIB  # of the 248 KiB that a holder keeps


class Layers(nn.Module):
    """What the blocks here are made of, ``[n, 32]`` to ``[n, 32]``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 96), nn.Linear(96, 32)

    def hidden(self, x: Tensor) -> Tensor:
        """Return the hidden layer."""
        return F.gelu(self.up(x))


class Appends(Layers):
    """Notes an auxiliary loss in the caller's list."""

    def forward(self, x: Tensor, into: list[Tensor]) -> Tensor:
        """Return the block's sum."""
        hidden = self.hidden(x)
        into.append(hidden.square().mean())
        return x + self.down(hidden)


class Writes(Layers):
    """Notes it in the caller's dict."""

    def forward(self, x: Tensor, into: dict[str, Any]) -> Tensor:
        """Return the block's sum."""
        hidden = self.hidden(x)
        into["aux"] = into.get("aux", 0) + hidden.square().mean()
        return x + self.down(hidden)


@dataclass
class Both:
    """What a block may return."""

    out: Tensor
    aux: Tensor


class Pair(NamedTuple):
    """What a block may return."""

    out: Tensor
    weight: Tensor


class ReturnsDataclass(Layers):
    """Returns an object with fields."""

    def forward(self, x: Tensor) -> Both:
        """Return the sum and an auxiliary loss."""
        hidden = self.hidden(x)
        return Both(x + self.down(hidden), hidden.square().mean())


class ReturnsWeights(Layers):
    """Returns a view of a weight in a tuple with names, leaves another in an attribute."""

    def forward(self, x: Tensor) -> Pair:
        """Return the sum and a weight."""
        self.left = self.down.weight.t()
        return Pair(x + self.down(self.hidden(x)), self.up.weight[:4])


class Holder(nn.Module):
    """Compiled blocks and what their values go to."""

    def __init__(self, kind: type[Layers]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.last = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        losses: list[Tensor] = []
        noted: dict[str, Any] = {}
        for block in self.blocks:
            if isinstance(block, Appends):
                x = block(x, losses)
            elif isinstance(block, Writes):
                x = block(x, noted)
            elif isinstance(block, ReturnsDataclass):
                both = block(x)
                x = both.out
                losses.append(both.aux)
            else:
                x, weight = block(x)
                losses.append(weight.square().sum() + block.left.abs().sum())
        assert noted or len(losses) == len(self.blocks)
        return self.last(x).square().mean() + sum(losses) + noted.get("aux", 0.0)


def compiled_holder(kind: type[Layers]) -> nn.Module:
    """Return a holder of compiled blocks."""
    model = Holder(kind)
    for block in model.blocks:
        block.compile(**TRACED)
    return model


def loss_of(model: nn.Module, index: int) -> Tensor:
    """Return the loss of a batch, whose size changes."""
    loss: Tensor = model(random_batch(index, 4 + index % 3, 32))
    return loss


@cache
def alone(kind: type[Layers], loss: Any = loss_of, accumulate: int = 1) -> Outcome:
    """Train three steps with nobody managing the model."""
    found = train_plain(seeded(lambda: compiled_holder(kind)), loss, Recipe(steps=3, accumulate=accumulate))
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("kind", [Appends, Writes, ReturnsDataclass, ReturnsWeights])
@pytest.mark.parametrize("device_bytes", [TIGHT, "16MiB"])
def test_values_are_those_of_the_model_alone(
    kind: type[Layers], device_bytes: int | str, tmp_path: Path
) -> None:
    want = alone(kind)
    model = GeminiDDP(seeded(lambda: compiled_holder(kind)), **tight(tmp_path, device_bytes))
    got = train_managed(model, loss_of, Recipe(steps=3))
    assert_identical(got, want)
    assert (moved_bytes(got.stats) > 0) == (device_bytes == TIGHT)


def _evaluates_between(model: nn.Module, index: int) -> Tensor:
    """Return the loss of a batch, after another use of the model while gradients are there."""
    if index % 2:
        with torch.no_grad():
            model.eval()(random_batch(index, 2, 32))
        model.train()
    return loss_of(model, index)


@pytest.mark.parametrize("loss", [loss_of, _evaluates_between])
@pytest.mark.parametrize("device_bytes", [TIGHT, "16MiB"])
def test_a_block_is_compiled_anew_while_there_are_gradients(
    loss: Any, device_bytes: int | str, tmp_path: Path
) -> None:
    want = alone(ReturnsDataclass, loss, 2)
    model = GeminiDDP(seeded(lambda: compiled_holder(ReturnsDataclass)), **tight(tmp_path, device_bytes))
    assert_identical(train_managed(model, loss, Recipe(steps=3, accumulate=2)), want)


class TakesWeights(Layers):
    """Uses weights that come in a list, and adds its own to it."""

    def forward(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        """Return the block's sum."""
        weights.append(self.up.weight)
        return x + self.down(self.hidden(x)) + F.linear(x, weights[0])


def test_a_callers_list_has_managed_weights_again_afterwards(tmp_path: Path) -> None:
    model = nn.ModuleList([TakesWeights(), nn.Linear(32, 32)])
    with GeminiDDP(model, **tight(tmp_path, 200 * KIB)) as managed:
        block, layer = managed.module
        block.compile(**TRACED)
        managed.compiled.refresh()
        weights = [layer.weight]
        with torch.no_grad():
            block(random_batch(0, 4, 32), weights)
        assert weights[0] is layer.weight
        assert weights[1] is block.up.weight
        assert type(weights[1]) is ManagedParameter


def test_a_forward_that_is_compiled_after_wrapping_is_found(tmp_path: Path) -> None:
    want = train_plain(seeded(lambda: compiled_holder(ReturnsDataclass)), loss_of, Recipe(steps=2))
    torch._dynamo.reset()
    model = GeminiDDP(seeded(lambda: Holder(ReturnsDataclass)), **tight(tmp_path, 200 * KIB))
    for block in model.module.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, **TRACED)
    assert_identical(train_managed(model, loss_of, Recipe(steps=2)), want)


@dataclass
class Pack:
    x: Tensor


class Unpacks(Layers):
    """Finds its input in a dataclass, or in an attribute of its own."""

    memory: Tensor | None = None

    def forward(self, pack: Pack) -> Tensor:
        """Return the block's sum."""
        x = pack.x if self.memory is None else self.memory
        return x + self.down(self.hidden(x))


@pytest.mark.parametrize("ahead", range(-2, 10))
@pytest.mark.parametrize("place", ["dataclass", "attribute"])
@on_a_thread_of_its_own
def test_older_nodes_are_told_wherever_the_call_finds_its_input(
    place: str, ahead: int, tmp_path: Path
) -> None:
    advance_node_number(5_000)  # another thread begins at 0
    block = seeded(Unpacks)
    block.compile(**TRACED)
    with GeminiDDP(nn.Sequential(nn.Linear(32, 32), block), **tight(tmp_path, 160 * KIB)) as model:

        def prepared() -> tuple[int, Callable[[], Tensor]]:
            x = torch.tanh(torch.tanh(torch.tanh(model.module[0](random_batch(0, 4, 32)))))
            block.memory = x if place == "attribute" else None
            pack = Pack(x if place == "dataclass" else torch.zeros(4, 32))
            return x.grad_fn._sequence_nr(), lambda: block(pack)

        prepared()[1]()  # compiles
        wanted = num_hooked(model, prepared()[1])
        assert wanted > 0
        made, call = prepared()
        with ThreadPoolExecutor(1) as other:
            other.submit(advance_node_number, made - ahead).result()
            assert num_hooked(model, lambda: other.submit(call).result()) == wanted
