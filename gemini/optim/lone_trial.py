"""Trial steps of an optimizer over several made-up parameters, beside steps over one after another."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gemini.chunk.chunk import StateSpec
from gemini.errors import in_words
from gemini.optim.data_flow import DataFlow
from gemini.optim.shared_step import Inseparable, SharedStep, attributes_of, deep_copied, same
from gemini.optim.shells import GroupSettings, shell_of, step_of
from gemini.optim.step_trial import MAGNITUDES, Form, made_up

_MOST_NUMEL = 2**12  # of a parameter that is tried; the dimensions of larger ones are halved
_MOST_TRIED = 48


class _Tried(NamedTuple):
    group: int
    form: Form
    shape: tuple[int, ...]  # that of the real one
    state: Mapping[str, Any]  # at first


def try_one_by_one(
    optim: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
    *,
    is_said: bool = False,
) -> tuple[StateSpec, ...]:
    """Return what ``optim`` keeps of each element of parameters. Raises Inseparable where steps over one
    parameter after another make something else of values, states, groups or attributes than steps over all
    of them; or, with the bits that they have here, use of one what others have. ``is_said``: by the user that
    they do not: then bits alone count, and a class whose step cannot be tried has all its states beside the
    chunks."""
    tried = _chosen(optim, groups)
    draws = [made_up(each.form, dtype, len(MAGNITUDES)) for each in tried]
    together, apart = _Side(optim, groups, tried, draws), _Side(optim, groups, tried, draws)
    for index in range(1, 1 + len(MAGNITUDES)):
        try:
            before = _random_state()
            mixed = together.step_over_all([draw[index] for draw in draws])
            if mixed and not is_said:
                raise Inseparable(f"its step runs {mixed}() on several parameters")
            if not same(_random_state(), before):
                raise Inseparable("its step draws random numbers, whose order is that of all parameters")
            apart.step_over_each([draw[index] for draw in draws])
        except Inseparable:
            raise
        except Exception as error:  # of code that is not ours
            if is_said:
                return ()
            raise Inseparable(
                f"a trial step over made-up parameters failed with {type(error).__name__}: {in_words(error)}"
            ) from error
        _compare(together, apart, index)
    return apart.arrays()


class _Side:
    """Parameters of a trial with their optimizer."""

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        groups: Sequence[Mapping[str, Any]],
        tried: Sequence[_Tried],
        draws: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        self.optim = shell_of(optim)
        vars(self.optim).update(deep_copied(attributes_of(optim), optim, self.optim))
        self.params = [
            each.form.tensor(draw[0].clone()).requires_grad_()
            for each, draw in zip(tried, draws, strict=True)
        ]
        self.states: list[dict[str, Any]] = [_first(each) for each in tried]
        self.groups = [{**GroupSettings.of(group).values} for group in groups]
        self._of = [each.group for each in tried]
        self._kept: dict[str, torch.dtype | None] = {}
        self._forms = [each.form for each in tried]

    def _set(self, grads: Sequence[torch.Tensor]) -> None:
        for param, form, grad in zip(self.params, self._forms, grads, strict=True):
            param.grad = form.tensor(grad.clone())

    def step_over_all(self, grads: Sequence[torch.Tensor]) -> str:
        """Step over all parameters at once; return an operator by which something flows from one to another,
        or nothing."""
        self._set(grads)
        shell = self.optim
        of = zip(self.params, self._of, strict=True)
        named: dict[int, list[torch.Tensor]] = {}
        for param, group in of:
            named.setdefault(group, []).append(param)
        shell.param_groups = [
            {**values, "params": named.get(index, [])} for index, values in enumerate(self.groups)
        ]
        for param, state in zip(self.params, self.states, strict=True):
            if state:
                shell.state[param] = state
        owned = [
            _nested_tensors([param, param.grad, state])
            for param, state in zip(self.params, self.states, strict=True)
        ]
        with torch.enable_grad(), DataFlow(owned) as flow:
            step_of(type(shell))(shell)
        self.states = [dict(shell.state.pop(param, {})) for param in self.params]
        if any(shell.state.values()):
            raise Inseparable("its state has entries that are no parameter's")
        shell.state.clear()
        self.groups = [
            {name: value for name, value in group.items() if name != "params"} for group in shell.param_groups
        ]
        return flow.mixed

    def step_over_each(self, grads: Sequence[torch.Tensor]) -> None:
        """Step over one parameter after another, as an update of chunks does."""
        self._set(grads)
        shared = SharedStep(self.optim, self.groups)
        for index, param in enumerate(self.params):
            states = {param: deep_copied(self.states[index])}
            shared.run({self._of[index]: [param]}, states)
            self.states[index] = states[param]
            self._note(param, states[param])
        shared.commit(self.groups)

    def _note(self, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Note what is in the form of a parameter, and so can be kept in chunks."""
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and param.numel() > 1 and Form.of(value) == Form.of(param):
                usable = value.dtype.is_floating_point and self._kept.get(name, value.dtype) == value.dtype
                self._kept[name] = value.dtype if usable else None

    def arrays(self) -> tuple[StateSpec, ...]:
        """Return what is kept of each element."""
        return tuple(StateSpec(name, dtype) for name, dtype in self._kept.items() if dtype is not None)


def _compare(together: _Side, apart: _Side, step: int) -> None:
    for index, (one, other) in enumerate(zip(together.params, apart.params, strict=True)):
        among = f"one of several parameters, of shape {tuple(one.shape)}"
        if not same(one.detach(), other.detach()):
            raise Inseparable(f"trial step {step} makes something else of {among}")
        if not same(together.states[index], apart.states[index]):
            raise Inseparable(f"trial step {step} keeps something else of {among}")
    for one_group, other_group in zip(together.groups, apart.groups, strict=True):
        if not same(one_group, other_group):
            raise Inseparable("its step changes groups' settings once for each parameter")
    if not same(attributes_of(together.optim), attributes_of(apart.optim)):
        raise Inseparable("its step changes its attributes once for each parameter")


def _chosen(optim: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[_Tried]:
    """Return a parameter of each form and group, but of many groups one each; two at least."""
    tried: list[_Tried] = []
    forms: set[tuple[str, Form]] = set()
    for index, group in enumerate(groups):
        settings = GroupSettings.of(group).switches
        here: list[_Tried] = []
        with torch._C.DisableTorchFunctionSubclass():
            each = [(param, Form.of(param)) for param in group["params"]]
        for param, form in sorted(each, key=lambda pair: pair[1].numel):
            if here and ((settings, form) in forms or len(tried) + len(here) >= _MOST_TRIED):
                continue
            forms.add((settings, form))
            here.append(_Tried(index, form.bounded(_MOST_NUMEL), form.shape, optim.state.get(param) or {}))
        tried += here
    return tried if len(tried) > 1 else tried * 2


def _first(tried: _Tried) -> dict[str, Any]:
    """Return the state of a parameter before the trial: that of a real one, in the form that is tried."""
    found: dict[str, Any] = {}
    for name, value in tried.state.items():
        found[name] = deep_copied(value)
        is_array = isinstance(value, torch.Tensor) and tuple(value.shape) == tried.shape
        if is_array and tried.shape != tried.form.shape:
            one, numel = float(value.reshape(-1)[0]), tried.form.numel
            found[name] = tried.form.tensor(torch.full((numel,), one, dtype=value.dtype, device="cpu"))
    return found


def _nested_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _nested_tensors(item)]


def _random_state() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate()
