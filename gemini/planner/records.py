"""Records what one rank computes, keeps and sends for a micro-batch, segment by segment.

The model is cut as for the first rank of ``tp`` and ``sp``, and runs forward and backward once on ``meta``.
The segments are the blocks between which a model is cut into stages, one segment before them, and one behind.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from gemini.errors import ConfigError, GeminiError
from gemini.forecast.meter import Meter, Operation, Period
from gemini.parallel.layout_plan import Run, cuttable, trainable_outline
from gemini.parallel.pipeline.split_backward import checkpoints_noted
from gemini.parallel.pipeline.units import Units, find_units
from gemini.parallel.sequence.outline import SequenceOutline
from gemini.parallel.sequence.parallelize import refuse_unfit_model
from gemini.parallel.tensor.cut_outline import OutlineAxis, outline_part
from gemini.parallel.tensor.layers import CutLayer
from gemini.parallel.tensor.region import Region
from gemini.runtime.intercept.cpu_operators import CpuAttention


class Message(NamedTuple):
    """A collective over ``axis``. A rank contributes ``nbytes`` and sends ``sent_bytes``."""

    axis: str
    collective: str
    nbytes: int
    sent_bytes: int


Messages = Counter[Message]


@dataclass(frozen=True)
class Part:
    """The share of every layer (``tp``) and sequence (``sp``) that a rank has."""

    tp: int = 1
    sp: int = 1
    sp_mode: str = "ulysses"


@dataclass(frozen=True)
class ParameterSize:
    """The size of a parameter on this rank. Tied parameters have the same ``key``."""

    key: str
    numel: int
    itemsize: int
    trains: bool


@dataclass(frozen=True)
class Pass:
    """The work of a segment in one direction. ``peak_bytes``: peak of non-model data, minus the bytes that
    existed when forward entered the segment."""

    operations: Counter[Operation]
    messages: Messages
    peak_bytes: int


@dataclass(frozen=True)
class Use:
    """The operators from one use of parameters to the next.

    In forward, a use begins with a module that has parameters. In backward, it ends when a gradient is
    complete.

    Attributes:
        keys: the parameters used; empty for the operators before the first use.
        peak_bytes: peak of non-model data, relative as in :class:`Pass`.
        left_bytes: non-model data at the end, relative as in :class:`Pass`.
        is_lookup: backward does not read the parameters, as of an embedding.
    """

    keys: tuple[str, ...]
    operations: Counter[Operation]
    peak_bytes: int
    left_bytes: int
    is_lookup: bool = False


@dataclass(frozen=True)
class Segment:
    """A block of the model, or the layers before or behind all blocks.

    Attributes:
        name: name of the block; empty for the segments before and behind all blocks.
        kept_bytes: bytes that forward keeps for backward.
        input_bytes: size of the segment's input tensor.
        uses: the uses of its ``parameters`` in forward.
        gradients: the same in backward, in the order in which gradients are complete.
        saved_bytes: size of each tensor that autograd saves.
        again_messages: messages of forward until autograd has saved the last tensor. A block that is
            recomputed alone stops there.
        output_bytes: outputs of modules with weights that train. Between the halves of a split backward
            pass the gradients of these outputs wait for the gradients of the weights.
        received_bytes: all tensors that the segment begins with and that need a gradient or come from the
            last block; another rank sends them.
        rest_bytes: those of ``kept_bytes`` that code behind the block makes, before the next block. They stay
            where the block recomputes.
        front_bytes: tensors that autograd saves in it, and that the layers before the blocks made: each stage
            makes its own.
        carried_bytes: gradients when backward first needs a tensor that the segment saved, where a block that
            recomputes begins to.
        half_bytes: peak of the input's half of a split backward pass, above what all segments keep: that
            stays for the weights' half.
        recomputes: the model itself recomputes activations in it, by ``torch.utils.checkpoint``.
    """

    name: str
    forward: Pass
    backward: Pass
    kept_bytes: int
    input_bytes: int
    parameters: tuple[ParameterSize, ...]
    uses: tuple[Use, ...] = ()
    gradients: tuple[Use, ...] = ()
    saved_bytes: tuple[int, ...] = ()
    again_messages: Messages = field(default_factory=Counter)
    output_bytes: int = 0
    received_bytes: int = 0
    rest_bytes: int = 0
    front_bytes: int = 0
    carried_bytes: int = 0
    half_bytes: int = 0
    recomputes: bool = False


@dataclass(frozen=True)
class Record:
    """The work of a rank for one micro-batch.

    Attributes:
        segments: the layers before the blocks, each block, and the layers behind.
        why_one: why the model cannot be cut into stages; it then has a single segment.
    """

    part: Part
    segments: tuple[Segment, ...]
    why_one: str | None = None
    units: Units | None = None

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks between which the model can be cut."""
        return tuple(each.name for each in self.segments[1:-1]) if self.units is not None else ()


class CutModel:
    """A copy of a model on ``meta``, cut to ``part``. It can run with any number of samples.

    Raises:
        ConfigError: the model cannot be cut to this part.
    """

    def __init__(self, model: nn.Module, part: Part) -> None:
        self._part, self.model = part, trainable_outline(model)
        self._units, self._why_one = _units_of(self.model)
        inner = cuttable(self.model)
        if part.sp > 1:
            refuse_unfit_model(inner)
        partition = outline_part(inner, part.tp)
        self._sequences = SequenceOutline(inner, part.sp, part.sp_mode) if part.sp > 1 else None
        sp = None if self._sequences is None else self._sequences.axis("sp")
        self._axes = {name: axis for name, axis in (("tp", partition.axis), ("sp", sp)) if axis is not None}

    def record(self, run: Run) -> Record:
        """Run forward and backward of one micro-batch. If blocks do not run one after another, the whole
        model is one segment.

        Raises:
            ConfigError: a step cannot be rehearsed without values.
        """
        try:
            return self._record(run)
        except _NotInARow as reason:
            self._units, self._why_one = None, str(reason)
            return self._record(run)

    def _record(self, run: Run) -> Record:
        watch = _SegmentWatch(self._units)
        for name, axis in self._axes.items():
            assert isinstance(axis, OutlineAxis)
            axis.set_log(partial(watch.log, name))
        with (
            _watched(self.model, self._units, watch),
            _skip_repeated_blocks(self.model, self._units, watch),
        ):
            watch.run(self.model, run, self._sequences)
        return Record(self._part, watch.segments(self.model, self._units), self._why_one, self._units)


class _NotInARow(ConfigError):
    """The blocks did not run one after another, once each."""


def _units_of(model: nn.Module) -> tuple[Units | None, str | None]:
    try:
        return find_units(model), None
    except ConfigError as error:
        return None, str(error)


@dataclass
class _Stretch:
    """The periods and messages of a segment in one direction, collected during the run."""

    periods: list[Period] = field(default_factory=list)
    messages: Messages = field(default_factory=Counter)
    keys: list[tuple[str, ...]] = field(default_factory=list)  # parameters used, by period
    left_bytes: dict[int, int] = field(default_factory=dict)  # by period that ends with a complete gradient
    lookups: set[int] = field(default_factory=set)  # periods with parameters that backward does not read

    def uses(self, before: int) -> tuple[Use, ...]:
        """Return one use per period. ``before``: the bytes that existed when forward entered the segment."""
        return tuple(
            Use(
                keys,
                period.operations,
                max(period.peak_bytes - before, 0),
                max(self.left_bytes.get(at, period.peak_bytes) - before, 0),
                at in self.lookups,
            )
            for at, (keys, period) in enumerate(zip(self.keys, self.periods, strict=True))
        )


class _SegmentWatch:
    """Assigns the operators of a run to segments. Forward enters a segment when its block begins; backward
    enters it when the gradient of the next segment's input arrives."""

    def __init__(self, units: Units | None) -> None:
        self._meter = Meter()
        self._count = 1 if units is None else len(units.blocks) + 2
        self.equal_segment: dict[int, int] = {}  # by segment that did not run: the equal segment that did
        self._forward = [_Stretch() for _ in range(self._count)]
        self._backward = [_Stretch() for _ in range(self._count)]
        self._half = [_Stretch() for _ in range(self._count)]  # backward without the gradients of weights
        self._live_bytes = 0  # at the end of forward; 0 until then
        self._is_half, self._inputs = False, list[torch.Tensor]()  # of the first block
        self._entered_back = 0  # the segment that runs backward
        self._carried: dict[
            int, int
        ] = {}  # by segment: bytes alive when backward first needed a saved tensor
        self._first_periods = [0] * self._count + [sys.maxsize]  # of each segment, in forward
        self._behind_periods = [sys.maxsize] * self._count  # the first behind the block of each segment
        self._kept_bytes, self._rest_bytes = [0] * self._count, [0] * self._count
        self._input_bytes = [0] * self._count
        self._saved_bytes: list[list[int]] = [[] for _ in range(self._count)]
        self._again_messages: list[Messages] = [Counter() for _ in range(self._count)]
        self._output_bytes, self._received_bytes = [0] * self._count, [0] * self._count
        self._regions: set[Region] = set()
        self._returned: set[int] = set()  # storages of the outputs of the last block that has run
        self._front_periods = 0  # those before the first block
        self._from_front: list[dict[int, int]] = [{} for _ in range(self._count)]  # bytes by storage
        self._recomputing: set[int] = set()  # segments that call torch.utils.checkpoint
        self._saved: set[int] = set()  # storages: those of weights, and those that a segment saved
        self._now = self._forward[0]
        self._entered = 0

    def log(self, axis: str, collective: str, nbytes: int, sent_bytes: int) -> None:
        """Record a message of the segment that runs."""
        self._now.messages[Message(axis, collective, nbytes, sent_bytes)] += 1

    def enter(self, segment: int, tensors: Sequence[torch.Tensor]) -> None:
        """Begin forward of a segment. The gradient of its input will mark the start of backward in the
        segment before."""
        if segment != self._entered + 1:
            raise _NotInARow(
                f"block {segment - 1} ran after block {self._entered - 1}: blocks run one after another, "
                "once each"
            )
        self._entered = segment
        for region in self._regions:  # a stage that ends here lets the copy go; no segment keeps it
            region.forget_input()
        self._begin(self._forward[segment])
        self._first_periods[segment] = len(self._meter.periods)
        passed = [each for each in tensors if each.requires_grad]
        self._input_bytes[segment] = sum(each.nbytes for each in passed[:1] or tensors[:1])
        received = {
            each.untyped_storage()._cdata: each.nbytes
            for each in tensors
            if each.requires_grad or each.untyped_storage()._cdata in self._returned
        }
        self._received_bytes[segment] = sum(received.values())
        if passed:
            passed[0].register_hook(lambda _grad: self._go_back(segment - 1))
        if segment == 1:
            self._inputs, self._front_periods = passed, len(self._meter.periods) - 1

    def _go_back(self, segment: int) -> None:
        self._entered_back = segment
        self._begin((self._half if self._is_half else self._backward)[segment])

    def _begin(self, stretch: _Stretch, keys: tuple[str, ...] = ()) -> None:
        self._now = stretch
        self._meter.open_period()
        stretch.periods.append(self._meter.periods[-1])
        stretch.keys.append(keys)

    def use(self, keys: tuple[str, ...], *, is_lookup: bool) -> None:
        """Begin a period for the operators of a module that has parameters of its own."""
        self._begin(self._now, keys)
        if is_lookup:
            self._now.lookups.add(len(self._now.periods) - 1)

    def returned(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note what a module with weights that train has returned."""
        self._output_bytes[self._entered] += sum(each.nbytes for each in tensors)

    def returned_block(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note what a block has returned. In forward, code behind it begins."""
        if self._behind_periods[self._entered] == sys.maxsize and not self._live_bytes:
            self._begin(self._forward[self._entered])
            self._behind_periods[self._entered] = len(self._meter.periods)
        self._returned = {each.untyped_storage()._cdata for each in tensors}

    def complete(self, key: str) -> None:
        """Record that the operators until now completed the gradient of a parameter."""
        self._now.keys[-1] = (key,)
        self._now.left_bytes[len(self._now.periods) - 1] = self._meter.live_bytes
        self._begin(self._now)

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that autograd saves. Each storage counts in the segment that saves it first."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._again_messages[self._entered] = self._now.messages.copy()
        if self._entered and 0 <= self._meter.period_of(tensor) <= self._front_periods:
            self._from_front[self._entered][key] = storage.nbytes()
        if key not in self._saved:
            self._saved.add(key)
            weakref.finalize(storage, self._saved.discard, key)  # a later storage may get the same address
            self._saved_bytes[self._entered].append(storage.nbytes())
        return tensor.detach()

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that autograd saved, which backward needs now."""
        if not self._is_half:
            self._carried.setdefault(self._entered_back, self._meter.live_bytes)
        return tensor

    def run(self, model: nn.Module, run: Run, sequences: SequenceOutline | None) -> None:
        """Run forward and backward."""
        self._saved |= {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
        self._regions = {each.tensor_region for each in model.modules() if isinstance(each, CutLayer)}
        backward = torch.autograd.Variable._execution_engine.run_backward
        with torch.random.fork_rng(devices=[]), torch.device("meta"), CpuAttention(), self._meter:
            self._begin(self._forward[0])
            try:
                with (
                    torch.autograd.graph.saved_tensors_hooks(self.save, self.unpack),
                    checkpoints_noted(lambda: self._recomputing.add(self._entered)),
                ):
                    loss = run(model, sequences)
                if self._entered != self._count - 1:
                    raise _NotInARow(f"{self._entered} of {self._count - 2} blocks ran; stages run each once")
                self._note_kept()
                self._run_half(loss)
                self._go_back(self._count - 1)
                backward(
                    (loss,),
                    (torch.ones_like(loss),),
                    False,
                    False,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
            except GeminiError:
                raise
            except (RuntimeError, ValueError) as error:
                what = (
                    "cannot be rehearsed without values" if isinstance(error, RuntimeError) else "was refused"
                )
                raise ConfigError(f"the step {what}: {str(error).partition(chr(10))[0]}") from error

    def _note_kept(self) -> None:
        """Note what each segment has made that is alive when forward is over. What frames of the model's code
        hold until then counts in no segment."""
        alive = self._meter.live_by_period()
        for at, (first, end) in enumerate(pairwise(self._first_periods)):
            self._kept_bytes[at] = sum(alive[period] for period in alive if first <= period < end)
            behind = self._behind_periods[at]
            self._rest_bytes[at] = sum(alive[period] for period in alive if behind <= period < end)
        self._live_bytes = self._meter.live_bytes

    def _run_half(self, loss: torch.Tensor) -> None:
        """Run backward as the input's half does: it computes no gradients of weights and keeps the graph. A
        model that recomputes by itself is not split."""
        inputs, self._inputs = self._inputs, []
        if self._count < 3 or self._recomputing or not inputs or not loss.requires_grad:
            return
        self._is_half = True
        try:
            self._go_back(self._count - 1)
            torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        finally:
            self._is_half = False

    def segments(self, model: nn.Module, units: Units | None) -> tuple[Segment, ...]:
        """Return the recorded segments."""
        owned = _parameters_of(model, units)
        names = ("",) if units is None else ("", *units.blocks, "")
        return tuple(self._segment(at, names[at], owned) for at in range(self._count))

    def _segment(self, at: int, name: str, owned: Sequence[tuple[ParameterSize, ...]]) -> Segment:
        seen = self.equal_segment.get(at, at)
        before = sum(self._kept_bytes[:seen])
        after = before + self._kept_bytes[seen]
        output = self._input_bytes[seen + 1] if seen + 1 < self._count else 0  # freed by then
        forward, backward = self._forward[seen], self._backward[seen]
        return Segment(
            name,
            _pass(forward, before),
            _pass(backward, before),
            self._kept_bytes[seen],
            self._input_bytes[seen],
            owned[at],
            _named_as(owned[at], owned[seen], forward.uses(before)),
            _named_as(owned[at], owned[seen], backward.uses(before)),
            tuple(self._saved_bytes[seen]),
            self._again_messages[seen],
            self._output_bytes[seen],
            self._received_bytes[seen],
            self._rest_bytes[seen],
            sum(self._from_front[seen].values()),
            max(self._carried.get(seen, 0) - after, 0) + output,
            _peak(self._half[seen], self._live_bytes),
            seen in self._recomputing,
        )


def _named_as(
    own: Sequence[ParameterSize], seen: Sequence[ParameterSize], uses: tuple[Use, ...]
) -> tuple[Use, ...]:
    """Return ``uses``, recorded with the parameters ``seen`` of an equal segment, with the names of ``own``
    instead."""
    if own is seen:
        return uses
    names = {old.key: new.key for old, new in zip(seen, own, strict=True)}
    return tuple(replace(each, keys=tuple(names.get(key, key) for key in each.keys)) for each in uses)


def _pass(stretch: _Stretch, before: int) -> Pass:
    operations: Counter[Operation] = Counter()
    for period in stretch.periods:
        operations.update(period.operations)
    return Pass(operations, stretch.messages, _peak(stretch, before))


def _peak(stretch: _Stretch, before: int) -> int:
    return max((period.peak_bytes - before for period in stretch.periods), default=0)


@contextmanager
def _watched(model: nn.Module, units: Units | None, watch: _SegmentWatch) -> Iterator[None]:
    """Report to ``watch`` the begin of each block, the end of the last one, and the use of modules with
    parameters. Gradients of weights are freed as soon as they are complete, as with chunks."""
    hooks: list[Any] = []
    keys: dict[int, str] = {}
    for name, each in model.named_parameters(remove_duplicate=False):
        keys.setdefault(id(each), name)

    def begin(segment: int, _module: nn.Module, args: Any, kwargs: Any) -> None:
        watch.enter(segment, _tensors((args, kwargs)))

    def end(segment: int, _module: nn.Module, _args: Any, out: Any) -> None:
        watch.enter(segment, _tensors(out))

    def use(own: tuple[str, ...], module: nn.Module, _args: Any) -> None:
        watch.use(own, is_lookup=isinstance(module, nn.Embedding))

    def drop(param: torch.Tensor) -> None:
        param.grad = None
        watch.complete(keys[id(param)])

    for at, name in enumerate(() if units is None else units.blocks, 1):
        block = model.get_submodule(name)
        hooks.append(block.register_forward_pre_hook(partial(begin, at), with_kwargs=True))
        hooks.append(block.register_forward_hook(lambda *given: watch.returned_block(_tensors(given[2]))))
        if units is not None and at == len(units.blocks):
            hooks.append(block.register_forward_hook(partial(end, at + 1)))
    for module in model.modules():
        if own := tuple(keys[id(param)] for param in module.parameters(recurse=False)):
            hooks.append(module.register_forward_pre_hook(partial(use, own)))
            if any(param.requires_grad for param in module.parameters(recurse=False)):
                hooks.append(module.register_forward_hook(lambda *given: watch.returned(_tensors(given[2]))))
    hooks += [p.register_post_accumulate_grad_hook(drop) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_RUNS_PER_KIND = 2  # blocks of a kind that run; later ones are skipped
# Attributes that only number the blocks: equal blocks may differ in them.
_NUMBERS = ("layer_idx", "layer_id", "layer_index", "block_idx", "idx", "index", "tensor_sublayer")


@contextmanager
def _skip_repeated_blocks(model: nn.Module, units: Units | None, watch: _SegmentWatch) -> Iterator[None]:
    """Skip blocks that are equal to blocks already seen: they pass on their input. A model of a hundred equal
    layers then takes as long as a model of two."""
    changed: list[nn.Module] = []
    last: dict[Any, _EqualBlocks] = {}
    try:
        for at, name in enumerate(() if units is None else units.blocks, 1):
            block = model.get_submodule(name)
            seen = last.setdefault(_kind_of(block), _EqualBlocks(watch))
            block.forward = partial(seen.run, block.forward, at)
            changed.append(block)
        yield
    finally:
        for block in changed:
            del block.forward


class _EqualBlocks:
    """Blocks of one kind. The first ones run; later ones pass on their input if they are called with equal
    shapes."""

    def __init__(self, watch: _SegmentWatch) -> None:
        self._watch = watch
        self._runs: dict[
            Any, tuple[int, int, Any, bool]
        ] = {}  # by shapes of the arguments: (calls, last segment, its output, whether output is like input)

    def run(self, forward: Callable[..., Any], at: int, *args: Any, **kwargs: Any) -> Any:
        """Run the block of segment ``at``, or skip it and record the segment that represents it."""
        key = _shapes_of((args, kwargs))
        count, seen, out, passes = self._runs.get(key, (0, at, None, False))
        if count >= _RUNS_PER_KIND and passes:
            self._watch.equal_segment[at] = seen
            return _passed_on((args, kwargs), out)
        out = forward(*args, **kwargs)
        passed, came = _tensors((args, kwargs))[:1], _tensors(out)[:1]
        passes = (
            bool(passed and came) and passed[0].shape == came[0].shape and passed[0].dtype == came[0].dtype
        )
        self._runs[key] = (count + 1, at, tree_map_only(torch.Tensor, _Shape.of, out), passes)
        return out


@dataclass(frozen=True)
class _Shape:
    """The shape and dtype of a tensor, without the tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        """Return the shape and dtype of a tensor."""
        return cls(tensor.shape, tensor.dtype)


def _passed_on(inputs: Any, out: Any) -> Any:
    """Return an output like ``out`` in which the first floating-point tensor is the first of ``inputs``."""
    waiting = [_tensors(inputs)[0]]

    def made(shape: _Shape) -> torch.Tensor:
        if waiting and shape.dtype.is_floating_point:
            tensor = waiting.pop()
            return tensor.view_as(tensor)  # a new tensor, so that it gets its own gradient hook
        return torch.empty(shape.shape, dtype=shape.dtype, device="meta")

    return tree_map_only(_Shape, made, out)


def _shapes_of(value: Any) -> Any:
    """Return a cache key for the arguments of a call: calls with equal keys have equal shapes and plain
    values."""
    leaves, spec = tree_flatten(value)
    return spec, tuple(
        (tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else _plain(each) for each in leaves
    )


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value)


def _kind_of(block: nn.Module) -> Any:
    """Return a key that is equal for blocks that do the same: their modules, sizes and settings, except layer
    numbers."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, tuple(p.shape), p.dtype, p.requires_grad)
                for key, p in module.named_parameters(recurse=False)
            ),
            tuple(
                (key, value)
                for key, value in sorted(module.__dict__.items())
                if key not in _NUMBERS and isinstance(value, (int, float, str, bool))
            ),
        )
        for name, module in block.named_modules()
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    return [
        each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor) and each.is_floating_point()
    ]


def _parameters_of(model: nn.Module, units: Units | None) -> tuple[tuple[ParameterSize, ...], ...]:
    """Return the parameters of each segment. A tied parameter is in every segment that uses it."""
    keys: dict[int, str] = {}
    count = 1 if units is None else len(units.blocks) + 2
    found: list[dict[str, ParameterSize]] = [{} for _ in range(count)]
    for name, param in model.named_parameters(remove_duplicate=False):
        key = keys.setdefault(id(param), name)
        size = ParameterSize(key, param.numel(), param.element_size(), param.requires_grad)
        found[0 if units is None else _segment_of(name, units)][key] = size
    return tuple(tuple(each.values()) for each in found)


def _segment_of(name: str, units: Units) -> int:
    """Return the segment that contains the parameter ``name``."""
    for at, block in enumerate(units.blocks, 1):
        if name.startswith(f"{block}."):
            return at
    for unit, count in units.between:
        if name == unit or name.startswith(f"{unit}."):
            return count  # the unit runs behind this many blocks
    if any(name == unit or name.startswith(f"{unit}.") for unit in units.behind):
        return len(units.blocks) + 1
    return 0
