"""LayoutPlan: the memory and the idle time of each rank of a layout, computed before the layout exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from gemini.errors import ConfigError
from gemini.parallel.layout import Layout
from gemini.parallel.pipeline.orders import Costs, Order, make_order, simulate
from gemini.parallel.pipeline.remote_modules import meta_copy_of
from gemini.parallel.pipeline.split import Split, choose_ranges
from gemini.parallel.pipeline.units import Units, find_units
from gemini.parallel.sequence.outline import SequenceOutline
from gemini.parallel.sequence.parallelize import refuse_unfit_model
from gemini.parallel.tensor.cut_outline import outline_part
from gemini.runtime.intercept.cpu_operators import GROUPED_MM, CpuAttention, grouped_mm

# Runs a model on ``meta`` on one micro-batch and returns the loss. The second argument cuts the micro-batch
# into this rank's part of the sequences; None keeps sequences whole.
Run = Callable[[nn.Module, SequenceOutline | None], torch.Tensor]

_aten = torch.ops.aten


def _attention_flops(q: Any, k: Any, v: Any, *_args: Any, **_options: Any) -> int:
    """Return the flops of the CPU's attention from shapes; torch does not count them."""
    return int(sdpa_flop_count(q, k, v))


def _grouped_flops(left: Sequence[int], right: Sequence[int], *_args: Any, **_options: Any) -> int:
    """Return the flops of the grouped products of experts from shapes. They do not depend on how rows are
    spread over the experts.
    """
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


_FLOPS_OF_CPU = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._grouped_mm: _grouped_flops,
}

_ADAM_BYTES = 8  # two fp32 moments for each element
_MASTER_BYTES = 4  # for each element of a 16-bit parameter


@dataclass(frozen=True)
class LayoutChoices:
    """The settings to plan: ``layout``, how a batch passes through the stages, what ``zero_stage`` cuts, and
    further options of :class:`gemini.parallel.HybridParallelPlugin` under the names that they have there.
    """

    layout: Layout
    sp_mode: str = "ulysses"
    style: str = "1f1b"
    chunks: int = 1
    num_micro_batches: int = 1
    zero_stage: int = 3
    split: Split = "bytes"
    costs: Sequence[float] | None = None
    units: Mapping[str, Any] | None = None
    cut: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RankPlan:
    """The plan of a rank along ``pp``. Sizes are in bytes.

    Ranks along ``dp`` and ``tp`` hold the same. Along ``sp`` this is the first rank, which never has fewer
    heads than the others.

    Attributes:
        rank: its index along ``pp``.
        stages: the indices of its stages.
        blocks: the first and last block name of each of its stages; empty if the model is not cut.
        parameter_bytes: parameters.
        gradient_bytes: the most gradients at one time.
        state_bytes: Adam's states, with the fp32 masters of 16-bit parameters.
        activation_bytes: the most that forward passes keep for backward in this schedule. Temporary memory of
            operators comes on top.
        message_bytes: the most that attention over parts of sequences sends and receives at once, backward
            included.
        idle: the fraction of the step in which it is idle.
    """

    rank: int
    stages: tuple[int, ...]
    blocks: tuple[tuple[str, str], ...]
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int
    message_bytes: int
    idle: float

    @property
    def unplaced_bytes(self) -> int:
        """The bytes that are on DEVICE wherever chunks are: activations and messages."""
        return self.activation_bytes + self.message_bytes

    @property
    def total_bytes(self) -> int:
        """The sum of all bytes."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes + self.unplaced_bytes


@dataclass(frozen=True)
class LayoutPlan:
    """The result of :func:`plan_layout`."""

    choices: LayoutChoices
    ranks: tuple[RankPlan, ...]

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they are idle."""
        return sum(rank.idle for rank in self.ranks) / len(self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a JSON-compatible dict; sizes in bytes."""
        choices, layout = self.choices, self.choices.layout
        return {
            "processes": layout.world_size,
            **{name: getattr(layout, name) for name in ("tp", "pp", "sp", "dp")},
            "sp_mode": choices.sp_mode if layout.sp > 1 else None,
            "zero_stage": choices.zero_stage,
            "schedule": choices.style,
            "stages_per_rank": choices.chunks,
            "micro_batches": choices.num_micro_batches,
            "bubble": self.bubble,
            "ranks": [{**asdict(rank), "total_bytes": rank.total_bytes} for rank in self.ranks],
        }


def plan_layout(model: nn.Module, run: Run, choices: LayoutChoices) -> LayoutPlan:
    """Return what each rank of a layout holds of ``model``.

    Args:
        model: the whole model, on any device; a copy of it on ``meta`` is cut and run.
        run: runs the model on one micro-batch, see :data:`Run`.
        choices: the layout and its options.

    Raises:
        ConfigError: the model cannot be cut over so many ranks (the message says over how many it can), it
            cannot work on parts of sequences, or a batch cannot be cut that way.
    """
    layout = choices.layout
    order = make_order(choices.style, layout.pp, choices.num_micro_batches, choices.chunks)
    model = trainable_outline(model)
    units, ranges = _cut(model, choices, order.num_stages)
    sequences = SequenceOutline(cuttable(model), layout.sp, choices.sp_mode) if layout.sp > 1 else None
    work = _measured(model, run, units, ranges, order, sequences)
    shares = [float(each) for each in work.flops] if any(work.flops) else None
    clock = simulate(order, Costs(1.0, 1.0, 1.0), shares)
    peaks = simulate(order, Costs(), [float(each) for each in work.held_bytes]).peak_activations
    cut = DataCut(layout.dp * layout.sp, choices.zero_stage, choices.num_micro_batches)
    found = []
    for rank in range(layout.pp):
        stages = order.stages_of(rank)
        own, whole = [ranges[stage] for stage in stages], order.num_stages == 1
        params = _parameters(model, units, own, whole=whole)
        sizes = ((each.numel(), each.element_size(), each.requires_grad) for each in params)
        parameters, gradients, states = model_bytes(sizes, cut)
        blocks = () if whole else tuple((units.blocks[a], units.blocks[b - 1]) for a, b in own)
        found.append(
            RankPlan(
                rank,
                stages,
                blocks,
                parameters,
                gradients,
                states,
                round(peaks[rank]),
                max(work.message_bytes[stage] for stage in stages),
                clock.idle[rank] / clock.seconds if clock.seconds else 0.0,
            )
        )
    return LayoutPlan(choices, tuple(found))


def refuse_uncuttable(model: nn.Module, choices: LayoutChoices) -> None:
    """Raise ConfigError if the whole ``model`` cannot be cut over the ranks of ``choices``. It cuts a copy on
    ``meta`` and runs nothing.
    """
    order = make_order(choices.style, choices.layout.pp, choices.num_micro_batches, choices.chunks)
    _cut(trainable_outline(model), choices, order.num_stages)


def _cut(
    model: nn.Module, choices: LayoutChoices, num_stages: int
) -> tuple[Units, tuple[tuple[int, int], ...]]:
    """Cut the layers of ``model``, which is on ``meta``; return the result of :func:`_divided`."""
    divided = _divided(model, choices, num_stages)
    if choices.layout.sp > 1:
        refuse_unfit_model(cuttable(model))  # before layers are cut, in the plugin's order
    outline_part(cuttable(model), choices.layout.tp, **(choices.cut or {}))
    return divided


def cuttable(model: nn.Module) -> nn.Module:
    """Return the model that can be cut: the only child of a wrapper if the child has a plan or embeddings of
    its own, else ``model``.
    """
    inner = list(model.children())
    known = ("_tp_plan", "get_input_embeddings")
    if len(inner) == 1 and not any(hasattr(model, name) for name in known):
        return inner[0] if any(hasattr(inner[0], name) for name in known) else model
    return model


def trainable_outline(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` on ``meta`` with the same ``requires_grad`` flags."""
    outline = meta_copy_of(model)
    trains = dict(model.named_parameters())
    for name, param in outline.named_parameters():
        param.requires_grad_(trains[name].requires_grad)
    return outline.train(model.training)


def _divided(
    model: nn.Module, choices: LayoutChoices, num_stages: int
) -> tuple[Units, tuple[tuple[int, int], ...]]:
    """Return the units at which the model can be cut, and the range of blocks of each stage."""
    if num_stages == 1:
        return Units(("",), (), ()), ((0, 1),)
    units = find_units(model, **(choices.units or {}))
    try:
        return units, choose_ranges(model, units, num_stages, choices.split, choices.costs)
    except ConfigError as error:
        most = len(units.blocks) // choices.chunks
        if most >= choices.layout.pp:
            raise
        raise ConfigError(
            f"pp {choices.layout.pp}: the model can be cut between {len(units.blocks)} blocks, and each rank "
            f"takes {choices.chunks} stages of at least one block; choose pp from 1 to {most}"
        ) from error


def _parameters(
    model: nn.Module, units: Units, ranges: Sequence[tuple[int, int]], *, whole: bool
) -> list[nn.Parameter]:
    """Return the parameters of some stages, tied ones once."""
    names = frozenset().union(*(units.of_stage(*each) for each in ranges))

    def is_here(name: str) -> bool:
        return whole or any(name == unit or name.startswith(f"{unit}.") for unit in names)

    found = {id(p): p for n, p in model.named_parameters(remove_duplicate=False) if is_here(n)}
    return list(found.values())


@dataclass(frozen=True)
class DataCut:
    """How ranks with the same part of a model divide it: ``copies`` ranks, by ``zero_stage``."""

    copies: int
    zero_stage: int
    num_micro_batches: int


def model_bytes(params: Iterable[tuple[int, int, bool]], cut: DataCut) -> tuple[int, int, int]:
    """Return the bytes of parameters, gradients and states that a rank holds of ``params``.

    Args:
        params: for each parameter its numel, its element size in bytes, and whether it trains.
        cut: how the ranks divide them.
    """
    parameters = gradients = states = 0
    for numel, itemsize, trains in params:
        part = -(-numel // cut.copies)
        parameters += itemsize * (part if cut.zero_stage == 3 else numel)
        if not trains:
            continue
        master = _MASTER_BYTES if itemsize < 4 else 0
        states += (_ADAM_BYTES + master) * (numel if cut.zero_stage == 0 else part)
        gradients += _gradient_bytes(numel, part, itemsize, cut)
    return parameters, gradients, states


def _gradient_bytes(numel: int, part: int, itemsize: int, cut: DataCut) -> int:
    """Return the most gradient bytes of one parameter: the whole gradient while micro-batches accumulate, in
    fp32 or a wider type, plus the mean. With one micro-batch the whole gradient has the parameter's type.
    """
    wide = max(itemsize, 4)
    if cut.zero_stage == 3:
        return wide * (numel if cut.num_micro_batches > 1 else part)
    if cut.copies == 1 or cut.zero_stage == 2:
        return wide * numel
    local = (wide if cut.num_micro_batches > 1 else itemsize) * numel
    return local + wide * (numel if cut.zero_stage == 0 else part)


@dataclass(frozen=True)
class _StageWork:
    """The work of one micro-batch in each stage: flops of forward, bytes kept for backward, and the largest
    number of message bytes at once.
    """

    flops: list[int]
    held_bytes: list[int]
    message_bytes: list[int]


def _measured(
    model: nn.Module,
    run: Run,
    units: Units,
    ranges: Sequence[tuple[int, int]],
    order: Order,
    sequences: SequenceOutline | None,
) -> _StageWork:
    """Run the whole model once on ``meta`` and measure each stage, which begins with its first block."""
    held = _SavedStorages([*model.parameters(), *model.buffers()], len(ranges))
    counter = FlopCounterMode(display=False, custom_mapping=_FLOPS_OF_CPU)
    marks, messages = [0], list[int]()

    def mark() -> None:
        marks.append(counter.get_total_flops())
        messages.append(0 if sequences is None else sequences.take_message_bytes())

    def begin(stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mark()
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        passed = [each for each in tensors if each.requires_grad] or tensors[:1]
        held.pass_on(stage, passed, is_sent=order.rank_of[stage - 1] != order.rank_of[stage])

    hooks = [
        model.get_submodule(units.blocks[start]).register_forward_pre_hook(
            lambda _module, args, kwargs, stage=stage: begin(stage, args, kwargs), with_kwargs=True
        )
        for stage, (start, _) in enumerate(ranges)
        if stage
    ]
    try:
        # Tensor-parallel regions draw seeds.
        with (
            torch.random.fork_rng(devices=[]),
            held.watched(),
            _AsOnCpu(sequences),
            counter,  # innermost, so that it sees the operators that the other modes run
            torch.device("meta"),
            CpuAttention(),
        ):
            run(model, sequences)
    finally:
        for hook in hooks:
            hook.remove()
    if len(marks) != len(ranges):
        raise ConfigError(
            f"only {len(marks)} of {len(ranges)} stages started: the blocks must run one after another, once "
            "each; name them with blocks=[...]"
        )
    mark()
    flops = [after - before for before, after in pairwise(marks)]
    return _StageWork(flops, held.nbytes, messages)


class _AsOnCpu(TorchDispatchMode):
    """Makes ``meta`` behave like the CPU: grouped products of experts work in any dtype, and a bool read from
    a tensor without data is True (models mostly ask whether a mask is all True) unless sequences are padded.
    """

    def __init__(self, sequences: SequenceOutline | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sequences = sequences

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return self._sequences is None or not self._sequences.fills_up
        return (grouped_mm if func is GROUPED_MM else func)(*args, **(kwargs or {}))


class _SavedStorages:
    """The storages that autograd keeps, by stage, without those that existed before."""

    def __init__(self, before: Sequence[torch.Tensor], num_stages: int) -> None:
        self.nbytes = [0] * num_stages
        self._before = {tensor.untyped_storage()._cdata for tensor in before}
        self._seen: list[dict[int, torch.UntypedStorage]] = [{} for _ in range(num_stages)]
        self._stage = 0

    def pass_on(self, stage: int, tensors: Sequence[torch.Tensor], *, is_sent: bool) -> None:
        """Begin a stage with the inputs ``tensors``. If they are sent, the previous stage keeps them too: its
        backward begins with them.
        """
        for tensor in tensors if is_sent else ():
            self._count(tensor)
        self._stage = stage
        for tensor in tensors:
            self._count(tensor)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count the storages saved within the block."""

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            self._count(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        seen, key = self._seen[self._stage], storage._cdata
        if key not in self._before and key not in seen:
            seen[key] = storage  # keep it alive, so that no other storage gets its address
            self.nbytes[self._stage] += storage.nbytes()
