"""Finds parameters that were added to a module, or left it, since it was wrapped, and moves the new ones into
chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gemini.chunk.memory import ComputeDevice
from gemini.errors import ConfigError
from gemini.runtime.adopt import Adopted, adopt_parameter, release_all, warn_of_rounded
from gemini.runtime.build import Outline, lay_out
from gemini.runtime.config import GeminiConfig
from gemini.runtime.intercept.precision import is_quantized
from gemini.runtime.intercept.tensors import ManagedParameter, ManagedTensor
from gemini.runtime.manager import GeminiManager
from gemini.runtime.storage.data_sizes import GroupSpec, chunk_bytes, largest_operator
from gemini.runtime.storage.model_storage import ManagedSlot, ModelStorage, slot_of


@dataclass(frozen=True)
class Changes:
    """Changes of a module's parameters since it was wrapped. ``names``: the managed parameters that it has
    now; some may have been away. ``departed``: managed parameters that it no longer has. ``outline``: of the
    new parameters."""

    names: dict[ManagedSlot, str]
    departed: tuple[ManagedSlot, ...]
    outline: Outline

    def __str__(self) -> str:
        """Return a text that must be equal on all ranks."""
        outline, places = self.outline, [(_place(slot), name) for slot, name in self.names.items()]
        arrived = [
            (name, tuple(param.shape), param.stride(), outline.types[name], name in outline.trainable)
            for name, param in outline.params.items()
        ] + list(outline.forms.items())
        return f"{places} {[_place(slot) for slot in self.departed]} {arrived}"


def _place(slot: ManagedSlot) -> tuple[int, int]:
    return slot.group.number, slot.start


def find_changes(
    module: nn.Module, config: GeminiConfig, storage: ModelStorage, manager: GeminiManager
) -> Changes | None:
    """Compare the parameters of ``module`` with the managed ones; None if they are the same.

    Raises:
        ConfigError: a new parameter cannot be managed.
    """
    names: dict[ManagedSlot, str] = {}
    has_arrivals = False
    for name, param in module.named_parameters():
        if isinstance(param, ManagedParameter) and param._ref.manager is manager:
            names.setdefault(slot_of(param), name)
        else:
            has_arrivals = True
    before = {slot: name for name, slot in storage.slots.items()}
    if names == before and not has_arrivals:
        return None
    _refuse_unfit(module, manager)
    departed = tuple(slot for slot in before if slot not in names)
    return Changes(names, departed, Outline.of(module, config, manager))


def adopt_new(
    module: nn.Module,
    changes: Changes,
    config: GeminiConfig,
    chunk_numel: int,
    device: ComputeDevice,
    storage: ModelStorage,
    manager: GeminiManager,
) -> Sequence[Adopted]:
    """Move new parameters into chunks of their own, of at most ``chunk_numel`` elements unless a parameter is
    larger; discard the gradients of departed parameters; rename the others as in the module. Collective: all
    ranks call it with the same module; the values of the first rank count.

    Raises:
        OutOfBudgetError, ConfigError: the tiers cannot hold them; nothing was changed.
        IoError: the same, or a chunk could not be written. The new parameters are ordinary ones; chunks that
            were created for them stay, empty.
    """
    before = {slot: name for name, slot in storage.slots.items()}
    specs = lay_out(changes.outline, config, chunk_numel, device)
    slots: list[ManagedSlot] = []
    if specs:
        raises_disk = config.disk_bytes is None and manager.chunks.budgets.disk_bytes > 0
        operator = _largest_operator(changes, specs, device)
        assert manager.growth is not None
        slots = manager.growth.add_parameters(specs, operator, raises_disk=raises_disk)
    try:
        adopted = _adopt(module, slots, manager)
    except BaseException:
        storage.rename(before)
        raise
    for slot in changes.departed:
        slot.free_grad()
    storage.rename(changes.names | {slot: slot.name for slot in slots})
    manager.name_parameters(storage.parameter_names())
    return adopted


def _largest_operator(changes: Changes, specs: Sequence[GroupSpec], device: ComputeDevice) -> tuple[int, str]:
    chunks = chunk_bytes(specs, device.block_bytes)
    chunks |= {name: (slot.group, slot.group.param.spec.nbytes) for slot, name in changes.names.items()}
    return largest_operator(changes.outline.operators, chunks)


@torch.no_grad()
def _adopt(module: nn.Module, slots: Sequence[ManagedSlot], manager: GeminiManager) -> Sequence[Adopted]:
    """Copy parameters into their chunks, with their gradients, and make them managed. If that fails, they are
    ordinary ones again."""
    adopted: list[Adopted] = []
    grads: list[torch.Tensor | None] = []
    try:
        for slot in slots:
            param = module.get_parameter(slot.name)
            grads.append(param.grad)
            owner = module.get_submodule(slot.name.rpartition(".")[0])
            adopted.append(adopt_parameter(param, slot, manager, owner))
        for slot, grad in zip(slots, grads, strict=True):
            if grad is not None and slot.grad is not None:
                slot.grad.assign(grad.to(slot.grad.view))
    except BaseException:
        release_all(adopted, manager)
        for entry, grad in zip(adopted, grads, strict=False):
            entry.param.grad = grad
        raise
    warn_of_rounded(adopted)
    return adopted


def _refuse_unfit(module: nn.Module, manager: GeminiManager) -> None:
    """Raise ConfigError if a new parameter has no values, shares memory with a managed one, or has a gradient
    that only this rank made although ranks would have to exchange it."""
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "parameters cannot be adopted inside torch.inference_mode(), because they could "
            "not train; adopt them outside"
        )
    for name, param in module.named_parameters():
        if isinstance(param, ManagedParameter):
            continue
        if isinstance(param, ManagedTensor) or (
            param.numel() and not is_quantized(param) and param.data_ptr() in manager.windows
        ):
            raise ConfigError(
                f"parameter {name!r} shares memory with a managed parameter; tie them by assigning "
                "the parameter itself (layer.weight = other_layer.weight), or give it its own "
                "memory: nn.Parameter(weight.detach().clone())"
            )
        if param.is_meta:
            raise ConfigError(f"parameter {name!r} was added to the model on 'meta': give it values first")
        if param.grad is not None and manager.is_sharded:
            raise ConfigError(
                f"parameter {name!r} was added to the model with a gradient of this rank only; call "
                "zero_grad() before it is managed"
            )
