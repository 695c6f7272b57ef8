"""Update rules: what an optimizer keeps of each element, and how a piece of chunks is updated.

Storage knows none of them. A rule is element by element: what it makes of an element depends on that element
alone, so a parameter may be updated a piece at a time, with the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from gemini.errors import ConfigError
from gemini.optim.cpu_adam import CPUAdam
from gemini.optim.gradients import scaled
from gemini.optim.kernels import AdamHyper, AdamStep, GradScale, Row, make_row, run_rows
from gemini.optim.lion import Lion, LionHyper, lion_update
from gemini.optim.settings import numbers_of, require_non_negative


@dataclass(frozen=True)
class UpdateStep:
    """One step of a parameter: the settings of its group as its rule has them, its number (from 1), and what
    happens to the gradient first."""

    hyper: Any
    number: int
    scale: GradScale = field(default_factory=GradScale)


class Part(NamedTuple):
    """Elements of a parameter that are updated together, as flat tensors over memory that is pinned.

    ``values``: the fp32 master or the parameter itself. ``states``: fp32, by name, zeros before the first
    step. ``half_out``: where the 16-bit copy of a master goes.
    """

    values: torch.Tensor
    grad: torch.Tensor
    states: Mapping[str, torch.Tensor]
    half_out: torch.Tensor | None
    step: UpdateStep


class UpdateRule(Protocol):
    """How one kind of optimizer updates. Without state of its own. ``counts_steps``: whether a state dict
    says of each parameter how many steps it has made."""

    counts_steps: bool

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """Return what a step takes of a parameter group, hashable. Raises ConfigError for what is out of
        range, or not done under management."""

    def state_names(self, groups: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Return what is kept of each element, by torch's names."""

    def prepare(
        self, parts: Sequence[Part], device: torch.device | str, processors: Sequence[int] = ()
    ) -> Callable[[], object]:
        """Return what updates ``parts``, which are on ``device``, in place; nothing has changed before it is
        called. ``processors``: of the CPU, to compute on."""


class AdamRule:
    """CPUAdam's and HybridAdam's kernel, one call for all parts."""

    counts_steps = True

    def hyper(self, group: Mapping[str, Any]) -> AdamHyper:
        return AdamHyper.from_group(group)

    def state_names(self, groups: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def prepare(
        self, parts: Sequence[Part], device: torch.device | str, processors: Sequence[int] = ()
    ) -> Callable[[], object]:
        rows: list[Row] = []
        for index, part in enumerate(parts):
            addresses = {name: state.data_ptr() for name, state in part.states.items()}
            rows.append(make_row(part.values, part.grad, addresses, half_out=part.half_out, step_index=index))
        steps = [AdamStep(part.step.hyper, part.step.number, part.step.scale) for part in parts]
        return partial(run_rows, rows, steps, device, processors)


class _TorchRule(ABC):
    """Operators of torch on each part. Values of 16 bits without a master are updated in their own type, and
    so are their states, as torch does it: fp32 holds what comes of that."""

    counts_steps = False

    def prepare(
        self, parts: Sequence[Part], device: torch.device | str, processors: Sequence[int] = ()
    ) -> Callable[[], object]:
        return partial(self._run, parts)

    def _run(self, parts: Sequence[Part]) -> None:
        with torch.no_grad():
            for part in parts:
                dtype = part.values.dtype
                grad = scaled(part.grad, part.step.scale).to(dtype)
                states = {name: state.to(dtype) for name, state in part.states.items()}
                self.update(part._replace(states=states), grad)
                for name, state in part.states.items():
                    if states[name] is not state:
                        state.copy_(states[name])
                if part.half_out is not None:
                    part.half_out.copy_(part.values)

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


_RULES: dict[type[torch.optim.Optimizer], UpdateRule] = {
    CPUAdam: AdamRule(),
    torch.optim.SGD: SgdRule(),
    Lion: LionRule(),
}


def rule_of(optim: torch.optim.Optimizer) -> UpdateRule:
    """Return how ``optim`` updates. Raises ConfigError where nothing here does as it does."""
    for kind in type(optim).__mro__:
        if kind in _RULES and (kind is CPUAdam or type(optim).step is kind.step):
            return _RULES[kind]
    raise ConfigError(
        f"GeminiOptimizer drives CPUAdam, HybridAdam, Lion and torch.optim.SGD, whose steps can be cut into "
        f"pieces, not {type(optim).__name__}"
    )
