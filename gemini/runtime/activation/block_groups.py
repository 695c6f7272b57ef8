"""Groups of blocks that keep only the input of the first block, and run forward again in backward.

A group is a sequence of blocks and nested groups. When backward reaches its last block, all of its blocks run
again, in order. Blocks named directly in the group then save their tensors for backward; a nested group saves
its input until backward reaches it. Tensors passed from block to block inside a group are not kept if the
next block gets the very tensor that the previous one returned. All other inputs of blocks are kept.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias, Union

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from gemini.errors import ConfigError, StateError

Names: TypeAlias = Union[str, "tuple[Names, ...]"]  # name of a block, or names of a group


def flat_names(names: Names) -> tuple[str, ...]:
    """Return the blocks of a group, or the single block."""
    return (names,) if isinstance(names, str) else tuple(each for part in names for each in flat_names(part))


# Weak references to tensors, and their versions.
Returned: TypeAlias = Sequence["tuple[Callable[[], torch.Tensor | None], int]"]


class _SaveInputs(torch.autograd.Function):
    """Saves tensors through autograd, so that saved-tensor hooks and checks of in-place writes apply to
    them."""

    @staticmethod
    def forward(ctx: Any, _connected: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0, dtype=torch.float32, device="cpu")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("nothing depends on what was saved")


def text_of_names(names: Sequence[Names]) -> str:
    """Return names separated by commas, with groups in parentheses."""
    return ",".join(each if isinstance(each, str) else f"({text_of_names(each)})" for each in names)


def names_in(text: str) -> tuple[Names, ...]:
    """Parse the output of :func:`text_of_names`, or text that a person wrote.

    Raises:
        ConfigError: a parenthesis is not closed, or closes nothing.
    """
    open_: list[list[Names]] = [[]]
    for part in re.split(r"([(),])", text):
        if part == "(":
            open_.append([])
        elif part == ")" and len(open_) > 1:
            group = tuple(open_.pop())
            open_[-1] += [group] if group else []
        elif part == ")":
            raise ConfigError(f"recompute {text!r:.200} closes a group that it does not open")
        elif part.strip(", "):
            open_[-1].append(part.strip())
    if len(open_) > 1:
        raise ConfigError(f"recompute {text!r:.200} opens a group that it does not close")
    return tuple(open_[0])


class _Link(NamedTuple):
    """The argument is the previous block's output at this place."""

    place: int


class _Kept(NamedTuple):
    """The argument is the tensor that autograd saved at this place."""

    place: int


class _Given:
    """The inputs of a block's call, and the state of generators and autocast."""

    def __init__(self, args: Any, kwargs: Any, returned: Returned) -> None:
        leaves, self._spec = tree_flatten((args, kwargs))
        places = {
            id(ref()): place for place, (ref, version) in enumerate(returned) if _is_same(ref(), version)
        }
        kept: list[torch.Tensor] = []
        self._leaves: list[Any] = []
        self._requires_grad: list[bool] = []
        for leaf in leaves:
            is_tensor = isinstance(leaf, torch.Tensor)
            self._requires_grad.append(is_tensor and leaf.requires_grad)
            if is_tensor and id(leaf) in places:
                self._leaves.append(_Link(places[id(leaf)]))
            elif is_tensor:
                self._leaves.append(_Kept(len(kept)))
                kept.append(leaf)
            else:
                self._leaves.append(leaf)
        connected = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
        self._saved = _SaveInputs.apply(connected, *kept).grad_fn  # type: ignore[no-untyped-call]
        self._random = torch.get_rng_state(), get_device_states(*leaves)
        self._types = {each.device.type for each in leaves if isinstance(each, torch.Tensor)} | {"cpu"}
        self._casts = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in self._types - {"meta"}
        }

    def arguments(self, returned: Sequence[Any]) -> tuple[Any, Any]:
        """Return the arguments again; ``returned``: the outputs of the previous block."""
        saved = self._saved.saved_tensors if self._saved is not None else ()
        leaves = []
        for leaf, requires_grad in zip(self._leaves, self._requires_grad, strict=True):
            if isinstance(leaf, (_Link, _Kept)):
                tensor = (returned if isinstance(leaf, _Link) else saved)[leaf.place].detach()
                leaf = tensor.requires_grad_(requires_grad)
            leaves.append(leaf)
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs

    @contextmanager
    def restored_state(self) -> Iterator[None]:
        """Restore generators and autocast to their state at the call for the block."""
        cpu, (devices, states) = self._random
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            torch.set_rng_state(cpu)
            if devices:
                set_device_states(devices, states)
            for kind, (dtype, enabled) in self._casts.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(torch.enable_grad())
            yield


def _is_same(tensor: torch.Tensor | None, version: int) -> bool:
    return tensor is not None and tensor._version == version


class _Slot:
    """Placeholder for a tensor that autograd saves in a block; ``value`` is set when the block runs again."""

    __slots__ = ("__weakref__", "member", "run", "value")

    def __init__(self, run: _GroupPass, member: int) -> None:
        self.run, self.member = run, member
        self.value: torch.Tensor | None = None


class _GroupPass:
    """A forward pass through a group. The graph keeps it alive."""

    def __init__(self, group: BlockGroup, first: int) -> None:
        self._group, self._first = group, first
        self._given: dict[int, _Given] = {}
        self._runs: dict[int, Callable[..., Any]] = {}
        self._slots: dict[int, list[weakref.ref[_Slot]]] = {}
        # By a block, if that is the input of a group; without grads.
        self._returned: dict[int, list[Any]] = {}
        self._done: set[tuple[_Item, ...]] = set()
        self.returned: Returned = []  # outputs of the last block that ran

    @property
    def next_member(self) -> int:
        """The block that is expected next."""
        return self._first + len(self._given)

    def forward(self, member: int, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block for the first time; tensors that autograd saves are replaced by slots."""
        self._given[member], self._runs[member] = _Given(args, kwargs, self.returned), run
        slots = self._slots[member] = []

        def pack(_tensor: torch.Tensor) -> _Slot:
            slot = _Slot(self, member)
            slots.append(weakref.ref(slot))
            return slot

        with saved_tensors_hooks(pack, _value_of):
            out = run(*args, **kwargs)
        self.returned = [
            (weakref.ref(each), each._version) if isinstance(each, torch.Tensor) else (_nothing, -1)
            for each in tree_flatten(out)[0]
        ]
        return out

    def compute(self, member: int) -> None:
        """Compute the tensors that a block has saved."""
        part: _Item = self._group.items
        while isinstance(part, tuple):
            if part not in self._done:
                self._done.add(part)
                self._again(part)
            part = next(each for each in part if member in _members(each))

    def _again(self, part: tuple[_Item, ...]) -> None:
        """Run the blocks of a group again."""
        returned = self._returned.pop(_members(part)[0], [])
        for item in part:
            if not isinstance(item, int):
                self._returned[_members(item)[0]] = returned
            for member in _members(item):
                if member in self._given:
                    returned = self._repeat(member, returned, keeps=isinstance(item, int))

    def _repeat(self, member: int, returned: Sequence[Any], *, keeps: bool) -> list[Any]:
        """Run a block again, and fill its slots if it ``keeps``; return its outputs without grads."""
        given, slots, place = self._given[member], self._slots[member], 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal place
            slot = slots[place]() if place < len(slots) else None
            place += 1
            if slot is not None and keeps:
                slot.value = tensor.detach()

        with given.restored_state(), saved_tensors_hooks(pack, _refuse):
            args, kwargs = given.arguments(returned)
            out = self._runs[member](*args, **kwargs)
        if place != len(slots):
            raise StateError(
                f"block {self._group.names[member]!r} saved {len(slots)} tensors in forward, and "
                f"{place} when it ran again in backward: its computation differs from run to run; "
                "leave it out of recompute="
            )
        return [each.detach() if isinstance(each, torch.Tensor) else each for each in tree_flatten(out)[0]]


def _nothing() -> None:
    return None


def _value_of(slot: _Slot) -> torch.Tensor:
    if slot.value is None:
        slot.run.compute(slot.member)
    assert slot.value is not None, "a block that ran again has filled its slots"
    return slot.value


def _refuse(_: None) -> torch.Tensor:
    raise AssertionError("backward goes through the first forward pass alone")


_Item: TypeAlias = Union[int, "tuple[_Item, ...]"]


def _members(item: _Item) -> tuple[int, ...]:
    return (item,) if isinstance(item, int) else tuple(each for part in item for each in _members(part))


class BlockGroup:
    """The blocks of a group. If a block does not follow the previous one, it begins a new pass, which keeps
    that block's input."""

    def __init__(self, names: Names) -> None:
        self.names = flat_names(names)
        numbers = iter(range(len(self.names)))

        def numbered(part: Names) -> _Item:
            return next(numbers) if isinstance(part, str) else tuple(numbered(each) for each in part)

        items = numbered(names)
        self.items: tuple[_Item, ...] = (items,) if isinstance(items, int) else items
        self._run: _GroupPass | None = None

    def forward(self, member: int, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block of the group."""
        if self._run is None or self._run.next_member != member:
            self._run = _GroupPass(self, member)
        return self._run.forward(member, run, args, kwargs)
