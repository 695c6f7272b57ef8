"""Searches the space for the fastest combinations that fit, and records why others were excluded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import heapify, heappop, heappush

from torch import nn

from gemini.errors import ConfigError, OutOfBudgetError
from gemini.forecast.forecast import ignore_progress
from gemini.forecast.machine import MachineSpeeds
from gemini.forecast.meter import OperationCosts, Period
from gemini.forecast.timing import sample
from gemini.memstats.collectives import KINDS
from gemini.parallel.layout import Layout
from gemini.parallel.layout_plan import Run
from gemini.planner.chunks import ChunkSizes, StageCapacity, chunk_sizes
from gemini.planner.price import Pricer
from gemini.planner.prices import Misfit, Price, is_better
from gemini.planner.records import CutModel, Part, Record
from gemini.planner.segment_costs import SegmentCosts, Speeds, scaled
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

# Given a number of samples, returns the function that runs a model on a micro-batch of that size.
RunOf = Callable[[int], Run]


@dataclass(frozen=True)
class Question:
    """The input of a search: ``num_ranks`` ranks train ``batch`` samples per step.

    Attributes:
        capacity: budget of each rank.
        pins: settings that every result must have.
        sample_seconds: how long operators are timed on this machine; 0: estimate them from ``machine``.
        tell: called with a description of each phase of the search.
    """

    num_ranks: int
    batch: int
    machine: MachineSpeeds
    capacity: StageCapacity
    pins: Pins = field(default=Pins({}))
    sample_seconds: float = 0.0
    tell: Callable[[str], None] = ignore_progress


@dataclass
class Found:
    """The result of a search.

    Attributes:
        prices: the fastest combinations that fit, fastest first.
        left_out: excluded settings, with the reason.
        misfits: for each layout without a fit, the combination that lacks the fewest bytes.
        blocks: names of the model's blocks.
        enough: budgets that are enough, if nothing fits.
        num_combinations: size of the space.
        num_priced: how many were priced. The rest cannot be faster than the last of ``prices``.
    """

    prices: list[Price] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    misfits: dict[Layout, Misfit] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    enough: StageCapacity | None = None
    num_combinations: int = 0
    num_priced: int = 0


def require_speeds(machine: MachineSpeeds, num_ranks: int) -> None:
    """Raise ConfigError if there are several ranks and the machine has no speeds of collectives."""
    known = {each.kind for each in machine.collectives.records}
    if num_ranks > 1 and (missing := [kind for kind in KINDS if kind not in known]):
        raise ConfigError(
            f"machine {machine.name!r} has no speeds between ranks ({', '.join(missing)}): measure them "
            "there with gemini plan --measure-ranks N --save-machine FILE, or write them (docs/plan.md)"
        )


def search(model: nn.Module, run_of: RunOf, question: Question) -> Found:
    """Return the fastest combinations.

    Raises:
        ConfigError: the pins exclude everything, or a step cannot be rehearsed.
    """
    return Search(model, run_of, question).run()


def search_each(model: nn.Module, run_of: RunOf, question: Question, pins: Sequence[Pins]) -> list[Found]:
    """Return the result of :func:`search` for each of ``pins``, which replace the question's own. Operators
    are timed once for all. Raises the errors of :func:`search`."""
    searching = Search(model, run_of, question)
    return [searching.run(each) for each in pins]


class Search:
    """A reusable :func:`search`: records of the model and operator times are kept between runs. Raises the
    errors of :func:`search`."""

    def __init__(self, model: nn.Module, run_of: RunOf, question: Question) -> None:
        self._model, self._question = model, question
        self._run_of = cache(run_of)  # shared by all parts
        self._impossible: Mapping[Layout, str] = {}
        self._records: dict[tuple[Part, int], Record] = {}
        self._cut: dict[Part, CutModel] = {}
        self._refused: dict[Part, ConfigError] = {}
        self._least, self._why_more = 1, ""  # smallest micro-batch, and why it is not 1
        self._whole = self._first_record()
        self.speeds = Speeds(question.machine, self._costs())

    @property
    def whole(self) -> Record:
        """The record of the whole model."""
        return self._whole

    def _first_record(self) -> Record:
        """Return the record of the whole model with one sample; with two if the model refuses one, as batch
        norm does."""
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
        """Reset the result and the pricers for a budget."""
        self._capacity, self._found = capacity, Found(blocks=self._whole.blocks)
        self._pricer = Pricer(self.speeds, capacity, self.costs_of)
        self._exact_pricer = Pricer(self.speeds, capacity, self._exact, self._chunks)

    def run(self, pins: Pins | None = None, impossible: Mapping[Layout, str] | None = None) -> Found:
        """Run the search, optionally with other ``pins``. If nothing fits, also find budgets that are enough.

        Args:
            pins: replace the question's pins; None: keep them.
            impossible: layouts to exclude, with the reason.
        """
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
        """Return the smallest DEVICE budget found with which anything fits, starting from the current one,
        which is enough. Each budget gives other stages, so less than the reported misfit may be enough."""
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
        """Return the fastest combinations, fastest first.

        All combinations are in one priority queue, at first with a lower bound of their seconds. The first
        one is taken out and advances one step: from its bound to a price with extrapolated costs, then to a
        price with a record of its own. Bounds are below prices, so results come out in order of their time,
        and the combinations that remain in the queue are slower.
        """
        found, pricer = self._found, self._pricer
        # The name breaks ties: combinations themselves cannot be compared.
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
        any_layout = any_choice = False
        for layout in layouts(self._question.num_ranks, self._question.pins):
            any_layout = True
            if self._goes(layout):
                for choice in self._combinations(layout, self._question.pins):
                    any_choice = True
                    if choice.microbatch_size < self._least:
                        self._leave_out("micro-batches of one sample", self._why_more)
                    elif self._part_goes(choice.part):
                        yield choice
        if not any_layout:
            raise ConfigError(
                f"no layout of {self._question.num_ranks} ranks has what is pinned: "
                + ", ".join(f"{name}={value}" for name, value in self._question.pins.values.items())
            )
        if not any_choice and not self._found.left_out:
            raise ConfigError(self._contradiction())

    def _combinations(self, layout: Layout, pins: Pins) -> Iterator[Combination]:
        return combinations(layout, self._question.batch, pins, blocks=len(self._whole.blocks))

    def _contradiction(self) -> str:
        """Return which pins leave nothing together, and what there is without them."""
        values = self._question.pins.values

        def there_is(names: Iterable[str]) -> bool:
            pins = Pins({name: values[name] for name in names})
            tried = layouts(self._question.num_ranks, pins)
            return any(any(self._combinations(layout, pins)) for layout in tried)

        wrong = [name for name in values if there_is(each for each in values if each != name)]
        said = ", ".join(f"{name}={value}" for name, value in values.items())
        text = f"no combination of {self._question.batch} samples has all that is pinned: {said}"
        if not wrong:
            return f"{text}; give fewer pins"
        return f"{text}; without {' or '.join(f'{name}={values[name]}' for name in wrong)} there are some"

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
        """Return whether layers and sequences can be cut to a part; if not, record the reason."""
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
        """Return the price, with chunks below DEVICE if they do not fit on it. None if it does not fit or is
        a duplicate."""
        priced = self._priced(pricer, choice)
        if isinstance(priced, Price):
            return None if self._is_known(priced) else priced
        nearest = self._found.misfits.get(choice.layout)
        if nearest is None or priced.missing_bytes < nearest.missing_bytes:
            self._found.misfits[choice.layout] = priced
        return None

    def _is_known(self, priced: Price) -> bool:
        """Return whether another combination recomputes the same blocks: FIT if ROTOR has no group of several
        blocks, NONE if nothing is recomputed."""
        allow, how = self._question.pins.allow, priced.combination.recompute
        if how == ROTOR and not priced.groups and allow("recompute", FIT):
            return True
        return how in AS_NEEDED and not priced.recompute and not priced.groups and allow("recompute", NONE)

    def _priced(self, pricer: Pricer, choice: Combination) -> Price | Misfit:
        """Return the price, or why the combination does not fit. Tiers below DEVICE are tried if DEVICE is
        too small."""
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

    def _exact(self, part: Part, samples: int) -> tuple[SegmentCosts, ...]:
        return self.speeds.segment_costs(self._record(part, samples))

    def _chunks(self, part: Part, names: frozenset[str], copies: int) -> ChunkSizes:
        try:
            return chunk_sizes(self._cut[part].model, names, copies, self._capacity)
        except OutOfBudgetError:  # the layout would need too many pieces: treat it as a misfit
            return ChunkSizes(2**62, 2**62)

    def costs_of(self, part: Part, samples: int) -> tuple[SegmentCosts, ...]:
        """Return the costs of each segment, extrapolated linearly beyond three samples. Raises ConfigError
        if the model cannot be cut to ``part``."""
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
_BOUND, _EVEN, _EXACT = range(3)  # what the queue knows: a bound, an extrapolated price, an exact price
_MOST_LESS = 8  # attempts to find a smaller budget that is enough
_MOST_TRIES = 32  # attempts to find a budget that is enough: chunks grow with DEVICE, so one may not do
# Micro-batches up to this size are recorded; larger ones are extrapolated from two and three samples. One
# sample is no basis: its transposed tensors are still contiguous and are not copied.
_LARGE = 3


def _waits(priced: Price | Misfit) -> bool:
    """Return whether moving activations off DEVICE could help: the combination does not fit or waits for
    transfers."""
    return isinstance(priced, Misfit) or priced.most_waiting > 0


def _with(capacity: StageCapacity, misfit: Misfit) -> StageCapacity:
    """Return the capacity that the nearest misfit would need."""
    if misfit.tier == "DEVICE":
        return replace(capacity, device_bytes=misfit.needed_bytes)
    if not capacity.disk_bytes:  # the machine may have no disk
        return replace(capacity, host_bytes=misfit.needed_bytes)
    return replace(capacity, disk_bytes=misfit.needed_bytes - capacity.host_bytes)
