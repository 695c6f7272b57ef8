"""Placeholders: FakeTensors that stand for values of another stage.

A FakeTensor has a shape, a type and a device, but no numbers. The result of an operator on one is a
FakeTensor too; the result of an operator on real tensors only stays real. So the class of a value tells
whether it depends on another stage. Three cases need more than torch's own mode:

- Writing a placeholder into a real tensor (``out[:, 1:] = embed(ids)``) does not change the numbers of
  ``out``. From then on its storage counts as a placeholder, until the pass ends.
- An operator that draws random numbers for a placeholder draws as many as for a real tensor, so that later
  random numbers are equal on all stages.
- A decision on a placeholder raises a ConfigError with the line of the model's code.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_flatten, tree_unflatten

from gemini.errors import ConfigError

_TORCH = str(Path(torch.__file__).parent)
_OURS = (str(Path(inspect.getfile(ConfigError)).parent), str(Path(__file__).parents[1]))
_UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
# They use the shape, the type and the device of their tensor, but no numbers.
_LIKE = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
    )
)
_WATCHED, _FOLLOWED, _LOOKED = range(3)  # what begin_block() has done
# How many numbers they draw depends on the values of their arguments.
_DRAWS_BY_VALUE = frozenset(
    getattr(torch.ops.aten, name) for name in ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")
)


class Placeholders(FakeTensorMode):
    """The FakeTensors of the stages of a rank; :meth:`like` makes them."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # Real tensors that a placeholder was written to, by storage; kept, so that the key stays theirs.
        self._written: dict[int, torch.Tensor] = {}
        self._first: dict[torch.device, torch.Tensor] = {}  # a placeholder for each device
        self._watch = _Watch(self)
        # Whether operators around the blocks are followed; whether one of them is being computed.
        self._follows, self._computes = False, False
        self._outer: TorchDispatchMode | None = None  # the program's mode around the followed operators

    def like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a placeholder for ``tensor``, on ``device``."""
        first = self._first.get(device)
        if first is None:
            first = self._first[device] = _fake(
                self, torch.empty(0, dtype=torch.float32, device="meta"), device
            )
        # The same as FakeTensor(...), with the attributes of an existing one: in a third of the time.
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        made: torch.Tensor = torch.Tensor._make_subclass(
            FakeTensor, shape, False, dispatch_device=True, device_for_backend_keys=first.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(first.__dict__)
        return made

    def stands_for(self, value: Any) -> bool:
        """Return whether ``value`` is a placeholder, or has one written to it."""
        if isinstance(value, FakeTensor):
            return True
        return bool(self._written) and isinstance(value, torch.Tensor) and _storage(value) in self._written

    @property
    def has_written(self) -> bool:
        """each copy has its own"""
        return bool(self._written)

    def is_given(self, values: Iterable[Any]) -> bool:
        """Return whether a placeholder, or a tensor with one written to it, is among the arguments of an
        operator. Called for every operator around the blocks once such a tensor exists.
        """
        for value in values:
            if isinstance(value, torch.Tensor):
                if self.stands_for(value):
                    return True
            elif isinstance(value, (list, tuple)) and self.is_given(value):
                return True
        return False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow writes of placeholders into real tensors inside the block. Operators on real tensors only
        are intercepted after the first such write.
        """
        self._follows, self._outer = True, _get_current_dispatch_mode()
        if self._written:
            self._watch.begin(self._outer)
        try:
            yield
        finally:
            self._follows, self._outer = False, None
            self._watch.end()

    def mark(self, tensor: torch.Tensor) -> None:
        """Record that a placeholder was written to ``tensor``."""
        if not isinstance(tensor, FakeTensor):
            self._written[_storage(tensor)] = tensor
            if self._follows:
                self._watch.begin(self._outer)

    def forget_writes(self) -> None:
        """Begin a pass: earlier writes have no effect on it."""
        self._written.clear()

    def begin_block(self) -> int:
        """Stop intercepting operators during a block of the stage, which has no placeholders, so that it runs
        at full speed. Return the argument for :meth:`end_block`. If the program has entered its own mode
        around the block, interception continues.
        """
        is_on, top = self._watch.is_on, _get_current_dispatch_mode()
        if not self._follows or not (top is self._outer or (is_on and top is self._watch)):
            return _WATCHED
        self._follows = False
        if not is_on:
            return _FOLLOWED
        self._watch.end()
        return _LOOKED

    def end_block(self, before: int) -> None:
        """Restore the state before the block."""
        if before == _WATCHED:
            return
        self._follows = True
        if before == _LOOKED:
            self._watch.begin(self._outer)

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Any = None
    ) -> object:
        """Run an operator with a placeholder among its arguments.

        Raises:
            ConfigError: its result decides how the model continues, or a block writes it into a real tensor.
        """
        if self._follows and not self._computes and _is_operator(func):
            return self.compute(func, tuple(args), dict(kwargs or {}))
        if not all(map(self.stands_for, _written_by(func, tuple(args), kwargs or {}))):
            raise ConfigError(
                "a block of this stage, or the criterion, writes a value of another stage into a tensor "
                f"({_name(func)} in {_place()}), but this stage does not have that value; have it return the "
                "value, or train without pp"
            )
        try:
            return super().dispatch(func, types, args, kwargs or {})
        except _UNKNOWN as error:
            raise ConfigError(
                f"the model makes a decision from a value that only another stage has ({_name(func)} in "
                f"{_place()}): code in front of the blocks, or a weight there, computes the value; let a "
                "block make the decision, or train without pp"
            ) from error

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator around the blocks with a placeholder, or a tensor that has one written to it, among
        its arguments. Raises as :meth:`dispatch`.
        """
        self._computes = True
        try:
            return self._compute(func, args, kwargs)
        finally:
            self._computes = False

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.overloadpacket in _LIKE and isinstance(args[0], FakeTensor):
            return func(_real(args[0]), *args[1:], **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draw(func, args, kwargs)
        func, args = self._by_numbers(func, args)
        written = [value for value in _written_by(func, args, kwargs) if not isinstance(value, FakeTensor)]
        values, form = tree_flatten((args, kwargs))
        args, kwargs = tree_unflatten([self._faked(value) for value in values], form)
        with self:
            found = func(*args, **kwargs)
        if not written:
            return found
        for tensor in written:
            self.mark(tensor)
        returns = func._schema.returns
        if not returns:
            return None
        return written[0] if len(returns) == 1 else tuple(written[: len(returns)])

    def _by_numbers(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Replace real masks in a call by indices, so that the number of selected elements is known."""
        aten = torch.ops.aten
        if func is aten.masked_select.default and not self.stands_for(args[1]):
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            func, args = aten.index.Tensor, (args[0].expand(shape), [args[1].expand(shape)])
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            indices: list[Any] = []
            for each in args[1]:
                is_mask = isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
                known = is_mask and not self.stands_for(each)
                indices += each.nonzero(as_tuple=True) if known else [each]
            args = (args[0], indices, *args[2:])
        return func, args

    def _faked(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        return _fake(self, value, value.device)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Draw the random numbers that ``func`` would draw for real tensors."""
        if func.overloadpacket in _DRAWS_BY_VALUE:
            raise ConfigError(
                f"{_name(func)} in {_place()} draws random numbers that depend on a value of another stage, "
                "so the stages would draw different numbers after it; let a block draw them, or train "
                "without pp"
            )
        values, form = tree_flatten((args, kwargs))
        real = [_real(value).fill_(1) if self.stands_for(value) else value for value in values]
        written = [id(value) for value in _written_by(func, args, kwargs)]
        real = [
            each.clone() if id(value) in written and each is value else each
            for each, value in zip(real, values, strict=True)
        ]
        args, kwargs = tree_unflatten(real, form)
        func(*args, **kwargs)


class _Watch(TorchDispatchMode):
    """Passes operators on placeholders, and on tensors that one was written to, to their owner."""

    supports_higher_order_operators = True

    def __init__(self, owner: Placeholders) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self.is_on = False

    def begin(self, outer: TorchDispatchMode | None) -> None:
        """Intercept every operator from now on. This mode goes directly inside ``outer``, below modes that
        the program has entered since.
        """
        if self.is_on:
            return
        with _modes_above(outer):
            self.__enter__()  # type: ignore[no-untyped-call]
        self.is_on = True

    def end(self) -> None:
        """Stop intercepting operators."""
        if not self.is_on:
            return
        self.is_on = False
        with _modes_above(self):
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_operator(func):
            owner = self._owner
            if owner.is_given(args) or (kwargs and owner.is_given(kwargs.values())):
                return owner.compute(func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def _modes_above(mode: TorchDispatchMode | None) -> Iterator[None]:
    """Remove the modes inside ``mode`` from the stack for the block; all modes if ``mode`` is not on the
    stack, as inside an operator that the outer modes have passed on.
    """
    above: list[TorchDispatchMode] = []
    while (top := _get_current_dispatch_mode()) is not None and top is not mode and not top.is_infra_mode():
        above.append(_pop_mode())
    try:
        yield
    finally:
        while above:
            _push_mode(above.pop())


def _is_operator(func: Any) -> bool:
    return isinstance(func, OpOverload) and func.namespace != "prim"


def _fake(mode: Placeholders, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, shape, device)


def _real(value: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor like a placeholder."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to, in the order of its schema."""
    if not func._schema.is_mutable:
        return []
    found: list[Any] = []
    for index, known in enumerate(func._schema.arguments):
        if known.alias_info is not None and known.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(known.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if isinstance(value, torch.Tensor)]


def _name(func: Any) -> str:
    return str(getattr(func, "overloadpacket", func)).replace("aten.", "torch.")


def _place() -> str:
    """Return the line of the model's own code that is running."""
    frames = [
        each for each in traceback.extract_stack() if not each.filename.startswith((_TORCH, *_OURS, "<"))
    ]
    if not frames:
        return "its forward()"
    return f"line {frames[-1].lineno} of {frames[-1].filename}: {(frames[-1].line or '').strip()}"
