"""Rules of optimizers that update by their own ``step``, run over views of chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gemini.chunk.chunk import StateSpec
from gemini.errors import ConfigError
from gemini.optim.gradients import scaled
from gemini.optim.rule import Part

_TRIED_NUMEL, _TRIED_CUT, _TRIED_STEPS = 12, 5, 2


@dataclass(frozen=True, eq=False)
class GroupSettings:
    """The settings of a parameter group as they were; one-element tensors are copies."""

    values: Mapping[str, Any]
    text: str

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> GroupSettings:
        named = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        text = ", ".join(f"{name}={value!r}" for name, value in named.items())
        return cls({name: _copied(value) for name, value in named.items()}, text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupSettings) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text

    @property
    def switches(self) -> str:
        """The settings that decide what is kept: names, and which numbers are 0."""
        return repr(
            [(name, bool(value) if _is_number(value) else value) for name, value in self.values.items()]
        )


class SteppedRule:
    """What an optimizer does in its own ``step``, which is element by element, or ``whole``: it gets all of a
    parameter, in its shape. ``arrays``: of a whole one, what it keeps for each element; otherwise that is
    found out.

    What has another number of values than the parameter (a count, a product, factors of a matrix) is small,
    and kept beside the chunks. Not thread-safe.
    """

    counts_steps = False
    converts = False
    keeps_small = True

    def __init__(self, optim: torch.optim.Optimizer, *, whole: bool, arrays: tuple[str, ...] = ()) -> None:
        self._optim = optim
        self.whole = whole
        self._arrays = arrays
        # As Adagrad has it, which makes no state in its steps.
        self._first: dict[str, Any] = next((entry for entry in optim.state.values() if entry), {})
        self._found: dict[tuple[str, torch.dtype], tuple[StateSpec, ...]] = {}

    def hyper(self, group: Mapping[str, Any]) -> GroupSettings:
        for flag in ("fused", "differentiable"):
            if group.get(flag):
                raise ConfigError(
                    f"{flag}=True of {type(self._optim).__name__}: under management a parameter is updated "
                    f"in pieces, and gives the same bits only without; leave {flag} out"
                )
        return GroupSettings.of(group)

    def states(self, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> tuple[StateSpec, ...]:
        if self.whole:
            return tuple(StateSpec(name, dtype) for name in self._arrays)
        found: dict[StateSpec, None] = {}
        for group in groups:
            settings = self.hyper(group)
            key = settings.switches, dtype
            if key not in self._found:
                self._found[key] = self._try(settings, dtype)
            found.update(dict.fromkeys(self._found[key]))
        return tuple(found)

    def required(self, states: Sequence[StateSpec]) -> tuple[str, ...]:
        return ()

    def exported(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(state)

    def imported(self, state: Mapping[str, Any], like: torch.Tensor) -> Mapping[str, Any]:
        return state

    def prepare(
        self, parts: Sequence[Part], device: torch.device | str, processors: Sequence[int] = ()
    ) -> Callable[[], object]:
        return partial(self._run, parts)

    def _run(self, parts: Sequence[Part]) -> None:
        """Step over all parts at once."""
        shell = _shell(self._optim)
        states: list[tuple[Part, dict[str, Any]]] = []
        groups: dict[GroupSettings, list[torch.Tensor]] = {}
        for part in parts:
            values = part.values.detach().requires_grad_()
            values.grad = scaled(part.grad, part.step.scale).to(values.dtype)
            groups.setdefault(part.step.hyper, []).append(values)
            state: dict[str, Any] = {}
            if part.step.before is not None:
                state = {name: _copied(value) for name, value in part.step.before.items()} | dict(part.states)
            shell.state[values] = state
            states.append((part, state))
        shell.param_groups = [{**settings.values, "params": params} for settings, params in groups.items()]
        step_of(type(shell))(shell)
        with torch.no_grad():
            for part, state in states:
                self._keep(part, state)
                if part.half_out is not None:
                    part.half_out.copy_(part.values)

    def _keep(self, part: Part, state: Mapping[str, Any]) -> None:
        for name, kept in part.states.items():
            value = state.get(name)
            if value is not None and value.data_ptr() != kept.data_ptr():
                kept.copy_(value)
        part.step.after.update((name, value) for name, value in state.items() if name not in part.states)

    # -- what an optimizer keeps -----------------------------------------------------------------

    def _try(self, settings: GroupSettings, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Return what is kept of each element with these settings. Raises ConfigError where steps over two
        parts make something else of them than steps over both together."""
        whole = self._tried(settings, dtype, (_TRIED_NUMEL,))
        parts = self._tried(settings, dtype, (_TRIED_CUT, _TRIED_NUMEL - _TRIED_CUT))
        joined: dict[str, Any] = {}
        for name, value in whole[0].items():
            both = [part[name] for part in parts]
            if name != "values" and not _is_array(value, _TRIED_NUMEL):
                same = all(_equal(each, value) for each in both)
            else:
                joined[name] = torch.cat(both)
                same = _equal(joined[name], value)
            if not same:
                raise ConfigError(
                    f"{type(self._optim).__name__} was said to be element-wise, and makes something else of "
                    f"{name} of {_TRIED_NUMEL} elements than of {_TRIED_CUT} and the others by themselves: "
                    "what it makes of an element depends on others. It cannot update a managed model"
                )
        del joined["values"]
        odd = [name for name, value in joined.items() if not value.dtype.is_floating_point]
        if odd:
            raise ConfigError(
                f"{type(self._optim).__name__} keeps {odd[0]} of {joined[odd[0]].dtype} for each element; "
                "chunks hold floats. It cannot update a managed model"
            )
        return tuple(StateSpec(name, value.dtype) for name, value in joined.items())

    def _tried(
        self, settings: GroupSettings, dtype: torch.dtype, numels: Sequence[int]
    ) -> list[dict[str, Any]]:
        """Return values and states after a few steps over parts of so many elements."""
        numbers = torch.Generator().manual_seed(0)
        drawn = torch.randn(
            1 + _TRIED_STEPS, _TRIED_NUMEL, generator=numbers, dtype=torch.float32, device="cpu"
        )
        values, *grads = (row.to(dtype).split(list(numels)) for row in drawn)
        shell = _shell(self._optim)
        params = [value.clone().requires_grad_() for value in values]
        for param in params:
            if self._first:
                shell.state[param] = {
                    name: _uniform(value, param) if _has_elements(value) else _copied(value)
                    for name, value in self._first.items()
                }
        shell.param_groups = [{**settings.values, "params": params}]
        before = {**vars(shell)}
        for each in grads:
            for param, grad in zip(params, each, strict=True):
                param.grad = grad.clone()
            step_of(type(shell))(shell)
        self._refuse_others(settings, before, shell)
        return [{"values": param.detach(), **shell.state[param]} for param in params]

    def _refuse_others(
        self, settings: GroupSettings, before: Mapping[str, Any], shell: torch.optim.Optimizer
    ) -> None:
        """Raise ConfigError where a step has written to what one over pieces would write to more than once:
        settings of groups, attributes of the optimizer."""
        changed = [name for name, value in vars(shell).items() if before.get(name) is not value]
        if GroupSettings.of(shell.param_groups[0]) != settings:
            changed.append("param_groups")
        if changed:
            raise ConfigError(
                f"{type(self._optim).__name__} was said to be element-wise, and its step writes to "
                f"{', '.join(changed)}, which all parameters share. It cannot update a managed model"
            )


def step_of(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], object]:
    """Return the ``step`` of an optimizer's class, without what torch wraps around it to run hooks."""
    step = kind.step
    bare: Callable[[torch.optim.Optimizer], object] = getattr(step, "__wrapped__", step)
    return bare if getattr(step, "hooked", False) else step


def _shell(optim: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer like ``optim``, for parameters of one step."""
    shell: torch.optim.Optimizer = object.__new__(type(optim))
    vars(shell).update(vars(optim))
    shell.state = defaultdict(dict)
    return shell


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _has_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _uniform(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a state of ``like`` that has the first value of one of another parameter."""
    return torch.full_like(like.detach(), float(value.reshape(-1)[0]) if value.numel() else 0.0)


def _is_array(value: Any, numel: int) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == (numel,)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
