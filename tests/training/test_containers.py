"""Tensors go into a model and come out of it in whatever holds them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_harness import KIB, Recipe, assert_trains_alike, tight
from training_models import Around

from gemini import GeminiDDP

Pair = namedtuple("Pair", ["x", "scale"])


@dataclass
class Record:
    x: Tensor
    note: str = "kept"
    parts: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    total: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.x.sum())


class Settings(OrderedDict[Any, Any]):
    """A mapping whose constructor takes something else."""

    def __init__(self, title: str = "") -> None:
        super().__init__()
        self.title = title


def _settings(x: Tensor) -> Settings:
    made = Settings("kept")
    made[1] = x
    return made


def _defaultdict(x: Tensor) -> defaultdict[Any, Any]:
    made: defaultdict[Any, Any] = defaultdict(list)
    made[3] = x
    return made


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda c: c),
    "dict": (lambda x: {"x": x, "n": 3}, lambda c: c["x"]),
    "nested": (lambda x: {"a": [{"b": (x, None)}]}, lambda c: c["a"][0]["b"][0]),
    "tuple": (lambda x: (x, "label"), lambda c: c[0]),
    "list": (lambda x: [x], lambda c: c[0]),
    "namedtuple": (lambda x: Pair(x, 2), lambda c: c.x),
    "dataclass": (lambda x: Record(x, parts=[x]), lambda c: c.parts[0] if c.note == "kept" else None),
    "frozen dataclass": (Frozen, lambda c: c.x + 0 * c.total),
    "int keys": (lambda x: OrderedDict({1: x}), lambda c: c[1]),
    "default dict": (_defaultdict, lambda c: c[3] if c["missing"] == [] else None),
    "own mapping": (_settings, lambda c: c[1] if c.title == "kept" else None),
    "packed sequence": (
        lambda x: nn.utils.rnn.pack_sequence([x[:3], x[3:]], enforce_sorted=False),
        lambda c: c.data,
    ),
}


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_inputs_and_outputs_may_be_in_any_container(name: str, precision: str | None, tmp_path: Path) -> None:
    pack, unpack = CONTAINERS[name]

    class Boxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Around(nn.Linear(32, 32))

        def forward(self, box: Any, *, other: Any = None) -> Any:
            kinds.append(type(box))
            return pack(self.net(unpack(box) + unpack(other)))

    def loss_fn(model: nn.Module, index: int) -> Tensor:
        x = torch.randn(6, 32, generator=torch.Generator().manual_seed(index))
        if not isinstance(model, GeminiDDP) and precision:
            x = x.to(torch.bfloat16)
        out = model(pack(x), other=pack(x / 2))
        kinds.append(type(out))
        return unpack(out).float().square().mean()

    kinds: list[type] = []
    assert_trains_alike(Boxed, loss_fn, tight(tmp_path, 48 * KIB), Recipe(steps=2, precision=precision))
    assert len(set(kinds)) == 1


def test_only_floating_point_inputs_are_cast_and_outputs_only_when_asked(tmp_path: Path) -> None:
    class Types(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor, count: int) -> Any:
            seen.append((x.dtype, mask.dtype, count))
            return super().forward(x), mask

    seen: list[Any] = []
    for outputs_fp32 in (False, True):
        options = tight(tmp_path, 64 * KIB, force_outputs_fp32=outputs_fp32)
        with GeminiDDP(Types(32, 32), mixed_precision="bf16", **options) as model:
            out, mask = model(torch.ones(2, 32), torch.ones(2, dtype=torch.bool), 3)
            assert out.dtype == (torch.float32 if outputs_fp32 else torch.bfloat16)
            assert mask.dtype == torch.bool
    assert seen == [(torch.bfloat16, torch.bool, 3)] * 2
