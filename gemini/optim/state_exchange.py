"""Reads and writes optimizer states in chunks in the format of torch's optimizers: whole, in shards, or on
the first rank only. Exported tensors have every bit and do not alias chunks.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, StateDict

from gemini.chunk.chunk import StateSpec
from gemini.chunk.layout import flat
from gemini.comm.ranks import Rank
from gemini.errors import ConfigError, StateError
from gemini.offload.mapped_tensors import IN_MEMORY, MappedTensors, Place
from gemini.optim.kernels import ARRAYS, StateFormat, step_count
from gemini.optim.managed_optimizer import ManagedOptimizer
from gemini.optim.rule import ABSENT
from gemini.optim.self_managed import SelfManaged
from gemini.optim.wrapped_optimizer import hooks_set_aside
from gemini.runtime.adopt import read_state
from gemini.runtime.storage.model_storage import ManagedSlot
from gemini.system.config import parse_bytes

logger = logging.getLogger(__name__)

# Arguments of torch's Adam that we do not support, with the default values, which we accept.
TORCH_FLAGS = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
# The two that change results. The other keys of torch's groups have no meaning here.
_UNSUPPORTED = ("amsgrad", "maximize")
_OF_THE_OPTIMIZER = (
    "state_dtype",
    "master_remainders",
    "nvme_offload_fraction",
    "nvme_offload_dir",
    "nvme_offload_checksums",
)
_TORCH_ONLY = (*TORCH_FLAGS, "decoupled_weight_decay")
STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class _Box:
    """Hides a value from ``Optimizer.load_state_dict``, which casts every tensor that it sees."""

    value: Any


def refuse_flags(kind: str, flags: Mapping[str, Any]) -> None:
    """Check the extra keywords of ``kind``. Raises TypeError for one that torch lacks, and ConfigError for
    one of torch's that is not at its default.
    """
    for name in flags:
        if name not in TORCH_FLAGS:
            raise TypeError(f"{kind}() got an unexpected keyword argument {name!r}")
    for name, default in TORCH_FLAGS.items():
        if name in flags and flags[name] is not default:
            raise ConfigError(
                f"{kind}({name}={flags[name]!r}) is not supported, only {name}={default}; leave it out, or "
                "use torch.optim.AdamW for it"
            )


def torch_flags_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a group that select variants of torch's Adam."""
    return {name: group[name] for name in TORCH_FLAGS if name in group}


def refuse_unsupported(group: Mapping[str, Any]) -> None:
    """Raise ConfigError if a group selects a variant of Adam that the kernel does not support."""
    for name in _UNSUPPORTED:
        if group.get(name):
            raise ConfigError(f"{name}=True is not supported; use torch.optim.AdamW for it")
    for name in _OF_THE_OPTIMIZER:
        if name in group:
            raise ConfigError(f"{name} is a setting of the whole optimizer, not of a parameter group")


def require_complete(state: Mapping[str, Any], label: str) -> None:
    """Raise ConfigError if the state of ``label`` is neither empty nor a complete Adam state."""
    missing = [name for name in STATE_KEYS if name not in state]
    if state and missing:
        raise ConfigError(f"the state of parameter {label} has no {', '.join(missing)}: not an Adam state")


def boxed_state_dict(_optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Check a state dict and box its values (a load_state_dict pre-hook)."""
    for group in state_dict["param_groups"]:
        refuse_unsupported(group)
    numbers = param_numbers(state_dict)
    boxed = dict(state_dict["state"])
    for key in boxed.keys() & numbers:
        require_complete(boxed[key], str(key))
        boxed[key] = {name: _Box(value) for name, value in boxed[key].items()}
    return {**state_dict, "state": boxed}


def param_numbers(state_dict: StateDict) -> set[Any]:
    """Return the parameter numbers of a state dict. Other keys of its state belong to the user."""
    return {number for group in state_dict["param_groups"] for number in group["params"]}


def unboxed_state(state: Mapping[Any, Any], state_format: StateFormat) -> defaultdict[Any, Any]:
    """Return states in our format. Boxed states, which have fp32 moments, are converted and copied."""
    result: defaultdict[Any, Any] = defaultdict(dict)
    for param, values in state.items():
        if not isinstance(param, torch.Tensor):
            result[param] = values
            continue
        if not any(isinstance(value, _Box) for value in values.values()):
            result[param] = dict(values)
            continue
        plain = {name: box.value for name, box in values.items()}
        result[param] = {
            "step": step_count(plain["step"]),
            **_others(plain),
            **state_format.imported(plain, param),
        }
    return result


def complete_groups(groups: list[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Add our keys to groups from torch, and remove keys without meaning here."""
    for group in groups:
        decoupled = group.get("decoupled_weight_decay", defaults["adamw_mode"])
        group.setdefault("adamw_mode", decoupled)
        for name, value in defaults.items():
            group.setdefault(name, value)
        for name in _TORCH_ONLY:
            group.pop(name, None)


def _others(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the entries that a user keeps in an Adam state."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
        if name != "step" and name not in ARRAYS
    }


_ZERO = torch.zeros((), dtype=torch.float32, device="cpu")


def write_state(
    optimizer: ManagedOptimizer, slot: ManagedSlot, state: StateSpec, values: torch.Tensor
) -> None:
    """Copy ``values`` (in the parameter's shape, or one per block) into a state of a parameter."""
    if state.per_block:
        full = torch.empty(state.count(slot.param_view.numel()), dtype=state.dtype, device="cpu")
    else:
        full = _like(slot, state.dtype)
    full.copy_(values)
    write_state_range(optimizer, slot, state, 0, torch.as_strided(full, (full.numel(),), (1,)))


def _like(slot: ManagedSlot, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized CPU tensor with the shape and memory order of a parameter."""
    return torch.empty_strided(slot.param_view.shape, slot.param_view.stride(), dtype=dtype, device="cpu")


def forget_states(optimizer: ManagedOptimizer, slots: Iterable[ManagedSlot]) -> None:
    """Zero the existing states of ``slots``, those of an earlier optimizer included."""
    manager = optimizer.model.manager
    manager.run_pending()
    for slot in slots:
        if slot.grad is None:
            continue  # it has none until it is unfrozen
        for state in optimizer.states_of(slot):
            kept = (piece.tensors[state.key] for piece in slot.pieces)
            if any(manager.chunks.has_content(tensor) for tensor in kept):
                write_state(optimizer, slot, state, _ZERO)


def replace_step_counts(optimizer: ManagedOptimizer, steps: dict[ManagedSlot, int]) -> None:
    """Replace all step counts by ``steps``, and zero the states of parameters without a count there. The
    caller still writes the other states.
    """
    for slot in optimizer.steps.keys() - steps.keys():
        for state in optimizer.states_of(slot):
            write_state(optimizer, slot, state, _ZERO)
    optimizer.steps.clear()
    optimizer.steps.update(steps)
    optimizer.small.clear()


def write_state_range(
    optimizer: ManagedOptimizer, slot: ManagedSlot, state: StateSpec, first: int, values: torch.Tensor
) -> None:
    """Copy flat ``values`` into one state of a parameter, from its value number ``first`` on, in the
    parameter's memory order.
    """
    manager = optimizer.model.manager
    manager.snapshot.before_write()
    for piece in slot.pieces:
        span = slot.span_in(piece, state)
        start, stop = max(first, span.start), min(first + values.numel(), span.stop)
        if start < stop:
            tensors = (piece.tensors[state.key],)
            with manager.operator(tensors, tensors):
                kept = slot.state_in(piece, state)[start - span.start : stop - span.start]
                kept.copy_(values[start - first : stop - first])


def export_state(optimizer: ManagedOptimizer) -> dict[str, Any]:
    """Return ``{"state": ..., "param_groups": ...}`` like ``torch.optim.AdamW.state_dict``, and the loss
    scale if there is one. Runs pending updates. With a disk directory the tensors are mapped from a file
    there.
    """
    optimizer.require_complete("state_dict")
    slots = slots_in_order(optimizer)
    chunks = optimizer.model.manager.chunks
    directory = chunks.budgets.disk_dir
    if directory is None and chunks.file_backed is not None:
        directory = chunks.file_backed.directory
    capacity = sum(exported_bytes(optimizer, slot) for slot in optimizer.steps)
    place: Place = IN_MEMORY
    if directory is not None and capacity:
        place = MappedTensors(directory, capacity, len(optimizer.state_names) * len(optimizer.steps))
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, slot in enumerate(slots):
        if slot in optimizer.steps and entries(optimizer, slot):
            state[index] = {**counted_steps(optimizer, slot), **exported_state(optimizer, slot, place)}
    exported: dict[str, Any] = {"state": state, "param_groups": exported_groups(optimizer)}
    if optimizer.loss_scale is not None:
        exported["loss_scale"] = optimizer.loss_scale.state_dict()
    return exported


def exported_bytes(optimizer: ManagedOptimizer, slot: ManagedSlot) -> int:
    """Return an upper bound of the bytes of :func:`exported_state`."""
    states = optimizer.states_of(slot)
    wide = optimizer.rule.required(states) if optimizer.rule.converts else ()
    numel = slot.param_view.numel()
    return sum(4 * numel if state.name in wide else state.nbytes(numel) for state in states)


def exported_state(
    optimizer: ManagedOptimizer, slot: ManagedSlot, place: Place = IN_MEMORY, *, only: str | None = None
) -> dict[str, torch.Tensor]:
    """Return the states of a parameter, without step count, as in a state dict, allocated in ``place``.
    Collective over ranks.

    ``only``: the name of the one state that is needed; if states must be converted, all are returned.
    """
    manager, states = optimizer.model.manager, present_states(optimizer, slot)
    if not optimizer.rule.converts:
        states = tuple(state for state in states if only in (None, state.name))
        return {state.name: read_state(slot, state, manager, place) for state in states}
    kept = {state.name: read_state(slot, state, manager) for state in states}
    return {name: _placed(value, place) for name, value in optimizer.rule.exported(kept).items()}


def present_states(optimizer: ManagedOptimizer, slot: ManagedSlot) -> tuple[StateSpec, ...]:
    """Return the states that chunks keep for a parameter that has a state."""
    small = optimizer.small.get(slot, {})
    elsewhere = {*small, *small.get(ABSENT, ())}
    return tuple(state for state in optimizer.states_of(slot) if state.name not in elsewhere)


def _placed(value: torch.Tensor, place: Place) -> torch.Tensor:
    """Return a dense tensor in ``place``, with its shape and memory order."""
    values = flat(value)
    kept = place.empty(values.numel(), values.dtype)
    place.put(kept, 0, values)
    return torch.as_strided(kept, value.shape, value.stride())


def exported_groups(optimizer: ManagedOptimizer) -> list[dict[str, Any]]:
    """Return the groups as in a state dict, with parameter numbers."""
    groups, first = [], 0
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        if "adamw_mode" in settings:
            settings["decoupled_weight_decay"] = settings["adamw_mode"]
        count = len(group["params"])
        groups.append({**settings, "params": list(range(first, first + count))})
        first += count
    return groups


@dataclass(frozen=True)
class CheckedState:
    """A checked state in the format of torch's optimizers: the groups in our terms, the state of each
    parameter that has one, and the loss scale or None.
    """

    groups: list[dict[str, Any]]
    states: dict[ManagedSlot, dict[str, Any]]
    loss_scale: dict[str, float] | None


def checked_state(optimizer: ManagedOptimizer, state_dict: dict[str, Any]) -> CheckedState:
    """Check a state from :func:`export_state` or a torch Adam and return it. Raises ConfigError; changes
    nothing.
    """
    missing = [key for key in ("param_groups", "state") if key not in state_dict]
    if missing:
        raise ConfigError(
            f"the state has no {' and no '.join(missing)}; give what optimizer.state_dict() returned"
        )
    groups = _checked_groups(optimizer, state_dict["param_groups"])
    slots = slots_in_order(optimizer)
    keys = [key for group in groups for key in group["params"]]
    states = {
        slot: state_dict["state"][key]
        for slot, key in zip(slots, keys, strict=True)
        if any(value is not None for value in state_dict["state"].get(key, {}).values())
    }
    frozen = [slot for slot in states if slot.grad is None]
    for slot in frozen:
        del states[slot]
    for slot, entry in states.items():
        _check_entry(optimizer, slot, entry)
    note_frozen("the state", [slot.name for slot in frozen])
    return CheckedState(groups, states, state_dict.get("loss_scale"))


def note_frozen(source: str, names: Sequence[str]) -> None:
    """Warn that ``source`` has states of parameters that are frozen here and so have no place for them."""
    if names:
        more = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
        logger.warning(
            "%s has optimizer states of %r%s, frozen here since wrapping: they are left out. To keep them, "
            "call param.requires_grad_(True) before loading",
            source,
            names[0],
            more,
        )


def import_state(optimizer: ManagedOptimizer, loaded: CheckedState) -> None:
    """Load a checked state. Over ranks each rank writes its own part."""
    # Rules that do not count steps only distinguish the first one.
    counted = not optimizer.rule.shares
    steps = {slot: int(entry.get("step", 1)) if counted else 1 for slot, entry in loaded.states.items()}
    with torch.no_grad():
        replace_step_counts(optimizer, steps)
        for slot, entry in loaded.states.items():
            states = optimizer.states_of(slot)
            found = optimizer.rule.imported(entry, _like(slot, slot.group.plan.updated_dtype))
            if optimizer.rule.keeps_small:
                small_of = _small_of_form if optimizer.rule.shares else _small
                unread = optimizer.rule.unread(states)
                read = {name: value for name, value in entry.items() if name not in unread}
                optimizer.small[slot] = small_of(read, states, slot.param_view.shape)
            small = optimizer.small.get(slot, {})
            for state in states:
                value = found.get(state.name)  # None: the state was saved under settings that do not keep it
                kept = _ZERO if value is None or state.name in small else value
                write_state(optimizer, slot, state, kept)
    for group, settings in zip(optimizer.param_groups, loaded.groups, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})


def take_over_state(optimizer: ManagedOptimizer, optim: torch.optim.Optimizer) -> None:
    """Continue from the state of the wrapped optimizer, if it has made steps; its own state becomes empty."""
    if optim.state:
        with hooks_set_aside(optim):
            earlier = checked_state(optimizer, optim.state_dict())
        import_state(optimizer, earlier)
        optim.state.clear()
    if not isinstance(optim, SelfManaged):
        optim.state = optimizer.state  # read by the optimizer's own methods; writes raise


def import_together(optimizer: ManagedOptimizer, loaded: CheckedState, rank: Rank) -> None:
    """Load a checked state on every rank, then set all step numbers to the least of them: this also removes
    the effect of an update that failed on some ranks. Raises like :meth:`Rank.collect`. Collective.
    """
    manager = optimizer.model.manager

    def run() -> str:
        import_state(optimizer, loaded)
        return str(manager.step)

    manager.set_finished_steps(min(int(step) for step in rank.collect(run)))


def _checked_groups(optimizer: ManagedOptimizer, loaded: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of ``loaded`` in our terms. Raises ConfigError if this optimizer does not support it."""
    lengths = [len(group["params"]) for group in loaded]
    if lengths != [len(group["params"]) for group in optimizer.param_groups]:
        raise ConfigError(f"the state has parameter groups of {lengths} parameters; the optimizer's differ")
    groups = [copy.deepcopy(group) for group in loaded]
    if "adamw_mode" in optimizer.defaults:
        for group in groups:
            refuse_unsupported(group)
        complete_groups(groups, optimizer.defaults)
    for group in groups:
        optimizer.rule.hyper({**optimizer.defaults, **group})
    optimizer.refuse_changes(groups)
    return groups


def _check_entry(optimizer: ManagedOptimizer, slot: ManagedSlot, entry: dict[str, Any]) -> None:
    if optimizer.rule.counts_steps:
        require_complete(entry, repr(slot.name))
        _check_count(slot, entry["step"])
    for name in optimizer.rule.required(optimizer.states_of(slot)):
        if not isinstance(entry.get(name), torch.Tensor):
            found = f"a {type(entry[name]).__name__}, not a tensor" if name in entry else "not there"
            raise ConfigError(f"{name} of {slot.name!r} is {found}")
        if tuple(entry[name].shape) != tuple(slot.param_view.shape):
            raise ConfigError(
                f"{name} of {slot.name!r} has shape {tuple(entry[name].shape)}, its parameter "
                f"{tuple(slot.param_view.shape)}"
            )


def _check_count(slot: ManagedSlot, count: Any) -> None:
    try:
        counted = 0 <= int(count) < 2**63
    except (TypeError, ValueError, OverflowError, RuntimeError):
        counted = False
    if not counted:
        raise ConfigError(f"the state of {slot.name!r} has step = {count!r:.200}, which is not a number")


def counted_steps(optimizer: ManagedOptimizer, slot: ManagedSlot) -> dict[str, Any]:
    """Return a parameter's state without arrays: its step count, if its rule counts steps, else its small
    states.
    """
    if optimizer.rule.counts_steps:
        return {"step": step_count(optimizer.steps[slot])}
    return _small(optimizer.small.get(slot, {}), ())


def _small(
    entry: Mapping[str, Any], arrays: Sequence[StateSpec], shape: torch.Size | None = None
) -> dict[str, Any]:
    """Return copies of the small states in an entry of a state dict."""
    names = {ABSENT, *(state.name for state in arrays)}
    return {name: _copied(value) for name, value in entry.items() if name not in names}


def _small_of_form(
    entry: Mapping[str, Any], states: Sequence[StateSpec], shape: torch.Size
) -> dict[str, Any]:
    """Return the small states in an entry of an unknown optimizer: those with no place in chunks or another
    shape than their place, and the names of missing ones.
    """

    def fits(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == shape

    small = _small(entry, [state for state in states if fits(entry.get(state.name))])
    absent = tuple(sorted(state.name for state in states if state.name not in entry))
    return {**small, ABSENT: absent} if absent else small


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, (list, dict, tuple)) else value


def nbytes_of(value: Any) -> int:
    """Return the bytes of all tensors in a state."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    items = value.values() if isinstance(value, Mapping) else value
    return sum(map(nbytes_of, items)) if isinstance(value, (Mapping, list, tuple)) else 0


def entries(optimizer: ManagedOptimizer, slot: ManagedSlot) -> tuple[str, ...]:
    """Return the names of all entries in a parameter's state."""
    return (
        *(("step",) if optimizer.rule.counts_steps else _small(optimizer.small.get(slot, {}), ())),
        *(state.name for state in present_states(optimizer, slot)),
    )


def slots_in_order(optimizer: ManagedOptimizer) -> Sequence[ManagedSlot]:
    """Return the slots of the parameters in the order of a state dict's numbers."""
    optimizer.model.managed.refuse_exchanged("optimizer")
    return [param._slot for group in optimizer.param_groups for param in group["params"]]


Entries = dict[int, dict[str, Any]]


def export_to_first(optimizer: ManagedOptimizer) -> dict[str, Any]:
    """Return :func:`export_state` on the first rank and {} on the others. Collective: the others contribute
    their parts.
    """
    if optimizer.model.rank().index == 0:
        return export_state(optimizer)
    optimizer.require_complete("state_dict")
    for _ in _entries(optimizer):
        pass
    return {}


def export_shards(
    optimizer: ManagedOptimizer, max_shard_size: int | str, only_rank_0: bool
) -> Iterator[tuple[Entries, int]]:
    """Implements :meth:`GeminiOptimizer.state_dict_shard`."""
    most = parse_bytes(max_shard_size, name="max_shard_size")
    if not most or most < 0:
        raise ConfigError(f"max_shard_size is {max_shard_size!r}; give a number of bytes or '1GiB'")
    keeps = not only_rank_0 or optimizer.model.rank().index == 0
    optimizer.require_complete("state_dict_shard")
    return _shards(optimizer, most, keeps)


def _shards(optimizer: ManagedOptimizer, most: int, keeps: bool) -> Iterator[tuple[Entries, int]]:
    shard: Entries = {}
    held = 0
    for number, entry in _entries(optimizer):
        nbytes = nbytes_of(entry)
        if shard and held + nbytes > most:
            yield shard, held
            shard, held = {}, 0
        if keeps:
            shard[number] = entry
            held += nbytes
    if shard:
        yield shard, held


def _entries(optimizer: ManagedOptimizer) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the state of each parameter that has one. Collective: all ranks read together."""
    manager = optimizer.model.manager
    begun, steps = manager.step, dict(optimizer.steps)
    for number, slot in enumerate(slots_in_order(optimizer)):
        if slot not in steps or not entries(optimizer, slot):
            continue
        if (manager.step, optimizer.steps.get(slot)) != (begun, steps[slot]):
            raise StateError("states changed while they were read in shards; start again after the step")
        yield number, {**counted_steps(optimizer, slot), **exported_state(optimizer, slot)}
