"""Moves a module's parameters into chunks, one parameter at a time, and back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch.nn.parameter import is_lazy

from gemini import _C
from gemini.chunk.chunk import StateSpec, TensorIds
from gemini.errors import ConfigError, GeminiError
from gemini.offload.mapped_tensors import IN_MEMORY, Place
from gemini.runtime.gate.gradients import MASTER, StatePiece
from gemini.runtime.gate.guards import span_bytes
from gemini.runtime.intercept.precision import is_quantized
from gemini.runtime.intercept.quantized import (
    QuantizedForm,
    form_of,
    keep_layout,
    refuse_without_values,
)
from gemini.runtime.intercept.quantized_operators import make_managed_quantized, make_plain_quantized
from gemini.runtime.intercept.tensors import (
    ManagedParameter,
    ManagedTensor,
    make_managed,
    make_plain,
    make_plain_view,
    plain_copy,
    resident,
    restore_saved_weights,
)
from gemini.runtime.manager import GeminiManager
from gemini.runtime.storage.initialization import (
    Initialization,
    children_first,
    is_unwritten,
    replace_parameter,
)
from gemini.runtime.storage.model_storage import ManagedSlot, ModelStorage, slot_of
from gemini.system.pages import LEAST_BYTES, release_file_pages

logger = logging.getLogger(__name__)

_COMPARED_NUMEL = 2**18
# Blocks of less than 32 MiB stay with the C library when they are freed.
_MOST_FREED_BYTES = 2**23

_AS_IT_IS = nullcontext()

_MASTERS = StateSpec(MASTER)

# Parameters that nn.Parameter(weight) made of managed weights; some may be ordinary again.
second_names: WeakSet[ManagedParameter] = WeakSet()


def unique_parameters(
    module: nn.Module, manager: GeminiManager | None = None
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter that ``manager`` does not manage, once, by its first name, in initialization
    order.

    Raises:
        ConfigError: a parameter cannot be managed (not floating point, not strided, of a class of its own,
            managed already, or used by scripted code).
    """
    for name, owner in module.named_modules():
        if isinstance(owner, torch.jit.ScriptModule) and next(owner.parameters(), None) is not None:
            raise ConfigError(
                f"submodule {name or 'the model itself'!r} is scripted: the runtime cannot see "
                "operators of TorchScript; give the module from before torch.jit.script or "
                "torch.jit.trace"
            )
    for name, param in module.named_parameters():
        if isinstance(param, ManagedParameter):
            if param._ref.manager is manager:
                continue
            raise ConfigError(
                f"parameter {name!r} is already managed; release it first "
                "(gemini.handle_of(model).release()), build a new model, or wrap "
                "copy.deepcopy(module) of this one, made before it is closed"
            )
        if is_lazy(param):
            raise ConfigError(
                f"parameter {name!r} has no shape yet (lazy module); run the model once before wrapping it"
            )
        if is_quantized(param):
            form = form_of(name, param, module.get_submodule(name.rpartition(".")[0]))
            refuse_without_values(name, param, form)
            yield name, param
            continue
        if type(param) is not nn.Parameter:
            kind = type(param)
            way_out = "replace it by an ordinary nn.Parameter"
            if kind.__name__ == "DTensor":
                way_out = (
                    "replace it by nn.Parameter(param.full_tensor()); to shard it over ranks give "
                    "process_group= or a DeviceMesh, or use parallelize() of gemini.parallel for "
                    "tensor parallelism"
                )
            if kind.__name__ == "ColoParameter":
                way_out = "wrap the model in GeminiDDP of gemini.parallel.colo, or call its apply_specs first"
            raise ConfigError(
                f"parameter {name!r} is a {kind.__module__}.{kind.__qualname__}; chunks hold only an "
                f"nn.Parameter of ordinary memory or a frozen quantized weight: {way_out}"
            )
        if not param.is_floating_point() or param.layout is not torch.strided:
            raise ConfigError(
                f"parameter {name!r} is {param.dtype} with layout {param.layout}; only dense floating-point "
                f"parameters are managed"
            )
        yield name, param


def check_apart(params: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that share memory: in chunks each would get a place of its own, and train separately.

    Raises:
        ConfigError: the memory of two parameters overlaps.
    """
    spans = [
        (param.data_ptr(), param.data_ptr() + span_bytes(param), name)
        for name, param in params
        if not param.is_meta and param.numel() and not is_quantized(param)
    ]
    spans.sort()
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise ConfigError(
                f"parameters {name!r} and {other!r} share memory; tie them by assigning the parameter itself "
                "(layer.weight = other_layer.weight), or give each its own: param.data = param.data.clone()"
            )


def adopt_module(
    module: nn.Module, storage: ModelStorage, manager: GeminiManager, awaited: Set[str] = frozenset()
) -> list[Adopted]:
    """Copy every parameter into its chunk and make it managed. Parameters on ``meta`` are initialized on the
    way, except for those ``awaited`` from a load. Returns the input of :func:`release_adopted`.

    The original memory of each parameter is freed before the next is adopted. Extra memory: the parameters of
    one submodule. Gradients are not recorded.

    Raises:
        ConfigError: a buffer on ``meta`` has no values, and no state dict would contain it.
        OutOfBudgetError, IoError: the tiers could not take the parameters. They are ordinary ones again,
            initialized if they were on ``meta``; a frozen one that was cast to 16 bits keeps the cast values.
    """
    adopted: list[Adopted] = []
    freed_bytes = 0  # since the C library was last asked to give back what is free
    initialization, first_names = Initialization(module, awaited), _first_names(module)
    try:
        with torch.no_grad():
            for name, owner in list(children_first(module)):
                initialization.run(name, owner)
                for key, param in owner.named_parameters(prefix=name, recurse=False):
                    # Tied parameters are adopted under their first name.
                    if not isinstance(param, ManagedParameter):
                        slot, nbytes = storage.slots[first_names[key]], param.nbytes
                        adopted.append(adopt_parameter(param, slot, manager, owner))
                        freed_bytes += nbytes
                        if freed_bytes >= _MOST_FREED_BYTES:
                            freed_bytes = 0
                            _C.malloc_trim()
    except BaseException:
        _undo(adopted, manager)
        raise
    warn_of_rounded(adopted)
    if initialization.unset:
        unset = [first_names.get(name, name) for name in initialization.unset]
        why = "no reset_parameters() or _init_weights() initializes them"
        if not awaited.isdisjoint(unset):
            why = "each rank has some of the experts, and would initialize them like the first ones"
        _await_load(unset, why, module, storage, manager)
    return adopted


@torch.no_grad()
def adopt_without_values(module: nn.Module, storage: ModelStorage, manager: GeminiManager) -> list[Adopted]:
    """Make every parameter of a module on ``meta`` managed, without values: the caller must write all of them
    (:func:`write_values`) before the module is used. Parameters with memory are adopted with their values.
    Quantized weights and buffers are left alone; :func:`adopt_parameter` adopts the former once they have
    values."""
    adopted: list[Adopted] = []
    for name, param in list(module.named_parameters()):
        slot = storage.slots[name]
        if is_quantized(param):
            continue
        if not param.is_meta:
            owner = module.get_submodule(name.rpartition(".")[0])
            adopted.append(adopt_parameter(param, slot, manager, owner))
            continue
        # .data has a version counter of its own, which gathering the chunk over ranks does not raise.
        real = nn.Parameter(slot.param_view.data, requires_grad=param.requires_grad)
        replace_parameter(param, real, module)
        managed = module.get_parameter(name)
        manage(managed, slot)
        adopted.append(Adopted(managed, slot, param.dtype, torch.device("cpu"), rounded=False))
    for group in storage.groups:
        shard = group.shard
        if shard is not None and not any(s.start < shard.stop and shard.start < s.stop for s in group.slots):
            tensors = (shard.param_tensor,)  # no parameter writes to it, and it must be equal on all ranks
            with manager.operator(tensors, tensors):
                shard.param.tensor.zero_()
    return adopted


def warn_of_rounded(adopted: Sequence[Adopted]) -> None:
    """Warn about parameters with values that were rounded to 16 bits permanently."""
    rounded = [entry for entry in adopted if entry.rounded]
    if rounded:
        logger.warning(
            "%d frozen parameters (first %r) have no fp32 masters, and their values were permanently "
            "rounded to %s: state_dict() and checkpoints have the rounded values; freeze them after "
            "wrapping to keep masters",
            len(rounded),
            rounded[0].slot.name,
            rounded[0].slot.param_view.dtype,
        )


def _first_names(module: nn.Module) -> dict[str, str]:
    """Map each name of a parameter to the name under which it is managed."""
    firsts = {id(param): name for name, param in module.named_parameters()}
    return {name: firsts[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}


def _await_load(
    names: Sequence[str], why: str, module: nn.Module, storage: ModelStorage, manager: GeminiManager
) -> None:
    """Refuse uses of the model until each of ``names`` was loaded or written to."""

    def is_left(name: str) -> bool:
        if name in storage.slots:
            return manager.written.times(storage.slots[name].param_ref.tensors) == 0
        return is_unwritten(module.get_buffer(name))

    storage.mixture.await_load(
        f"{len(names)} weights that were built on 'meta' have no values yet (first: {names[0]!r}): {why}",
        set(names),
        is_left,
    )


def write_values(slot: ManagedSlot, values: torch.Tensor, manager: GeminiManager) -> None:
    """Copy ``values`` (shape of the parameter, any float dtype) into the parameter and its fp32 master, if
    any."""
    write_range(slot, 0, _memory_order(slot, values), manager)


def write_range(slot: ManagedSlot, first: int, values: torch.Tensor, manager: GeminiManager) -> None:
    """Write flat ``values`` beginning at element ``first`` of the parameter's memory; see
    :func:`write_values`.

    Over several ranks each writes the part that it owns and none waits for another: one may fail alone.
    """
    manager.snapshot.before_write()
    if manager.sharding is not None:
        manager.backward_pins.settle()
        manager.sharding.close(slot.param_ref.tensors[0])
    begin = slot.start + first
    start, stop = begin, begin + values.numel()
    if slot.group.shard is not None:
        start, stop = slot.group.shard.clip(start, stop)
    for at, end, tensors in slot.group.stretches(slot, start, stop) if start < stop else ():
        with manager.operator(tensors, tensors):
            slot.group.values(at, end).copy_(values[at - begin : end - begin])
    _write_master(slot, begin, values, manager)


def _write_master(slot: ManagedSlot, begin: int, values: torch.Tensor, manager: GeminiManager) -> None:
    """Copy ``values``, which begin at element ``begin`` of the parameter chunk, uncast into the parameter's
    master, if any."""
    manager.written.take(slot.param_ref.tensors)
    for piece in _master_pieces(slot):
        start, stop = max(begin, piece.start), min(begin + values.numel(), piece.stop)
        if start < stop:
            tensors = (piece.tensors[MASTER],)
            with manager.operator(tensors, tensors):
                piece.master(start, stop).copy_(values[start - begin : stop - begin])


@torch.no_grad()
def read_values(
    slot: ManagedSlot,
    manager: GeminiManager,
    place: Place = IN_MEMORY,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a copy of the parameter in ``place`` on the CPU, in the parameter's own memory layout: of its
    fp32 master if it has one, else in ``dtype`` (None: its own)."""
    if not slot.group.has_master:
        flat = place.empty(slot.stop - slot.start, dtype or slot.param_view.dtype)
        for tensors, start, stop in _whole_stretches(slot):
            with manager.operator(tensors):
                place.put(flat, start - slot.start, slot.group.param.tensor[start:stop])
        return _shaped(flat, slot)
    refresh_master(slot, manager)
    return read_state(slot, _MASTERS, manager, place)


@torch.no_grad()
def read_state(
    slot: ManagedSlot, state: StateSpec, manager: GeminiManager, place: Place = IN_MEMORY
) -> torch.Tensor:
    """Return a whole copy of a parameter's state in ``place``, in the parameter's own memory layout; a state
    with one value per block is flat. Collective over ranks."""
    flat = place.empty(state.count(slot.stop - slot.start), state.dtype)
    if manager.sharding is not None:
        flat.zero_()
    for piece in slot.pieces:
        with manager.operator((piece.tensors[state.key],)):
            place.put(flat, slot.span_in(piece, state).start, slot.state_in(piece, state))
    if manager.sharding is not None:
        manager.sharding.assemble(flat, slot.group)
        place.release(flat)
    return flat if state.per_block else _shaped(flat, slot)


def _shaped(flat: torch.Tensor, slot: ManagedSlot) -> torch.Tensor:
    return torch.as_strided(flat, slot.param_view.shape, slot.param_view.stride())


def refresh_master(slot: ManagedSlot, manager: GeminiManager) -> None:
    """Copy a 16-bit parameter to its fp32 master if user code wrote to it since the last update; else do
    nothing.

    Raises:
        OutOfBudgetError, IoError: a chunk cannot be fetched; the master still counts as outdated.
    """
    tensors = slot.param_ref.tensors
    written = manager.written.take(tensors)
    if not written:
        return
    try:
        if manager.sharding is not None:
            manager.sharding.write_back(*tensors)
        for piece in _master_pieces(slot):
            start, stop = slot.overlapping(piece)
            master, values = piece.tensors[MASTER], slot.group.tensors_under(piece, [slot])
            if len(tensors) > 1 and written.isdisjoint(values):
                continue
            manager.snapshot.before_change((master,))
            with manager.operator((*values, master), (master,)), torch.no_grad():
                piece.master(start, stop).copy_(slot.group.values(start, stop))
    except BaseException:
        manager.written.note(list(written))
        raise


def _master_pieces(slot: ManagedSlot) -> list[StatePiece]:
    """Return the state pieces that hold a part of the parameter's master."""
    return [piece for piece in slot.pieces if piece.has_master]


def _memory_order(slot: ManagedSlot, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` flat, in the memory order of the parameter's elements."""
    if slot.param_view.is_contiguous():
        return values.reshape(-1)
    laid_out = torch.empty_strided(
        slot.param_view.shape, slot.param_view.stride(), dtype=values.dtype, device=values.device
    )
    laid_out.copy_(values)
    return torch.as_strided(laid_out, (laid_out.numel(),), (1,))


@dataclass(frozen=True)
class Adopted:
    """The record that is needed to make a parameter an ordinary one again."""

    param: nn.Parameter
    slot: ManagedSlot
    dtype: torch.dtype
    device: torch.device
    rounded: bool  # the original values are lost


def adopt_parameter(
    param: nn.Parameter, slot: ManagedSlot, manager: GeminiManager, owner: nn.Module
) -> Adopted:
    """Copy a parameter of ``owner`` into its chunk and make it managed; return its record for release."""
    if is_quantized(param):
        return _adopt_quantized(param, slot, manager, owner)
    dtype, device = param.dtype, param.device
    given = param.data if manager.sharding is None else manager.sharding.agreed(param.data, slot.group)
    values = _memory_order(slot, given)
    rounded = False
    for tensors, start, stop in _whole_stretches(slot):
        with manager.operator(tensors, tensors):  # whole, not a shard: forward uses it next
            kept, read = slot.group.param.tensor[start:stop], values[start - slot.start : stop - slot.start]
            kept.copy_(read)
            rounded = rounded or (not slot.group.has_master and _differs(kept, read))
    _write_master(slot, slot.start, values, manager)
    if param.nbytes >= LEAST_BYTES:
        release_file_pages(param.data)
    manage(param, slot)
    return Adopted(param, slot, dtype, device, rounded)


def _adopt_quantized(
    param: nn.Parameter, slot: ManagedSlot, manager: GeminiManager, owner: nn.Module
) -> Adopted:
    """Copy the inner tensors of a quantized weight into its chunk and make it managed; over several ranks
    those of the first rank."""
    form = form_of(slot.name, param, owner)
    given = [each.bytes_of(value) for each, value in zip(form.inner, form.tensors_of(param), strict=True)]
    if manager.sharding is not None:
        for values in given:
            manager.sharding.agree_on(values, slot.group)
    tensors = slot.param_ref.tensors
    with manager.operator(tensors, tensors):  # whole, not a shard: forward uses it next
        for each, values in zip(form.inner, given, strict=True):
            slot.param_view[each.start : each.start + each.nbytes].copy_(values)
    return manage_quantized(param, form, slot, owner)


def fill_quantized(
    param: nn.Parameter, slot: ManagedSlot, manager: GeminiManager, owner: nn.Module
) -> Adopted:
    """Copy a quantized weight of ``owner`` into its chunk, which was laid out without values, and make it
    managed. Over several ranks all have the same weight, and each writes the part that it owns, not
    collectively."""
    form = form_of(slot.name, param, owner)
    _write_inner(slot, form, list(form.tensors_of(param)), manager)
    return manage_quantized(param, form, slot, owner)


def manage_quantized(
    param: nn.Parameter, form: QuantizedForm, slot: ManagedSlot, owner: nn.Module
) -> Adopted:
    """Make a quantized weight managed; its bytes must be in its chunk."""
    dtype, device = param.dtype, param.device
    keep_layout(owner)
    slot.set_quantized_form(form)
    make_managed_quantized(param, form, slot.param_view, slot.param_ref, slot, name_again)
    slot.param_ref.manager.parameters.add(cast("ManagedParameter", param))
    restore_saved_weights()
    return Adopted(param, slot, dtype, device, rounded=False)


def write_quantized(slot: ManagedSlot, value: torch.Tensor, manager: GeminiManager) -> None:
    """Copy the inner tensors of ``value`` into the chunk of a quantized weight; over several ranks each
    writes the part that it owns. Raises ConfigError if ``value`` has another format."""
    assert slot.form is not None
    _write_inner(slot, slot.form, slot.form.values_of(value), manager)


def _write_inner(
    slot: ManagedSlot, form: QuantizedForm, given: Sequence[torch.Tensor], manager: GeminiManager
) -> None:
    """Write the first inner tensors of a quantized weight; see :func:`write_range`."""
    for each, values in zip(form.inner, given, strict=False):
        write_range(slot, each.start, each.bytes_of(values), manager)


def read_quantized(slot: ManagedSlot, manager: GeminiManager, place: Place = IN_MEMORY) -> torch.Tensor:
    """Return an unmanaged copy of a quantized weight, like its ``detach()``."""
    assert slot.form is not None
    return slot.form.over(read_values(slot, manager, place))


def _whole_stretches(slot: ManagedSlot) -> Iterator[tuple[TensorIds, int, int]]:
    """Yield the tensors to pin at once, with begin and end in the chunk, over the whole parameter (not this
    rank's shard)."""
    if len(slot.param_ref.tensors) == 1:
        yield slot.param_ref.tensors, slot.start, slot.stop
        return
    for start, stop, tensors in slot.group.stretches(slot, slot.start, slot.stop):
        yield tensors, start, stop


def _differs(kept: torch.Tensor, values: torch.Tensor) -> bool:
    """Say whether casting to a narrower dtype lost information; compares in small parts."""
    if kept.dtype.itemsize >= values.dtype.itemsize:
        return False
    pairs = zip(kept.split(_COMPARED_NUMEL), values.split(_COMPARED_NUMEL), strict=True)
    return any(not torch.equal(part.to(whole.device, whole.dtype), whole) for part, whole in pairs)


def name_again(slot: ManagedSlot, tensor: torch.Tensor) -> nn.Parameter:
    """Make ``tensor``, a plain view of the memory of ``slot``, a second parameter that shares the gradient of
    the first."""
    param = cast("ManagedParameter", tensor.requires_grad_(slot.grad is not None))
    manage(param, slot)
    second_names.add(param)
    return param


def manage(param: nn.Parameter, slot: ManagedSlot) -> None:
    """Make ``param`` a managed view of its chunk, with the chunk's current content; collect its gradients if
    it trains."""
    param.grad = None
    param.data = slot.param_view
    if slot.grad is not None:
        watch(param)
    make_managed(param, slot.param_ref, slot, name_again)
    slot.param_ref.manager.parameters.add(cast("ManagedParameter", param))
    restore_saved_weights()


def watch(param: nn.Parameter) -> None:
    """Collect the gradients of ``param``, which must be managed before its first gradient."""
    with PlainTensors():
        # The hook holds no references: Python's collector does not see what torch stores for these hooks.
        hook = param.register_post_accumulate_grad_hook(_on_grad)
        # Ours runs first, so that hooks of the user find the accumulated gradient in ``param.grad``.
        hooks = param._post_accumulate_grad_hooks
    for key in [key for key in hooks if key != hook.id]:
        hooks[key] = hooks.pop(key)


def is_watched(param: nn.Parameter) -> bool:
    """Say whether :func:`watch` was called for ``param``."""
    return bool(_our_hooks(param))


def _our_hooks(param: nn.Parameter) -> list[int]:
    """Return the keys of the hooks that :func:`watch` has registered: one or none."""
    with PlainTensors():
        hooks = param._post_accumulate_grad_hooks or {}
    return [key for key, hook in hooks.items() if hook is _on_grad]


@contextmanager
def collected_once(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let autograd accumulate the gradients of several backward passes in the block itself, and collect the
    sums afterwards. The additions and their order are the same as if each gradient was collected. For a
    resident model, with gradients in autograd's memory. Meanwhile operators use its parameters without
    interception. Parameters that have a gradient already, or hooks of the user, are collected as usual."""
    waiting: list[tuple[nn.Parameter, dict[int, Any], dict[int, Any]]] = []
    with PlainTensors():
        for param in params:
            hooks = param._post_accumulate_grad_hooks
            is_plain = type(param) is ManagedParameter and not param._backward_hooks
            if is_plain and hooks and [*hooks.values()] == [_on_grad] and not slot_of(param).has_grad:
                waiting.append((param, hooks, dict(hooks)))
    for _, hooks, _ in waiting:
        hooks.clear()
    try:
        with resident([param for param, _, _ in waiting]):
            yield
    finally:
        for _, hooks, ours in waiting:
            hooks.update({**ours, **hooks})
        with torch.no_grad():
            for param, _, _ in waiting:
                _on_grad(param)


def _release(entry: Adopted, manager: GeminiManager) -> None:
    """Make one parameter an ordinary one again. Raises as :func:`read_values`; it stays managed then."""
    if entry.slot.form is not None:
        make_plain_quantized(entry.param, entry.slot.form, read_values(entry.slot, manager).to(entry.device))
        return
    values = read_values(entry.slot, manager).to(entry.device, entry.dtype)
    managed = [param for param in second_names if type(param) is ManagedParameter]
    twins = [param for param in managed if param._slot is entry.slot]
    for param in (*twins, entry.param):
        make_plain(param, values)
        for key in _our_hooks(param):
            del param._post_accumulate_grad_hooks[key]


@torch.no_grad()
def release_adopted(adopted: Sequence[Adopted], module: nn.Module, manager: GeminiManager) -> None:
    """Make the parameters ordinary ones in memory of their own, on the device and in the dtype from before
    wrapping, with the values of their masters if any. Second names of them and views that ``module`` keeps
    become ordinary too, and still share memory with them. Gradients are discarded.

    Raises:
        OutOfBudgetError, IoError: a chunk could not be read, or memory ran out: the parameters so far are
            ordinary, the others stay managed. Call it again to continue.
    """
    for entry in adopted:
        if isinstance(entry.param, ManagedParameter):
            _release(entry, manager)
    by_tensor = {entry.slot.param_ref.tensors: entry for entry in adopted}
    for part in module.modules():
        for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if type(value) is ManagedTensor and value._ref.manager is manager:
                viewed = by_tensor.get(value._ref.tensors)
                if viewed is not None:
                    _release_view(value, viewed)


def _release_view(view: ManagedTensor, entry: Adopted) -> None:
    """Make a view, such as ``weight.detach()``, an ordinary view of the parameter, or a copy if dtype or
    device now differ."""
    inside = view.storage_offset() - entry.slot.param_view.storage_offset()
    if view.dtype == entry.param.dtype and view.device == entry.param.device:
        values = entry.param.data
        values = values.as_strided(view.shape, view.stride(), values.storage_offset() + inside)
    else:
        values = plain_copy(view)
    make_plain_view(view, values)


@torch.no_grad()
def _undo(adopted: Sequence[Adopted], manager: GeminiManager) -> None:
    """Make the parameters ordinary ones in memory of their own. One that cannot be read stays managed, with a
    warning."""
    if release_all(adopted, manager):
        with suppress(GeminiError):  # from a transfer that is no longer needed
            manager.close()


def release_all(adopted: Sequence[Adopted], manager: GeminiManager) -> bool:
    """Make all parameters ordinary that can be read; say whether all could."""
    manager.recover()
    all_read = True
    for entry in adopted:
        try:
            _release(entry, manager)
        except (GeminiError, torch.OutOfMemoryError) as error:
            logger.warning(
                "parameter %r stays in its chunk, which cannot be read: %s", entry.slot.name, error
            )
            all_read = False
    return all_read


def _on_grad(param: Any) -> None:
    """Move the gradient that autograd just accumulated off the parameter and into its chunk."""
    slot: ManagedSlot = param._slot
    with PlainTensors():
        grad = param.grad
        param.grad = None
    if grad is not None:
        # A backward pass disables gradients itself, unless it runs with create_graph.
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
            slot.trainable_grad.collect(grad)
            del grad
            if slot.group.watcher is not None:
                with PlainTensors():
                    others_see_it = len(param._post_accumulate_grad_hooks or ()) > 1
                slot.group.watcher.note(slot, is_watched=others_see_it)
