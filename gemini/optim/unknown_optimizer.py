"""Rules for optimizers of unknown classes. PerParameterRule steps over one parameter after
another. PieceRule steps over pieces, if the user declared the step element-wise.

User code may read anything until it has run, so these rules never defer updates beyond ``step()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gemini.errors import ConfigError, StateError
from gemini.optim.gradients import scaled
from gemini.optim.rule import ABSENT, Independent, KeptAsNamed, Part, States, SteppedPart, refuse_loops
from gemini.optim.shared_step import (
    GivenLoss,
    GroupSettings,
    Inseparable,
    SharedStep,
    StepGroups,
    Visibility,
    attributes_of,
    deep_copied,
    is_own,
    left_over,
    refuse,
    refuse_marks,
    shell_of,
    with_own_attributes,
    written_by,
)
from gemini.optim.trials import Found, PieceTrial, key_of, try_one_by_one


class PerParameterRule(KeptAsNamed):
    """Runs the optimizer's own ``step`` over each parameter, in its shape, as if no other had a gradient.

    Shared data (group settings and attributes) advances once per step. States that a trial found in the
    parameter's shape and dtype are kept in chunks while they stay so; all others are small. Not thread-safe.
    """

    counts_steps = False
    converts = False
    keeps_small = True
    whole = True
    shares = True
    defers = False

    def __init__(self, optim: torch.optim.Optimizer, *, is_declared: bool) -> None:
        """``is_declared``: whether the user declared that the optimizer may run so (``whole=True``); see
        :func:`try_one_by_one`.
        """
        self._optim = optim
        self._is_declared = is_declared
        self._trials = _Trials(self._try)
        self._shared: SharedStep | None = None
        self._written: set[str] = set()  # attributes that steps change

    def hyper(self, group: Mapping[str, Any]) -> GroupSettings:
        return GroupSettings.of(group)

    def states(self, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> States:
        found = self._trials.found(groups, dtype, tuple(len(group["params"]) for group in groups))
        self._written |= found.written
        return (found.states,) * len(groups)

    def _try(self, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype, loss: GivenLoss | None) -> Found:
        try:
            return try_one_by_one(self._optim, groups, dtype, loss, is_declared=self._is_declared)
        except Inseparable as reason:
            raise refuse(self._optim, reason) from reason

    def begin(self, groups: Sequence[dict[str, Any]], loss: GivenLoss | None = None) -> None:
        self._shared = SharedStep(self._optim, self._trials.groups(self._optim, groups, loss))

    def end(self, groups: Sequence[dict[str, Any]]) -> None:
        shared, self._shared = self._shared, None
        assert shared is not None
        try:
            self._written |= shared.end(groups)
        except Inseparable as reason:
            raise self._late(reason) from reason

    def attributes(self) -> dict[str, Any]:
        return {name: value for name, value in attributes_of(self._optim).items() if name in self._written}

    def check_attributes(self, names: Iterable[str]) -> None:
        kind = type(self._optim)
        odd = [name for name in names if is_own(name) or callable(getattr(kind, name, None))]
        if odd:
            raise ConfigError(f"{odd[0]!r} is no attribute that a step of {kind.__name__} changes")

    def restore_attributes(self, values: Mapping[str, Any]) -> None:
        vars(self._optim).update(values)
        self._written |= values.keys()

    def prepare(
        self, parts: Sequence[Part], device: torch.device | str, processors: Sequence[int] = ()
    ) -> Callable[[], object]:
        return partial(self._run, parts)

    def _run(self, parts: Sequence[Part]) -> None:
        assert self._shared is not None
        for part in parts:
            values = part.values.detach().requires_grad_()
            part.step.marks.put_on(values)
            values.grad = scaled(part.grad, part.step.scale).to(values.dtype)
            before = part.step.before
            kept: dict[str, Any] = {}
            if before is not None:
                absent = before.get(ABSENT, ())
                kept = {name: value for name, value in part.states.items() if name not in absent}
            drawn = torch.get_rng_state()
            try:
                small = {name: deep_copied(v) for name, v in (before or {}).items() if name != ABSENT}
                states = {values: {**kept, **small}}
                self._shared.run({part.step.param_index: values}, states)
                refuse_marks(part.step.marks, values)
            except Inseparable as reason:
                raise self._late(reason) from reason
            if not torch.equal(drawn, torch.get_rng_state()):
                raise self._late("its step draws random numbers")
            with torch.no_grad():
                self._keep(part, values, states[values])

    def _keep(self, part: Part, values: torch.Tensor, state: Mapping[str, Any]) -> None:
        own = part.values
        if values.data_ptr() != own.data_ptr():  # the step replaced param.data
            own.copy_(values)
        if part.half_out is not None:
            part.half_out.copy_(part.values)
        in_chunks = {name for name, kept in part.states.items() if _fits(state.get(name), kept)}
        for name in in_chunks:
            found, kept = state[name], part.states[name]
            if found.data_ptr() != kept.data_ptr():
                kept.copy_(found)
        storages = {t.untyped_storage()._cdata for t in (part.values, part.grad, *part.states.values())}
        after = part.step.after
        after.clear()
        for name, value in state.items():
            if name not in in_chunks:
                after[name] = _owned(value, storages)
        absent = tuple(sorted(name for name in part.states if name not in state))
        if absent:
            after[ABSENT] = absent

    def _late(self, reason: object) -> StateError:
        return StateError(
            f"{type(self._optim).__name__} does in this step what it did not in trial steps: {reason}. Its "
            "parameters belong together, and were updated one after another: load a checkpoint, and train on "
            "without GeminiOptimizer"
        )


class PieceRule(KeptAsNamed, Independent):
    """Runs the optimizer's own ``step``, declared element-wise by the user, over all pieces at once.

    It is tested on every shape of its parameters. Not thread-safe.
    """

    counts_steps = False
    converts = False
    keeps_small = True
    whole = False
    defers = False

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self._optim = optim
        self._trials = _Trials(PieceTrial(optim).of_groups)
        self._groups: StepGroups | None = None

    def hyper(self, group: Mapping[str, Any]) -> GroupSettings:
        return refuse_loops(self._optim, group)

    def states(self, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> States:
        return (self._trials.found(groups, dtype, key_of(groups)).states,) * len(groups)

    def begin(self, groups: Sequence[dict[str, Any]], loss: GivenLoss | None = None) -> None:
        self._groups = self._trials.groups(self._optim, groups, loss)

    def end(self, groups: Sequence[dict[str, Any]]) -> None:
        self._groups = None

    def prepare(
        self, parts: Sequence[Part], device: torch.device | str, processors: Sequence[int] = ()
    ) -> Callable[[], object]:
        return partial(self._run, parts)

    def _run(self, parts: Sequence[Part]) -> None:
        groups, shell = self._groups, shell_of(self._optim)
        assert groups is not None
        before = with_own_attributes(shell, self._optim)
        stepped = [SteppedPart(part, shell) for part in parts]
        shell.param_groups = groups.filled(
            {each.param_index: each.values for each in stepped}, self._optim, shell
        )
        given = [{**group, "params": list(group["params"])} for group in shell.param_groups]
        try:
            groups.step(shell, [each.values for each in stepped])
        except Inseparable as reason:
            raise self._late(reason) from reason
        changed = written_by(shell, before)
        try:
            seen = groups.indices([each.param_index for each in stepped])
            if any(groups.changes(given, shell.param_groups, seen)):
                changed.append("param_groups")
        except Inseparable:
            changed.append("param_groups")
        if left_over(shell.state, [each.values for each in stepped]):
            changed.append("state")
        changed += {name for each in stepped for name in each.changed_marks()}
        if changed:
            raise self._late(f"its step changes {', '.join(changed)}")
        for each in stepped:
            each.keep()

    def _late(self, reason: object) -> StateError:
        return StateError(
            f"{type(self._optim).__name__} does in this step what it did not when it was tried for "
            f"elementwise=True: {reason}; load a checkpoint, and leave elementwise out"
        )


class _Trials:
    """Caches the results of an optimizer's trials, by dtype of the updated values."""

    def __init__(
        self, attempt: Callable[[Sequence[Mapping[str, Any]], torch.dtype, GivenLoss | None], Found]
    ) -> None:
        self._attempt = attempt
        self._found: dict[tuple[torch.dtype, bool], tuple[Any, Found]] = {}

    def found(
        self,
        groups: Sequence[Mapping[str, Any]],
        dtype: torch.dtype,
        key: Any,
        loss: GivenLoss | None = None,
    ) -> Found:
        """Return the result of a trial; it runs again if ``key`` changes."""
        kept = self._found.get((dtype, loss is not None))
        if kept is None or kept[0] != key:
            kept = key, self._attempt(groups, dtype, loss)
            self._found[dtype, loss is not None] = kept
        return kept[1]

    def groups(
        self, optim: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], loss: GivenLoss | None
    ) -> StepGroups:
        """Return the groups as a step sees them.

        Raises ConfigError if trials with a closure fail, or if trials showed that every parameter needs a
        gradient and one has none.
        """
        trials = [(dtype, key, found) for (dtype, closes), (key, found) in self._found.items() if not closes]
        if loss is not None:
            like = GivenLoss(torch.tensor(0.7, dtype=torch.float32, device="cpu"))
            trials = [(dtype, key, self.found(groups, dtype, key, like)) for dtype, key, _ in trials]
        seen = [found for _, _, found in trials]
        if any(found.needs_gradients for found in seen):
            _require_gradients(optim, groups)
        return StepGroups.of(
            groups, max((found.visibility for found in seen), key=list(Visibility).index), loss
        )


def _require_gradients(optim: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    missing = [p._slot.name for group in groups for p in group["params"] if not p._slot.has_grad]
    if missing:
        raise ConfigError(
            f"{missing[0]!r} and {len(missing) - 1} more parameters have no gradient in this step, in which "
            f"{type(optim).__name__} fails or changes them; over chunks it would not. Give every parameter "
            "of its groups a gradient, and leave out of them what is not trained"
        )


def _fits(value: Any, kept: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return (value.dtype, value.shape, value.stride()) == (kept.dtype, kept.shape, kept.stride())


def _owned(value: Any, storages: set[int]) -> Any:
    """Return ``value`` with tensors over one of ``storages`` (chunk memory) replaced by copies."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.untyped_storage()._cdata in storages else value
    if isinstance(value, dict):
        return type(value)((key, _owned(item, storages)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_owned(item, storages) for item in value)
    return value
