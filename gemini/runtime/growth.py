"""Growth: creates the chunks that are added after a model was wrapped: states when an optimizer is created;
gradients, masters and states when a frozen parameter is unfrozen; all of them for new parameters.

Filling: writes weights one after another, while chunks leave DEVICE to make room for the next.
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
    """An optimizer: the parameters that it updates, frozen or not, and the states that it keeps of them."""

    @property
    def slots(self) -> set[ManagedSlot]: ...

    def kept_of(self, group: ChunkGroup) -> Kept:
        """Return the states that are kept of the parameters of a group."""

    def note_new_chunks(self) -> None:
        """Called after chunks were created for some of the slots."""


# Returns a DEVICE budget that avoids the error while the named parameters train.
LeastBytes = Callable[[DeviceTooSmallError, Mapping[str, Kept]], int]


class Growth:
    """Creates additional chunks: checks that they fit the budgets, as wrapping does, and plans again."""

    def __init__(self, storage: ModelStorage, manager: GeminiManager, least_bytes: LeastBytes) -> None:
        self._storage = storage
        self._manager = manager
        self._least_bytes = least_bytes
        self._owners: WeakSet[StateOwner] = WeakSet()

    def provide(self, owner: StateOwner) -> None:
        """Create the states for the parameters of ``owner`` that are not frozen, and later for those that are
        unfrozen.

        Raises:
            OutOfBudgetError, IoError: the tiers cannot hold them; nothing was changed.
        """
        trained = {slot.group for slot in owner.slots if slot.grad is not None}
        # In a fixed order: traces refer to chunks by their numbers.
        self._grow({group: owner.kept_of(group) for group in self._storage.groups if group in trained})
        self._owners.add(owner)

    def unfreeze(self, param: ManagedParameter) -> None:
        """Let ``param``, which never trained, take gradients: its chunk gets the gradients, masters and
        states that an update needs, and the next step is recorded again. Collective over ranks.

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
                    f"parameter {slot.name!r} was unfrozen during a backward pass; unfreeze it "
                    "before the forward pass"
                )
            self._open(slot)
        with PlainTensors():
            param.requires_grad_(True)
        if not is_watched(param):
            watch(param)

    def add_parameters(
        self, specs: Sequence[GroupSpec], operator: tuple[int, str], *, raises_disk: bool
    ) -> list[ManagedSlot]:
        """Create the chunks of parameters that were added to the module, with the layouts in ``specs``, and
        return their slots; the next step is recorded again. Collective over ranks.

        Args:
            operator: the most bytes of parameter chunks that an operator needs at once, and its name.
            raises_disk: the DISK budget is the size of the model, and grows with it.

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
        # Chunk numbers are part of the signature: chunks of states may lie between the earlier parameters and
        # these.
        layouts = "+".join(spec.layout.signature() for spec in specs)
        signature = f"{before.chunk_signature}+{len(chunks.chunks)}:{layouts}"
        chunks.expect(expected, more_disk_bytes)
        slots = storage.widen(specs, plans, manager)
        if sharding is not None:
            sharding.widen(storage, gather_bytes)
        manager.replan(replace(before, size=size, capacity=capacity, chunk_signature=signature))
        return slots

    def _size_with(self, plans: Sequence[GroupPlan], operator: tuple[int, str]) -> tuple[ModelDataSize, int]:
        """Return the size of model data with additional parameter chunks, and the bytes of whole chunks over
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
        """Create the gradient of a parameter, and the chunks that its update needs."""
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
            owner.note_new_chunks()

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
        """Return the size of model data with ``more``. Raises OutOfBudgetError if it does not fit."""
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
        """Return the names of parameters that train, with the states that are kept of each."""
        kept = {group: group.kept.joined(more.get(group, Kept())) for group in self._storage.groups}
        return {
            name: kept[slot.group]
            for name, slot in self._storage.slots.items()
            if slot.group.grad is not None or slot.group in more
        }


def least_gathered(sizes: DataSizes, operator_bytes: int) -> int:
    """Return the least bytes for whole parameter chunks over ranks: those of one operator, the next chunk,
    and the small ones."""
    return max(operator_bytes, sizes.largest_window) + sizes.largest_window + sizes.small_windows


def with_gathered(
    sizes: DataSizes, gather_bytes: int, operator_bytes: int, operator_name: str
) -> ModelDataSize:
    """Return the sizes that a placement policy needs; chunks that are whole only at times count as always
    present."""
    # A gradient is made while another is exchanged, and the exchange chunk is as large as a third. An update
    # that needs all of a parameter runs after these are freed.
    whole = max(gather_bytes + 3 * sizes.largest_gradient, sizes.room)
    working = max(sizes.working, operator_bytes) + whole
    return ModelDataSize(sizes.total + whole, working, sizes.largest, operator_bytes, operator_name)


_AHEAD_BYTES = 32 * 2**20  # keeps a disk busy for about as long as reading a tensor takes
_AHEAD_SHARE = 8  # at most 1 / share of DEVICE: the chunk that is being filled stays
_FILLED_SHARE = 0.75  # share of DEVICE, if steps leave more to other memory than reading needs


class Filling:
    """Writes the parameters of a model without values, in any order; for one thread. Call :meth:`finish`
    after the last one.

    A write that finds DEVICE full waits until a chunk has left. So each write starts to evict for later
    writes, and returns meanwhile. The budget is kept, and nothing is evicted if all fits.
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
        """Whether chunks must leave DEVICE before all values are written."""
        return self._to_come_bytes > self._limit_bytes

    def write(self, slot: ManagedSlot, values: torch.Tensor) -> None:
        """Write the values as :func:`gemini.runtime.adopt.write_values` does.

        Raises:
            IoError: also if a chunk of an earlier write cannot leave; no value is lost.
        """
        write_values(slot, values, self._manager)
        self._make_way(slot)

    def adopt(self, param: nn.Parameter, slot: ManagedSlot, owner: nn.Module) -> Adopted:
        """Copy a quantized weight of ``owner`` into its chunk and make it managed. Raises as
        :meth:`write`."""
        adopted = fill_quantized(param, slot, self._manager, owner)
        self._make_way(slot)
        return adopted

    def _make_way(self, slot: ManagedSlot) -> None:
        """Start to evict chunks for the writes after ``slot``, which has its values now."""
        for chunk in _chunks_of(slot.group):
            self._to_come_bytes -= self._to_come.pop(chunk, 0)
        chunks = self._manager.chunks
        too_much = chunks.usages()[0] + self._to_come_bytes - self._limit_bytes
        if too_much > 0:
            chunks.make_way(min(self._ahead_bytes, too_much), self._limit_bytes)

    def finish(self) -> None:
        """Restore the model's own limit; chunks beyond it are evicted in the first step."""
        self._manager.chunks.table.set_limit(self._later_limit_bytes)


def _chunks_of(group: ChunkGroup) -> dict[int, int]:
    """Return the bytes of the chunks that a group's values are written to, by id."""
    chunks = [group.updated[0], *(piece.chunks[MASTER] for piece in group.pieces if piece.has_master)]
    return {chunk.id: chunk.spec.nbytes for chunk in chunks}
