"""What a refusal asks for is accepted."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from gemini import GeminiAdamOptimizer, GeminiDDP, IoError, OutOfBudgetError
from gemini.system.config import parse_bytes


class Odd(nn.Module):
    """Parameters of sizes that waste a different share of every chunk size."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(2000, 256)
        self.recurrent = nn.LSTM(256, 128, num_layers=2)
        self.head = nn.Linear(128, 2000)


@pytest.fixture(params=[None, "adam"], ids=["made", "announced"])
def train(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return what wraps a module and makes its optimizer, which may have been announced: one of the two is
    refused."""

    def wrap_and_make(module: nn.Module, **options: Any) -> None:
        with GeminiDDP(module, optimizer_rule=request.param, **options) as model:
            GeminiAdamOptimizer(model)

    return wrap_and_make


@pytest.mark.parametrize(
    "options", [{}, {"non_model_bytes": 2**18}, {"mixed_precision": "bf16"}, {"placement_policy": "cuda"}]
)
@pytest.mark.parametrize("build", [Odd, lambda: nn.Linear(700, 900), lambda: nn.LSTM(300, 300)])
def test_what_a_refusal_asks_for_is_accepted(
    train: Callable[..., None], build: Any, options: dict[str, Any], tmp_path: Any
) -> None:
    with pytest.raises(OutOfBudgetError) as refused:
        train(build(), device_bytes=2**19, disk_dir=str(tmp_path), **options)
    asked = re.search(r"raise device_bytes to at least ([\d.]+\wiB)", str(refused.value))
    assert asked is not None
    train(build(), device_bytes=asked[1], disk_dir=str(tmp_path), **options)


def test_what_is_too_large_may_be_split(train: Callable[..., None], tmp_path: Any) -> None:
    def wrap(rows: int) -> None:
        layers = nn.Sequential(*(nn.Linear(256, rows, bias=False) for _ in range(1024 // rows)))
        train(layers, device_bytes=2**19, disk_dir=str(tmp_path), non_model_bytes=0)

    whole = r"split this submodule, or its parameters \(the largest chunk has 1.0 MiB\)"
    with pytest.raises(OutOfBudgetError, match=whole):
        wrap(rows=1024)
    update = r"split the largest parameter \(the largest chunk has 256.0 KiB\)"
    with pytest.raises(OutOfBudgetError, match=update):
        wrap(rows=256)
    wrap(rows=64)


@pytest.mark.parametrize(
    "options", [{}, {"host_bytes": 2**20}, {"host_bytes": 2**20, "mixed_precision": "bf16"}]
)
@pytest.mark.parametrize("build", [Odd, lambda: nn.Sequential(*(nn.Linear(90, 90) for _ in range(30)))])
def test_it_is_accepted_without_a_disk_too(
    train: Callable[..., None], build: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(
        OutOfBudgetError, match=r"raise host_bytes to at least .*, or give disk_dir"
    ) as refused:
        train(build(), device_bytes=2**16, **options)
    asked = re.search(r"raise device_bytes to at least ([\d.]+\wiB)", str(refused.value))
    assert asked is not None
    train(build(), device_bytes=asked[1], **options)


@pytest.mark.parametrize(
    "below", [{"disk_bytes": 2**22}, {"host_bytes": 2**22, "disk_bytes": 2**20}, {"host_bytes": 2**22}]
)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_more_below_device_is_accepted_and_no_less(
    train: Callable[..., None], tier: str, below: dict[str, int], tmp_path: Any
) -> None:
    def wrap(**options: Any) -> None:
        disk = {"disk_dir": str(tmp_path)} if "disk_bytes" in options else {}
        train(Odd(), device_bytes=5 * 2**20, **options, **disk)

    with pytest.raises(OutOfBudgetError) as refused:
        wrap(**below)
    asked = re.search(rf"{tier}_bytes (?:to|of) at least ([\d.]+\wiB)", str(refused.value))
    assert asked is not None
    least = parse_bytes(asked[1]) or 0
    wrap(**{**below, f"{tier}_bytes": least})
    with pytest.raises(OutOfBudgetError):
        wrap(**{**below, f"{tier}_bytes": int(least * 0.99) - 1})


def test_a_disk_without_the_space_is_refused_before_training(
    train: Callable[..., None], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=2**20, total=2**30))
    options: dict[str, Any] = {"device_bytes": 5 * 2**20, "disk_dir": str(tmp_path), "non_model_bytes": 0}
    for more in ({"host_bytes": "1GiB"}, {"host_bytes": 13 * 2**20}, {"device_bytes": "1GiB"}):
        train(Odd(), disk_bytes=10 * 2**20, **{**options, **more})  # hardly any goes there
    for tiers in ({"host_bytes": 9 * 2**20, "disk_bytes": 12 * 2**20}, {"disk_bytes": 24 * 2**20}):
        with pytest.raises(IoError, match=r"takes at least .* MiB but 1\.0 MiB are free; free some space"):
            train(Odd(), **options, **tiers)
