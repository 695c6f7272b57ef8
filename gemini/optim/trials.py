"""Trial steps of an optimizer over random parameters. They find the states that it keeps, whether its
parameters may be divided into pieces, and whether it may step over one parameter after another.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from gemini.chunk.chunk import StateSpec
from gemini.chunk.layout import flat, ordered_like
from gemini.errors import ConfigError, in_words
from gemini.optim.data_flow import DataFlow, OperatorTrace
from gemini.optim.marks import Marks, ParamIndex
from gemini.optim.shared_step import (
    GivenLoss,
    GroupSettings,
    Inseparable,
    SharedStep,
    StepGroups,
    Visibility,
    attributes_of,
    copied,
    deep_copied,
    equal,
    left_over,
    refuse,
    refuse_identities,
    refuse_marks,
    same,
    shell_of,
    states_of,
    with_own_attributes,
    written_by,
)

# Parameters with more elements are tried in a smaller shape: their dimensions are halved.
_MOST_NUMEL = 2**16
# Factors of the gradients, step by step, so that trials reach both sides of thresholds.
MAGNITUDES = (1.0, 1.0, 1e-4, 1e4, 1.0, 1e-8, 1e2, 1.0, 1.0, 1e-2, 1.0, 1.0, 1e-20, 1e15)
# Factors of one parameter's gradients while those of the other parameters are unchanged.
_OUTLIERS = (1e6, 1e-30, 0.0, 1e-6, math.inf, math.nan)
_STEPS_OF_KNOWN = 2
_NUMEL_TOGETHER = 2**12  # _MOST_NUMEL for classes that update whole parameters
_NUMEL_OF_SAME = 2**6  # for a parameter if another one of its kind is tried, too
_STEPS_OF_MANY = 4
_MOST_TRIED = 48  # parameters of such a class, beside one of each group


class Form(NamedTuple):
    """The shape and memory order of a parameter."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def bounded(self, most_numel: int = _MOST_NUMEL) -> Form:
        """Return a form of at most ``most_numel`` elements: the largest dimensions, all equal ones together,
        are halved until it fits.
        """
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
        """Return flat ``values``, in memory order, as a view in this form."""
        return values.as_strided(self.shape, self.stride)


VECTOR = Form((12,), (1,))


class Kind(NamedTuple):
    """The properties by which one parameter may represent others in a trial."""

    form: Form
    marks: Marks


def kinds_of(params: Iterable[torch.Tensor]) -> tuple[Kind, ...]:
    """Return the distinct kinds of ``params``, without reading their values."""
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(dict.fromkeys(Kind(Form.of(param).bounded(), Marks.of(param)) for param in params))


def first_state(optim: torch.optim.Optimizer) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return the state that an optimizer creates for a parameter in its constructor, as Adagrad does, and the
    names of its arrays. For a 0-dim parameter every tensor except ``step`` counts as an array.
    """
    made = {p: entry for p, entry in states_of(optim).items() if entry and isinstance(p, torch.Tensor)}
    if not made:
        return {}, frozenset()
    widest = max(made, key=lambda param: param.dim())
    tensors = {name: value for name, value in made[widest].items() if isinstance(value, torch.Tensor)}
    if widest.dim() == 0:
        return made[widest], frozenset(tensors.keys() - {"step"})
    return made[widest], frozenset(name for name, value in tensors.items() if value.dim() > 0)


class Found(NamedTuple):
    """The result of a trial.

    Attributes:
        states: those with one value per element.
        visibility: how steps must see the other parameters.
        needs_gradients: whether a step fails, or changes a parameter, if that parameter has no gradient.
        written: the names of attributes that steps change.
    """

    states: tuple[StateSpec, ...]
    visibility: Visibility
    needs_gradients: bool
    written: frozenset[str] = frozenset()


class _TrialFailed(ConfigError):
    """A trial step raised."""


class _Tried(NamedTuple):
    param_index: ParamIndex
    form: Form
    shape: tuple[int, ...]  # of the real parameter
    state: Mapping[str, Any]  # before the first step
    marks: Marks
    switches: str  # GroupSettings.switches of its group


class PieceTrial:
    """Compares steps over whole parameters with steps over their pieces, each by itself. Finds the states
    kept per element; raises ConfigError if values or states differ.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        *,
        cut_unless: str = "",
        claim: str = "is to update parts of parameters",
    ) -> None:
        """``cut_unless``: advice for the error, how to avoid pieces. If given, one step updates a piece of
        each parameter, so it may also change shared data. ``claim``: text for the error, what the optimizer
        would do.
        """
        self._optim = optim
        self._at_once = bool(cut_unless)
        self._claim = claim if cut_unless else "was said to be element-wise"
        self._way_out = cut_unless or "Leave elementwise out: it may do for whole parameters"
        self._kind = type(optim).__name__
        self._first, self._first_arrays = first_state(optim)

    def of_known(self, settings: GroupSettings, dtype: torch.dtype) -> tuple[StateSpec, ...]:
        """Return the states that a known class keeps per element under these settings."""
        groups = StepGroups([settings.values], [], [()], Visibility.GROUPS)
        tried = _Tried(ParamIndex(0, 0), VECTOR, VECTOR.shape, {}, Marks(), "")
        return self._specs(self._arrays_of(groups, tried, dtype, _STEPS_OF_KNOWN))

    def of_groups(
        self, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype, loss: GivenLoss | None = None
    ) -> Found:
        """Return the states that an unknown class keeps per element. ``loss``: of a closure that
        steps get.
        """
        try:
            refuse_identities(self._optim, ())
        except Inseparable as reason:
            raise self._refusal(reason) from reason
        return _first_that_runs(lambda visibility: self._try(groups, dtype, visibility, loss))

    def of_closure(self, groups: Sequence[Mapping[str, Any]], dtype: torch.dtype, loss: GivenLoss) -> None:
        """Raise ConfigError if a step over whole parameters does not run its closure exactly once, before it
        changes anything.
        """

        def attempt(visibility: Visibility) -> Found:
            tried = _chosen(self._optim, groups, _NUMEL_TOGETHER, every=visibility is not Visibility.ALL)
            draws = [made_up(each.form, dtype, _STEPS_OF_KNOWN) for each in tried]
            rows = [[each.form.tensor(row) for row in draw] for each, draw in zip(tried, draws, strict=True)]
            self._run(_step_groups(groups, tried, dtype, visibility, loss), tried, rows)
            return Found((), visibility, False)

        _first_that_runs(attempt)

    def _try(
        self,
        groups: Sequence[Mapping[str, Any]],
        dtype: torch.dtype,
        visibility: Visibility,
        loss: GivenLoss | None,
    ) -> Found:
        tried = _chosen(self._optim, groups, _MOST_NUMEL, every=visibility is not Visibility.ALL)
        stepped = _step_groups(groups, tried, dtype, visibility, loss)
        draws = [made_up(each.form, dtype, len(MAGNITUDES)) for each in tried]
        self._refuse_reductions(stepped, tried, draws)
        self._refuse_by_size(stepped, tried)
        found: dict[StateSpec, None] = {}
        arrays: dict[tuple[str, Marks], Mapping[str, torch.Tensor]] = {}
        for each in tried:
            if (each.switches, each.marks) not in arrays:
                vector = each._replace(form=VECTOR, shape=VECTOR.shape)
                kept = self._arrays_of(stepped, vector, dtype, len(MAGNITUDES))
                arrays[each.switches, each.marks] = kept
                found.update(dict.fromkeys(self._specs(kept)))
        names = [arrays[each.switches, each.marks].keys() for each in tried]
        self._check(stepped, tried, draws, names)
        needs_gradients = _fails(lambda: self._check(stepped, tried, _with_gaps(draws), names))
        return Found(tuple(found), visibility, needs_gradients)

    def _arrays_of(
        self, groups: StepGroups, tried: _Tried, dtype: torch.dtype, steps: int
    ) -> Mapping[str, torch.Tensor]:
        """Return the states of a vector that have one value per element."""
        draw = made_up(tried.form, dtype, steps)
        arrays = _arrays(self._run(groups, [tried], [draw])[-1][0])
        self._check(groups, [tried], [draw], [arrays.keys()])
        return arrays

    def _specs(self, arrays: Mapping[str, torch.Tensor]) -> tuple[StateSpec, ...]:
        odd = [name for name, array in arrays.items() if not array.dtype.is_floating_point]
        if odd and not self._at_once:
            raise ConfigError(
                f"{self._kind} keeps {odd[0]} of {arrays[odd[0]].dtype} for each element; chunks hold "
                "floats. It cannot update a managed model"
            )
        return tuple(StateSpec(name, array.dtype) for name, array in arrays.items())

    def _check(
        self,
        groups: StepGroups,
        tried: Sequence[_Tried],
        draws: Sequence[Draw],
        arrays: Sequence[Collection[str]],
    ) -> None:
        """Raise ConfigError if steps over pieces give other results than steps over whole parameters.
        ``arrays``: the names of each parameter's states with one value per element.
        """
        shaped = [
            [each.form.tensor(row) if row is not None else None for row in draw]
            for each, draw in zip(tried, draws, strict=True)
        ]
        whole = self._run(groups, tried, shaped)
        self._refuse_without_gradient(whole, draws)
        pieces = self._over_pieces(groups, tried, draws)
        if self._at_once:  # a rank without a part of a parameter steps over empty tensors
            nothing = [[None if row is None else row.reshape(-1)[:0] for row in draw] for draw in draws]
            self._run(groups, tried, nothing)
        for index, (each, draw) in enumerate(zip(tried, draws, strict=True)):
            steps = [step for step, row in enumerate(draw[1:]) if row is not None or self._at_once]
            # Compare after each step: later values may be so large that earlier differences are lost.
            for number, step in enumerate(steps):
                parts = [piece[number] for piece in pieces[index]]
                self._compare(each.form, whole[step][index], parts, arrays[index])

    def _refuse_without_gradient(
        self, whole: Sequence[Sequence[Mapping[str, Any]]], draws: Sequence[Draw]
    ) -> None:
        """Raise ConfigError if a step changed the values of a parameter that had no gradient. The first step
        is not checked.
        """
        for index, draw in enumerate(draws):
            for before, after, grad in zip(whole, whole[1:], draw[2:], strict=False):
                if grad is None and not equal(before[index]["values"], after[index]["values"]):
                    raise ConfigError(
                        f"{self._kind} {self._claim}, and its step changes a parameter that has no gradient. "
                        f"{self._way_out}"
                    )

    def _over_pieces(
        self, groups: StepGroups, tried: Sequence[_Tried], draws: Sequence[Draw]
    ) -> list[list[list[dict[str, Any]]]]:
        """Return values and states of the pieces of each parameter after each of their steps."""
        cut = [_pieces_of(each.form, draw, self._at_once) for each, draw in zip(tried, draws, strict=True)]
        found: list[list[list[dict[str, Any]]]] = [[] for _ in tried]
        if not self._at_once:
            for index, each in enumerate(tried):
                for piece in cut[index]:
                    run = self._run(groups, [each], [[row for row in piece if row is not None]])
                    found[index].append([states for (states,) in run])
            return found
        for rows in zip(*cut, strict=True):
            run = self._run(groups, tried, rows)
            for index, pieces in enumerate(found):
                pieces.append([states[index] for states in run])
        return found

    def _run(
        self, groups: StepGroups, tried: Sequence[_Tried], rows: Sequence[Draw]
    ) -> list[list[dict[str, Any]]]:
        """Return values and states of the parameters after each step. ``rows``: for each parameter its
        values, then its gradients.
        """
        shell = shell_of(self._optim)
        params = [values_of(row).clone().requires_grad_() for row in rows]
        marks = [each.marks.apart() for each in tried]
        for param, each in zip(params, marks, strict=True):
            each.put_on(param)
            if self._first:
                shell.state[param] = {
                    name: _uniform(value, param) if name in self._first_arrays else copied(value)
                    for name, value in self._first.items()
                }
        before = with_own_attributes(shell, self._optim)
        indices = {each.param_index: param for each, param in zip(tried, params, strict=True)}
        try:
            shell.param_groups = groups.filled(indices, self._optim, shell)
        except Inseparable as reason:
            raise self._refusal(reason) from reason
        given = [{**group, "params": list(group["params"])} for group in shell.param_groups]
        after: list[list[dict[str, Any]]] = []
        for index in range(1, len(rows[0])):
            for param, row in zip(params, rows, strict=True):
                grad = row[index]
                param.grad = None if grad is None else grad.clone()
            try:
                groups.step(shell, params)
            except Inseparable as reason:
                raise self._refusal(reason) from reason
            except Exception as error:
                raise _TrialFailed(
                    f"a trial step of {self._kind} over made-up parameters of shapes "
                    f"{[tuple(param.shape) for param in params]} failed with {type(error).__name__}: "
                    f"{in_words(error)}. {self._way_out}"
                ) from error
            after.append([self._entry(shell, *each) for each in zip(params, marks, tried, strict=True)])
        if not self._at_once:
            each_written = map(_written, params, marks, (first.marks for first in tried))
            written = {name for names in each_written for name in names}
            seen = groups.indices(indices)
            changed = [*written_by(shell, before), *sorted(written), *_changed(groups, given, shell, seen)]
            if left_over(shell.state, params):
                changed.append("state")
            self._refuse_shared(changed)
        return after

    def _entry(
        self, shell: torch.optim.Optimizer, param: torch.Tensor, given: Marks, tried: _Tried
    ) -> dict[str, Any]:
        """Return copies of the values and states of a parameter; ``given``: the marks that were put on it."""
        entry = {"values": param.detach(), **shell.state.get(param, {})}
        copies = {name: copied(value) for name, value in entry.items()}
        if self._at_once:  # attributes set by steps must be equal on all pieces
            names = _written(param, given, tried.marks)
            copies["its attributes"] = {name: copied(vars(param).get(name)) for name in names}
        return copies

    def _refusal(self, reason: object) -> ConfigError:
        """Return the error for an optimizer that cannot be tried."""
        if self._at_once:
            return ConfigError(f"{self._kind} {self._claim}, and {reason}. {self._way_out}")
        return refuse(self._optim, reason)

    def _refuse_reductions(self, groups: StepGroups, tried: Sequence[_Tried], draws: Sequence[Draw]) -> None:
        """Raise ConfigError if an operator of a step combines several elements, or reads one as a number.
        Comparing a few results is not enough: they may agree by chance.
        """
        rows = [
            [each.form.tensor(row) for row in draw if row is not None]
            for each, draw in zip(tried, draws, strict=True)
        ]
        with DataFlow(rows) as flow:
            self._run(groups, tried, rows)
        found = flow.mixed or flow.reduced or flow.read or flow.drawn
        if found:
            raise ConfigError(
                f"{self._kind} {self._claim}, and its step runs {found}() on values or "
                "gradients, which makes something of several elements, or of what is none of theirs. "
                f"{self._way_out}"
            )

    def _refuse_by_size(self, groups: StepGroups, tried: Sequence[_Tried]) -> None:
        """Raise ConfigError if a step over a parameter that is too large to be tried runs other operators, on
        ``meta``, than over the smaller shape in its place. A step that does not run there is not compared.
        """
        for each in tried:
            if each.form.shape == each.shape:
                continue
            try:
                small, large = (
                    self._operators(groups, each, shape) for shape in (each.form.shape, each.shape)
                )
            except (ConfigError, RuntimeError):
                continue
            if small != large:
                raise ConfigError(
                    f"{self._kind} {self._claim}, and its step over a parameter of shape {each.shape} runs "
                    f"other operators than over one of shape {each.form.shape}. {self._way_out}"
                )

    def _operators(
        self, groups: StepGroups, tried: _Tried, shape: tuple[int, ...]
    ) -> list[tuple[str, tuple[float, ...]]]:
        """Return the operators of some steps over a parameter of ``shape`` without memory."""
        rows = [torch.empty(shape, dtype=torch.float32, device="meta") for _ in range(1 + _STEPS_OF_MANY)]
        trace = OperatorTrace()
        with trace:
            self._run(groups, [tried], [rows])
        return trace.operators

    def _refuse_shared(self, changed: Sequence[str]) -> None:
        """Raise ConfigError if a step wrote shared data, which a step over pieces would write more than once:
        group settings, attributes of the optimizer or of parameters.
        """
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
        arrays: Collection[str],
    ) -> None:
        """Raise ConfigError if the state of a whole parameter differs from the combined states of
        its pieces.
        """
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


Draw = Sequence[torch.Tensor | None]  # of a parameter: its values, then a gradient or None for each step


def values_of(draw: Draw) -> torch.Tensor:
    """Return the values of a parameter before the first step."""
    assert draw[0] is not None
    return draw[0]


def _written(param: torch.Tensor, given: Marks, first: Marks) -> list[str]:
    """Return the names of attributes of ``param`` that steps set, or changed in place. They were ``given``,
    which read as ``first``.
    """
    changed, now = given.changed_on(param), vars(param)
    inside = [name for name in first.values if name in now and not same(now[name], first.values[name])]
    return list(dict.fromkeys([*changed, *inside]))


def _pieces_of(form: Form, draw: Draw, at_once: bool) -> list[Draw]:
    """Return a flat draw divided in pieces: two, where one step has a piece of each parameter (``at_once``);
    the second piece of a single element is empty. Otherwise the first piece is one element, so that a rule
    with another update for large parameters is found. 16-bit values have no such piece: torch rounds the
    last elements of a tensor in another way.
    """
    middle, ends = max(1, form.numel * 5 // 12), [form.numel]
    if at_once or form.numel > 1:
        ends = [middle, form.numel]
    if not at_once and middle > 1 and values_of(draw).element_size() > 2:
        ends = [1, *ends]
    flat_rows = [None if row is None else row.reshape(-1) for row in draw]
    return [
        [None if row is None else row[begin:end] for row in flat_rows]
        for begin, end in zip([0, *ends], ends, strict=False)
    ]


def _with_gaps(draws: Sequence[Draw]) -> list[Draw]:
    """Return the first steps of the draws with some gradients missing in each step."""
    return [
        [draw[0], *(row if _has_gradient(number, step) else None for step, row in enumerate(draw[1:6]))]
        for number, draw in enumerate(draws)
    ]


def _with_outliers(draws: Sequence[Draw]) -> list[Draw]:
    """Return the first steps of the draws. In each step one parameter has an extreme gradient, which must not
    affect the other parameters.
    """
    made: list[Draw] = []
    for number, (values, *grads) in enumerate(draws):
        factors = zip(_OUTLIERS, grads, strict=False)
        made.append(
            [values]
            + [
                grad * factor if grad is not None and step % min(2, len(draws)) == number else grad
                for step, (factor, grad) in enumerate(factors)
            ]
        )
    return made


def _has_gradient(number: int, step: int) -> bool:
    """Return whether parameter ``number`` has a gradient in trial step ``step`` of :func:`_with_gaps`: all
    but the first, every other one, all, the others, every third one.
    """
    return (number > 0, number % 2 == 0, True, number % 2 == 1, number % 3 == 0)[step]


def _first_that_runs(attempt: Callable[[Visibility], Found]) -> Found:
    """Return the result of ``attempt`` for the first :class:`Visibility` under which steps do not fail: some
    optimizers need a gradient for each parameter that they see, or a parameter in each group. Raises like
    ``attempt``.
    """
    errors: list[_TrialFailed] = []
    for visibility in Visibility:
        try:
            return attempt(visibility)
        except _TrialFailed as error:
            errors.append(error)
    raise errors[0]


def _fails(check: Callable[[], object]) -> bool:
    """Return whether a trial without some gradients fails, so that all are needed."""
    try:
        check()
    except (ConfigError, Inseparable):
        return True
    return False


def _changed(
    groups: StepGroups,
    given: Sequence[Mapping[str, Any]],
    shell: torch.optim.Optimizer,
    seen: Sequence[int],
) -> list[str]:
    try:
        return ["param_groups"] if any(groups.changes(given, shell.param_groups, seen)) else []
    except Inseparable:
        return ["param_groups"]


def _joined(form: Form, found: Sequence[Any]) -> bool:
    """Return whether the first of ``found`` is a tensor in ``form`` with the values of the others,
    concatenated.
    """
    if not all(isinstance(value, torch.Tensor) for value in found):
        return False
    whole, *pieces = found
    if tuple(whole.shape) != form.shape:
        return False
    like = form.tensor(torch.empty(form.numel, dtype=whole.dtype, device="cpu"))
    ordered = flat(ordered_like(whole, like, whole.dtype))
    return equal(ordered, torch.cat([piece.reshape(-1) for piece in pieces]))


def made_up(form: Form, dtype: torch.dtype, steps: int) -> list[torch.Tensor]:
    """Return random values, then random gradients for ``steps`` steps, flat."""
    numbers = torch.Generator().manual_seed(form.numel)
    drawn = torch.randn(1 + steps, form.numel, generator=numbers, dtype=torch.float32, device="cpu")
    for row, magnitude in zip(drawn[1:], MAGNITUDES, strict=False):
        row.mul_(magnitude)
    return list(drawn.to(dtype))


def _arrays(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the entries of a parameter's state with one value per element."""
    shape = state["values"].shape
    return {
        name: value
        for name, value in state.items()
        if name != "values" and _has_elements(value) and value.shape == shape
    }


def _has_elements(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _uniform(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor like ``like``, filled with the first value of ``value``, a state of another
    parameter.
    """
    return torch.full_like(like.detach(), float(value.reshape(-1)[0]) if value.numel() else 0.0)


def try_one_by_one(
    optim: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
    loss: GivenLoss | None = None,
    *,
    is_declared: bool = False,
) -> Found:
    """Return the states that ``optim`` keeps per element.

    Args:
        optim: the optimizer.
        groups: its groups.
        dtype: of the updated values.
        loss: of a closure that steps get; None without one.
        is_declared: whether the user declared that parameters are independent. Then only the bits are
            compared, and a class with steps that cannot be tried keeps all states outside chunks.

    Raises:
        Inseparable: steps over one parameter after another change values, states, groups or attributes
            differently than steps over all parameters; or a step combines parameters, even if the bits agree
            here.
    """
    refuse_identities(optim, groups)
    try:
        return _first_that_runs(
            lambda visibility: _try_all(optim, groups, dtype, visibility, loss, is_declared=is_declared)
        )
    except _TrialFailed as error:
        if is_declared:
            return Found((), Visibility.GROUPS, True)
        raise Inseparable(str(error)) from error


def _try_all(
    optim: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
    visibility: Visibility,
    loss: GivenLoss | None,
    *,
    is_declared: bool,
) -> Found:
    every = visibility is not Visibility.ALL
    tried = _chosen(optim, groups, _NUMEL_TOGETHER, most=_MOST_TRIED, every=every)
    steps = _STEPS_OF_MANY if every and len(tried) > _MOST_TRIED else len(MAGNITUDES)
    draws: list[Draw] = [made_up(each.form, dtype, steps) for each in tried]
    stepped = _step_groups(groups, tried, dtype, visibility, loss)
    states, apart = _try_draws(optim, stepped, tried, draws, is_declared=is_declared)
    if apart.reads:
        with suppress(_TrialFailed):  # plain training fails there, too
            _try_draws(optim, stepped, tried, _with_outliers(draws), is_declared=is_declared)
    fails = _fails(lambda: _try_draws(optim, stepped, tried, _with_gaps(draws), is_declared=is_declared))
    return Found(states, visibility, fails, frozenset(written_by(apart.optim, attributes_of(optim))))


def _try_draws(
    optim: torch.optim.Optimizer,
    groups: StepGroups,
    tried: Sequence[_Tried],
    draws: Sequence[Draw],
    *,
    is_declared: bool,
) -> tuple[tuple[StateSpec, ...], _Side]:
    """Return the states kept per element, and the side that stepped over one parameter after another. Raises
    Inseparable like :func:`try_one_by_one`.
    """
    together, apart = _Side(optim, groups, tried, draws), _Side(optim, groups, tried, draws)
    for index in range(1, len(draws[0])):
        grads = [draw[index] for draw in draws]
        try:
            before = _random_state()
            mixed = together.step_over_all(grads)
            if mixed and not is_declared:
                raise Inseparable(f"its step runs {mixed}() on several parameters")
            if not same(_random_state(), before):
                raise Inseparable("its step draws random numbers, whose order is that of all parameters")
            apart.step_over_each(grads)
        except Inseparable:
            raise
        except Exception as error:  # user code may raise anything
            raise _TrialFailed(
                f"a trial step over made-up parameters failed with {type(error).__name__}: {in_words(error)}"
            ) from error
        _compare(together, apart, index, grads)
    apart.reads = together.reads
    return apart.arrays(), apart


class _Side:
    """The parameters of a trial with their optimizer."""

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        groups: StepGroups,
        tried: Sequence[_Tried],
        draws: Sequence[Draw],
    ) -> None:
        self.optim = shell_of(optim)
        vars(self.optim).update(deep_copied(attributes_of(optim), optim, self.optim))
        self.params = [
            each.form.tensor(values_of(draw).clone()).requires_grad_()
            for each, draw in zip(tried, draws, strict=True)
        ]
        self._marks = [each.marks.apart() for each in tried]
        for marks, param in zip(self._marks, self.params, strict=True):
            marks.put_on(param)
        self.states: list[dict[str, Any]] = [_first(each) for each in tried]
        self.groups: list[dict[str, Any]] = [{**settings} for settings in groups.settings]
        self._stepped = groups
        self._indices = [each.param_index for each in tried]
        self._kept: dict[str, torch.dtype | None] = {}
        self._forms = [each.form for each in tried]
        self.reads = False  # whether a step read elements as numbers, or combined parameters

    def _set(self, grads: Draw) -> None:
        for param, form, grad in zip(self.params, self._forms, grads, strict=True):
            param.grad = None if grad is None else form.tensor(grad.clone())

    def step_over_all(self, grads: Draw) -> str:
        """Step over all parameters at once. Return the name of an operator that combined
        parameters, or "".
        """
        self._set(grads)
        shell, groups = self.optim, self._stepped.with_settings(self.groups)
        shell.param_groups = groups.filled(dict(zip(self._indices, self.params, strict=True)), shell, shell)
        given = [{**group, "params": list(group["params"])} for group in shell.param_groups]
        for param, state in zip(self.params, self.states, strict=True):
            if state:
                shell.state[param] = state
        owned = [
            _nested_tensors([param, param.grad, state])
            for param, state in zip(self.params, self.states, strict=True)
        ]
        with torch.enable_grad(), DataFlow(owned) as flow:
            groups.step(shell, self.params)
        self._refuse_marks()
        if left_over(shell.state, self.params):
            raise Inseparable("its state has entries that are no parameter's")
        self.states = [dict(shell.state.pop(param, {})) for param in self.params]
        shell.state.clear()
        seen = groups.indices(self._indices)
        for index, changed in zip(seen, groups.changes(given, shell.param_groups, seen), strict=True):
            self.groups[index].update(changed)
        self.reads = self.reads or bool(flow.read or flow.mixed)
        return flow.mixed

    def step_over_each(self, grads: Draw) -> None:
        """Step over one parameter after another, as updates of chunks do."""
        self._set(grads)
        shared = SharedStep(self.optim, self._stepped.with_settings(self.groups))
        for index, param in enumerate(self.params):
            if param.grad is None:
                continue
            states = {param: deep_copied(self.states[index])}
            shared.run({self._indices[index]: param}, states)
            self.states[index] = states[param]
            self._note(param, states[param])
        shared.end(self.groups)
        self._refuse_marks()

    def _refuse_marks(self) -> None:
        for marks, param in zip(self._marks, self.params, strict=True):
            refuse_marks(marks, param)

    def _note(self, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Record states with the parameter's shape and memory order: chunks can keep these."""
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and param.numel() > 1 and Form.of(value) == Form.of(param):
                usable = value.dtype.is_floating_point and self._kept.get(name, value.dtype) == value.dtype
                self._kept[name] = value.dtype if usable else None

    def arrays(self) -> tuple[StateSpec, ...]:
        """Return the states with one value per element."""
        return tuple(StateSpec(name, dtype) for name, dtype in self._kept.items() if dtype is not None)


def _compare(together: _Side, apart: _Side, step: int, grads: Draw) -> None:
    for index, (one, other) in enumerate(zip(together.params, apart.params, strict=True)):
        has_gradient = grads[index] is not None
        which = "one of several parameters" if has_gradient else "a parameter that has no gradient"
        if not same(one.detach(), other.detach()):
            raise Inseparable(
                f"trial step {step} makes something else of {which}, of shape {tuple(one.shape)}"
            )
        if has_gradient and not same(together.states[index], apart.states[index]):
            raise Inseparable(
                f"trial step {step} keeps something else of {which}, of shape {tuple(one.shape)}"
            )
    for one_group, other_group in zip(together.groups, apart.groups, strict=True):
        if not same(one_group, other_group):
            raise Inseparable("its step changes groups' settings once for each parameter")
    if not same(attributes_of(together.optim), attributes_of(apart.optim)):
        raise Inseparable("its step changes its attributes once for each parameter")


def _chosen(
    optim: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    most_numel: int,
    *,
    most: int | None = None,
    every: bool = False,
) -> list[_Tried]:
    """Choose the parameters to try: one for each kind and setting, two for each setting if a group has two;
    beyond ``most``, one of each group. ``every``: choose all parameters, in small shapes if there are many.
    """
    tried: list[_Tried] = []
    kinds: set[tuple[str, Kind]] = set()
    pairs: set[str] = set()
    for number, group in enumerate(groups):
        switches = GroupSettings.of(group).switches
        here: list[_Tried] = []
        with torch._C.DisableTorchFunctionSubclass():
            each = [(index, p, Kind(Form.of(p), Marks.of(p))) for index, p in enumerate(group["params"])]
        for index, param, kind in sorted(each, key=lambda item: item[2].form.numel):
            is_many = most is not None and len(tried) + len(here) >= most
            is_known = (switches, kind) in kinds
            is_wanted = not is_known or (len(here) == 1 and switches not in pairs)
            if here and not every and (is_many or not is_wanted):
                continue
            kinds.add((switches, kind))
            if here:
                pairs.add(switches)
            form, state = kind.form, states_of(optim).get(param) or {}
            # The first ones keep their form: a class may be written for one specific shape.
            is_small = every and (is_many or (is_known and len(tried) + len(here) >= _MOST_TRIED))
            bounded = form.bounded(_NUMEL_OF_SAME if is_small else most_numel)
            here.append(_Tried(ParamIndex(number, index), bounded, form.shape, state, kind.marks, switches))
        tried += here
    return tried


def _step_groups(
    groups: Sequence[Mapping[str, Any]],
    tried: Sequence[_Tried],
    dtype: torch.dtype,
    visibility: Visibility,
    loss: GivenLoss | None,
) -> StepGroups:
    """Return the groups of a trial: all parameters with one dtype, the tried ones in their trial forms."""
    stepped = StepGroups.of(groups, visibility, loss)
    if visibility is not Visibility.ALL:
        return stepped
    forms = [
        [form._replace(dtype=dtype, device=torch.device("cpu")) for form in each] for each in stepped.forms
    ]
    for each in tried:
        group, place = each.param_index
        forms[group][place] = forms[group][place]._replace(shape=each.form.shape, stride=each.form.stride)
    return stepped.with_forms(forms)


def key_of(groups: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Return a key for the groups: equal keys give equal trial results."""
    return tuple(
        (GroupSettings.of(group).switches, len(group["params"]), kinds_of(group["params"]))
        for group in groups
    )


def _first(tried: _Tried) -> dict[str, Any]:
    """Return the state of a parameter before the trial: that of the real parameter, in the trial form."""
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
