"""Growth: the chunks that come after a model was wrapped: states when an optimizer is made; gradients,
masters and states when a frozen parameter is unfrozen; all of them when parameters come into the module.
Filling: weights written one after another, while chunks leave DEVICE to make room for the next.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as PlainTensors

from gemini.errors import ConfigError, IoError, StateError
from gemini.placement import ModelDataSize
from gemini.placement.policies import DeviceTooSmallError
from gemini.runtime.adopt import Adopted, fill_quantized, is_watched, watch, write_values
from gemini.runtime.gate.gradients import MASTER
from gemini.runtime.intercept.tensors import ManagedParameter
from gemini.runtime.manager import GeminiManager
from gemini.runtime.storage.data_sizes import DataSizes, GroupPlan, GroupSpec, Kept
from gemini.runtime.storage.model_storage import ChunkGroup, ManagedSlot, ModelStorage, slot_of


class StateOwner(Protocol):
    """An optimizer: what it updates, frozen or not, and what it keeps of that."""

    @property
    def slots(self) -> set[ManagedSlot]: ...

    def kept_of(self, group: ChunkGroup) -> Kept:
        """Return what is kept of the parameters of a group."""

    def take_chunks(self) -> None:
        """Chunks were made for some of the slots."""


# Return a DEVICE that would hold what an error says that it cannot, while parameters of these names train.
LeastBytes = Callable[[DeviceTooSmallError, Mapping[str, Kept]], int]


class Growth:
    """Checks that what is to come fits the budgets, as wrapping does, makes it, and has it planned for."""

    def __init__(self, storage: ModelStorage, manager: GeminiManager, least_bytes: LeastBytes) -> None:
        self._storage = storage
        self._manager = manager
        self._least_bytes = least_bytes
        self._owners: WeakSet[StateOwner] = WeakSet()

    def provide(self, owner: StateOwner) -> None:
        """Make the states of what ``owner`` updates, and does not find frozen; of that when it is unfrozen.

        Raises:
            OutOfBudgetError, IoError: the tiers cannot hold them; nothing was changed.
        """
        trained = {slot.group for slot in owner.slots if slot.grad is not None}
        # In an order that does not change: traces name chunks by their numbers.
        self._grow({group: owner.kept_of(group) for group in self._storage.groups if group in trained})
        self._owners.add(owner)

    def unfreeze(self, param: ManagedParameter) -> None:
        """Have ``param``, which never trained, take gradients: its chunk gets the gradients, masters and
        states that an update needs, and the next step is recorded again. Over ranks all of them call it.

        Raises:
            OutOfBudgetError, IoError: the tiers cannot hold them; nothing was changed.
            StateError: a backward pass is under way, or the model was closed.
            ConfigError: it is a quantized weight.
        """
        slot = slot_of(param)
        if slot.grad is None:
            if not slot.param_view.is_floating_point():
                raise ConfigError(
                    f"parameter {slot.name!r} is a quantized weight, and quantized weights in chunks "
                    "stay frozen; train adapters beside it, as LoRA of peft"
                )
            if torch._C._current_graph_task_id() != -1:
                raise StateError(
                    f"parameter {slot.name!r} is unfrozen within a backward pass; do it before the forward "
                    "pass"
                )
            self._open(slot)
        with PlainTensors():
            param.requires_grad_(True)
        if not is_watched(param):
            watch(param)

    def take_in(
        self, specs: Sequence[GroupSpec], operator: tuple[int, str], *, raises_disk: bool
    ) -> list[ManagedSlot]:
        """Make the chunks of parameters that came into the module, laid out as ``specs`` say, and return
        their slots; the next step is recorded again. Over ranks all of them call it.

        Args:
            operator: the most bytes of parameter chunks that an operator takes at once, and its name.
            raises_disk: the budget of DISK is what the model takes, and grows with it.

        Raises:
            OutOfBudgetError, IoError, ConfigError: the tiers cannot hold them; nothing was changed.
        """
        manager, storage, sharding = self._manager, self._storage, self._manager.sharding
        plans = storage.plans(specs)
        size, gather_bytes = self._size_with(plans, operator)
        expected, first_bytes = storage.expected(plans), sum(c.nbytes for p in plans for c in p.at_first())
        more_disk_bytes = sum(chunk.nbytes for chunk in expected) if raises_disk else 0
        before, chunks = manager.context, manager.chunks
        capacity = replace(before.capacity, disk_bytes=before.capacity.disk_bytes + more_disk_bytes)

        def check() -> None:
            before.policy.warmup_plan(size, capacity)
            chunks.prepare(expected, first_bytes, more_disk_bytes)

        manager.together(check)
        # Chunk numbers are part of it: there may be chunks of states between those of before and these.
        layouts = "+".join(spec.layout.signature() for spec in specs)
        signature = f"{before.chunk_signature}+{len(chunks.chunks)}:{layouts}"
        chunks.expect(expected, more_disk_bytes)
        slots = storage.widen(specs, plans, manager)
        if sharding is not None:
            sharding.widen(storage, gather_bytes)
        manager.replan(replace(before, size=size, capacity=capacity, chunk_signature=signature))
        return slots

    def _size_with(self, plans: Sequence[GroupPlan], operator: tuple[int, str]) -> tuple[ModelDataSize, int]:
        """Return the size of model data with further parameter chunks, and what of it may be whole over
        ranks."""
        sharding, before = self._manager.sharding, self._manager.size
        operator = max(operator, (before.operator_bytes, before.operator_name))
        sizes = self._storage.sizes(plans=plans)
        gather_bytes = 0
        if sharding is not None:
            least = min(sizes.windows, least_gathered(sizes, operator[0]))
            gather_bytes = max(sharding.gather_bytes, least)
        return with_gathered(sizes, gather_bytes, *operator), gather_bytes

    def _open(self, slot: ManagedSlot) -> None:
        """Make the gradient of a parameter, and what an update of it needs."""
        manager, storage, group = self._manager, self._storage, slot.group
        owners = [owner for owner in self._owners if slot in owner.slots]
        kept = reduce(Kept.joined, [owner.kept_of(group) for owner in owners], Kept())
        is_first = group.grad is None
        manager.refuse_closed()
        manager.run_pending()
        manager.snapshot.before_write()
        self._grow({group: kept})
        assert group.grad is not None
        grad = slot.make_grad(group.grad)
        if is_first and group.has_master:
            manager.written.note([t for each in group.members for t in each.param_ref.tensors])
        if manager.sharding is not None:
            manager.sharding.add_gradient(storage, grad)
        manager.replan(manager.context)
        for owner in owners:
            owner.take_chunks()

    def _grow(self, more: Mapping[ChunkGroup, Kept]) -> None:
        storage, manager = self._storage, self._manager
        missing = storage.missing(more)
        is_known = all(group.kept.joined(kept) == group.kept for group, kept in more.items())
        if not missing and is_known and (storage.trains or not more):
            return
        manager.refuse_closed()
        manager.threads.refuse_other("a change of what trains")
        size = self._checked(more)
        lack = manager.chunks.lacking_place(missing)
        if lack is not None:
            raise IoError(errno.ENOSPC, lack, manager.chunks.budgets.disk_dir or "")
        manager.run_pending()
        storage.add(more)
        manager.replan(replace(manager.context, size=size))

    def _checked(self, more: Mapping[ChunkGroup, Kept]) -> ModelDataSize:
        """Return the size of model data with ``more`` of it. Raises OutOfBudgetError."""
        context, sharding = self._manager.context, self._manager.sharding
        gather_bytes = sharding.gather_bytes if sharding is not None else 0
        before = context.size
        size = with_gathered(
            self._storage.sizes(more), gather_bytes, before.operator_bytes, before.operator_name
        )
        try:
            context.policy.warmup_plan(size, context.capacity)
        except DeviceTooSmallError as error:
            raise error.asking(self._least_bytes(error, self._trained(more))) from None
        return size

    def _trained(self, more: Mapping[ChunkGroup, Kept]) -> dict[str, Kept]:
        """Return by name what trains, with what is kept of it."""
        kept = {group: group.kept.joined(more.get(group, Kept())) for group in self._storage.groups}
        return {
            name: kept[slot.group]
            for name, slot in self._storage.slots.items()
            if slot.group.grad is not None or slot.group in more
        }


def least_gathered(sizes: DataSizes, operator_bytes: int) -> int:
    """Return what whole parameter chunks may take over ranks at the least: those of an operator, the next
    chunk, and the small ones."""
    return max(operator_bytes, sizes.largest_window) + sizes.largest_window + sizes.small_windows


def with_gathered(
    sizes: DataSizes, gather_bytes: int, operator_bytes: int, operator_name: str
) -> ModelDataSize:
    """Return what a placement policy needs to know; what is whole at times counts as being there always."""
    # A gradient is made while another is exchanged, which takes the room of a third. An update that needs all
    # of a parameter comes when they are gone.
    whole = max(gather_bytes + 3 * sizes.largest_gradient, sizes.room)
    working = max(sizes.working, operator_bytes) + whole
    return ModelDataSize(sizes.total + whole, working, sizes.largest, operator_bytes, operator_name)


_AHEAD_BYTES = 32 * 2**20  # keeps a disk busy for about as long as a tensor is read
_AHEAD_SHARE = 8  # of DEVICE at most one in so many: what is being filled stays
_FILLED_SHARE = 0.75  # of DEVICE, where steps will leave more to other memory than reading takes


class Filling:
    """Gives the parameters of a model that has no values yet theirs, in any order; for one thread. Call
    :meth:`finish` after the last.

    A write that finds DEVICE full waits until a chunk has left. So each starts what will have to leave for
    those after it, and returns while that is under way: within the budget, and nothing where all fits.
    """

    def __init__(self, storage: ModelStorage, manager: GeminiManager) -> None:
        self._manager = manager
        budget_bytes = manager.chunks.budgets.device_bytes
        self._later_limit_bytes = manager.order.plan.device_limit_bytes
        self._limit_bytes = max(self._later_limit_bytes, int(_FILLED_SHARE * budget_bytes))
        self._ahead_bytes = min(_AHEAD_BYTES, self._limit_bytes // _AHEAD_SHARE)
        self._to_come = {
            chunk: nbytes for group in storage.groups for chunk, nbytes in _chunks_of(group).items()
        }
        self._to_come_bytes = sum(self._to_come.values())
        manager.chunks.table.set_limit(self._limit_bytes)

    @property
    def overflows(self) -> bool:
        """Whether chunks leave DEVICE while what has no values yet comes."""
        return self._to_come_bytes > self._limit_bytes

    def write(self, slot: ManagedSlot, values: torch.Tensor) -> None:
        """Do what :func:`gemini.runtime.write_values` does.

        Raises:
            IoError: also where a chunk of an earlier write cannot leave; no value is lost.
        """
        write_values(slot, values, self._manager)
        self._make_way(slot)

    def adopt(self, param: nn.Parameter, slot: ManagedSlot, owner: nn.Module) -> Adopted:
        """Copy a parameter of ``owner``, a quantized weight, into its chunk and make it managed. Raises as
        :meth:`write`."""
        adopted = fill_quantized(param, slot, self._manager, owner)
        self._make_way(slot)
        return adopted

    def _make_way(self, slot: ManagedSlot) -> None:
        """Start what will have to leave DEVICE for those after ``slot``, which has its values now."""
        for chunk in _chunks_of(slot.group):
            self._to_come_bytes -= self._to_come.pop(chunk, 0)
        chunks = self._manager.chunks
        too_much = chunks.usages()[0] + self._to_come_bytes - self._limit_bytes
        if too_much > 0:
            chunks.make_way(min(self._ahead_bytes, too_much), self._limit_bytes)

    def finish(self) -> None:
        """Have the model's own limit in force again; what exceeds it leaves when there is a step."""
        self._manager.chunks.table.set_limit(self._later_limit_bytes)


def _chunks_of(group: ChunkGroup) -> dict[int, int]:
    """Return the bytes of the chunks that values of a group are written to, by id."""
    chunks = [group.updated[0], *(piece.chunks[MASTER] for piece in group.pieces if piece.has_master)]
    return {chunk.id: chunk.spec.nbytes for chunk in chunks}
