"""SharedStep runs one step of an optimizer over its parameters one after another. It uses shells: objects of
the optimizer's class that step over other tensors than its parameters.
"""

from __future__ import annotations

import copy
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from gemini.errors import ConfigError
from gemini.optim.marks import Marks, ParamForm, ParamIndex, Placeholder, holder_of_identities
from gemini.optim.wrapped_optimizer import HOOKS, step_of


@dataclass(frozen=True, eq=False)
class GroupSettings:
    """A snapshot of a parameter group's settings; tensors are copied. Equal if the settings read equal."""

    values: Mapping[str, Any]
    text: str

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> GroupSettings:
        named = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        text = ", ".join(f"{name}={_shown(value)}" for name, value in named.items())
        return cls({name: copied(value) for name, value in named.items()}, text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupSettings) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text

    def as_numbers(self) -> dict[str, Any]:
        """Return the settings that are numbers, strings, None, or sequences of these."""
        return {name: value for name, value in self.values.items() if _is_plain(value)}

    @property
    def switches(self) -> str:
        """The settings that decide which states exist, as text: numbers only as zero or nonzero, others in
        full.
        """
        return repr(
            [(name, bool(value) if _is_number(value) else value) for name, value in self.values.items()]
        )


def shell_of(optim: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a shell of ``optim``: the same class and attributes, with empty state and without hooks."""
    shell: torch.optim.Optimizer = object.__new__(type(optim))
    vars(shell).update(vars(optim))
    vars(shell).pop("_own", None)  # a shell of a self-managed optimizer steps over plain tensors
    shell.state = defaultdict(dict)
    for name in HOOKS:
        setattr(shell, name, OrderedDict())  # hooks run once, around the step of all parameters
    return shell


def copied(value: Any) -> Any:
    """Return a detached copy of a tensor; other values unchanged."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def equal(one: Any, other: Any) -> bool:
    """Return whether two values of states or settings are equal; NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    return _is_true(one == other) or (_is_true(one != one) and _is_true(other != other))


def _is_true(value: Any) -> bool:
    """Return the truth of a comparison's result; of an array: whether all elements are true."""
    return bool(value.all() if hasattr(value, "all") else value)


def _shown(value: Any) -> str:
    """Return text that differs if the values differ; repr of a tensor rounds its values."""
    return f"tensor({value.tolist()})" if isinstance(value, torch.Tensor) else repr(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


_OWN = frozenset(("state", "param_groups", "step", "_own", "_given_to"))  # is_own() adds torch's hooks
_SHARED = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, type)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_DICTS = (dict, OrderedDict, defaultdict)
_LISTS = (list, tuple, set, frozenset, deque)


class Inseparable(Exception):
    """A step cannot be taken over one parameter after another. The message is the end of a sentence."""


class Visibility(Enum):
    """How a step over some parameters sees the other parameters."""

    ALL = "placeholders in their places"
    GROUPS = "their groups, without them"
    NOTHING = "nothing"


class GivenLoss:
    """The loss that a step's closure returned. The closure has run before the step, which is taken in parts;
    each part gets a closure that only returns this value.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    @contextmanager
    def closure(self, params: Iterable[torch.Tensor]) -> Iterator[Callable[[], Any]]:
        """Yield a closure for a part of the step over ``params``. Raises Inseparable if the step does not
        call it exactly once, before it changes parameters or gradients.
        """
        before = [(param, param.detach().clone(), param.grad) for param in params]
        calls = 0

        def closure() -> Any:
            nonlocal calls
            calls += 1
            with _disable_current_modes():  # a trial must record only the operators of the step
                changed = any(p.grad is not grad or not equal(p.detach(), kept) for p, kept, grad in before)
            if changed:
                raise Inseparable("its step runs the closure after it has changed parameters or gradients")
            return self._value

        yield closure
        if calls != 1:
            raise Inseparable(f"its step runs the closure {calls} times")


def number_of(loss: Any) -> float | None:
    """Return a closure's result as a number; None if it is not one."""
    is_number = isinstance(loss, (int, float)) or (isinstance(loss, torch.Tensor) and loss.numel() == 1)
    return float(loss) if is_number else None


def mean_like(loss: Any, mean: float) -> Any:
    """Return ``mean``, of several ranks' losses, in the type of this rank's ``loss``; an fp32 tensor if it
    has none.
    """
    if isinstance(loss, (int, float)):
        return mean
    if isinstance(loss, torch.Tensor):
        return torch.full_like(loss.detach(), mean)
    return torch.tensor(mean, dtype=torch.float32, device="cpu")


class StepGroups:
    """A snapshot of all parameter groups, and the closure, for steps over some parameters at a time."""

    def __init__(
        self,
        settings: Sequence[Mapping[str, Any]],
        forms: Sequence[Sequence[ParamForm]],
        names: Sequence[Sequence[str]],
        visibility: Visibility,
        loss: GivenLoss | None = None,
    ) -> None:
        """Args:
        settings: of each group.
        forms: describe the parameters of each group, for placeholders; empty unless ``visibility`` is ALL.
        names: the parameter names of each group, if there are any.
        visibility: how a step sees the parameters that it does not update.
        loss: of the step's closure; None if it has none.
        """
        self._loss = loss
        self.settings = list(settings)
        self.forms, self.names, self.visibility = forms, names, visibility
        self._touched: list[Placeholder] = []
        self._others = [[Placeholder.of(form, self._touched) for form in each] for each in forms]

    @classmethod
    def of(
        cls, groups: Sequence[Mapping[str, Any]], visibility: Visibility, loss: GivenLoss | None = None
    ) -> StepGroups:
        """Return a snapshot of an optimizer's groups."""
        settings = [GroupSettings.of(group).values for group in groups]
        params = [group["params"] if visibility is Visibility.ALL else () for group in groups]
        forms = [[ParamForm.of(param) for param in each] for each in params]
        return cls(
            settings, forms, [list(group.get("param_names", ())) for group in groups], visibility, loss
        )

    def with_forms(self, forms: Sequence[Sequence[ParamForm]]) -> StepGroups:
        """Return the same groups with other parameters."""
        return StepGroups(self.settings, forms, self.names, self.visibility, self._loss)

    def step(self, shell: torch.optim.Optimizer, params: Iterable[torch.Tensor]) -> None:
        """Run the step of ``shell``, with its groups filled, over ``params``. Raises Inseparable like
        :meth:`GivenLoss.closure`.
        """
        step: Callable[..., object] = step_of(type(shell))
        if self._loss is None:
            step(shell)
            return
        with self._loss.closure(params) as closure:
            step(shell, closure)

    def with_settings(self, settings: Sequence[Mapping[str, Any]]) -> StepGroups:
        """Return the same parameters with other group settings."""
        return StepGroups(settings, self.forms, self.names, self.visibility, self._loss)

    def filled(
        self,
        tensors: Mapping[ParamIndex, torch.Tensor],
        optim: torch.optim.Optimizer,
        shell: torch.optim.Optimizer,
    ) -> list[dict[str, Any]]:
        """Return the groups for a step of ``shell``, a shell of ``optim``, over ``tensors`` by index. Raises
        Inseparable if a setting cannot be copied.
        """
        while self._touched:
            self._touched.pop().forget()
        filled: list[dict[str, Any]] = []
        for index in self.indices(tensors):
            settings, names = self.settings[index], self.names[index]
            places = sorted(at for at in tensors if at.group == index)
            params = [tensors[at] for at in places]
            if self.visibility is Visibility.ALL:
                params = list(self._others[index])
                for at in places:
                    params[at.place] = tensors[at]
            elif names:
                names = [names[at.place] for at in places]
            named = {"param_names": list(names)} if names else {}
            filled.append({**deep_copied(settings, optim, shell), **named, "params": params})
        return filled

    def indices(self, tensors: Collection[ParamIndex]) -> list[int]:
        """Return the indices of the groups that a step over ``tensors`` sees."""
        if self.visibility is Visibility.NOTHING:
            return sorted({at.group for at in tensors})
        return list(range(len(self.settings)))

    def changes(
        self, filled: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], indices: Sequence[int]
    ) -> list[dict[str, Any]]:
        """Return for each group of ``indices`` the settings that a step changed: ``filled`` are the groups
        before, ``after`` those after it. Raises Inseparable if it changed anything else.
        """
        if len(after) != len(filled):
            raise Inseparable("its step changes the number of parameter groups")
        found: list[dict[str, Any]] = []
        for index, before, group in zip(indices, filled, after, strict=True):
            settings = self.settings[index]
            params, kept = group.get("params", ()), before["params"]
            is_kept = group.get("param_names") == before.get("param_names") and len(params) == len(kept)
            if not is_kept or not all(map(operator.is_, params, kept)):
                raise Inseparable("its step changes which parameters a group has, or their order")
            now = {name: v for name, v in group.items() if name not in ("params", "param_names")}
            if not now.keys() >= settings.keys():
                raise Inseparable("its step removes settings of a group")
            found.append(_difference(settings, now))
        return found


class SharedStep:
    """A step taken in parts. It holds the data that all parameters share, group settings and attributes.

    Each part begins with a copy of the values before the step. :meth:`end` applies the values that the parts
    left, once.
    """

    def __init__(self, optim: torch.optim.Optimizer, groups: StepGroups) -> None:
        self._optim = optim
        self._groups = groups
        self._attributes = attributes_of(optim)
        self._changed: dict[int, dict[str, Any]] = {}  # settings changed by parts with the group's parameters
        self._aside: dict[int, dict[str, Any]] = {}  # settings changed by other parts
        self._written: dict[str, Any] = {}  # attributes
        self.is_begun = False

    def run(self, tensors: Mapping[ParamIndex, torch.Tensor], states: dict[torch.Tensor, Any]) -> None:
        """Step over parameters that have gradients, by their indices. ``states``: their states, updated in
        place.

        Raises Inseparable if an attribute cannot be copied, or if earlier parts left other shared values.
        """
        shell = shell_of(self._optim)
        vars(shell).update(deep_copied(self._attributes, self._optim, shell))
        shell.param_groups = filled = self._groups.filled(tensors, self._optim, shell)
        given = [{**group, "params": list(group["params"])} for group in filled]
        shell.state.update(states)
        with torch.enable_grad():
            self._groups.step(shell, tensors.values())
        if left_over(shell.state, states):
            raise Inseparable("its state has entries that are no parameter's")
        states.update((tensor, shell.state.get(tensor, {})) for tensor in states)
        self.is_begun = True
        have, seen = {at.group for at in tensors}, self._groups.indices(tensors)
        found = self._groups.changes(given, shell.param_groups, seen)
        for index, changed in zip(seen, found, strict=True):
            kept = self._changed if index in have else self._aside
            _merge(kept.setdefault(index, {}), changed, "a group's setting")
        attributes = attributes_of(shell)
        if not attributes.keys() >= self._attributes.keys():
            raise Inseparable("its step removes attributes")
        _merge(self._written, _difference(self._attributes, attributes), "the attribute")

    def end(self, groups: Sequence[dict[str, Any]]) -> set[str]:
        """Apply the shared values that the parts left. Return the names of the changed attributes.

        If there was no part, run a step without gradients first. Raises Inseparable if parts disagree.
        """
        if not self.is_begun:  # step counters advance even without gradients
            self.run({}, {})
        for index, group in enumerate(groups):
            found, aside = self._changed.get(index), self._aside.get(index, {})
            if found is None:
                found = aside
            _merge(dict(found), aside, "a group's setting")
            if not found.keys() >= aside.keys():
                raise Inseparable("its step changes settings of a group for parameters of others")
            for name, value in found.items():
                held = group.get(name)
                if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor):
                    held.copy_(value)  # in place: a scheduler holds the tensor
                else:
                    group[name] = value
        vars(self._optim).update(deep_copied(self._written, None, self._optim))
        return set(self._written)


def left_over(states: Mapping[Any, Any], given: Iterable[Any]) -> bool:
    """Return whether a step left states for keys other than the parameters ``given``. States of placeholders,
    and empty states of other tensors, do not count.
    """
    known = set(given)
    others = [key for key in states if key not in known and not isinstance(key, Placeholder)]
    return any(states[key] or not isinstance(key, torch.Tensor) for key in others)


def attributes_of(optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes without groups, states and hooks."""
    return {name: value for name, value in vars(optim).items() if not is_own(name)}


def is_own(name: str) -> bool:
    """Return whether torch or this package uses the attribute ``name`` of optimizers."""
    return name in _OWN or name.startswith(("_optimizer_", "_patched", "_zero_grad"))


def states_of(optim: torch.optim.Optimizer) -> Mapping[Any, Any]:
    """Return an optimizer's own states; {} if a GeminiOptimizer has them in chunks."""
    return optim.state if isinstance(optim.state, dict) else {}


def refuse_identities(optim: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise Inseparable if ``optim`` has states under keys that are not parameters, or keeps a reference to,
    or the id of, one of its parameters: a step gets other tensors, and not all at once.
    """
    if not all(isinstance(param, torch.Tensor) for param in states_of(optim)):
        raise Inseparable("its state has entries that are no parameter's")
    refuse_kept_identities(optim, groups)


def refuse_kept_identities(optim: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]] = ()) -> None:
    """Raise Inseparable if ``optim`` keeps a reference to, or the id of, one of its parameters or groups: a
    step gets other tensors.
    """
    groups = [*optim.param_groups, *groups]
    lists = [group["params"] for group in groups]
    found = [*groups, *lists, *(param for params in lists for param in params)]
    states = states_of(optim).items()
    held = [attributes_of(optim), *(entry for key, entry in states if isinstance(key, torch.Tensor))]
    held.append({str(key): entry for key, entry in states if not isinstance(key, torch.Tensor)})
    held += [{name: value for name, value in group.items() if name != "params"} for group in groups]
    for each in held:
        name = holder_of_identities(each, found, optim)
        if name:
            raise Inseparable(
                f"its {name!r} keeps a parameter among its attributes or states, a group, or the id of one, "
                "and its step has other tensors"
            )


def refuse_marks(marks: Marks, param: torch.Tensor) -> None:
    """Raise Inseparable if a step set attributes of ``param``, which had ``marks`` before."""
    written = marks.changed_on(param)
    if written:
        raise Inseparable(
            f"its step sets {', '.join(written)} on parameters, and has other tensors over chunks"
        )


def with_own_attributes(shell: torch.optim.Optimizer, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Give ``shell`` copies of the attributes of ``optim``, so that a step does not write the originals;
    return the originals. Raises ConfigError if one cannot be copied.
    """
    before = attributes_of(optim)
    try:
        vars(shell).update(deep_copied(before, optim, shell))
    except Inseparable as reason:
        raise refuse(optim, reason) from reason
    return before


def written_by(shell: torch.optim.Optimizer, before: Mapping[str, Any]) -> list[str]:
    """Return the names of attributes that a step changed; ``before``: the attributes before it."""
    after = attributes_of(shell)
    return sorted(_difference(before, after).keys() | (before.keys() - after.keys()))


def deep_copied(value: Any, old: Any = None, new: Any = None) -> Any:
    """Return a copy that shares nothing writable with ``value``; methods bound to ``old`` become methods of
    ``new``. Raises Inseparable if it contains a parameter, optimizer, module, generator or something else
    that cannot be copied.
    """
    kind = type(value)
    if isinstance(value, (*_SHARED, *_FUNCTIONS)):
        return value
    if isinstance(value, (nn.Parameter, torch.optim.Optimizer, nn.Module, torch.Generator)):
        raise Inseparable(f"it keeps a {kind.__name__} among its attributes or states")
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, new) if value.__self__ is old and new is not None else value
    if kind in _DICTS:
        made: dict[Any, Any] = (
            defaultdict(value.default_factory) if isinstance(value, defaultdict) else kind()
        )
        made.update((key, deep_copied(item, old, new)) for key, item in value.items())
        return made
    if kind in _LISTS:
        return kind(deep_copied(item, old, new) for item in value)
    try:
        return copy.deepcopy(value)
    except Exception as error:  # user classes may raise anything
        raise Inseparable(f"it keeps a {kind.__name__} that cannot be copied ({error})") from error


def same(one: Any, other: Any) -> bool:
    """Return whether two values, perhaps nested, are equal."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return equal(one, other)
    if type(one) is not type(other):
        return _is_plain_number(one) and _is_plain_number(other) and bool(one == other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, types.MethodType):
        return one.__func__ is other.__func__
    if hasattr(one, "__dict__") and not isinstance(one, (type, types.FunctionType)):
        return same(vars(one), vars(other))
    return equal(one, other)


def _is_plain_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``after`` that are new or changed."""
    return {name: v for name, v in after.items() if name not in before or not same(before[name], v)}


def _merge(found: dict[str, Any], more: Mapping[str, Any], what: str) -> None:
    for name, value in more.items():
        if name in found and not same(found[name], value):
            raise Inseparable(f"what its step makes of {what} {name!r} depends on the parameter")
        found[name] = value


def refuse(optim: torch.optim.Optimizer, reason: object) -> ConfigError:
    """Return the error for an optimizer that cannot update chunks, with the alternative that works."""
    return ConfigError(
        f"{type(optim).__name__} cannot update a managed model through GeminiOptimizer: {reason}. It works "
        "by itself, without GeminiOptimizer: loss.backward(), optimizer.step(), optimizer.zero_grad(), or "
        "optimizer.step(closure), over managed parameters, without mixed_precision, in one process; its "
        "states are beside the budgets"
    )
