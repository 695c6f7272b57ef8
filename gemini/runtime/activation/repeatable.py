"""Checks whether a call of a block can be repeated in backward, and repeats it.

The checks run no block: they look at arguments, attributes (by a digest) and generators before and after a
call. If a repeated call differs anyway, it is refused before its gradients are used.
"""

from __future__ import annotations

import enum
import functools
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as PlainTensors

from gemini import _C
from gemini.errors import StateError
from gemini.runtime.activation.saved_tensors import Version

_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_FIXED = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    enum.Enum,
    weakref.ref,
    nn.Module,  # digested separately if it is inside the block
)
_MOST_VALUES = 20_000
# Updates change parameters in every step; a replaced forward is the runtime's own.
_LEFT_OUT = frozenset({"_parameters", "forward"})


class CannotRepeat(Exception):
    """A block must not be run again; the message says why."""


class Digest:
    """A digest of a module's state: two are equal if nothing was set, written or grew in between. It keeps
    the objects that it has looked at alive, so that no other object gets their ids."""

    def __init__(self) -> None:
        self._found: list[object] = []
        self._kept: list[object] = []
        self._seen: set[int] = set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digest) and self._found == other._found

    __hash__ = None  # type: ignore[assignment]

    def add(self, value: Any) -> None:
        """Add a value and its contents. Raises CannotRepeat if it may change unseen."""
        if len(self._found) > _MOST_VALUES:
            raise CannotRepeat("it has too many attributes to look at")
        if isinstance(value, _VALUES):
            self._found.append((type(value), value))
            return
        self._kept.append(value)
        self._found.append(id(value))
        if id(value) in self._seen or isinstance(value, _FIXED):
            return
        self._seen.add(id(value))
        self._look_into(value)

    def _look_into(self, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            return
        if isinstance(value, torch.Tensor):
            self._found.append(0 if value.is_inference() else value._version)
        elif isinstance(value, torch.Generator):
            self._found.append(bytes(value.get_state().tolist()))
        elif isinstance(value, random.Random):
            self._found.append(value.getstate())
        elif isinstance(value, dict):
            for key, one in value.items():
                self.add(key)
                self.add(one)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            self._found.append(len(value))
            for one in value:
                self.add(one)
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            self._found.append(value.tobytes())
        elif hasattr(value, "__dict__"):
            self.add(vars(value))
        else:
            raise CannotRepeat(
                f"it has an attribute of type {type(value).__name__}, which may change undetected"
            )


def digest_of(module: nn.Module) -> Digest:
    """Return the digest of a module and its submodules. Raises CannotRepeat."""
    digest = Digest()
    with torch._C.DisableTorchFunctionSubclass():
        for part in module.modules():
            for name, value in vars(part).items():
                if name not in _LEFT_OUT:
                    digest.add(name)
                    digest.add(value)
    return digest


_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


class _Place(NamedTuple):
    """The index of a tensor among the tensors of a call."""

    number: int


class Given:
    """The arguments of a call, split into tensors and a structure that holds none of them.

    Raises:
        CannotRepeat: an argument is neither a plain tensor nor a plain value, nor a tuple of these. A call
            may write to it.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._args = tuple(self._place(value) for value in args)
        self._kwargs = {name: self._place(value) for name, value in kwargs.items()}

    def release(self) -> list[torch.Tensor]:
        """Return the tensors and drop the references to them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``tensors`` at the places of the original ones."""
        args = tuple(_filled(value, tensors) for value in self._args)
        return args, {name: _filled(value, tensors) for name, value in self._kwargs.items()}

    def _place(self, value: object) -> object:
        if isinstance(value, torch.Tensor) and is_ordinary(value):
            self.tensors.append(value)
            return _Place(len(self.tensors) - 1)
        if type(value) is tuple:
            return tuple(self._place(one) for one in value)
        if isinstance(value, _PLAIN):
            return value
        raise CannotRepeat(f"it is called with an object of type {type(value).__name__}")


def _filled(value: object, tensors: Sequence[torch.Tensor]) -> object:
    if isinstance(value, _Place):
        return tensors[value.number]
    return tuple(_filled(one, tensors) for one in value) if type(value) is tuple else value


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is plain strided memory with a version counter; managed tensors are not."""
    return (
        type(tensor) is torch.Tensor
        and not tensor.is_nested
        and tensor.layout is torch.strided
        and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg() or tensor.is_meta)
    )


class Look:
    """Compares the state around a block before and after a call: buffers, attributes, and generators other
    than torch's."""

    def __init__(self, module: nn.Module) -> None:
        """Record the state before the call. Raises CannotRepeat if a part of it cannot be compared."""
        self._module = module
        if any(part._forward_hooks or part._forward_pre_hooks for part in _within(module)):
            raise CannotRepeat("modules within it have forward hooks, which would run twice")
        self._digest = digest_of(module)
        self._parameters = _versions(module.parameters())
        self._random = _other_random_states()

    def require_unchanged(self, versions: Sequence[Version], out: object) -> None:
        """Raise CannotRepeat if the call wrote to its arguments (``versions``: those before it), its module,
        or generators that are not restored; or if ``out``, its result, is of an unknown type."""
        if not all(version.is_current for version in versions):
            raise CannotRepeat("it writes to its arguments")
        if _versions(self._module.parameters()) != self._parameters:
            raise CannotRepeat("it writes to its parameters")
        if _other_random_states() != self._random:
            raise CannotRepeat("it draws random numbers from Python or numpy")
        if not self.holds:
            raise CannotRepeat("it changes its attributes or buffers")
        strange = next(
            (one for one in _leaves(out) if not isinstance(one, _PLAIN) and not _is_plain(one)), None
        )
        if strange is not None:
            raise CannotRepeat(f"it returns an object of type {type(strange).__name__}")

    @property
    def holds(self) -> bool:
        """Whether buffers and attributes are unchanged."""
        try:
            return digest_of(self._module) == self._digest
        except CannotRepeat:  # a new attribute cannot be digested
            return False


class Repeat:
    """The function that is checkpointed: a call of a block, which must return the same result each time."""

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any], given: Given) -> None:
        self._name, self._module, self._forward, self._given = name, module, forward, given
        self._bits: list[object] | None = None
        self._training: list[bool] = []
        self._buffers: list[tuple[int, int]] = []

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run the block. Raises StateError if a repeated call returns other bits than the first."""
        if self._bits is None:
            args, kwargs = self._given.rebuilt(tensors)
            out = self._forward(*args, **kwargs)
            self._training = training_modes(self._module)
            self._buffers = _versions(self._module.buffers())
            self._bits = _bits_of(out)
            return out
        # Aliases: hooks that the block registers on its inputs must not reach the real graph again.
        aliases = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        args, kwargs = self._given.rebuilt(aliases)
        modes = training_modes(self._module)
        set_training(self._module, self._training)
        try:
            out = self._forward(*args, **kwargs)
        finally:
            set_training(self._module, modes)
        if _versions(self._module.buffers()) != self._buffers or _bits_of(out) != self._bits:
            raise StateError(
                f"block {self._name!r} gave other results in backward than in forward, or its "
                "buffers were written: its gradients would be wrong. An input that it depends on "
                "changed in between; leave out activation_recompute, call zero_grad() and repeat the "
                "step"
            )
        return out


def training_modes(module: nn.Module) -> list[bool]:
    """Return ``training`` of a module and its submodules."""
    return [part.training for part in module.modules()]


def set_training(root: nn.Module, modes: Sequence[bool]) -> None:
    """Set the modes that :func:`training_modes` returned."""
    for module, mode in zip(root.modules(), modes, strict=True):
        module.training = mode


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    with PlainTensors():
        return [(id(one), 0 if one.is_inference() else one._version) for one in tensors]


def _within(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if part is not module)


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and is_ordinary(value)


def _bits_of(out: object) -> list[object]:
    """Return a value that is equal for equal results: tensors are represented by checksums."""
    found: list[object] = []
    with PlainTensors():
        for value in _leaves(out):
            if isinstance(value, torch.Tensor) and is_ordinary(value):
                dense = value.detach().contiguous()
                found.append((tuple(value.shape), _C.crc32c(dense.data_ptr(), dense.nbytes)))
            elif isinstance(value, _PLAIN):
                found.append(value)
    return found


def _other_random_states() -> list[object]:
    """Return the states of generators that recomputation does not restore."""
    numpy = sys.modules.get("numpy")
    states: list[object] = [random.getstate()]
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states += [kind, keys.tobytes(), *rest]
    return states
