"""Whether a block of a model can be run again: what it is given, what it changes, what it returns."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


class Watched:
    """What a block had before a call: its arguments, its buffers and attributes, the state of the random
    numbers."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.random_state = torch.get_rng_state()
        self._module = module
        self._tensors = [*_tensors((args, kwargs)), *module.buffers()]
        self._versions = [tensor._version for tensor in self._tensors]
        self._attributes = _attributes(module)
        self._random_states = _other_random_states()

    def why_not(self, out: object) -> str | None:
        """Return why the call, which returned ``out``, must not be repeated; None where nothing shows."""
        refusal = why_not_given(self.args, self.kwargs)
        if refusal is not None:
            return refusal
        inside = [part for part in self._module.modules() if part is not self._module]
        if any(part._forward_hooks or part._forward_pre_hooks for part in inside):
            return "modules within it have forward hooks, which would run twice"
        if [tensor._version for tensor in self._tensors] != self._versions:
            return "it writes to its arguments or buffers"
        if _attributes(self._module) != self._attributes:
            return "it changes its attributes"
        if _other_random_states() != self._random_states:
            return "it draws random numbers of Python or numpy"
        strange = _strange(out)
        return f"it returns an object of type {strange}" if strange is not None else None


def why_not_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why a call with these arguments cannot be repeated: an object (a cache of keys and values, say)
    may be changed by each."""
    strange = _strange((args, kwargs))
    return f"it is given an object of type {strange}" if strange is not None else None


def outputs_again(forward: Callable[..., Any], watched: Watched, out: object) -> str | None:
    """Run a block again from the state of the random numbers that it began with; return what is wrong where
    that does not give the bits of ``out``. The state is as before afterwards."""
    after = torch.get_rng_state()
    torch.set_rng_state(watched.random_state)
    try:
        with saved_tensors_hooks(_forget, _refuse):
            again = forward(*watched.args, **watched.kwargs)
    finally:
        torch.set_rng_state(after)
    pairs = list(zip(_tensors(out), _tensors(again), strict=False))
    same = len(pairs) == sum(1 for _ in _tensors(out)) == sum(1 for _ in _tensors(again))
    if same and all(_same_bits(one, other) for one, other in pairs):
        return None
    return "run twice, it does not return the same"


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)


def _forget(_tensor: torch.Tensor) -> None:
    """Save nothing: nobody runs backward."""


def _refuse(_saved: object) -> torch.Tensor:
    raise AssertionError("a graph that was only made to be compared runs backward")


def _tensors(values: object) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))


def _strange(values: object) -> str | None:
    """Return the type of something that is neither a tensor, nor plain, nor made of such."""
    if type(values) in (torch.Tensor, nn.Parameter) or isinstance(values, _PLAIN):
        return None
    if type(values) in (list, tuple) or (isinstance(values, tuple) and hasattr(values, "_fields")):
        return next((found for value in values if (found := _strange(value)) is not None), None)  # type: ignore[attr-defined]
    if type(values) is dict:
        return _strange(list(values.values()))
    return type(values).__name__


def _attributes(module: nn.Module) -> list[tuple[str, list[int]]]:
    """Return what tells whether attributes of a module or its submodules were set or written, down to what is
    in a list or dict."""
    return [
        (f"{name}.{key}", [_mark(value), *(_mark(one) for one in _inside(value))])
        for name, part in module.named_modules()
        for key, value in vars(part).items()
    ]


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple, set, frozenset)) else ()


def _mark(value: object) -> int:
    """Return a number that is another one when a value was replaced, or written as far as that shows."""
    if isinstance(value, (bool, int, float, str)):
        return hash(value)
    if isinstance(value, torch.Generator):
        return hash(tuple(value.get_state().tolist()))
    return id(value) + (value._version if isinstance(value, torch.Tensor) else 0)


def _other_random_states() -> list[object]:
    """Return the states of generators that recomputation does not set back."""
    numpy = sys.modules.get("numpy")
    states: list[object] = [random.getstate()]
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states += [kind, keys.tobytes(), *rest]
    return states
