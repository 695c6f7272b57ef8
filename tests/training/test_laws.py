"""Law 1: placement never changes the numbers. Law 2: a budget is a promise."""

from __future__ import annotations

import itertools
import logging
import mmap
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from disk_space import INDEX_BYTES, disk_space
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from training_harness import (
    KIB,
    Outcome,
    Recipe,
    assert_identical,
    assert_trains_alike,
    assert_within_budgets,
    moved_bytes,
    seeded,
    tight,
    train_managed,
    train_plain,
)
from training_models import TinyGPT, gpt_loss

from gemini import GeminiAdamOptimizer, GeminiDDP
from gemini.errors import IoError
from gemini.offload.async_file import AsyncFile

# Model data of the tiny GPT: 422 KiB in fp32.
_BUDGETS: dict[str, dict[str, Any]] = {
    "unbounded": {},
    "comfortable": {"device_bytes": 320 * KIB},
    "just fits": {"device_bytes": 72 * KIB},
    "host and disk": {"device_bytes": 72 * KIB, "host_bytes": 128 * KIB},
    "host and a small disk": {"device_bytes": 136 * KIB, "host_bytes": 264 * KIB, "disk_bytes": 272 * KIB},
    "host only": {"device_bytes": 96 * KIB, "host_bytes": 640 * KIB, "disk_dir": None},
}


class Case(NamedTuple):
    """One way to train."""

    budget: str
    policy: str
    checkpointing: str
    accumulation: str
    clip: str
    precision: str

    def recipe(self) -> Recipe:
        """Return what both runs have in common."""
        return Recipe(
            accumulate=1 if self.accumulation == "no" else 3,
            no_sync=self.accumulation == "no_sync",
            clip={"no": None, "norm": ("norm", 0.5), "value": ("value", 0.02)}[self.clip],
            precision=None if self.precision == "fp32" else self.precision,
        )


_LEVELS = (
    tuple(_BUDGETS),
    ("auto", "cpu", "cuda", "const"),
    ("none", "reentrant", "non-reentrant"),
    ("no", "plain", "no_sync"),
    ("no", "norm", "value"),
    ("fp32", "bf16"),
)


def _is_legal(case: Case) -> bool:
    return case.policy != "cuda" or case.budget == "unbounded"


def _pairs(case: Case) -> set[tuple[int, str, int, str]]:
    numbered = list(enumerate(case))
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(numbered, 2)}


def _covering_cases() -> Iterator[Case]:
    """Yield cases until every two settings that may meet have met."""
    candidates = [case for case in itertools.starmap(Case, itertools.product(*_LEVELS)) if _is_legal(case)]
    uncovered = set().union(*map(_pairs, candidates))
    while uncovered:
        best = max(candidates, key=lambda case: len(_pairs(case) & uncovered))
        uncovered -= _pairs(best)
        yield best


@cache
def _unmanaged(
    checkpointing: str, accumulate: int, clip: tuple[str, float] | None, precision: str | None
) -> Outcome:
    recipe = Recipe(accumulate=accumulate, clip=clip, precision=precision)
    return train_plain(seeded(lambda: TinyGPT(checkpointing)), gpt_loss, recipe)


def _train(case: Case, options: dict[str, Any]) -> Outcome:
    """Train as ``case`` says; state law 1 and law 2 on the way."""
    recipe = case.recipe()
    want = _unmanaged(case.checkpointing, recipe.accumulate, recipe.clip, recipe.precision)
    module = seeded(lambda: TinyGPT(case.checkpointing))
    model = GeminiDDP(module, placement_policy=case.policy, mixed_precision=recipe.precision, **options)
    got = train_managed(model, gpt_loss, recipe)
    assert_identical(got, want)
    assert_within_budgets(got.stats)
    return got


@pytest.mark.parametrize("case", list(_covering_cases()), ids=lambda case: "-".join(case).replace(" ", "_"))
def test_placement_never_changes_the_numbers(case: Case, tmp_path: Path) -> None:
    options = tight(tmp_path, **{"device_bytes": None, **_BUDGETS[case.budget]})
    got = _train(case, options)
    assert (moved_bytes(got.stats) > 0) == (case.budget != "unbounded")


@pytest.mark.dear("drawn budgets, with a training within each")
@settings(
    max_examples=num_examples(12),
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    levels=st.tuples(*(st.sampled_from(level) for level in _LEVELS[1:])),
    device_kib=st.integers(96, 460),
    host_kib=st.integers(0, 300),
    chunk_kib=st.integers(4, 12),
)
def test_any_budget_trains_to_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory,
    levels: tuple[str, ...],
    device_kib: int,
    host_kib: int,
    chunk_kib: int,
) -> None:
    case = Case("random", *levels)
    device_bytes = 2**20 if case.policy == "cuda" else device_kib * KIB
    options = tight(tmp_path_factory.mktemp("disk"), device_bytes, host_bytes=host_kib * KIB)
    _train(case, {**options, "min_chunk_size_mb": chunk_kib / KIB})


def test_a_small_disk_takes_no_more_space_than_its_budget(tmp_path: Path) -> None:
    options = tight(tmp_path, 128 * KIB, host_bytes=232 * KIB, disk_bytes=240 * KIB)
    taken: list[int] = []

    def loss_and_look(model: torch.nn.Module, index: int) -> torch.Tensor:
        taken.append(disk_space(tmp_path))
        return gpt_loss(model, index)

    got = assert_trains_alike(TinyGPT, loss_and_look, options, Recipe())
    assert got.stats["disk_write"]["bytes"] > 2 * options["disk_bytes"]
    assert options["disk_bytes"] / 2 < max(taken) <= options["disk_bytes"] + INDEX_BYTES


@pytest.mark.parametrize(
    "trouble", [KeyboardInterrupt, partial(IoError, 5, "cannot give back disk space of", "f", 0)]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_small_disk_keeps_its_budget_after_trouble(
    when: str, trouble: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    discard, armed, met = AsyncFile.discard, [False], 0

    def trip() -> None:
        nonlocal met
        met += 1
        if armed[0] and met % 3 == 0:
            armed[0] = False
            raise trouble()

    def discard_or_trip(self: AsyncFile, offset: int, nbytes: int) -> None:
        if when == "before":
            trip()
        discard(self, offset, nbytes)
        if when == "after":
            trip()

    monkeypatch.setattr(AsyncFile, "discard", discard_or_trip)
    # Every forward pass gives up places under a policy that measures nothing. Under a plan, which follows the
    # speed of the disk, it may be next to none.
    options = tight(tmp_path, 292 * KIB, host_bytes=100 * KIB, disk_bytes=200 * KIB, placement_policy="cpu")
    troubled, taken = [0], []

    def loss_again(model: torch.nn.Module, index: int) -> torch.Tensor:
        armed[0] = isinstance(model, GeminiDDP)
        try:
            loss = gpt_loss(model, index)
        except (KeyboardInterrupt, IoError):
            troubled[0] += 1
            loss = gpt_loss(model, index)
        armed[0] = False
        taken.append(disk_space(tmp_path))
        return loss

    assert_trains_alike(TinyGPT, loss_again, options, Recipe(steps=12))
    assert troubled[0] > 3
    assert max(taken) <= options["disk_bytes"] + INDEX_BYTES


@pytest.mark.parametrize("device_bytes", [None, "1GiB"])
def test_measured_non_model_memory_never_changes_the_numbers(
    device_bytes: str | None, tmp_path: Path
) -> None:
    options = tight(tmp_path, device_bytes, non_model_bytes=None)
    assert_trains_alike(TinyGPT, gpt_loss, options, Recipe())


def test_a_budget_below_the_measured_non_model_memory_warns_and_trains_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = tight(tmp_path, 72 * KIB, non_model_bytes=None)

    def loss_with_large_temporary(model: torch.nn.Module, index: int) -> torch.Tensor:
        loss = gpt_loss(model, index)
        # 40 MiB that the budget cannot hold; malloc could take them from what earlier tests left resident.
        fresh = mmap.mmap(-1, 40 * 2**20)
        return loss + torch.frombuffer(fresh, dtype=torch.float32).fill_(1).sum() * 0

    with caplog.at_level(logging.WARNING, logger="gemini"):
        got = assert_trains_alike(TinyGPT, loss_with_large_temporary, options, Recipe(steps=5))
    assert moved_bytes(got.stats) > 0
    assert any("device_bytes=73728" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_max_norm_of_the_optimizer_equals_clipping_by_hand(precision: str | None, tmp_path: Path) -> None:
    recipe = Recipe(steps=5, clip=("norm", 0.5), precision=precision)
    want = train_plain(seeded(TinyGPT), gpt_loss, recipe)
    with GeminiDDP(seeded(TinyGPT), mixed_precision=precision, **tight(tmp_path)) as model:
        optimizer = GeminiAdamOptimizer(model, max_norm=0.5, **recipe.adam)
        losses = []
        for index in range(recipe.steps):
            loss = gpt_loss(model, index)
            optimizer.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        assert_identical(Outcome(losses, model.state_dict()), want)
