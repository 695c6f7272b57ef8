"""ManagedGroups: the parameter groups and states of an optimizer over a managed model, including the share of
the states that is kept in a file. Also the checks of GeminiOptimizer's arguments.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from gemini.chunk import Chunk
from gemini.chunk.chunk import StateSpec
from gemini.errors import ConfigError, StateError
from gemini.model.handle import ManagedModel
from gemini.optim.gradients import LossScale
from gemini.optim.host_update import elements_per_second
from gemini.optim.kernel_adam import KernelAdam
from gemini.optim.kernels import has_cuda_kernel
from gemini.optim.managed_optimizer import ManagedOptimizer
from gemini.optim.managed_states import ManagedStates, refuse_write
from gemini.optim.marks import Marks, ParamIndex
from gemini.optim.rule import States, UpdateRule
from gemini.optim.rule_choice import rule_of
from gemini.optim.self_managed import SelfManaged
from gemini.optim.shared_step import GroupSettings, attributes_of, shell_of
from gemini.optim.state_exchange import (
    export_shards,
    exported_groups,
    forget_states,
    nbytes_of,
    slots_in_order,
)
from gemini.optim.wrapped_optimizer import WrappedOptimizer, refuse_states_of
from gemini.runtime import ManagedParameter
from gemini.runtime.storage.data_sizes import Kept
from gemini.runtime.storage.host_choice import HostUpdates
from gemini.runtime.storage.model_storage import ChunkGroup, ManagedSlot
from gemini.system.config import format_bytes, format_enough
from gemini.system.threads import usable_processors

logger = logging.getLogger(__name__)


Overlap = bool | Literal["backward"]  # of GeminiOptimizer: where updates run
Margin = float | Literal["auto"] | None  # its gpu_margin_mem_ratio


def checked_max_norm(max_norm: float) -> float:
    """Return ``max_norm``. Raises ConfigError if it is negative or NaN."""
    if not max_norm >= 0:
        raise ConfigError(f"max_norm is {max_norm}; give a positive number, or 0 to clip nothing")
    return max_norm


def check_optimizer(
    optim: torch.optim.Optimizer, model: ManagedModel, *, elementwise: bool = False, whole: bool = False
) -> UpdateRule:
    """Return the rule by which ``optim`` updates the chunks of ``model``. Raises ConfigError if there is
    none.
    """
    if isinstance(optim, SelfManaged):
        optim.require_free()
    rule = rule_of(optim, elementwise=elementwise, whole=whole)
    if not isinstance(optim, SelfManaged) or not optim.makes_driver:
        refuse_replaced_step(optim)
    if rule.whole and model.manager.part is not None:
        raise ConfigError(
            f"{type(optim).__name__} needs whole parameters, but this model was divided before it "
            "was wrapped (model_ranks: tensor or pipeline parallelism), so a parameter may be only a "
            "part; use only data parallelism, or an element-wise optimizer: HybridAdam, Lion, or one "
            "of torch's except Muon and Adafactor"
        )
    if rule.whole and model.divides_experts:
        raise ConfigError(
            f"{type(optim).__name__} needs whole parameters, but ep_size divides the experts over "
            "ranks: use an element-wise optimizer (HybridAdam, Lion, or one of torch's except Muon "
            "and Adafactor), or leave out ep_size"
        )
    for index, group in enumerate(optim.param_groups):
        check_parameters(index, group["params"], model)
    for group in optim.param_groups:
        rule.hyper(group)
    if not isinstance(optim, KernelAdam):
        return rule
    if model.device.torch_device.type == "cuda" and not has_cuda_kernel():
        raise ConfigError(
            "this build cannot update parameters on a GPU: it was built without nvcc; build it with "
            "nvcc on PATH (`gemini check` prints the commands)"
        )
    if optim.state_format.remainders and any(group.plan.master for group in model.storage.groups):
        raise ConfigError(
            "master_remainders keeps the low bits of bf16 parameters, and mixed_precision keeps "
            "whole fp32 masters: use only one of them. To train a parameter in 14 bytes, 10 or 8, "
            "make the model bf16 (model.to(torch.bfloat16)) and leave mixed_precision out"
        )
    return rule


def refuse_replaced_step(optim: torch.optim.Optimizer) -> None:
    """Raise ConfigError if user code replaced ``step`` on the object ``optim``: the replacement would not
    run.
    """
    replaced = vars(optim).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise ConfigError(
            f"the step of this {type(optim).__name__} was replaced by {replaced!r:.100}, which a "
            "GeminiOptimizer would not run; put it into a subclass, or replace step of the GeminiOptimizer"
        )


def check_parameters(index: int, params: Iterable[Any], model: ManagedModel) -> None:
    """Raise ConfigError if ``model`` does not manage a parameter of the optimizer's group ``index``.
    ``params`` may contain (name, parameter) pairs.
    """
    for tensor in map(bare, params):
        if is_managed(tensor, model):
            continue
        held = f"group {index} of the optimizer holds a parameter of shape {tuple(tensor.shape)}"
        if hasattr(tensor, "_slot"):
            raise ConfigError(
                f"{held} of another managed model; give each model its own optimizer, or put both models "
                "into one module (nn.ModuleDict) and manage that"
            )
        raise ConfigError(
            f"{held} that the model does not manage; build the optimizer from the wrapped model's parameters"
        )


def bare(param: Any) -> Any:
    """Return the parameter from a (name, parameter) pair, or ``param`` itself."""
    return param[1] if isinstance(param, tuple) else param


def is_managed(tensor: Any, model: ManagedModel) -> bool:
    """Return whether ``tensor`` is a parameter of the module that ``model`` manages."""
    if type(tensor) is not ManagedParameter:
        return False
    return model.storage.slots.get(tensor._slot.name) is tensor._slot


def host_updates_of(model: ManagedModel, ratio: Margin) -> HostUpdates | None:
    """Return which updates the CPU runs on HOST for ``gpu_margin_mem_ratio=ratio``; None: none.

    ``"auto"`` also gives None if a number would be refused.

    Raises:
        ConfigError: this model's tiers cannot do it.
    """
    has_gpu = model.device.has_own_memory
    if ratio is None or (ratio in ("auto", 0) and not has_gpu):
        return None
    if ratio != "auto" and not (isinstance(ratio, (int, float)) and 0 <= ratio <= 1):
        raise ConfigError(f"gpu_margin_mem_ratio is {ratio!r}; give a number from 0 to 1, 'auto' or None")
    if not has_gpu:
        raise ConfigError(
            f"gpu_margin_mem_ratio is {ratio}, but there is no GPU: the CPU makes all updates, and "
            "optimizer states stay on DEVICE if they fit; leave it out and raise device_bytes instead"
        )
    budgets = model.manager.chunks.budgets
    if budgets.host_bytes < _least_host_bytes(model):
        if ratio == "auto":
            return None
        beside_disk = budgets.disk_dir is not None
        held = (
            "all model data, beside disk_dir,"
            if beside_disk
            else "the optimizer states and one update's chunks"
        )
        raise ConfigError(
            f"gpu_margin_mem_ratio is {ratio}, but host_bytes is {format_bytes(budgets.host_bytes)} and "
            f"{held} take {format_enough(_least_host_bytes(model))}: the CPU updates only states on HOST; "
            "raise host_bytes to that, or leave out gpu_margin_mem_ratio to update states on the GPU"
        )
    sharding = model.manager.sharding
    whole_bytes = sharding.gather_bytes if sharding is not None else 0
    _warn_of_one_thread(model)
    updates = HostUpdates.of_groups(model.storage.groups, whole_bytes, ratio)
    if ratio != "auto":
        return updates
    numel = sum(group.numel for group in updates.groups)
    return replace(updates, elements_per_second=elements_per_second(model.device.processors, numel))


def _warn_of_one_thread(model: ManagedModel) -> None:
    """Warn if this rank of several updates with one thread although more processors are available."""
    sharding = model.manager.sharding
    if sharding is None or torch.get_num_threads() > 1:
        return
    usable = usable_processors()
    near = usable.intersection(model.device.processors) or usable
    share = len(near) // sharding.peers.ranks_on_this_host
    if share > 1:
        logger.warning(
            "the CPU updates optimizer states with one thread, and there are processors for %d in each of "
            "the ranks here; torchrun sets OMP_NUM_THREADS=1 where it is not set: set OMP_NUM_THREADS=%d",
            share,
            share,
        )


def _least_host_bytes(model: ManagedModel) -> int:
    """Return the least HOST bytes for updates on HOST: all states and the chunks of one update.

    With a DISK tier it is all model data: otherwise other chunks could push states to DISK, where the CPU
    cannot update them.
    """
    if model.manager.chunks.budgets.disk_dir is not None:
        return model.manager.context.size.total_bytes
    groups = HostUpdates.of_groups(model.storage.groups, 0, 0.0).groups
    beside = max((group.param_bytes + group.grad_bytes for group in groups), default=0)
    return sum(group.state_bytes for group in groups) + beside


def check_several(model: ManagedModel, overlaps: set[Overlap], ratios: set[Margin]) -> None:
    """Raise ConfigError if ``model`` cannot have several optimizers with these values of ``overlap`` and
    ``gpu_margin_mem_ratio``.
    """
    if model.manager.sharding is not None:
        raise ConfigError(
            "over several ranks a model can have only one optimizer, because gradients of all "
            "parameters are exchanged and discarded together; put the parameters into groups of one "
            "optimizer"
        )
    if model.config.precision == torch.float16:
        raise ConfigError(
            "with mixed_precision='fp16' a model can have only one optimizer, because it keeps the "
            "loss scale; put the parameters into groups of one optimizer"
        )
    if "backward" in overlaps:
        raise ConfigError(
            "with overlap='backward' a model can have only one optimizer, because a backward pass "
            "computes the gradients of all parameters; put the parameters into groups of one "
            "optimizer"
        )
    if len(ratios) > 1:
        raise ConfigError(
            f"the optimizers of one model have gpu_margin_mem_ratio {sorted(map(str, ratios))}, but share "
            "its chunks; give each the same"
        )


def check_mode(
    overlap: Overlap, *, clips: bool, counts: bool, scales: bool, several_ranks: bool, defers: bool
) -> None:
    """Raise ConfigError if ``overlap`` is unknown, or if updates cannot run in backward with these
    options.
    """
    if overlap in (True, False):
        return
    if overlap != "backward":
        raise ConfigError(f"overlap={overlap!r} is unknown; choose True, False or 'backward'")
    reasons = {
        "max_norm=: the norm needs all gradients": clips,
        "log_num_zeros_in_grad=: gradients are used up before they are counted": counts,
        "mixed_precision='fp16': an overflow is known only when all gradients are computed": scales,
        "several ranks": several_ranks,
        "an optimizer of an unknown class: its step may read or change anything": not defers,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"overlap='backward' does not go with {reason}; choose overlap=True")


def choose_share(states: Iterable[tuple[Chunk, int]], fraction: float) -> list[tuple[Chunk, int]]:
    """Choose ``fraction`` of the bytes of ``states``, rounded up to a chunk, spread evenly over their order.

    Spreading hides their reads and writes behind the updates of the other states.
    """
    chosen, seen_bytes, chosen_bytes = [], 0, 0
    for chunk, tensor in states:
        seen_bytes += chunk.spec.nbytes
        if chosen_bytes < fraction * seen_bytes:
            chosen.append((chunk, tensor))
            chosen_bytes += chunk.spec.nbytes
    return chosen


def back_by_file(optimizer: ManagedOptimizer, optim: torch.optim.Optimizer) -> frozenset[int]:
    """Keep the share of ``optimizer``'s states that ``optim`` asks for in a file, and return their tensors.

    States that it no longer asks for leave the file, except those of the model's other optimizers.

    Raises:
        ConfigError, IoError: the file cannot be made.
        OutOfBudgetError: states that leave the file do not fit the tiers.
    """
    model, mine = optimizer.model, optimizer.slots
    states = [
        (chunk, piece.tensors[kind])
        for group in model.storage.trainable_groups()
        for piece in group.pieces
        if any(slot in mine and slot.start < piece.stop and piece.start < slot.stop for slot in group.slots)
        for kind, chunk in piece.chunks.items()
    ]
    adam = optim if isinstance(optim, KernelAdam) else None
    chosen = choose_share(states, adam.disk_fraction if adam is not None else 0.0)
    wanted = frozenset(tensor for _, tensor in chosen)
    manager, chunks = model.manager, model.manager.chunks
    if chosen or chunks.file_backed is not None:  # a resident model may no longer be: states leave DEVICE
        manager.end_residence()
    others = [each.file_backed for each in model.optimizers if each is not optimizer]
    if chunks.file_backed is not None:
        kept, held = wanted.union(*others), chunks.file_backed
        held.remove([tensor for _, tensor in states if tensor in held and tensor not in kept])
    if chosen and adam is not None:
        directory = chunks.budgets.disk_dir
        directories = adam.disk_directories or ([directory] if directory is not None else None)
        chunks.open_file_backed().add(chosen, directories, checksums=adam.disk_checksums)
    return wanted


class ManagedGroups(WrappedOptimizer):
    """An optimizer over parameters of :attr:`model`. A subclass sets ``model`` before it adds the first
    group.
    """

    model: ManagedModel
    gpu_margin_mem_ratio: Margin
    file_backed: frozenset[int] = frozenset()  # tensors of states kept in a file between updates
    rule: UpdateRule
    steps: dict[ManagedSlot, int]
    small: dict[ManagedSlot, dict[str, Any]]
    loss_scale: LossScale | None
    _states: Mapping[torch.dtype, States] = MappingProxyType({})  # by dtype of the updated values
    _kept: dict[ManagedSlot, tuple[StateSpec, ...]]  # the states made for each parameter
    _driven_optim: torch.optim.Optimizer | None = None
    _driven_groups: list[dict[str, Any]]

    @abstractmethod
    def require_complete(self, doing: str) -> None:
        """Raise StateError if an update or a load failed half-way."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names, as in torch, of the states that chunks keep for parameters."""
        lists = (states for of_groups in self._states.values() for states in of_groups)
        return tuple(dict.fromkeys(state.name for states in lists for state in states))

    @property
    def small_state_bytes(self) -> int:
        """The bytes of small states, outside chunks. Thread-safe."""
        each = (value for kept in self.small.copy().values() for value in kept.copy().values())
        return sum(map(nbytes_of, each))

    @property
    def can_defer_updates(self) -> bool:
        """Whether updates may wait for the next use of their chunks. Not if ranks must run them together:
        each rank would reach them at a different time.
        """
        manager = self.model.manager
        ordered = self.rule.whole and manager.is_sharded
        return manager.can_defer_updates and self.rule.defers and not ordered

    def states_of(self, slot: ManagedSlot) -> tuple[StateSpec, ...]:
        """Return the states that chunks keep for a parameter."""
        return self._kept[slot]

    def kept_of(self, group: ChunkGroup) -> Kept:
        """Return the states that chunks keep for a group: those of any of its parameters."""
        states = (state for slot in group.slots for state in self._kept.get(slot, ()))
        return Kept(tuple(dict.fromkeys(states)), self.rule.whole)

    def _wanted_states(self) -> dict[torch.dtype, States]:
        dtypes = dict.fromkeys(group.plan.updated_dtype for group in self.model.storage.groups)
        return {dtype: self.rule.states(self.param_groups, dtype) for dtype in dtypes}

    def _by_parameter(self, states: Mapping[torch.dtype, States]) -> dict[ManagedSlot, tuple[StateSpec, ...]]:
        return {
            param._slot: states[param._slot.group.plan.updated_dtype][number]
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
        }

    def stand_for(self, optim: torch.optim.Optimizer) -> None:
        """Drive ``optim`` from now on: share its hooks, and serve states and groups on its behalf."""
        self.share_hooks(optim)
        self.record_driven_groups(optim)
        if isinstance(optim, SelfManaged):
            optim.give_to(self)
        if isinstance(optim.state, ManagedStates):  # left by an earlier wrapper
            optim.state = defaultdict(dict)
        refuse_states_of(optim, self, lambda wrapper: not wrapper.model.manager.is_closed)

    def record_driven_groups(self, optim: torch.optim.Optimizer) -> None:
        """Record the current groups of the driven ``optim`` as those it must keep."""
        self._driven_groups = list(optim.param_groups)

    def refuse_other_groups(self) -> None:
        """Raise ConfigError if groups were added to or removed from the wrapped optimizer, or if its ``step``
        was replaced: neither would have an effect.
        """
        optim = self._driven()
        if optim is None:
            return
        if getattr(optim, "_own", None) is not self:  # a self-managed optimizer runs its own step
            refuse_replaced_step(optim)
        now, then = optim.param_groups, self._driven_groups
        if len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
            raise ConfigError(
                f"param_groups of the wrapped {type(optim).__name__} are not the {len(then)} that the "
                f"{type(self).__name__} took over, and these are the ones it updates; change its own, with "
                "add_param_group() or in param_groups, and leave the other's as they were"
            )

    def hypers(self) -> dict[ManagedSlot, Any]:
        """Return the settings of each parameter. Raises ConfigError like :meth:`refuse_other_groups` and
        :meth:`refuse_new_states`.
        """
        self.refuse_other_groups()
        self.refuse_new_states()
        found: dict[ManagedSlot, Any] = {}
        for settings in self.param_groups:
            hyper = self.rule.hyper(settings)
            found.update((param._slot, hyper) for param in settings["params"])
        return found

    def marks(self) -> dict[ManagedSlot, tuple[Marks, ParamIndex]]:
        """Return for each parameter the attributes that user code set on it, and its place in the groups."""
        return {
            param._slot: (Marks.of(param), ParamIndex(number, index))
            for number, group in enumerate(self.param_groups)
            for index, param in enumerate(group["params"])
        }

    def refuse_changes(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError if saved groups say that their parameters were updated in another way
        than here.
        """
        if isinstance(self._driven_optim, SelfManaged):
            for index, (group, settings) in enumerate(zip(self.param_groups, saved, strict=True)):
                self._driven_optim.refuse_change(index, group, settings)

    def refuse_new_states(self) -> None:
        """Raise ConfigError if the groups' settings now need states that were not made."""
        new: set[str] = set()
        for slot, states in self._by_parameter(self._wanted_states()).items():
            kept = self._kept.setdefault(slot, states)
            if kept != states:
                new |= {state.name for state in states}.difference(state.name for state in kept)
        if new:
            raise ConfigError(
                f"the groups' settings ask for {', '.join(sorted(new))}, which they did not when the "
                "GeminiOptimizer was created (for example, momentum was 0); set them before you "
                "create it"
            )

    def make_states(self, optim: torch.optim.Optimizer) -> None:
        """Create the chunks of the states, and keep the share that ``optim`` asks for in a file. Also called
        when groups are added.

        Raises:
            OutOfBudgetError: the budgets cannot hold them.
            ConfigError, IoError: as in :func:`back_by_file` and :func:`host_updates_of`.
        """
        before, self._states = self._states, self._wanted_states()
        kept_before, self._kept = self._kept, self._by_parameter(self._states)
        growth = self.model.manager.growth
        try:
            if growth is not None:
                growth.provide(self)
            self._choose_places(optim)
        except BaseException:
            self._states, self._kept = before, kept_before
            raise
        self._driven_optim = optim

    def make_first_states(self, optim: torch.optim.Optimizer) -> None:
        """Call :meth:`make_states` for a new optimizer, and zero the states that an earlier
        optimizer left.
        """
        self.make_states(optim)
        forget_states(self, slots_in_order(self))

    def note_new_chunks(self) -> None:
        """Apply the file share and the HOST placement also to states of parameters that were unfrozen later.
        Raises like :meth:`make_states`.
        """
        if self._driven_optim is not None:
            self._choose_places(self._driven_optim)

    def _choose_places(self, optim: torch.optim.Optimizer) -> None:
        host_updates = host_updates_of(self.model, self.gpu_margin_mem_ratio)
        self.file_backed = back_by_file(self, optim)
        self.model.manager.update_on_host(host_updates)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model with their own settings. Parameters added to the module since it was
        wrapped become managed.

        Raises:
            ConfigError: the model cannot manage one of them.
            OutOfBudgetError: the budgets cannot hold them or their states.
            IoError: the file for their states cannot be made. After any error the groups are as before;
                new parameters of the module that could be managed stay managed.
        """
        params = param_group["params"]
        if not isinstance(params, (torch.Tensor, set)):  # torch refuses sets: they have no order
            params = param_group["params"] = list(params)  # in place: the dict may be shared
        each = [params] if isinstance(params, torch.Tensor) else params
        self._adopt([{"params": each}])
        check_parameters(len(self.param_groups), each, self.model)
        count = len(self.param_groups)
        try:
            self._add_group(param_group)
            for group in self.param_groups[count:]:
                self.rule.hyper(group)
            if self._driven_optim is not None:
                self.refuse_second_names()
                self.make_states(self._driven_optim)
        except BaseException:
            del self.param_groups[count:]
            raise

    def _add_group(self, param_group: dict[str, Any]) -> None:
        """Add a group like the driven optimizer's class does: it may add settings or split the group."""
        driven = self._own_class("add_param_group")
        if driven is None:
            ours = self._driven_optim
            groups = ours.split_group(param_group) if isinstance(ours, SelfManaged) else [param_group]
            for group in groups:
                super().add_param_group(group)
            return
        shell = shell_of(driven)
        shell.param_groups = list(self.param_groups)
        shell.add_param_group(param_group)
        vars(driven).update(attributes_of(shell))
        self.param_groups.append(shell.param_groups[-1])

    def run_own_zero_grad(self, set_to_none: bool) -> None:
        """Run the driven optimizer's own ``zero_grad``, if its class overrides it, for its side effects."""
        driven = self._own_class("zero_grad")
        if driven is not None and set_to_none:
            driven.zero_grad()
        elif driven is not None:
            driven.zero_grad(set_to_none)

    def with_own_entries(self, state: dict[str, Any]) -> dict[str, Any]:
        """Add the entries that the driven class's own ``state_dict()`` adds. Raises StateError if that method
        changes states or groups.
        """
        driven = self._own_class("state_dict")
        if driven is None or not state:
            return state
        found = self._shell_without_states(driven).state_dict()
        if found.get("state") or len(found.get("param_groups", ())) != len(self.param_groups):
            raise StateError(
                f"state_dict() of {type(driven).__name__} changes states or groups, which are in chunks; "
                "gemini.checkpoint.save() keeps them"
            )
        return {**found, **state}

    def from_own_entries(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes that the driven class's own ``load_state_dict()`` sets from extra entries of
        a state dict.
        """
        driven = self._own_class("load_state_dict")
        if driven is None:
            return {}
        shell = self._shell_without_states(driven)
        groups = [{**group, "params": []} for group in state["param_groups"]]
        shell.load_state_dict({**state, "state": {}, "param_groups": groups})
        return attributes_of(shell)

    def _shell_without_states(self, driven: torch.optim.Optimizer) -> torch.optim.Optimizer:
        shell = shell_of(driven)
        shell.param_groups = [{**group, "params": []} for group in self.param_groups]
        return shell

    def _own_class(self, method: str) -> torch.optim.Optimizer | None:
        """Return the driven optimizer if its class is not ours and overrides ``method``; else None."""
        driven = self._driven_optim
        if driven is None or isinstance(driven, SelfManaged):
            return None
        is_own = getattr(type(driven), method) is not getattr(torch.optim.Optimizer, method)
        return driven if is_own else None

    def _adopt(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Let the model manage parameters that were added to its module, if the groups contain one. Groups
        may hold (name, parameter) pairs. Raises like :meth:`ManagedModel.adopt`.
        """
        known = self.slots if self._driven_optim is not None else set()
        tensors = (bare(param) for group in groups for param in group["params"])
        fresh = [t for t in tensors if not is_managed(t, self.model) or t._slot in known]
        if fresh and set(self.model.module.parameters()).issuperset(fresh):
            self.model.adopt()

    def refuse_second_names(self) -> None:
        """Raise ConfigError if two parameters of the groups share memory."""
        counts = Counter(param._slot for group in self.param_groups for param in group["params"])
        twice = [slot.name for slot, count in counts.items() if count > 1]
        if twice:
            raise ConfigError(
                f"the groups have two parameters over the memory of {twice[0]!r}, as nn.Parameter(weight) is "
                "one; give nn.Parameter(weight.detach().clone())"
            )

    def keep_only(self, held: Mapping[torch.Tensor, str]) -> None:
        """Drop parameters that are not in ``held`` (parameter -> name, the module's current ones) from the
        groups, and forget their states.
        """
        gone: list[ManagedSlot] = []
        for group in self.param_groups:
            gone += [param._slot for param in group["params"] if param not in held]
            group["params"][:] = [param for param in group["params"] if param in held]
            if "param_names" in group:
                group["param_names"] = [held[param] for param in group["params"]]
        forget_states(self, gone)
        for slot in gone:
            self.steps.pop(slot, None)
            self.small.pop(slot, None)

    def __getattr__(self, name: str) -> Any:
        """Look up a public attribute (``train()``, ``eval()``) on a driven optimizer of an unknown class."""
        driven, rule = vars(self).get("_driven_optim"), vars(self).get("rule")
        if name.startswith("_") or driven is None or rule is None or not rule.shares:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(driven, name)

    @property  # type: ignore[override]
    def state(self) -> ManagedStates:
        """The state of each parameter, read-only."""
        return ManagedStates(self)

    @state.setter
    def state(self, states: Any) -> None:
        if states or "param_groups" in vars(self):  # torch's __init__ assigns an empty one
            refuse_write()

    def state_dict_shard(
        self, max_shard_size: int | str = "1GiB", *, only_rank_0: bool = False
    ) -> Iterator[tuple[dict[int, dict[str, Any]], int]]:
        """Yield ``state_dict()["state"]`` in shards of at most ``max_shard_size`` bytes, each with its byte
        size. A larger parameter gets a shard of its own.

        The rest of the state dict is :meth:`exported_groups` and ``loss_scale``. Collective: every rank
        iterates to the end; with ``only_rank_0`` the other ranks get no shard. No hooks run.
        """
        return export_shards(self, max_shard_size, only_rank_0)

    def exported_groups(self) -> list[dict[str, Any]]:
        """Return ``state_dict()["param_groups"]``. Not collective."""
        return exported_groups(self)

    def slot_of(self, param: torch.Tensor) -> ManagedSlot:
        """Return the slot of a parameter. Raises ConfigError if it is in no group of this optimizer."""
        slot: ManagedSlot | None = getattr(param, "_slot", None)
        if slot is None or slot not in self.slots:
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} does not belong to this optimizer; pass a "
                "parameter of its model that is in its param_groups"
            )
        return slot

    @property
    def settings(self) -> str:
        """The settings of an update, by group, as text."""
        each = (self.rule.hyper(group) for group in self.param_groups)
        return ", ".join(f"group {index}: {hyper}" for index, hyper in enumerate(each))

    def exported_settings(self) -> list[dict[str, Any]]:
        """Return the values of :attr:`settings` as numbers."""
        hypers = (self.rule.hyper(group) for group in self.param_groups)
        return [h.as_numbers() if isinstance(h, GroupSettings) else asdict(h) for h in hypers]

    def apply_settings(self, settings: list[dict[str, Any]]) -> None:
        """Apply another rank's :meth:`exported_settings`."""
        for group, given in zip(self.param_groups, settings, strict=True):
            for name, value in given.items():
                if isinstance(group[name], torch.Tensor):
                    group[name].fill_(value)  # in place: a scheduler holds the tensor
                else:
                    group[name] = tuple(value) if isinstance(group[name], tuple) else value

    @property
    def slots(self) -> set[ManagedSlot]:
        """The slots of this optimizer's parameters. Raises StateError if one is no longer managed."""
        self.model.managed.refuse_exchanged("optimizer")
        return {param._slot for group in self.param_groups for param in group["params"]}
