"""LazyLogits: logits that a head has not computed. A cross entropy over them runs by tiles; any other use
computes them.

A model computes its logits before it asks for their loss. So the head returns a tensor without memory that
remembers the head's inputs. It follows the usual operators between head and loss: scales, a soft cap, a cast,
selecting and reshaping rows. ``torch.nn.functional.cross_entropy`` of it is a tiled loss. Everything else
computes the whole logits first. See docs/tiled-loss.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch.nn import functional

from gemini.errors import StateError
from gemini.losses.tiled_cross_entropy import (
    Step,
    TileOptions,
    dtype_of_autocast,
    loss_by_tiles,
    without_autocast,
)
from gemini.system.lazy_tensor import LazyTensor, versions_of

_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class HeadCall:
    """The inputs of a linear head.

    Attributes:
        hidden, weight, bias: shapes (..., features), (entries, features), (entries,).
        state: returns a value that changes when the weight changes.
        note: called with the bytes of logits that are computed after all.
        steps: the operators applied to the logits since.
        compute_dtype: autocast's dtype; None without autocast.
        made: ``state()`` and the version of ``hidden`` at the time of the call.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: Callable[[], object]
    note: Callable[[int], None]
    steps: tuple[Step, ...] = ()
    compute_dtype: torch.dtype | None = None
    made: object = field(default=None)

    @classmethod
    def of(
        cls,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        state: Callable[[], object],
        note: Callable[[int], None],
    ) -> HeadCall:
        """Return a record of a call that is made now."""
        hidden = operands[0]
        compute = dtype_of_autocast(hidden.device.type)
        return cls(*operands, state, note, compute_dtype=compute, made=(state(), versions_of(hidden)))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        casts = [value for name, value in self.steps if name == "to"]
        return casts[-1] if casts else self.compute_dtype or self.hidden.dtype

    def then(self, name: str, value: Any = None) -> HeadCall:
        """Return a copy with one more step."""
        return replace(self, steps=(*self.steps, (name, value)))

    def of_rows(self, hidden: torch.Tensor) -> HeadCall:
        """Return a copy for other rows, which are a view of the present ones. Raises like :meth:`check`."""
        self.check()
        return replace(self, hidden=hidden, made=(self.state(), versions_of(hidden)))

    def check(self) -> None:
        """Raise StateError if the logits would differ from those at the time of the head's call."""
        if self.made != (self.state(), versions_of(self.hidden)):
            raise StateError(
                "the logits of a tiled loss are read after the weights of the head, or its input, have "
                "changed: they were not computed in the forward pass, and would be others now; read them "
                "before optimizer.step(), or leave tiled_loss out"
            )

    def logits(self) -> torch.Tensor:
        """Compute all logits."""
        self.check()
        device = self.hidden.device.type
        autocast: AbstractContextManager[Any] = without_autocast(device)
        if self.compute_dtype is not None:
            autocast = torch.autocast(device, self.compute_dtype)
        with autocast:
            logits = functional.linear(self.hidden, self.weight, self.bias)
        for name, value in self.steps:
            logits = getattr(logits, name)() if name == "tanh" else getattr(logits, name)(value)
        self.note(logits.nbytes)
        return logits

    def loss(self, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the cross entropy of the rows, by tiles. ``hidden`` must be two-dimensional."""
        self.check()
        chosen = TileOptions(steps=self.steps, compute_dtype=self.compute_dtype, **options)
        return loss_by_tiles(self.hidden, self.weight, self.bias, labels, chosen)


class LazyLogits(LazyTensor):
    """The logits of a :class:`HeadCall`, without memory until something other than a loss needs them."""

    lost_gradient = (
        "the gradient of logits goes to a place where nobody computes it further: an autograd.Function took "
        "the logits of a model with a tiled loss; give it logits.clone(), or leave tiled_loss out"
    )

    _call: HeadCall

    @staticmethod
    def __new__(cls, call: HeadCall) -> LazyLogits:
        operands = (call.hidden, call.weight, call.bias)
        is_recorded = torch.is_grad_enabled() and any(
            each is not None and each.requires_grad for each in operands
        )
        shape = (*call.hidden.shape[:-1], call.weight.shape[0])
        made = cls.without_memory(call.hidden, shape, trains=is_recorded, dtype=call.dtype)
        made._call = call
        return made

    def _may_stay_lazy(self) -> bool:
        """Return whether results may be lazy, too. They may not if gradients were turned off since, as in the
        forward of an autograd.Function, because its own backward must be used.
        """
        with PlainTensors():
            return self._whole is None and (torch.is_grad_enabled() or not self.requires_grad)

    def compute(self) -> torch.Tensor:
        """Compute all logits. Raises like :meth:`HeadCall.check`."""
        return self._call.logits()

    @classmethod
    def without_values(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return lazy logits for operators that models use between head and loss, and the loss by tiles."""
        rule = _RULES.get(getattr(func, "__name__", ""))
        if rule is None or not args or type(args[0]) is not cls or not args[0]._may_stay_lazy():
            return NotImplemented
        return rule(*args, **kwargs)


# -- operators that keep logits lazy; each returns NotImplemented if it needs the whole logits ---------------


def _to(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    call, wanted = logits._call, None
    if kwargs.keys() - {"dtype", "device", "non_blocking"}:
        return NotImplemented
    for each in (*args, kwargs.get("dtype"), kwargs.get("device")):
        if isinstance(each, torch.dtype):
            wanted = each
        elif isinstance(each, (str, torch.device)):
            if torch.device(each) != call.hidden.device:
                return NotImplemented
        elif each is not None and not isinstance(each, bool):
            return NotImplemented
    if wanted is None or wanted is call.dtype:
        return logits
    if wanted not in _WIDE or call.dtype is torch.float64:
        return NotImplemented
    return LazyLogits(call.then("to", wanted))


def _scaled(name: str) -> Callable[..., Any]:
    def rule(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or type(args[0]) not in (int, float):
            return NotImplemented
        if args[0] == 0 or not math.isfinite(args[0]):
            return NotImplemented
        return LazyLogits(logits._call.then(name, args[0]))

    return rule


def _tanh(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or any(name == "tanh" for name, _ in logits._call.steps):
        return NotImplemented
    return LazyLogits(logits._call.then("tanh"))


def _biased(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Add a number per entry, which some models keep as a buffer beside their head."""
    call = logits._call
    if kwargs or len(args) != 1 or type(args[0]) is not torch.Tensor or call.steps:
        return NotImplemented
    (offset,) = args
    entries = call.weight.shape[0]
    if offset.numel() != entries or offset.shape[-1:] != (entries,) or offset.dim() > call.hidden.dim():
        return NotImplemented
    if (offset.dtype, offset.device) != (call.dtype, call.hidden.device):
        return NotImplemented
    offset = offset.flatten()
    bias = offset if call.bias is None else call.bias + offset
    return LazyLogits(replace(call, bias=bias))


def _contiguous(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if args or kwargs else logits


def _part(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Index rows, as in ``logits[..., :-1, :]``; each row stays whole."""
    if kwargs or len(args) != 1:
        return NotImplemented
    call, index = logits._call, args[0]
    num_leading = call.hidden.dim() - 1
    if isinstance(index, torch.Tensor):
        is_mask = index.dtype is torch.bool and index.dim() <= num_leading
        return LazyLogits(call.of_rows(call.hidden[index])) if is_mask else NotImplemented
    places = list(index) if isinstance(index, tuple) else [index]
    is_basic = all(each is Ellipsis or type(each) in (int, slice) for each in places)
    if not is_basic or places.count(Ellipsis) > 1:
        return NotImplemented
    if Ellipsis in places:
        at = places.index(Ellipsis)
        places[at : at + 1] = [slice(None)] * (num_leading + 2 - len(places))
    if len(places) == num_leading + 1 and places.pop() != slice(None):
        return NotImplemented
    if len(places) > num_leading:
        return NotImplemented
    return LazyLogits(call.of_rows(call.hidden[tuple(places)]))


def _reshaped(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Reshape rows, as in ``logits.view(-1, entries)``; each row stays whole."""
    shape = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if kwargs or not shape or not all(type(each) is int for each in shape):
        return NotImplemented
    call = logits._call
    hidden, entries = call.hidden, call.weight.shape[0]
    num_rows, leading = math.prod(hidden.shape[:-1]), list(shape[:-1])
    if shape[-1] == -1 and -1 not in leading:
        is_whole = math.prod(leading) == num_rows
    else:
        known = math.prod(each for each in leading if each != -1)
        is_whole = shape[-1] == entries and leading.count(-1) <= 1
        is_whole &= known > 0 and num_rows % known == 0 and (-1 in leading or known == num_rows)
    if not is_whole:
        return NotImplemented
    return LazyLogits(call.of_rows(hidden.reshape(*leading, hidden.shape[-1])))


def _flattened(logits: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    hidden = logits._call.hidden
    last = end_dim + hidden.dim() if end_dim < 0 else end_dim
    if not 0 <= start_dim <= last < hidden.dim() - 1:
        return NotImplemented
    return LazyLogits(logits._call.of_rows(hidden.flatten(start_dim, last)))


def _cross_entropy(
    logits: LazyLogits,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return the loss, by tiles."""
    hidden = logits._call.hidden
    is_plain = all(each is None for each in (weight, size_average, reduce))
    is_plain &= type(target) is torch.Tensor and not target.is_floating_point()
    if not is_plain or hidden.dim() != 2 or target.shape != hidden.shape[:1] or reduction == "none":
        return NotImplemented
    if reduction not in ("mean", "sum") or target.device != hidden.device or not 0 <= label_smoothing <= 1:
        return NotImplemented  # torch raises the error
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    return logits._call.loss(target, **options)


_RULES: dict[str, Callable[..., Any]] = {
    "to": _to,
    "float": lambda logits, *args, **kwargs: _to(logits, torch.float32, *args, **kwargs),
    "double": lambda logits, *args, **kwargs: _to(logits, torch.float64, *args, **kwargs),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _scaled("mul")),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), _scaled("div")),
    **dict.fromkeys(("add", "__add__", "__radd__"), _biased),
    "tanh": _tanh,
    "contiguous": _contiguous,
    "__getitem__": _part,
    **dict.fromkeys(("view", "reshape"), _reshaped),
    "flatten": _flattened,
    "cross_entropy": _cross_entropy,
}
