"""Case ``steps``: ``CPUAdam.step()`` beside torch's fused AdamW by size, at rest and after a product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from gemini_bench import adam_ours as ours
from gemini_bench.adam_measure import prepared
from gemini_bench.adam_peers import TORCH, torch_peer
from gemini_bench.paired import Timings, run_paired, spread_row, wall_seconds
from gemini_bench.record import Row

RATIO = 1.02
SIZES = tuple(millions * 10**6 for millions in (1, 2, 5, 10, 30, 60, 100))
COUNTS = (1, 100)
OURS = "ours"

# Short steps vary more: they get so many times the rounds.
_SHORT_NUMEL, _SHORT_ROUNDS = 10_000_000, 4
# Some milliseconds of two cores: torch's threads are still awake when the step begins.
_PRODUCT_ROWS = 1024
_HELD_BYTES = 2 * 16 + 8  # per parameter: both, and what is copied while they are made


class Setting(NamedTuple):
    """The parameters of a measured step, and the work just before it."""

    numel: int
    num_tensors: int
    after_product: bool

    def __str__(self) -> str:
        tensors = "one tensor" if self.num_tensors == 1 else f"{self.num_tensors} tensors"
        when = "after a matrix product" if self.after_product else "at rest"
        return f"{self.numel / 10**6:g}M, {tensors}, {when}"


def sizes(numel: int) -> tuple[int, ...]:
    """Return the sizes to measure up to ``numel`` elements, at least the smallest."""
    return tuple(size for size in SIZES if size <= numel) or SIZES[:1]


def settings(numel: int) -> Iterator[Setting]:
    """Yield the settings to measure, in the table's order."""
    for size in sizes(numel):
        for count in COUNTS:
            yield from (Setting(size, count, after) for after in (False, True))


def task(options: dict[str, Any]) -> dict[str, Any]:
    """Time both optimizers by turns in every setting; their names are then followed by it."""
    numel = prepared(options)
    found: dict[str, dict[str, Any]] = {"seconds": {}, "nbytes": {}, "cores": {}}
    for setting in settings(numel):
        rounds = options["repeats"] * (_SHORT_ROUNDS if setting.numel < _SHORT_NUMEL else 1)
        each = [setting.numel // setting.num_tensors] * setting.num_tensors
        contenders = [
            ours.step_contender(OURS, ours.adam, each),
            ours.step_contender(TORCH, torch_peer().optimizer, each),
        ]
        timed = _after_a_product() if setting.after_product else wall_seconds
        measured = run_paired(contenders, rounds, timed=timed)
        for kind, values in found.items():
            values.update({_name(name, setting): value for name, value in measured[kind].items()})
    return {**found, "absent": {}, "numel": numel}


def _name(name: str, setting: Setting) -> str:
    return f"{name}: {setting}"


def _after_a_product() -> Callable[[Callable[[], object]], float]:
    """Return a function that multiplies two matrices, then times the call."""
    matrix = torch.ones(_PRODUCT_ROWS, _PRODUCT_ROWS)

    def timed(run: Callable[[], object]) -> float:
        torch.mm(matrix, matrix)
        return wall_seconds(run)

    return timed


def held_bytes(numel: int) -> float:
    """Return the bytes that the contenders of the largest size hold, and copy during construction."""
    return _HELD_BYTES * max(sizes(numel))


def rows(prefix: str, times: Timings, absent: Mapping[str, str]) -> list[Row]:
    """Return our time in every measured setting, and its ratio to torch's."""
    del absent
    found: list[Row] = []
    for setting in settings(max(SIZES)):
        mine, theirs = _name(OURS, setting), _name(TORCH, setting)
        if mine in times:
            found.append(spread_row(f"{prefix}{setting}: ours", times.milliseconds(mine), "ms"))
            ratio = times.ratio(mine, theirs)
            found.append(spread_row(f"{prefix}{setting}: ours / {TORCH}", ratio, "x", RATIO))
    return found
