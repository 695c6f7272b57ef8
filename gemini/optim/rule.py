"""Update rules: what an optimizer keeps of a parameter, and how a piece of chunks is updated, by the
project's kernels or by an optimizer's own ``step`` over views of chunks.

Storage knows none of them. A rule is element by element: what it makes of an element depends on that element
alone, so a parameter may be updated a piece at a time, with the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from gemini.chunk.chunk import StateSpec
from gemini.errors import ConfigError
from gemini.optim.gradients import scaled
from gemini.optim.kernels import (
    MOMENTS,
    AdamHyper,
    AdamRow,
    AdamStep,
    GradScale,
    StateFormat,
    numbers_of,
    require_non_negative,
    run_rows,
)
from gemini.optim.lion import LionHyper, lion_update
from gemini.optim.marks import Marks, Seat
from gemini.optim.shared_step import GivenLoss, GroupSettings, copied, shell_of
from gemini.optim.trials import PieceTrial
from gemini.optim.wrapped import step_of


@dataclass(frozen=True)
class UpdateStep:
    """One step of a parameter: the settings of its group as its rule has them, its number (from 1), and what
    happens to the gradient first. ``before``: its small states, None where there is no state yet; the step
    puts those of afterwards into ``after``. ``marks``: what user code has set on the parameter. ``seat``: its
    place. ``states``: what chunks keep of it."""

    hyper: Any
    number: int
    scale: GradScale = field(default_factory=GradScale)
    before: Mapping[str, Any] | None = None
    after: dict[str, Any] = field(default_factory=dict)
    marks: Marks = field(default_factory=Marks)
    seat: Seat = field(default_factory=partial(Seat, 0, 0))
    states: tuple[StateSpec, ...] = ()


class Part(NamedTuple):
    """Elements of a parameter that are updated together, as flat tensors over memory that is pinned.

    ``values``: the fp32 master or the parameter itself. ``states``: by name, zeros before the first step.
    ``half_out``: where the 16-bit copy of a master goes. ``first``: which element of the parameter is the
    first. ``kept``: what rules keep of it as long as all but the gradient and the step is the same; None: it
    is another one in the next step.
    """

    values: torch.Tensor
    grad: torch.Tensor
    states: Mapping[str, torch.Tensor]
    half_out: torch.Tensor | None
    step: UpdateStep
    first: int
    kept: dict[str, Any] | None = None


# Of each parameter group: the states that chunks keep of its parameters.
States = tuple[tuple[StateSpec, ...], ...]

# Among the small states of a parameter: the names of arrays that chunks have room for, and it does not keep.
ABSENT = "(absent)"


class UpdateRule(Protocol):
    """How one kind of optimizer updates. ``counts_steps``: whether a state dict says of each parameter how
    many steps it has made; ``keeps_small``: whether there are small states, beside chunks; ``whole``: whether
    a part is a whole parameter, in its shape."""

    @property
    def counts_steps(self) -> bool: ...

    @property
    def keeps_small(self) -> bool: ...

    @property
    def whole(self) -> bool: ...

    @property
    def shares(self) -> bool:
        """Whether a step may change what parameters share: settings of groups, attributes."""

    @property
    def defers(self) -> bool:
        """Whether updates may run after ``step()``: they read nothing but what is captured."""

    def begin(self, groups: Sequence[dict[str, Any]], loss: GivenLoss | None = None) -> None:
        """A step of all parameters begins; ``loss``: of its closure. Raises ConfigError where it cannot be
        made; changes nothing."""

    def end(self, groups: Sequence[dict[str, Any]]) -> None:
        """A step has updated all parameters, or, where nothing is shared, left that for later."""

    def attributes(self) -> dict[str, Any]:
        """Return what steps change in the optimizer object, which a checkpoint keeps."""

    def check_attributes(self, names: Iterable[str]) -> None:
        """Raise ConfigError where :meth:`attributes` has never returned something of such a name."""

    def take_attributes(self, values: Mapping[str, Any]) -> None:
        """Set what :meth:`attributes` returned."""

    @property
    def converts(self) -> bool:
        """Whether a state dict has something else than what is kept."""

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """Return what a step takes of a parameter group, hashable. Raises ConfigError for what is out of
        range, or not done under management."""

    def states(self, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> States:
        """Return what is kept of a parameter of each group, by torch's names; ``dtype``: of the values that
        are updated. What updates pieces keeps the same of all: parameters share a piece."""

    def required(self, states: Sequence[StateSpec]) -> tuple[str, ...]:
        """Return which of these a state dict must have, in the shape of the parameter."""

    def unread(self, states: Sequence[StateSpec]) -> frozenset[str]:
        """Return the names of arrays that a saved state may have of a parameter beside these, which no
        update reads: they are left out."""

    def exported(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is kept of a parameter, all of it, as a state dict has it."""

    def imported(self, state: Mapping[str, Any], like: torch.Tensor) -> Mapping[str, Any]:
        """Return what is to be kept of a parameter from its state in a state dict. ``like``: a tensor of the
        shape, memory order and type of the values that are updated."""

    def prepare(
        self, parts: Sequence[Part], device: torch.device | str, processors: Sequence[int] = ()
    ) -> Callable[[], object]:
        """Return what updates ``parts``, which are on ``device``, in place; nothing has changed before it is
        called. ``processors``: of the CPU, to compute on."""


class Independent:
    """A step changes nothing that parameters share."""

    shares: ClassVar[bool] = False
    defers: bool = True

    def begin(self, groups: Sequence[dict[str, Any]], loss: GivenLoss | None = None) -> None:
        """Nothing to be noted."""

    def end(self, groups: Sequence[dict[str, Any]]) -> None:
        """Nothing to be changed."""

    def attributes(self) -> dict[str, Any]:
        """Return nothing: no step changes any."""
        return {}

    def check_attributes(self, names: Iterable[str]) -> None:
        """Nothing can be wrong with what is not set."""

    def take_attributes(self, values: Mapping[str, Any]) -> None:
        """Nothing is to be set."""


class KeptAsNamed:
    """States have the names and the values that the optimizer gives them; a state dict may lack any."""

    def required(self, states: Sequence[StateSpec]) -> tuple[str, ...]:
        return ()

    def unread(self, states: Sequence[StateSpec]) -> frozenset[str]:
        return frozenset()

    def exported(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(state)

    def imported(self, state: Mapping[str, Any], like: torch.Tensor) -> Mapping[str, Any]:
        return state


@dataclass(frozen=True)
class AdamRule(Independent):
    """CPUAdam's and HybridAdam's kernel, one call for all parts. ``format``: how moments are kept."""

    format: StateFormat = field(default_factory=StateFormat)
    counts_steps: ClassVar[bool] = True
    keeps_small: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    @property
    def converts(self) -> bool:
        return self.format.state_dtype != "fp32"

    def hyper(self, group: Mapping[str, Any]) -> AdamHyper:
        return AdamHyper.from_group(group)

    def states(self, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> States:
        return (self.format.parts_for(dtype),) * len(groups)

    def required(self, states: Sequence[StateSpec]) -> tuple[str, ...]:
        return MOMENTS

    def unread(self, states: Sequence[StateSpec]) -> frozenset[str]:
        return frozenset()

    def exported(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.format.exported(state)

    def imported(self, state: Mapping[str, Any], like: torch.Tensor) -> Mapping[str, Any]:
        return state if self.format == StateFormat() else self.format.imported(state, like)

    def prepare(
        self, parts: Sequence[Part], device: torch.device | str, processors: Sequence[int] = ()
    ) -> Callable[[], object]:
        steps: list[AdamStep] = []
        known: dict[tuple[int, int, int], int] = {}  # most parts have the same step, of the same objects
        rows: list[AdamRow] = []
        for part in parts:
            step = part.step
            index = known.setdefault((id(step.hyper), step.number, id(step.scale)), len(steps))
            if index == len(steps):
                steps.append(AdamStep(step.hyper, step.number, step.scale))
            rows.append(self._row(part, index))
        return partial(run_rows, rows, steps, device, processors)

    def _row(self, part: Part, index: int) -> AdamRow:
        dtype = self.format.state_dtype
        kept = None if part.kept is None else part.kept.get(dtype)
        if kept is None:
            kept = self._new_row(part, index)
            if part.kept is not None:
                part.kept[dtype] = kept.without_gradient()
            return kept
        row: AdamRow = kept.again(part.grad, index)
        return row

    def _new_row(self, part: Part, index: int) -> AdamRow:
        return AdamRow(
            part.values,
            part.grad,
            part.states,
            state_dtype=self.format.state_dtype,
            half_out=part.half_out,
            first=part.first,
            step_index=index,
        )


class _TorchRule(KeptAsNamed, Independent, ABC):
    """Operators of torch on each part. States are of the type of the values, as torch has them."""

    counts_steps = False
    keeps_small = False
    whole = False
    converts = False

    def states(self, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> States:
        return (tuple(StateSpec(name, dtype) for name in self.state_names(groups)),) * len(groups)

    def required(self, states: Sequence[StateSpec]) -> tuple[str, ...]:
        return tuple(state.name for state in states)

    def prepare(
        self, parts: Sequence[Part], device: torch.device | str, processors: Sequence[int] = ()
    ) -> Callable[[], object]:
        return partial(self._run, parts)

    def _run(self, parts: Sequence[Part]) -> None:
        with torch.no_grad():
            for part in parts:
                self.update(part, scaled(part.grad, part.step.scale).to(part.values.dtype))
                if part.half_out is not None:
                    part.half_out.copy_(part.values)

    @abstractmethod
    def state_names(self, groups: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Return what is kept of each element, by torch's names."""

    @abstractmethod
    def update(self, part: Part, grad: torch.Tensor) -> None:
        """Update a part by its gradient, which may be the one in its chunk: it is not written to."""


@dataclass(frozen=True)
class SgdHyper:
    """What a step of torch.optim.SGD takes of a group."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


class SgdRule(_TorchRule):
    """torch.optim.SGD, operator by operator."""

    def hyper(self, group: Mapping[str, Any]) -> SgdHyper:
        numbers = numbers_of(group, "lr", "momentum", "weight_decay")
        require_non_negative(**numbers)
        dampening = numbers_of(group, "dampening")
        return SgdHyper(
            **numbers, **dampening, nesterov=bool(group["nesterov"]), maximize=bool(group["maximize"])
        )

    def state_names(self, groups: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        return ("momentum_buffer",) if any(float(group["momentum"]) for group in groups) else ()

    def update(self, part: Part, grad: torch.Tensor) -> None:
        hyper: SgdHyper = part.step.hyper
        if hyper.maximize:
            grad = -grad
        if hyper.weight_decay:
            grad = grad.add(part.values, alpha=hyper.weight_decay)
        if hyper.momentum:
            kept = part.states["momentum_buffer"]
            if part.step.number == 1:
                kept.copy_(grad)
            else:
                kept.mul_(hyper.momentum).add_(grad, alpha=1 - hyper.dampening)
            grad = grad.add(kept, alpha=hyper.momentum) if hyper.nesterov else kept
        part.values.add_(grad, alpha=-hyper.lr)


class LionRule(_TorchRule):
    """:class:`gemini.optim.Lion`."""

    def hyper(self, group: Mapping[str, Any]) -> LionHyper:
        return LionHyper.from_group(group)

    def state_names(self, groups: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        return ("exp_avg",)

    def update(self, part: Part, grad: torch.Tensor) -> None:
        lion_update(part.values, grad, part.states["exp_avg"], part.step.hyper)


def refuse_loops(optim: torch.optim.Optimizer, group: Mapping[str, Any]) -> GroupSettings:
    """Return the settings of a group. Raise ConfigError where they ask for loops of torch that treat a piece
    as no whole parameter."""
    for flag in ("fused", "differentiable"):
        if group.get(flag):
            raise ConfigError(
                f"{flag}=True of {type(optim).__name__}: under management a parameter is updated "
                f"in pieces, and gives the same bits only without; leave {flag} out"
            )
    return GroupSettings.of(group)


class SteppedPart:
    """A part as the tensor that an optimizer of torch, ``shell``, steps over: with its gradient, state and
    attributes."""

    def __init__(self, part: Part, shell: torch.optim.Optimizer) -> None:
        self.seat, self._part, self._states = part.step.seat, part, shell.state
        self.values = part.values.detach().requires_grad_()
        part.step.marks.put_on(self.values)
        self.values.grad = scaled(part.grad, part.step.scale).to(self.values.dtype)
        if part.step.before is not None:
            small = {name: copied(value) for name, value in part.step.before.items()}
            shell.state[self.values] = small | dict(part.states)

    def changed_marks(self) -> list[str]:
        """Return which attributes the step has changed."""
        return self._part.step.marks.changed_on(self.values)

    def keep(self) -> None:
        """Put what the step has left into the memory of the part."""
        part, values = self._part, self.values
        state = self._states.get(values, {})
        with torch.no_grad():
            if not values.is_set_to(part.values):  # its data was replaced
                part.values.copy_(values)
            for name, kept in part.states.items():
                value = state.get(name)
                if value is not None and value.data_ptr() != kept.data_ptr():
                    kept.copy_(value)
            part.step.after.update((name, value) for name, value in state.items() if name not in part.states)
            if part.half_out is not None:
                part.half_out.copy_(part.values)


class SteppedRule(KeptAsNamed, Independent):
    """What an optimizer of torch does in its own ``step``, which is element by element, or ``whole``: it gets
    all of a parameter, in its shape. ``arrays``: of a whole one, what it keeps for each element, and
    ``of_group`` which of these of the parameters of a group, None: all; otherwise that is found out.

    What has another number of values than the parameter (a count, a product, factors of a matrix) is small,
    and kept beside the chunks. Not thread-safe.
    """

    counts_steps = False
    converts = False
    keeps_small = True

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        *,
        whole: bool,
        arrays: tuple[str, ...] = (),
        of_group: Callable[[Mapping[str, Any]], tuple[str, ...]] | None = None,
    ) -> None:
        self._optim = optim
        self.whole = whole
        self._arrays = arrays
        self._of_group = of_group if of_group is not None else lambda _group: arrays
        self._trial = PieceTrial(optim)
        self._found: dict[tuple[str, torch.dtype], tuple[StateSpec, ...]] = {}

    def hyper(self, group: Mapping[str, Any]) -> GroupSettings:
        return refuse_loops(self._optim, group)

    def states(self, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> States:
        if self.whole:
            return tuple(tuple(StateSpec(name, dtype) for name in self._of_group(group)) for group in groups)
        found: dict[StateSpec, None] = {}
        for group in groups:
            settings = self.hyper(group)
            key = settings.switches, dtype
            if key not in self._found:
                self._found[key] = self._trial.of_known(settings, dtype)
            found.update(dict.fromkeys(self._found[key]))
        return (tuple(found),) * len(groups)

    def unread(self, states: Sequence[StateSpec]) -> frozenset[str]:
        return frozenset(self._arrays).difference(state.name for state in states)

    def prepare(
        self, parts: Sequence[Part], device: torch.device | str, processors: Sequence[int] = ()
    ) -> Callable[[], object]:
        return partial(self._run, parts)

    def _run(self, parts: Sequence[Part]) -> None:
        """Step over all parts at once. Parts of equal settings are one group: torch's steps read nothing
        else."""
        shell = shell_of(self._optim)
        stepped = [SteppedPart(part, shell) for part in parts]
        groups: dict[GroupSettings, list[torch.Tensor]] = {}
        for part, each in zip(parts, stepped, strict=True):
            groups.setdefault(part.step.hyper, []).append(each.values)
        shell.param_groups = [{**settings.values, "params": params} for settings, params in groups.items()]
        step_of(type(shell))(shell)
        for each in stepped:
            each.keep()
