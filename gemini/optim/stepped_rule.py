"""Rules of optimizers that update by their own ``step``, run over views of chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gemini.chunk.chunk import StateSpec
from gemini.errors import ConfigError, StateError
from gemini.optim.gradients import scaled
from gemini.optim.rule import Independent, KeptAsNamed, Part
from gemini.optim.shared_step import with_own_attributes, written_by
from gemini.optim.shells import GroupSettings, copied, shell_of, step_of
from gemini.optim.step_trial import Form, PieceTrial, forms_of


class SteppedRule(KeptAsNamed, Independent):
    """What an optimizer does in its own ``step``, which is element by element, or ``whole``: it gets all of a
    parameter, in its shape. ``arrays``: of a whole one, what it keeps for each element; otherwise that is
    found out. ``is_known``: whether it is known to be element by element; otherwise that is tried on every
    shape that its parameters have.

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
        is_known: bool = True,
    ) -> None:
        self._optim = optim
        self.whole = whole
        self._arrays = arrays
        self._is_known = is_known
        self._trial = PieceTrial(optim)
        self._found: dict[tuple[str, torch.dtype, tuple[Form, ...]], tuple[StateSpec, ...]] = {}

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
            forms = () if self._is_known else forms_of(group["params"])
            key = settings.switches, dtype, forms
            if key not in self._found:
                self._found[key] = self._trial.states(settings, dtype, forms)
            found.update(dict.fromkeys(self._found[key]))
        return tuple(found)

    def prepare(
        self, parts: Sequence[Part], device: torch.device | str, processors: Sequence[int] = ()
    ) -> Callable[[], object]:
        return partial(self._run, parts)

    def _run(self, parts: Sequence[Part]) -> None:
        """Step over all parts at once."""
        shell = shell_of(self._optim)
        states: list[tuple[Part, dict[str, Any]]] = []
        groups: dict[GroupSettings, list[torch.Tensor]] = {}
        for part in parts:
            values = part.values.detach().requires_grad_()
            values.grad = scaled(part.grad, part.step.scale).to(values.dtype)
            groups.setdefault(part.step.hyper, []).append(values)
            state: dict[str, Any] = {}
            if part.step.before is not None:
                state = {name: copied(value) for name, value in part.step.before.items()} | dict(part.states)
            shell.state[values] = state
            states.append((part, state))
        shell.param_groups = [{**settings.values, "params": params} for settings, params in groups.items()]
        before = {} if self._is_known else with_own_attributes(shell, self._optim)
        step_of(type(shell))(shell)
        if not self._is_known:
            self._refuse_shared(shell, before, list(groups))
        with torch.no_grad():
            for part, state in states:
                self._keep(part, state)
                if part.half_out is not None:
                    part.half_out.copy_(part.values)

    def _refuse_shared(
        self, shell: torch.optim.Optimizer, before: Mapping[str, Any], settings: Sequence[GroupSettings]
    ) -> None:
        """Raise StateError where a step has changed what it did not in the trial, and what pieces share."""
        changed = written_by(shell, before)
        if [GroupSettings.of(group) for group in shell.param_groups] != settings:
            changed.append("param_groups")
        if changed:
            raise StateError(
                f"the step of {type(self._optim).__name__} changes {', '.join(changed)}, as it did not when "
                "it was tried for elementwise=True; load a checkpoint, and leave elementwise out"
            )

    def _keep(self, part: Part, state: Mapping[str, Any]) -> None:
        for name, kept in part.states.items():
            value = state.get(name)
            if value is not None and value.data_ptr() != kept.data_ptr():
                kept.copy_(value)
        part.step.after.update((name, value) for name, value in state.items() if name not in part.states)
