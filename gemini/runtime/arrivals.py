"""Arrivals: parameters that came into a module after it was wrapped, and what has become of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from gemini.chunk import ComputeDevice
from gemini.errors import ConfigError
from gemini.runtime.adopt import Adopted, adopt_arrivals
from gemini.runtime.build import lay_out
from gemini.runtime.config import GeminiConfig
from gemini.runtime.gemini_mgr import GeminiManager
from gemini.runtime.intercept.param import ManagedParameter
from gemini.runtime.outline import Outline
from gemini.runtime.storage.data_sizes import chunk_bytes, largest_operator
from gemini.runtime.storage.model_storage import ManagedSlot, ModelStorage, slot_of


@dataclass(frozen=True)
class Changes:
    """What a module has come to hold since it was wrapped: ``names`` of the managed parameters that it has
    now, of which some may have been away, ``departed`` ones that it has no more, and the outline of those
    that arrived."""

    names: dict[ManagedSlot, str]
    departed: tuple[ManagedSlot, ...]
    outline: Outline

    def __str__(self) -> str:
        arrived = [
            (
                name,
                tuple(param.shape),
                param.stride(),
                self.outline.types[name],
                name in self.outline.trainable,
            )
            for name, param in self.outline.params.items()
        ]
        return f"{list(self.names.values())} {[slot.name for slot in self.departed]} {arrived}"


def find_changes(
    module: nn.Module, config: GeminiConfig, storage: ModelStorage, manager: GeminiManager
) -> Changes | None:
    """Compare the parameters of ``module`` with those that are managed; None: they are the same.

    Raises:
        ConfigError: a parameter that arrived cannot be managed.
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
    departed = tuple(slot for slot in before if slot not in names)
    changes = Changes(names, departed, Outline.of(module, config, manager))
    _refuse_unfit(module, manager)
    return changes


def take_in(
    module: nn.Module,
    changes: Changes,
    config: GeminiConfig,
    chunk_numel: int,
    device: ComputeDevice,
    storage: ModelStorage,
    manager: GeminiManager,
) -> Sequence[Adopted]:
    """Move what arrived into chunks of its own, of at most ``chunk_numel`` elements unless a parameter is
    larger, give up the gradients of what departed, and call the others what the module does. Over ranks all
    of them call it with the same module, of which the values of the first one count.

    Raises:
        OutOfBudgetError, IoError, ConfigError: the tiers cannot hold it; nothing was changed.
    """
    specs = lay_out(changes.outline, config, chunk_numel, device)
    layouts = "+".join(spec.layout.signature() for spec in specs)
    chunks = chunk_bytes(specs, device.block_bytes)
    chunks |= {name: (slot.group, slot.group.param.spec.nbytes) for slot, name in changes.names.items()}
    operator = largest_operator(changes.outline.operators, chunks)
    before = {slot: name for name, slot in storage.slots.items()}
    signature = f"{manager.context.chunk_signature}+{layouts}"
    raises_disk = config.disk_dir is not None and config.disk_bytes is None
    assert manager.growth is not None
    slots = manager.growth.take_in(specs, signature, operator, raises_disk=raises_disk)
    try:
        adopted = adopt_arrivals(module, slots, manager)
    except BaseException:
        storage.rename(before)
        raise
    for slot in changes.departed:
        slot.free_grad()
    storage.rename(changes.names | {slot: slot.name for slot in slots})
    manager.name_parameters(storage.parameter_names())
    return adopted


def _refuse_unfit(module: nn.Module, manager: GeminiManager) -> None:
    """Raise ConfigError where a parameter that arrived has no values, or those of a managed one, or where a
    gradient would have to be exchanged that the ranks have made apart."""
    for name, param in module.named_parameters():
        if isinstance(param, ManagedParameter):
            continue
        if param.is_meta:
            raise ConfigError(f"parameter {name!r} came into the model on 'meta': give it its values before")
        if param.numel() and param.data_ptr() in manager.windows:
            raise ConfigError(
                f"parameter {name!r} has the memory of a managed one; tie them by assigning the parameter "
                "itself (layer.weight = other_layer.weight), or give it its own: param.data.clone()"
            )
        if param.grad is not None and manager.is_sharded:
            raise ConfigError(
                f"parameter {name!r} came into the model and has a gradient of this rank alone; call "
                "zero_grad() before it is managed"
            )
