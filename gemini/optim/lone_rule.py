"""LoneRule: an optimizer of which nothing is known, stepped over one parameter after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gemini.chunk.chunk import StateSpec
from gemini.errors import StateError
from gemini.optim.gradients import scaled
from gemini.optim.rule import ABSENT, KeptAsNamed, Part
from gemini.optim.shared_step import GroupSettings, Inseparable, SharedStep, deep_copied, refuse, refuse_marks
from gemini.optim.trials import try_one_by_one


class LoneRule(KeptAsNamed):
    """Runs the optimizer's own ``step`` over each parameter, in its shape, as if no other had a gradient.
    What all parameters share, settings of groups and attributes, advances once a step.

    What a trial found in the form of the parameter is kept in chunks, as long as it is; everything else
    is small. Not thread-safe.
    """

    counts_steps = False
    converts = False
    keeps_small = True
    whole = True
    shares = True

    def __init__(self, optim: torch.optim.Optimizer, *, is_said: bool) -> None:
        """``is_said``: by the user that it may be run so; see :func:`try_one_by_one`."""
        self._optim = optim
        self._is_said = is_said
        self._found: dict[tuple[tuple[int, ...], torch.dtype], tuple[StateSpec, ...]] = {}
        self._shared: SharedStep | None = None
        self._places: dict[int, int] = {}

    def hyper(self, group: Mapping[str, Any]) -> GroupSettings:
        return GroupSettings.of(group)

    def states(self, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> tuple[StateSpec, ...]:
        key = tuple(len(group["params"]) for group in groups), dtype
        if key not in self._found:
            try:
                self._found[key] = try_one_by_one(self._optim, groups, dtype, is_said=self._is_said)
            except Inseparable as reason:
                raise refuse(self._optim, reason) from reason
        return self._found[key]

    def begin(self, groups: Sequence[dict[str, Any]]) -> None:
        self._places = {id(group): index for index, group in enumerate(groups)}
        self._shared = SharedStep(self._optim, groups)

    def end(self, groups: Sequence[dict[str, Any]]) -> None:
        shared, self._shared = self._shared, None
        assert shared is not None
        try:
            if not shared.is_begun:  # no parameter has a gradient: counters go on
                shared.run({}, {})
            shared.commit(groups)
        except Inseparable as reason:
            raise self._late(reason) from reason

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
                self._shared.run({self._places[part.step.hyper.place]: [values]}, states)
                refuse_marks(part.step.marks, values)
            except Inseparable as reason:
                raise self._late(reason) from reason
            if not torch.equal(drawn, torch.get_rng_state()):
                raise self._late("its step draws random numbers")
            with torch.no_grad():
                self._keep(part, values, states[values])

    def _keep(self, part: Part, values: torch.Tensor, state: Mapping[str, Any]) -> None:
        own = part.values
        if values.data_ptr() != own.data_ptr():  # of parameters whose data was replaced
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


def _fits(value: Any, kept: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return (value.dtype, value.shape, value.stride()) == (kept.dtype, kept.shape, kept.stride())


def _owned(value: Any, storages: set[int]) -> Any:
    """Return a value that is no view of one of these storages, whose memory is a chunk's."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.untyped_storage()._cdata in storages else value
    if isinstance(value, dict):
        return type(value)((key, _owned(item, storages)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_owned(item, storages) for item in value)
    return value
