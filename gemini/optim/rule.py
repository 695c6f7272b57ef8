"""Update rules: the states that an optimizer keeps per parameter, and its update of a piece of chunks, by the
project's kernels or by an optimizer's own ``step`` over views of chunks.

Storage knows no rule. An element-wise rule updates each element from that element alone, so a parameter may
be updated one piece at a time with the same bits.
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
    floats_of,
    require_non_negative,
    run_rows,
)
from gemini.optim.lion import LionHyper, lion_update
from gemini.optim.marks import Marks, ParamIndex
from gemini.optim.shared_step import GivenLoss, GroupSettings, copied, shell_of
from gemini.optim.trials import PieceTrial
from gemini.optim.wrapped_optimizer import step_of


@dataclass(frozen=True)
class UpdateStep:
    """One step of one parameter, as captured when ``step()`` was called.

    Attributes:
        hyper: the settings of its group, from :meth:`UpdateRule.hyper`.
        number: the number of the step, from 1.
        scale: applied to the gradient first.
        before: its small states; None before the first step.
        after: receives the small states that the step leaves.
        marks: the attributes that user code set on the parameter.
        param_index: its group and its index in the group.
        states: the states that chunks keep for it.
    """

    hyper: Any
    number: int
    scale: GradScale = field(default_factory=GradScale)
    before: Mapping[str, Any] | None = None
    after: dict[str, Any] = field(default_factory=dict)
    marks: Marks = field(default_factory=Marks)
    param_index: ParamIndex = field(default_factory=partial(ParamIndex, 0, 0))
    states: tuple[StateSpec, ...] = ()


class Part(NamedTuple):
    """Elements of a parameter that are updated together, as flat tensors over pinned memory.

    Attributes:
        values: the fp32 master, or the parameter itself.
        states: by name; zeros before the first step.
        half_out: receives the 16-bit copy of a master; None without master.
        first: the index of the first element within the parameter.
        kept: a dict in which rules cache data that stays valid while only the gradient and the step change;
            None if the next step uses another part.
    """

    values: torch.Tensor
    grad: torch.Tensor
    states: Mapping[str, torch.Tensor]
    half_out: torch.Tensor | None
    step: UpdateStep
    first: int
    kept: dict[str, Any] | None = None


# For each parameter group: the states that chunks keep for its parameters.
States = tuple[tuple[StateSpec, ...], ...]

# Key among a parameter's small states: names of arrays that chunks have room for but this parameter lacks.
ABSENT = "(absent)"


class UpdateRule(Protocol):
    """How one kind of optimizer updates parameters.

    ``counts_steps``: whether a state dict has a step count per parameter. ``keeps_small``: whether there are
    small states, outside chunks. ``whole``: whether a part is always a whole parameter, in its shape.
    """

    @property
    def counts_steps(self) -> bool: ...

    @property
    def keeps_small(self) -> bool: ...

    @property
    def whole(self) -> bool: ...

    @property
    def shares(self) -> bool:
        """Whether a step may change data that parameters share: group settings or optimizer attributes."""

    @property
    def defers(self) -> bool:
        """Whether updates may run after ``step()`` returned: they read only captured values."""

    def begin(self, groups: Sequence[dict[str, Any]], loss: GivenLoss | None = None) -> None:
        """Begin a step over all parameters; ``loss`` is that of its closure. Changes nothing. Raises
        ConfigError if the step cannot be made.
        """

    def end(self, groups: Sequence[dict[str, Any]]) -> None:
        """End a step: all parameters are updated or, if nothing is shared, their updates are pending."""

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the optimizer object that steps change; a checkpoint keeps them."""

    def check_attributes(self, names: Iterable[str]) -> None:
        """Raise ConfigError if :meth:`attributes` never returns one of ``names``."""

    def restore_attributes(self, values: Mapping[str, Any]) -> None:
        """Restore attributes that :meth:`attributes` returned."""

    @property
    def converts(self) -> bool:
        """Whether a state dict's format differs from the format kept in chunks."""

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """Return the settings that a step takes from a parameter group, hashable. Raises ConfigError for a
        value that is out of range or not supported under management.
        """

    def states(self, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> States:
        """Return for each group the states kept per parameter, by torch's names. ``dtype``: of the updated
        values.

        A rule that updates pieces returns the same states for all groups, because parameters share a piece.
        """

    def required(self, states: Sequence[StateSpec]) -> tuple[str, ...]:
        """Return the names of those ``states`` that a state dict must have, in the shape of the parameter."""

    def unread(self, states: Sequence[StateSpec]) -> frozenset[str]:
        """Return names of arrays that a saved state may have besides ``states`` and that no update reads;
        loading skips them.
        """

    def exported(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the complete state of one parameter in the format of a state dict."""

    def imported(self, state: Mapping[str, Any], like: torch.Tensor) -> Mapping[str, Any]:
        """Convert one parameter's state from a state dict to the format kept in chunks. ``like``: a tensor
        with the shape, memory order and dtype of the updated values.
        """

    def prepare(
        self, parts: Sequence[Part], device: torch.device | str, processors: Sequence[int] = ()
    ) -> Callable[[], object]:
        """Return a function that updates ``parts``, which are on ``device``, in place. Nothing changes before
        it is called. ``processors``: the CPUs to compute on; empty for any.
        """


class Independent:
    """Base of rules with steps that change no data shared between parameters."""

    shares: ClassVar[bool] = False
    defers: bool = True

    def begin(self, groups: Sequence[dict[str, Any]], loss: GivenLoss | None = None) -> None:
        """Do nothing."""

    def end(self, groups: Sequence[dict[str, Any]]) -> None:
        """Do nothing."""

    def attributes(self) -> dict[str, Any]:
        """Return {}: no step changes an attribute."""
        return {}

    def check_attributes(self, names: Iterable[str]) -> None:
        """Accept any names: :meth:`restore_attributes` ignores them."""

    def restore_attributes(self, values: Mapping[str, Any]) -> None:
        """Do nothing."""


class KeptAsNamed:
    """Base of rules that keep states under the optimizer's own names and values. A state dict may
    lack any.
    """

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
    """The kernel of CPUAdam and HybridAdam, one call for all parts. ``format``: how moments are stored."""

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
        known: dict[tuple[int, int, int], int] = {}  # most parts share one step, by object identity
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
    """Base of rules that run torch operators on each part. States have the dtype of the values, as
    in torch.
    """

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
        """Return torch's names of the states kept per element."""

    @abstractmethod
    def update(self, part: Part, grad: torch.Tensor) -> None:
        """Update a part. ``grad`` may alias the gradient in its chunk: it must not be written."""


@dataclass(frozen=True)
class SgdHyper:
    """The settings of a torch.optim.SGD group."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


class SgdRule(_TorchRule):
    """torch.optim.SGD, operator by operator."""

    def hyper(self, group: Mapping[str, Any]) -> SgdHyper:
        numbers = floats_of(group, "lr", "momentum", "weight_decay")
        require_non_negative(**numbers)
        dampening = floats_of(group, "dampening")
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
    """The update of :class:`gemini.optim.Lion`."""

    def hyper(self, group: Mapping[str, Any]) -> LionHyper:
        return LionHyper.from_group(group)

    def state_names(self, groups: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        return ("exp_avg",)

    def update(self, part: Part, grad: torch.Tensor) -> None:
        lion_update(part.values, grad, part.states["exp_avg"], part.step.hyper)


def refuse_loops(optim: torch.optim.Optimizer, group: Mapping[str, Any]) -> GroupSettings:
    """Return the settings of a group. Raise ConfigError if they select a torch implementation (``fused``,
    ``differentiable``) that gives other bits on a piece than on a whole parameter.
    """
    for flag in ("fused", "differentiable"):
        if group.get(flag):
            raise ConfigError(
                f"{flag}=True of {type(optim).__name__} is not supported: a managed parameter is "
                f"updated in pieces, which gives the same bits only without {flag}; leave it out"
            )
    return GroupSettings.of(group)


class SteppedPart:
    """A part as the tensor that a torch optimizer (``shell``) steps over, with its gradient, state and
    attributes.
    """

    def __init__(self, part: Part, shell: torch.optim.Optimizer) -> None:
        self.param_index, self._part, self._states = part.step.param_index, part, shell.state
        self.values = part.values.detach().requires_grad_()
        part.step.marks.put_on(self.values)
        self.values.grad = scaled(part.grad, part.step.scale).to(self.values.dtype)
        if part.step.before is not None:
            small = {name: copied(value) for name, value in part.step.before.items()}
            shell.state[self.values] = small | dict(part.states)

    def changed_marks(self) -> list[str]:
        """Return the names of the attributes that the step changed."""
        return self._part.step.marks.changed_on(self.values)

    def keep(self) -> None:
        """Copy the values and states that the step left into the memory of the part."""
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
    """Run an optimizer's own ``step`` over views of chunks. Not thread-safe.

    A state with another number of values than the parameter (a count, a product, matrix factors) is small and
    kept outside the chunks.

    Args:
        optim: the optimizer.
        whole: False: the step is element-wise and runs over pieces. True: it gets whole parameters, in their
            shapes.
        arrays: with ``whole``: the names of the states with one value per element. For element-wise steps
            trial steps find them.
        of_group: returns which of ``arrays`` the parameters of a group have; None: all.
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
        """Step over all parts at once. Parts with equal settings form one group: torch's steps read nothing
        else of a group.
        """
        shell = shell_of(self._optim)
        stepped = [SteppedPart(part, shell) for part in parts]
        groups: dict[GroupSettings, list[torch.Tensor]] = {}
        for part, each in zip(parts, stepped, strict=True):
            groups.setdefault(part.step.hyper, []).append(each.values)
        shell.param_groups = [{**settings.values, "params": params} for settings, params in groups.items()]
        step_of(type(shell))(shell)
        for each in stepped:
            each.keep()
