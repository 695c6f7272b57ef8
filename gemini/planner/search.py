"""The search: the fastest combination that fits, with runners-up and why others were left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import heapify, heappop, heappush

from torch import nn

from gemini.errors import ConfigError, OutOfBudgetError
from gemini.forecast.machine import MachineSpeeds
from gemini.forecast.meter import OperationCosts, Period
from gemini.forecast.timing import sample
from gemini.memstats.collectives import KINDS
from gemini.parallel.layout import Layout
from gemini.parallel.layout_plan import Run
from gemini.planner.chunks import ChunkSizes, StageCapacity, chunk_sizes
from gemini.planner.figures import Figures, Speeds, scaled
from gemini.planner.price import Pricer
from gemini.planner.prices import Misfit, Price, is_better
from gemini.planner.records import CutModel, Part, Record
from gemini.planner.space import (
    AS_NEEDED,
    FIT,
    NONE,
    ROTOR,
    Combination,
    Pins,
    below,
    combinations,
    layouts,
    named,
    offloading,
)

# Makes the function that runs a model on a micro-batch of so many samples.
RunOf = Callable[[int], Run]


def _say_nothing(_doing: str) -> None:
    """Nobody waits to hear."""


@dataclass(frozen=True)
class Question:
    """What is asked: ``num_ranks`` train ``batch`` samples in a step. ``capacity``: of each rank; ``pins``:
    what must be; ``sample_seconds``: how long operators are timed here. ``tell`` is told what is being
    done."""

    num_ranks: int
    batch: int
    machine: MachineSpeeds
    capacity: StageCapacity
    pins: Pins = field(default=Pins({}))
    sample_seconds: float = 0.0
    tell: Callable[[str], None] = _say_nothing


@dataclass
class Found:
    """What a search saw. ``prices``: the fastest that fit, the best first; ``left_out``: what cannot be, with
    the reason; ``misfits``: of what does not fit, the nearest miss of each layout; ``enough``: budgets that
    would do, where nothing fits; ``blocks`` of the model; ``num_combinations`` in all;
    ``num_priced`` were priced: the others cannot be faster than the last of ``prices``."""

    prices: list[Price] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    misfits: dict[Layout, Misfit] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    enough: StageCapacity | None = None
    num_combinations: int = 0
    num_priced: int = 0


def require_speeds(machine: MachineSpeeds, num_ranks: int) -> None:
    """Raise ConfigError where nothing is known of what ranks of a machine exchange, and there are several."""
    known = {each.kind for each in machine.collectives.records}
    if num_ranks > 1 and (missing := [kind for kind in KINDS if kind not in known]):
        raise ConfigError(
            f"machine {machine.name!r} has no speeds between ranks ({', '.join(missing)}): measure them "
            "there with gemini plan --measure-ranks N --save-machine FILE, or write them (docs/plan.md)"
        )


def search(model: nn.Module, run_of: RunOf, question: Question) -> Found:
    """Return the fastest combinations.

    Raises:
        ConfigError: pins leave nothing, or a step cannot be rehearsed.
    """
    return Search(model, run_of, question).run()


def search_each(model: nn.Module, run_of: RunOf, question: Question, pins: Sequence[Pins]) -> list[Found]:
    """Return what :func:`search` finds with each of ``pins`` instead of the question's own. Operators
    are timed once for all. Raises as :func:`search`."""
    searching = Search(model, run_of, question)
    return [searching.run(each) for each in pins]


class Search:
    """What :func:`search` does, any number of times; what it learns of the model is kept. Raises as it."""

    def __init__(self, model: nn.Module, run_of: RunOf, question: Question) -> None:
        self._model, self._question = model, question
        self._run_of = cache(run_of)  # for all parts
        self._impossible: Mapping[Layout, str] = {}
        self._records: dict[tuple[Part, int], Record] = {}
        self._cut: dict[Part, CutModel] = {}
        self._refused: dict[Part, ConfigError] = {}
        self._least, self._why_more = 1, ""  # samples of a micro-batch
        self._whole = self._first_record()
        self.speeds = Speeds(question.machine, self._costs())

    @property
    def whole(self) -> Record:
        """The record of the whole model."""
        return self._whole

    def _first_record(self) -> Record:
        """Return the record of the whole model with one sample; with two where one is refused, as batch norm
        does."""
        try:
            return self._record(Part(), 1)
        except ConfigError as error:
            try:
                whole = self._record(Part(), 2)
            except ConfigError:
                raise error from None
            self._least, self._why_more = 2, str(error)
            return whole

    def _look(self, capacity: StageCapacity) -> None:
        """Begin again, with what each rank may take."""
        self._capacity, self._found = capacity, Found(blocks=self._whole.blocks)
        self._pricer = Pricer(self.speeds, capacity, self.figures_of)
        self._exact_pricer = Pricer(self.speeds, capacity, self._exact, self._chunks)

    def run(self, pins: Pins | None = None, impossible: Mapping[Layout, str] | None = None) -> Found:
        """Return what was found with other ``pins``, and without layouts that are ``impossible``, for which
        reasons; where nothing fits, with what would do."""
        if pins is not None:
            self._question = replace(self._question, pins=pins)
        self._impossible = impossible or {}
        self._look(self._question.capacity)
        found = self._prices()
        if found.prices or not found.misfits:
            return found
        least = found
        for _ in range(_MOST_TRIES):
            nearest = min(least.misfits.values(), key=lambda each: each.missing_bytes)
            self._look(_with(self._capacity, nearest))
            least = self._prices()
            if least.prices or not least.misfits:
                break
        found.enough = self._least_capacity() if least.prices else None
        return found

    def _least_capacity(self) -> StageCapacity:
        """Return the least DEVICE with which anything fits, from one with which something does: stages are
        cut otherwise with every budget, so less may do than was lacking."""
        enough, tried = self._capacity, self._capacity.device_bytes - 1
        for _ in range(_MOST_LESS if not enough.lower_bytes else 0):
            self._look(replace(enough, device_bytes=tried))
            prices = self._prices().prices
            if prices:
                enough = self._capacity
                used = min(max(rank.device_bytes for rank in each.ranks) for each in prices)
                tried = min(used, tried - 1)
            elif tried == enough.device_bytes - 1:
                break
            else:
                tried = enough.device_bytes - 1
        return enough

    def _prices(self) -> Found:
        """Return what was found, the fastest first.

        Every combination lies in one queue: with its bound, then with a price from figures that grow evenly,
        then with that from a record of its own. Whichever is first goes one step on. Bounds are below prices,
        so what arrives at the end comes in the order of its time, and what stays in the queue is slower.
        """
        found, pricer = self._found, self._pricer
        queue = [(pricer.least_seconds(each), str(each), _BOUND, each) for each in self._choices()]
        found.num_combinations = len(queue)
        heapify(queue)
        prices: dict[str, Price] = {}
        while queue and len(found.prices) < _RUNNERS_UP:
            _, name, step, choice = heappop(queue)
            if step == _EXACT:
                found.prices.append(prices[name])
                continue
            found.num_priced += step == _BOUND
            priced = self._price(self._pricer if step == _BOUND else self._exact_pricer, choice)
            if priced is not None:
                prices[name] = priced
                heappush(queue, (priced.step_seconds, name, step + 1, choice))
        return found

    def _choices(self) -> Iterator[Combination]:
        any_layout = False
        for layout in layouts(self._question.num_ranks, self._question.pins):
            any_layout = True
            if self._goes(layout):
                blocks = len(self._whole.blocks)
                for choice in combinations(layout, self._question.batch, self._question.pins, blocks=blocks):
                    if choice.microbatch_size < self._least:
                        self._leave_out("micro-batches of one sample", self._why_more)
                    elif self._part_goes(choice.part):
                        yield choice
        if not any_layout:
            raise ConfigError(
                f"no layout of {self._question.num_ranks} ranks has what is pinned: "
                + ", ".join(f"{name}={value}" for name, value in self._question.pins.values.items())
            )

    def _goes(self, layout: Layout) -> bool:
        whole, batch = self._whole, self._question.batch
        if layout in self._impossible:
            self._leave_out(named(layout), self._impossible[layout])
        elif batch % layout.dp:
            self._leave_out(f"dp {layout.dp}", f"{batch} samples do not divide among {layout.dp} ranks")
        elif layout.pp > 1 and whole.why_one is not None:
            self._leave_out(f"pp {layout.pp}", whole.why_one)
        elif layout.pp > 1 and layout.pp > len(whole.blocks):
            self._leave_out(
                f"pp {layout.pp}", f"the model has {len(whole.blocks)} blocks between which it is cut"
            )
        else:
            return True
        return False

    def _part_goes(self, part: Part) -> bool:
        """Say whether layers and sequences can be cut into a part."""
        if part not in self._refused:
            try:
                self._record(part, self._least)
            except ConfigError as error:
                self._refused[part] = error
        if (refused := self._refused.get(part)) is None:
            return True
        sizes = [f"tp {part.tp}"] if part.tp > 1 else []
        sizes += [f"sp {part.sp} ({part.sp_mode})"] if part.sp > 1 else []
        self._leave_out(" x ".join(sizes), str(refused))
        return False

    def _price(self, pricer: Pricer, choice: Combination) -> Price | None:
        """Return the price, with chunks below DEVICE where they do not fit on it; None: it does not fit."""
        priced = self._priced(pricer, choice)
        if isinstance(priced, Price):
            return None if self._is_known(priced) else priced
        nearest = self._found.misfits.get(choice.layout)
        if nearest is None or priced.missing_bytes < nearest.missing_bytes:
            self._found.misfits[choice.layout] = priced
        return None

    def _is_known(self, priced: Price) -> bool:
        """Say whether another combination recomputes the same: FIT where ROTOR has no group of several
        blocks, NONE where nothing recomputes."""
        allow, how = self._question.pins.allow, priced.combination.recompute
        if how == ROTOR and not priced.groups and allow("recompute", FIT):
            return True
        return how in AS_NEEDED and not priced.recompute and not priced.groups and allow("recompute", NONE)

    def _priced(self, pricer: Pricer, choice: Combination) -> Price | Misfit:
        """Return the price, or why it does not fit."""
        priced = pricer.price(choice)
        lower = below(choice, self._question.pins)
        if isinstance(priced, Price) or not self._capacity.lower_bytes or lower is None:
            return priced
        priced = pricer.price(lower)
        both = offloading(lower, self._question.pins)
        if both is None or not _waits(priced):
            return priced
        offloaded = pricer.price(both)
        return offloaded if is_better(offloaded, priced) else priced

    def _leave_out(self, what: str, why: str) -> None:
        self._found.left_out.setdefault(what, why)

    def _exact(self, part: Part, samples: int) -> tuple[Figures, ...]:
        return self.speeds.figures(self._record(part, samples))

    def _chunks(self, part: Part, names: frozenset[str], copies: int) -> ChunkSizes:
        try:
            return chunk_sizes(self._cut[part].model, names, copies, self._capacity)
        except OutOfBudgetError:  # more pieces than are laid out
            return ChunkSizes(2**62, 2**62)

    def figures_of(self, part: Part, samples: int) -> tuple[Figures, ...]:
        """Return the figures of each segment; they grow evenly from three samples on. Raises ConfigError
        where the model cannot be cut so."""
        if samples <= _LARGE:
            return self._exact(part, samples)
        return scaled(self._exact(part, _LARGE - 1), self._exact(part, _LARGE), samples)

    def _record(self, part: Part, samples: int) -> Record:
        key = (part, samples)
        if key not in self._records:
            self._question.tell(f"rehearsing tp {part.tp}, sp {part.sp}, {samples} samples")
            if part not in self._cut:
                self._cut[part] = CutModel(self._model, part)
            self._records[key] = self._cut[part].record(self._run_of(samples))
        return self._records[key]

    def _costs(self) -> OperationCosts:
        question = self._question
        if question.sample_seconds <= 0:
            return OperationCosts(question.machine)
        question.tell(f"timing operators for {question.sample_seconds:g} s")
        ways = (way for each in self._whole.segments for way in (each.forward, each.backward))
        samples = sample(
            (Period(way.operations) for way in ways), question.machine, limit_seconds=question.sample_seconds
        )
        return OperationCosts(question.machine, samples)


_RUNNERS_UP = 16
_BOUND, _EVEN, _EXACT = range(3)  # what is known of a combination
_MOST_LESS = 8  # tries to find out whether less would do
_MOST_TRIES = 32  # to find out how much would do: chunks grow with DEVICE
# From two samples on, what a micro-batch takes grows evenly; so many are looked at. One sample is something
# else: what is transposed is still in order then, and is not copied.
_LARGE = 3


def _waits(priced: Price | Misfit) -> bool:
    """Say whether less on DEVICE could help."""
    return isinstance(priced, Misfit) or priced.most_waiting > 0


def _with(capacity: StageCapacity, misfit: Misfit) -> StageCapacity:
    """Return what the combination that was nearest would need."""
    if misfit.tier == "DEVICE":
        return replace(capacity, device_bytes=misfit.needed_bytes)
    if not capacity.disk_bytes:  # the machine may have no disk
        return replace(capacity, host_bytes=misfit.needed_bytes)
    return replace(capacity, disk_bytes=misfit.needed_bytes - capacity.host_bytes)
