"""The search space: every combination of layout, schedule, micro-batches, ZeRO stage, recomputation and
tiers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from gemini.errors import ConfigError
from gemini.parallel.layout import Layout
from gemini.parallel.pipeline.orders import make_order
from gemini.planner.records import Part

# Which blocks are recomputed. FIT: on each rank as few as its memory requires; ROTOR: the same in groups that
# keep one input each.
NONE, FIT, ROTOR, HALF, ALL = "none", "fit", "rotor", "half", "all"
RECOMPUTES = (NONE, FIT, ROTOR, HALF, ALL)
AS_NEEDED = (FIT, ROTOR)
_SAID = {
    FIT: "as few blocks recompute as fit",
    ROTOR: "groups of blocks recompute as they fit",
    HALF: "half blocks recompute",
    ALL: "all blocks recompute",
}
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev")
AXES = ("tp", "pp", "sp", "dp")
_SP_MODES = ("ulysses", "ring")
_TWO_STAGES = ("zbv", "dualpipev")
_SEVERAL_STAGES = ("interleaved", "zero_bubble", *_TWO_STAGES)


def named(layout: Layout) -> str:
    """Return the sizes of a layout that are above 1, as text."""
    sizes = (f"{name} {size}" for name in AXES if (size := getattr(layout, name)) > 1)
    return " x ".join(sizes) or "one rank"


@dataclass(frozen=True)
class Combination:
    """One way to train.

    Attributes:
        microbatch_size: number of samples.
        recompute: which blocks are recomputed in backward: NONE, FIT, ROTOR, HALF or ALL.
        uses_lower: chunks may lie on HOST and DISK.
        offloads: activations may lie there too.
    """

    layout: Layout
    sp_mode: str
    schedule: str
    stages_per_rank: int
    num_microbatches: int
    microbatch_size: int
    zero_stage: int
    recompute: str
    uses_lower: bool = False
    offloads: bool = False

    @property
    def part(self) -> Part:
        """The share of layers and sequences that a rank has."""
        return Part(self.layout.tp, self.layout.sp, self.sp_mode)

    def __str__(self) -> str:
        parts = [named(self.layout)]
        if self.layout.sp > 1:
            parts.append(self.sp_mode)
        if self.layout.pp > 1:
            several = f" of {self.stages_per_rank} stages a rank" if self.stages_per_rank > 1 else ""
            parts.append(self.schedule + several)
        parts.append(f"{self.num_microbatches} x {self.microbatch_size} samples")
        parts.append(f"ZeRO {self.zero_stage}")
        if self.recompute != NONE:
            parts.append(_SAID[self.recompute])
        if self.uses_lower:
            parts.append("tiers below DEVICE" + (", for activations too" if self.offloads else ""))
        return ", ".join(parts)


@dataclass(frozen=True)
class Pins:
    """Fields of a combination that are fixed to one value, by name."""

    values: Mapping[str, int | str]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Pins:
        """Parse ``name=value`` texts, such as ``tp=2`` or ``schedule=1f1b``.

        Raises:
            ConfigError: the name or the value is unknown.
        """
        found: dict[str, int | str] = {}
        for text in texts:
            name, given, value = text.partition("=")
            if not given or name not in _PINNED:
                raise ConfigError(f"pin {text}: write NAME=VALUE; the names are {', '.join(_PINNED)}")
            if name in found:
                raise ConfigError(f"pin {text}: {name} is pinned to {found[name]} already")
            found[name] = _value(name, value)
        return cls(found)

    def allow(self, name: str, value: int | str) -> bool:
        """Return whether the pins permit a value of a field."""
        return self.values.get(name, value) == value


_CHOICES: dict[str, tuple[str, ...]] = {
    "sp_mode": _SP_MODES,
    "schedule": SCHEDULES,
    "recompute": RECOMPUTES,
    "tiers": ("device", "lower"),
    "activations": ("device", "lower"),
}
_PINNED = (*AXES, "zero", "microbatches", *_CHOICES)


def _value(name: str, text: str) -> int | str:
    if name in _CHOICES:
        if text not in _CHOICES[name]:
            raise ConfigError(f"pin {name}={text}: {name} may be {', '.join(_CHOICES[name])}")
        return text
    if not text.isascii() or not text.isdecimal() or len(text) > 6 or (name != "zero" and int(text) == 0):
        raise ConfigError(f"pin {name}={text}: give a whole number")
    if name == "zero" and int(text) > 3:
        raise ConfigError(f"pin zero={text}: ZeRO stages are 0 to 3")
    return int(text)


def layouts(num_ranks: int, pins: Pins) -> Iterator[Layout]:
    """Yield all ordered factorizations of ``num_ranks`` into tp, pp, sp and dp."""
    divisors = [each for each in range(1, num_ranks + 1) if num_ranks % each == 0]
    for tp, pp, sp in product(divisors, repeat=3):
        if num_ranks % (tp * pp * sp):
            continue
        layout = Layout(dp=num_ranks // (tp * pp * sp), pp=pp, sp=sp, tp=tp)
        if all(pins.allow(name, getattr(layout, name)) for name in AXES):
            yield layout


def combinations(layout: Layout, batch: int, pins: Pins, *, blocks: int) -> Iterator[Combination]:
    """Yield all combinations for a layout, with model data on DEVICE only.

    ROTOR is yielded only if each rank has one stage.

    Args:
        batch: number of samples in a step of all ranks.
        blocks: number of blocks of the model; each can be recomputed or be a stage.
    """
    if batch % layout.dp:
        return
    modes = _SP_MODES if layout.sp > 1 else _SP_MODES[:1]
    recomputes = RECOMPUTES if blocks > 1 else RECOMPUTES[:1]
    zeros = range(4) if layout.dp * layout.sp > 1 else (0, 3)
    for micro in _divisors(batch // layout.dp):
        for schedule, stages in _schedules(layout.pp, micro, blocks):
            for mode, recompute, zero in product(modes, recomputes, zeros):
                found = Combination(
                    layout, mode, schedule, stages, micro, batch // layout.dp // micro, zero, recompute
                )
                if _is_allowed(found, pins) and (recompute != ROTOR or stages == 1):
                    yield found


def _is_allowed(choice: Combination, pins: Pins) -> bool:
    said: dict[str, Any] = {
        "zero": choice.zero_stage,
        "microbatches": choice.num_microbatches,
        "sp_mode": choice.sp_mode,
        "schedule": choice.schedule,
        "recompute": choice.recompute,
    }
    return all(pins.allow(name, value) for name, value in said.items())


def below(choice: Combination, pins: Pins) -> Combination | None:
    """Return ``choice`` with chunks below DEVICE; None if that is useless or forbidden.

    ZeRO 0 to 2 have no chunks to place, and pins may forbid it. With FIT or ROTOR, chunks below DEVICE would
    always leave enough room, so nothing would be recomputed.
    """
    if choice.zero_stage != 3 or choice.recompute in AS_NEEDED or not pins.allow("tiers", "lower"):
        return None
    return replace(choice, uses_lower=True)


def offloading(choice: Combination, pins: Pins) -> Combination | None:
    """Return ``choice`` with activations below DEVICE as well; None if blocks are recomputed (nothing to
    store) or pins forbid it."""
    if not choice.uses_lower or choice.recompute != NONE or not pins.allow("activations", "lower"):
        return None
    return replace(choice, offloads=True)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _schedules(pp: int, micro_batches: int, blocks: int) -> Iterator[tuple[str, int]]:
    """Yield each schedule with the number of stages per rank."""
    if pp == 1:
        yield "1f1b", 1
        return
    for schedule in SCHEDULES:
        for stages in (2,) if schedule in _SEVERAL_STAGES else (1,):
            if pp * stages <= blocks and _has_order(schedule, pp, micro_batches, stages):
                yield schedule, stages


def _has_order(schedule: str, pp: int, micro_batches: int, stages: int) -> bool:
    """Return whether a schedule supports this number of micro-batches."""
    try:
        make_order(schedule, pp, micro_batches, stages)
    except ConfigError:
        return False
    return True
