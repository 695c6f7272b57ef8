"""Frozen quantized weights: their plain inner tensors lie in a chunk as bytes.

A quantized weight is either a wrapper around plain tensors (``__tensor_flatten__``: torchao), or has memory
of its own and statistics in attributes (bitsandbytes). Each is one slot of bytes, so that an operator pins
all inner tensors at once. The weight stays the same object; it keeps its class by ``isinstance`` and by name.
See docs/notes/quantized.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gemini.chunk.layout import TENSOR_ALIGN_BYTES, is_dense, round_up
from gemini.errors import ConfigError
from gemini.runtime.intercept.precision import EIGHT_BITS, FOUR_BITS, class_name

# Classes with memory of their own, and the attributes with tensors that lie in chunks besides that memory.
# Code tables are shared by all weights and stay where they are.
_OWN_MEMORY: Mapping[str, tuple[str, ...]] = {
    FOUR_BITS: (
        "quant_state.absmax",
        "quant_state.state2.absmax",
        "quant_state.offset",
    ),
    EIGHT_BITS: ("CB", "SCB"),
}


class Holder(NamedTuple):
    """An attribute of an object that holds an inner tensor, or None while another holder has it."""

    owner: Any
    name: str

    @property
    def value(self) -> torch.Tensor | None:
        """The attribute's value."""
        found: torch.Tensor | None = getattr(self.owner, self.name, None)
        return found


@dataclass(frozen=True)
class InnerTensor:
    """A plain tensor of a weight and its place in the slot's bytes. ``holders`` is empty for the weight's own
    memory."""

    start: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    holders: tuple[Holder, ...]

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def view(self, held: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of ``held``, the bytes of the slot, with a version counter of its
        own."""
        flat = held[self.start : self.start + self.nbytes].view(self.dtype)
        with torch.no_grad():
            return torch.as_strided(flat, self.shape, self.stride, flat.storage_offset()).data

    def bytes_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value``, of this dtype and shape, as flat bytes in the slot's order; a copy if its memory
        order differs."""
        with PlainTensors(), torch.no_grad():
            if value.stride() != self.stride:
                laid_out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=value.device)
                value = laid_out.copy_(value)
            return torch.as_strided(value, (self.shape.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True)
class QuantizedForm:
    """The format of a quantized weight: its class and inner tensors. ``rebuild`` makes a wrapper of this
    class from plain tensors; None for a class with memory of its own. ``codes``: the name of the code table,
    which is not among the bytes; empty if there is none."""

    kind: type
    inner: tuple[InnerTensor, ...]
    nbytes: int
    rebuild: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None
    codes: str = ""

    def __str__(self) -> str:
        """Return a key of the format: the bytes of two weights are exchangeable if their keys are equal."""
        parts = [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in self.inner]
        kind = [class_name(self.kind), *([self.codes] if self.codes else [])]
        return " ".join([*kind, *parts]).replace(", ", ",")

    def views(self, held: torch.Tensor) -> list[torch.Tensor]:
        """Return the inner tensors as views of ``held``, the bytes of the slot."""
        return [each.view(held) for each in self.inner]

    def over(self, held: torch.Tensor) -> torch.Tensor:
        """Return an unmanaged tensor over ``held``, like ``detach()`` of the weight."""
        plain = self.views(held)
        return plain[0] if self.rebuild is None else self.rebuild(plain)

    def values_of(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in ``value`` to copy to :meth:`views`, from the first on.

        Raises:
            ConfigError: ``value`` is quantized in another format, or not quantized.
        """
        if self.rebuild is None:
            given = [value]
        elif isinstance(value, self.kind):
            given = leaves_of(value)
        else:
            given = []
        ours = [(each.dtype, each.shape) for each in self.inner[: max(1, len(given))]]
        if ours != [(each.dtype, each.shape) for each in given]:
            raise ConfigError(
                f"a {type(value).__name__} of {value.dtype} and shape {tuple(value.shape)} was given for a "
                f"quantized weight, {self}, which takes values that were quantized in the same way; quantize "
                "them, or build the model from other weights"
            )
        return given

    def tensors_of(self, param: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the inner tensors of ``param``, an unmanaged weight, in the order of :attr:`inner`."""
        for index, each in enumerate(self.inner):
            if index == 0 and self.rebuild is None:
                yield param.data
                continue
            yield next(value for holder in each.holders if (value := holder.value) is not None)

    def put(self, held: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Set the attributes to the inner tensors in ``held``, each passed through ``change``."""
        for each in self.inner:
            for holder in each.holders:
                if holder.value is not None:
                    setattr(holder.owner, holder.name, change(each.view(held)))


@dataclass
class _Layout:
    """Places inner tensors one behind another."""

    inner: list[InnerTensor] = field(default_factory=list)
    end: int = 0

    def add(self, tensor: torch.Tensor, *holders: Holder) -> None:
        shape = tensor.shape
        like = tensor if is_dense(tensor) else torch.empty(shape, dtype=tensor.dtype, device="meta")
        self.inner.append(InnerTensor(self.end, tensor.dtype, shape, like.stride(), holders))
        self.end = round_up(self.end + self.inner[-1].nbytes, TENSOR_ALIGN_BYTES)


def is_wrapper(value: Any) -> bool:
    """Say whether ``value`` is a tensor that wraps plain tensors and can be taken apart."""
    return is_traceable_wrapper_subclass(value)


def form_of(name: str, param: nn.Parameter, owner: nn.Module) -> QuantizedForm:
    """Return the format of a quantized weight of ``owner``.

    Raises:
        ConfigError: the weight trains or is not quantized yet, or a chunk cannot hold an inner tensor.
    """
    kind = class_name(type(param))
    if param.requires_grad:
        raise ConfigError(
            f"parameter {name!r} is a quantized weight ({kind}) that trains, and chunks hold frozen ones; "
            "call requires_grad_(False) on it and train adapters, as LoRA of peft"
        )
    layout = _Layout()
    if class_name(type(param)) not in _OWN_MEMORY:
        for holder, leaf in _leaves(param):
            _refuse_unfit(name, kind, holder.name, leaf)
            layout.add(leaf, holder)
        rebuild = rebuilding(param)
        return QuantizedForm(type(param), tuple(layout.inner), max(layout.end, 1), rebuild)
    if param.is_floating_point() and getattr(param, "quant_state", None) is None:
        raise ConfigError(
            f"parameter {name!r} is a {kind} that is not quantized yet ({param.dtype}); move the model to a "
            "device once, model.to('cpu'), which quantizes it"
        )
    with PlainTensors():
        own = param.data
    _refuse_unfit(name, kind, "data", own)
    layout.add(own)
    for holders in _statistics(param, owner):
        tensor = next((value for holder in holders if (value := holder.value) is not None), None)
        if tensor is None:
            continue
        if _is_same_memory(tensor, own):  # another name of the weight's own memory
            layout.inner[0] = replace(layout.inner[0], holders=holders)
            continue
        _refuse_unfit(name, kind, holders[0].name, tensor)
        layout.add(tensor, *holders)
    codes = getattr(getattr(param, "quant_state", None), "quant_type", None) or ""
    return QuantizedForm(type(param), tuple(layout.inner), max(layout.end, 1), None, codes)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_meta:  # every address is 0 there
        return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
    return one.data_ptr() == other.data_ptr()


def _statistics(param: nn.Parameter, owner: nn.Module) -> Iterator[tuple[Holder, ...]]:
    """Yield the possible holders of each statistics tensor of a weight with memory of its own: the weight, or
    the state of its module, where the first forward pass of bitsandbytes moves it."""
    for path in _OWN_MEMORY[class_name(type(param))]:
        *around, name = path.split(".")
        places = [param, getattr(owner, "state", None)]
        for step in around:
            places = [getattr(place, step, None) for place in places]
        yield tuple(Holder(place, name) for place in places if place is not None)


def _every_statistic(param: nn.Parameter, owner: nn.Module) -> list[Holder]:
    """Return the holders of all tensors of a weight besides its own memory, including code tables."""
    found = [holder for holders in _statistics(param, owner) for holder in holders]
    return [*found, *(Holder(holder.owner, "code") for holder in found if holder.name == "absmax")]


def _leaves(wrapper: Any) -> Iterator[tuple[Holder, torch.Tensor]]:
    """Yield the plain tensors in a wrapper and in nested wrappers, with their holders."""
    for name in wrapper.__tensor_flatten__()[0]:
        inner = getattr(wrapper, name)
        if is_wrapper(inner):
            yield from _leaves(inner)
        else:
            yield Holder(wrapper, name), inner


def leaves_of(wrapper: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors in a wrapper and in nested wrappers."""
    return [leaf for _, leaf in _leaves(wrapper)]


def rebuilding(wrapper: Any) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    """Return a function that makes a wrapper like this one from other plain tensors, in the order of
    :func:`leaves_of`."""
    names, context = wrapper.__tensor_flatten__()
    kind, size, stride = type(wrapper), wrapper.size(), wrapper.stride()
    parts = [(name, getattr(wrapper, name)) for name in names]
    within = {name: rebuilding(part) for name, part in parts if is_wrapper(part)}
    counts = [len(leaves_of(part)) if name in within else 1 for name, part in parts]

    def rebuild(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        tensors, first = {}, 0
        for name, count in zip(names, counts, strict=True):
            given = leaves[first : first + count]
            tensors[name] = within[name](given) if name in within else given[0]
            first += count
        made: torch.Tensor = kind.__tensor_unflatten__(tensors, context, size, stride)
        return made

    return rebuild


def like(sample: Any, owner: nn.Module, *, without_values: bool = False) -> nn.Parameter:
    """Return a quantized weight of ``owner`` with the values of ``sample``, an unmanaged weight, in the same
    memory; ``without_values``: on ``meta``."""

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("meta") if without_values else tensor

    if is_wrapper(sample):
        return nn.Parameter(rebuilding(sample)([taken(each) for each in leaves_of(sample)]), False)
    made: nn.Parameter = torch.Tensor._make_subclass(type(sample), taken(sample.data), False)
    vars(made).update(vars(sample))
    if "module" in vars(made):  # bitsandbytes: the module that owns the weight
        vars(made)["module"] = owner
    around: Any = made
    for name in ("quant_state", "state2"):  # each weight needs statistics objects of its own
        state = getattr(around, name, None)
        if state is None:
            break
        setattr(around, name, copy.copy(state))
        around = getattr(around, name)
    for holder in _every_statistic(made, owner) if without_values else ():
        value = holder.value
        if value is not None:
            is_own = _is_same_memory(value, sample.data)
            setattr(holder.owner, holder.name, made.data if is_own else value.to("meta"))
    return made


def keep_layout(owner: Any) -> None:
    """Keep a bitsandbytes layer from repacking its weight: on a CPU with AVX512-BF16 it would change the
    shape for inference."""
    if hasattr(owner, "support_avx512bf16_for_cpu"):
        owner.support_avx512bf16_for_cpu = False


def _refuse_unfit(name: str, kind: str, inner: str, tensor: Any) -> None:
    """Raise ConfigError if a chunk cannot hold an inner tensor."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise _unfit(name, kind, inner, f"a {type(tensor).__module__}.{type(tensor).__qualname__}")
    if tensor.layout is not torch.strided:
        raise _unfit(name, kind, inner, f"of layout {tensor.layout}")


def refuse_without_values(name: str, param: nn.Parameter, form: QuantizedForm) -> None:
    """Raise ConfigError if an inner tensor of a weight is on ``meta``."""
    for each, tensor in zip(form.inner, form.tensors_of(param), strict=True):
        if tensor.is_meta:
            inner = each.holders[0].name if each.holders else "data"
            raise _unfit(name, class_name(type(param)), inner, "on 'meta', without values")


def _unfit(name: str, kind: str, inner: str, why: str) -> ConfigError:
    return ConfigError(
        f"parameter {name!r} is a {kind}, and its inner tensor {inner!r} is {why}; chunks hold plain "
        "tensors with values: quantize the weight before the model is managed, or in another way"
    )
