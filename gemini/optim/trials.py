"""Trial steps of an optimizer over made-up parameters: what it keeps of them, whether it may have them cut,
and whether it may step over one after another.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gemini.chunk.chunk import StateSpec
from gemini.chunk.dense import flat, ordered_like
from gemini.errors import ConfigError, in_words
from gemini.optim.data_flow import DataFlow
from gemini.optim.marks import Marks
from gemini.optim.shared_step import (
    GroupSettings,
    Inseparable,
    SharedStep,
    attributes_of,
    copied,
    deep_copied,
    equal,
    refuse,
    refuse_identities,
    refuse_marks,
    same,
    shell_of,
    step_of,
    with_own_attributes,
    written_by,
)

# Elements of the largest parameter that is tried as it is; the dimensions of larger ones are halved.
_MOST_NUMEL = 2**16
# What the gradients of one step after another are multiplied by, so that both sides of a limit are met.
MAGNITUDES = (1.0, 1.0, 1e-4, 1e4, 1.0, 1e-8, 1e2, 1.0, 1.0, 1e-2, 1.0, 1.0, 1e-20, 1e15)
_STEPS_OF_KNOWN = 2


class Form(NamedTuple):
    """The shape and the memory order of a parameter."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def bounded(self, most_numel: int = _MOST_NUMEL) -> Form:
        """Return a form of at most so many elements: the largest dimensions, all equal ones together, are
        halved until it is."""
        shape = self.shape
        while torch.Size(shape).numel() > most_numel:
            shape = tuple((size + 1) // 2 if size == max(shape) else size for size in shape)
        if shape == self.shape:
            return self
        stride, step = [0] * len(shape), 1
        for dim in sorted(range(len(shape)), key=lambda dim: (self.stride[dim], -dim)):
            stride[dim] = step
            step *= shape[dim]
        return Form(shape, tuple(stride))

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values``, flat and in the order of memory, in this form."""
        return values.as_strided(self.shape, self.stride)


VECTOR = Form((12,), (1,))


class Kind(NamedTuple):
    """What is like in parameters that one of them may stand for in a trial."""

    form: Form
    marks: Marks


def kinds_of(params: Iterable[torch.Tensor]) -> tuple[Kind, ...]:
    """Return the kinds of parameters, each once, without asking for their values."""
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(dict.fromkeys(Kind(Form.of(param).bounded(), Marks.of(param)) for param in params))


def first_state(optim: torch.optim.Optimizer) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return the state that an optimizer makes of a parameter when it is made, as Adagrad does, and the names
    of its arrays. Of a parameter without dimensions everything but ``step`` counts as one."""
    made = {param: entry for param, entry in optim.state.items() if entry and isinstance(param, torch.Tensor)}
    if not made:
        return {}, frozenset()
    widest = max(made, key=lambda param: param.dim())
    tensors = {name: value for name, value in made[widest].items() if isinstance(value, torch.Tensor)}
    if widest.dim() == 0:
        return made[widest], frozenset(tensors.keys() - {"step"})
    return made[widest], frozenset(name for name, value in tensors.items() if value.dim() > 0)


class PieceTrial:
    """Steps over parameters as they are, beside steps over pieces of them, each by itself: what is kept of
    each element, and ConfigError where values or states differ."""

    def __init__(self, optim: torch.optim.Optimizer, *, at_once: bool = False) -> None:
        """``at_once``: whether one step updates a piece of each parameter, so that it may also change what
        they share."""
        self._optim = optim
        self._at_once = at_once
        self._claim = "is to update parts of parameters" if at_once else "was said to be element-wise"
        self._way_out = (
            "Use stage=0, which cuts nothing, or GeminiOptimizer over a GeminiDDP"
            if at_once
            else "Leave elementwise out: it may do for whole parameters"
        )
        self._kind = type(optim).__name__
        self._first, self._first_arrays = first_state(optim)

    def states(
        self, settings: GroupSettings, dtype: torch.dtype, kinds: Sequence[Kind]
    ) -> tuple[StateSpec, ...]:
        """Return what is kept of each element with these settings. ``kinds``: of the parameters that a class
        of which nothing is known may have."""
        steps = len(MAGNITUDES) if kinds else _STEPS_OF_KNOWN
        tried = [Kind(VECTOR, Marks()), *kinds]
        draws = [made_up(form, dtype, steps) for form, _ in tried]
        rows = [[form.tensor(row) for row in draw] for (form, _), draw in zip(tried, draws, strict=True)]
        marks = [marks for _, marks in tried]
        if kinds:
            self._refuse_identities()
            self._refuse_gathering(settings, rows, marks)
        whole = self._run(settings, rows, marks)
        arrays = _arrays(whole[-1][0])
        for index, ((form, _), draw) in enumerate(zip(tried, draws, strict=True)):
            numel = form.numel
            cut = [numel * 5 // 12, numel - numel * 5 // 12] if numel > 1 else [numel]
            pieces = zip(*(row.split(cut) for row in draw), strict=True)
            parts = [self._run(settings, [list(rows)], marks[index : index + 1]) for rows in pieces]
            # After each step: later ones may make values so large that what came before is rounded away.
            for step, states in enumerate(whole):
                self._compare(form, states[index], [part[step][0] for part in parts], arrays)
        odd = [name for name, array in arrays.items() if not array.dtype.is_floating_point]
        if odd and not self._at_once:
            raise ConfigError(
                f"{self._kind} keeps {odd[0]} of {arrays[odd[0]].dtype} for each element; chunks hold "
                "floats. It cannot update a managed model"
            )
        return tuple(StateSpec(name, array.dtype) for name, array in arrays.items())

    def _run(
        self,
        settings: GroupSettings,
        rows: Sequence[Sequence[torch.Tensor]],
        marks: Sequence[Marks],
    ) -> list[list[dict[str, Any]]]:
        """Return values and states of parameters after each step. ``rows``: of each its values, then its
        gradients."""
        shell = shell_of(self._optim)
        params = [values.clone().requires_grad_() for values, *_ in rows]
        given = [each.apart() for each in marks]
        for param, each in zip(params, given, strict=True):
            each.put_on(param)
            if self._first:
                shell.state[param] = {
                    name: _uniform(value, param) if name in self._first_arrays else copied(value)
                    for name, value in self._first.items()
                }
        shell.param_groups = [{**settings.values, "params": params}]
        before = with_own_attributes(shell, self._optim)
        after: list[list[dict[str, Any]]] = []
        for index in range(1, len(rows[0])):
            for param, row in zip(params, rows, strict=True):
                param.grad = row[index].clone()
            try:
                step_of(type(shell))(shell)
            except Exception as error:
                raise ConfigError(
                    f"a trial step of {self._kind} over made-up parameters of shapes "
                    f"{[tuple(param.shape) for param in params]} failed with {type(error).__name__}: "
                    f"{in_words(error)}. {self._way_out}"
                ) from error
            entries = [{"values": param.detach(), **shell.state[param]} for param in params]
            after.append([{name: copied(value) for name, value in entry.items()} for entry in entries])
        if not self._at_once:
            written = {
                name
                for param, each, first in zip(params, given, marks, strict=True)
                for name in vars(param)
                if name in each.changed_on(param) or not same(vars(param)[name], first.values[name])
            }
            self._refuse_shared(settings, before, shell, sorted(written))
        return after

    def _refuse_identities(self) -> None:
        try:
            refuse_identities(self._optim, ())
        except Inseparable as reason:
            raise refuse(self._optim, reason) from reason

    def _refuse_gathering(
        self, settings: GroupSettings, rows: Sequence[Sequence[torch.Tensor]], marks: Sequence[Marks]
    ) -> None:
        """Raise ConfigError where an operator of a step makes an element, or a number, of several elements.
        What a step makes of those of a few trials may be the same by chance."""
        with DataFlow(rows) as flow:
            self._run(settings, rows, marks)
        found = flow.mixed or flow.gathered or flow.read or flow.drawn
        if found:
            raise ConfigError(
                f"{self._kind} {self._claim}, and its step runs {found}() on values or "
                "gradients, which makes something of several elements, or of what is none of theirs. "
                f"{self._way_out}"
            )

    def _refuse_shared(
        self,
        settings: GroupSettings,
        before: Mapping[str, Any],
        shell: torch.optim.Optimizer,
        written: Sequence[str],
    ) -> None:
        """Raise ConfigError where a step has written to what one over pieces would write to more than once:
        settings of groups, attributes of the optimizer and, ``written``, of parameters."""
        changed = [*written_by(shell, before), *written]
        if GroupSettings.of(shell.param_groups[0]) != settings:
            changed.append("param_groups")
        if changed:
            raise ConfigError(
                f"{self._kind} {self._claim}, and its step writes to {', '.join(changed)}, "
                f"which all parameters share. {self._way_out}"
            )

    def _compare(
        self,
        form: Form,
        whole: Mapping[str, Any],
        parts: Sequence[Mapping[str, Any]],
        arrays: Mapping[str, torch.Tensor],
    ) -> None:
        """Raise ConfigError where the state of a whole parameter is not that of its pieces put together."""
        for name in {**whole, **{name: None for part in parts for name in part}}:
            each = [part.get(name) for part in parts]
            if name == "values" or name in arrays:
                found = [whole.get(name), *each]
                is_same = _joined(form, found)
            else:
                is_same = all(same(value, whole.get(name)) for value in each)
            if not is_same:
                raise ConfigError(
                    f"{self._kind} {self._claim}, and makes something else of {name} of a "
                    f"parameter of shape {form.shape} than of {len(parts)} pieces of it by themselves: what "
                    "it makes of an element depends on others, or on the shape. "
                    f"{self._way_out}"
                )


def _joined(form: Form, found: Sequence[Any]) -> bool:
    """Say whether the first is a tensor of a form and has the values of the others, one behind another."""
    if not all(isinstance(value, torch.Tensor) for value in found):
        return False
    whole, *pieces = found
    if tuple(whole.shape) != form.shape:
        return False
    like = form.tensor(torch.empty(form.numel, dtype=whole.dtype, device="cpu"))
    ordered = flat(ordered_like(whole, like, whole.dtype))
    return equal(ordered, torch.cat([piece.reshape(-1) for piece in pieces]))


def made_up(form: Form, dtype: torch.dtype, steps: int) -> list[torch.Tensor]:
    """Return values, then gradients of so many steps, flat."""
    numbers = torch.Generator().manual_seed(form.numel)
    drawn = torch.randn(1 + steps, form.numel, generator=numbers, dtype=torch.float32, device="cpu")
    for row, magnitude in zip(drawn[1:], MAGNITUDES, strict=False):
        row.mul_(magnitude)
    return list(drawn.to(dtype))


def _arrays(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return of the state of a parameter what has a value for each of its elements."""
    shape = state["values"].shape
    return {
        name: value
        for name, value in state.items()
        if name != "values" and _has_elements(value) and value.shape == shape
    }


def _has_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _uniform(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a state of ``like`` that has the first value of one of another parameter."""
    return torch.full_like(like.detach(), float(value.reshape(-1)[0]) if value.numel() else 0.0)


_NUMEL_TOGETHER = 2**12  # of a parameter that is tried; the dimensions of larger ones are halved
_MOST_TRIED = 48


class _Tried(NamedTuple):
    group: int
    form: Form
    shape: tuple[int, ...]  # that of the real one
    state: Mapping[str, Any]  # at first
    marks: Marks


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
    refuse_identities(optim, groups)
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
        self._marks = [each.marks.apart() for each in tried]
        for marks, param in zip(self._marks, self.params, strict=True):
            marks.put_on(param)
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
        self._refuse_marks()
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
        self._refuse_marks()

    def _refuse_marks(self) -> None:
        for marks, param in zip(self._marks, self.params, strict=True):
            refuse_marks(marks, param)

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
    kinds: set[tuple[str, Kind]] = set()
    for index, group in enumerate(groups):
        settings = GroupSettings.of(group).switches
        here: list[_Tried] = []
        with torch._C.DisableTorchFunctionSubclass():
            each = [(param, Kind(Form.of(param), Marks.of(param))) for param in group["params"]]
        for param, kind in sorted(each, key=lambda pair: pair[1].form.numel):
            if here and ((settings, kind) in kinds or len(tried) + len(here) >= _MOST_TRIED):
                continue
            kinds.add((settings, kind))
            form, state = kind.form, optim.state.get(param) or {}
            here.append(_Tried(index, form.bounded(_NUMEL_TOGETHER), form.shape, state, kind.marks))
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
