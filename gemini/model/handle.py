"""ManagedModel: the handle of a managed module, used by wrappers, optimizers, checkpoints and forecasts.

Also computes ``stats()`` and ``timeline()``, and detects misuse: steps that no optimizer ends, and parameters
that torch replaced.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, NoReturn, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from gemini import _C
from gemini.chunk.memory import ComputeDevice
from gemini.comm.peers import Peers, require_equal
from gemini.comm.ranks import ProcessGroupPeers, Rank
from gemini.errors import ConfigError, StateError
from gemini.memstats import Trace
from gemini.memstats.trace import KINDS
from gemini.model.entries import Entries
from gemini.model.foreign_classes import intercept_foreign_classes
from gemini.model.tiled_heads import TiledHeads
from gemini.placement import PlanReport
from gemini.runtime.adopt import Adopted, collected_once, release_adopted, second_names
from gemini.runtime.arrivals import Changes, adopt_new, find_changes
from gemini.runtime.build import Built
from gemini.runtime.config import GeminiConfig
from gemini.runtime.gate.gate import NO_SNAPSHOT
from gemini.runtime.gate.gradients import LooseBytes
from gemini.runtime.gate.guards import in_one_thread
from gemini.runtime.intercept.compiled import CompiledBlocks
from gemini.runtime.intercept.mixed_dtypes import FirstPasses
from gemini.runtime.intercept.nested import cast_floating, map_tensors, tensors_in
from gemini.runtime.intercept.precision import place_buffers
from gemini.runtime.intercept.tensors import MANAGED_PARAMETERS, ManagedParameter
from gemini.runtime.manager import GeminiManager
from gemini.runtime.step.evaluations import Call
from gemini.runtime.storage.gradient import SlotGradient
from gemini.runtime.storage.model_storage import ManagedSlot, ModelStorage, slot_of
from gemini.sharding.rounds import Joining
from gemini.system.config import format_bytes
from gemini.timeline.event_recorder import TimelineRecorder

logger = logging.getLogger(__name__)
T = TypeVar("T")


_STEPS_UNSEEN = 2  # warn after two in a row: one may be an error after which gradients were discarded


class Passes:
    """The forward passes of a model: whether one is under way, and whether an optimizer ends the steps."""

    def __init__(self) -> None:
        self.is_open = False
        self._gradients = 0  # number of gradients that had arrived when the previous pass began
        self._unseen = 0
        self._has_warned = False

    @contextmanager
    def inside(self, model: ManagedModel, training: bool) -> Iterator[None]:
        """Context of a forward pass of ``model``."""
        if training and model.manager.step == 0:
            self._look_for_steps(model)
        outer, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = outer

    def _look_for_steps(self, model: ManagedModel) -> None:
        gradients, before = model.manager.num_gradients, self._gradients
        self._gradients = gradients
        used_up = gradients > before and not any(slot.has_grad for slot in model.storage.slots.values())
        self._unseen = self._unseen + 1 if used_up else 0
        if self._unseen >= _STEPS_UNSEEN and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "gradients were created and freed, but no GeminiOptimizer ended a step: no step is "
                "planned, and torch's optimizer keeps its states outside the budgets; use "
                "GeminiOptimizer(optimizer, model)"
            )


class ManagedParameters:
    """The parameters that were made managed when a model was wrapped."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        named = list(module.named_parameters())
        self._names = [name for name, _ in named]
        self._params = [param for _, param in named]
        self._is_released = False

    def release(self) -> None:
        """Note that the parameters are ordinary again, permanently."""
        self._is_released = True

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """All parameters, each once."""
        return self._params

    def refuse_exchanged(self, doing: str) -> None:
        """Raise StateError if a parameter is no longer managed, because its chunk would keep values that
        nobody uses; or if two parameters of the module share one slot."""
        if self._is_released:
            raise StateError(
                f"{doing}: the model was released, and its parameters are ordinary tensors; manage "
                "it again, or use the module directly"
            )
        if second_names:
            self._refuse_twins(doing)
        if MANAGED_PARAMETERS.issuperset(map(type, self._params)):
            return
        managed = [isinstance(param, ManagedParameter) for param in self._params]
        name = self._names[managed.index(False)]
        raise StateError(
            f"{doing}: parameter {name!r} is no longer managed: torch.utils.swap_tensors, or "
            "load_state_dict() of the module under "
            "torch.__future__.set_swap_module_params_on_conversion(True), replaced its tensor. Build "
            "the model again, wrap it and load a checkpoint; to load weights, use load_state_dict() "
            "of the GeminiDDP, which copies them"
        )

    def _refuse_twins(self, doing: str) -> None:
        names: dict[int, str] = {}
        for name, param in self._module.named_parameters():  # torch yields each object once
            if type(param) is ManagedParameter:
                other = names.setdefault(id(param._slot), name)
                if other != name:
                    raise StateError(
                        f"{doing}: parameters {other!r} and {name!r} are different tensors over the "
                        "same memory (nn.Parameter(weight) makes such a tensor); tie them: "
                        "layer.weight = other_layer.weight"
                    )


_TIERS = {"device": _C.Tier.DEVICE, "host": _C.Tier.HOST, "disk": _C.Tier.DISK}
_LINKS = ("h2d", "d2h", "disk_read", "disk_write")


def usage_and_traffic(storage: ModelStorage, manager: GeminiManager) -> dict[str, Any]:
    """Return usage per tier and traffic per link since construction, as a plain dict. Any thread may call
    it."""
    chunks = manager.chunks
    tiers = _usage_of_tiers(chunks.table, manager.loose)
    links = chunks.link_stats()
    read_bytes = written_bytes = 0
    if chunks.file_backed is not None:
        for key, nbytes in chunks.file_backed.usage().items():
            tiers["disk"][key] += nbytes
        read_bytes, written_bytes = chunks.file_backed.traffic()
    return {
        **tiers,
        **{link: links[link] for link in _LINKS},
        "stowed": {"read_bytes": read_bytes, "written_bytes": written_bytes},
        "stall_seconds": chunks.stall_seconds,
        "step": manager.step,
        "warmup": not (manager.order.has_order or manager.resident),
        "num_chunks": len(chunks.chunks),
        "wasted_bytes": storage.wasted_bytes,
        "model_data_bytes": manager.context.size.total_bytes,
        "pending_updates": len(manager.pending.all()),
        "withheld_bytes": manager.shortage.withheld_bytes,
    }


def flattened(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return nested ``stats`` as one number per name for loggers, like ``device/bytes``."""
    flat: dict[str, float] = {}
    for name, value in stats.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{key}": each for key, each in flattened(value).items()}
        else:
            flat[name] = int(value) if isinstance(value, bool) else value
    return flat


def counters(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the counters in ``stats``, which only grow, by their names in :func:`flattened`."""
    counted = (*_LINKS, "stowed", "stall_seconds")
    return flattened({name: stats[name] for name in counted})


def without(stats: Mapping[str, Any], before: Mapping[str, float], prefix: str = "") -> dict[str, Any]:
    """Return ``stats`` minus the counters in ``before``."""
    return {
        name: without(value, before, f"{prefix}{name}/")
        if isinstance(value, Mapping)
        else value - before[prefix + name]
        if prefix + name in before
        else value
        for name, value in stats.items()
    }


def moments_of_step(manager: GeminiManager) -> list[dict[str, Any]]:
    """Return the fill of each tier at every moment of the last step; see :meth:`GeminiDDP.timeline`."""
    if not manager.threads.only_looks:
        manager.run_pending()
    trace = manager.trace
    reserve = trace.non_model_bytes if trace is not None else ()
    return [
        {
            "moment": moment,
            "phase": phase,
            "device_bytes": device,
            "host_bytes": host,
            "disk_bytes": disk,
            "non_model_bytes": reserve[moment] if moment < len(reserve) else 0,
        }
        for moment, (phase, device, host, disk) in enumerate(manager.order.timeline)
    ]


def measured_step(manager: GeminiManager) -> dict[str, float]:
    """Return ``step_seconds`` and ``device_bytes`` of the last step: its time, and the most bytes of model
    data plus recorded non-model data on DEVICE at one moment. Empty before the first step has ended."""
    seconds, trace = manager.clock.seconds, manager.trace
    if seconds is None:
        return {}
    reserve = trace.non_model_bytes if trace is not None else ()
    moments = enumerate(tuple(manager.order.timeline))
    held = [each[1] + (reserve[place] if place < len(reserve) else 0) for place, each in moments]
    now = manager.chunks.table.usage(_C.Tier.DEVICE)  # a resident model has no moments
    return {"step_seconds": seconds, "device_bytes": max(held, default=now)}


def _usage_of_tiers(table: _C.ChunkTable, loose: LooseBytes) -> dict[str, dict[str, int]]:
    """Return current, peak and allowed bytes of each tier at one moment. Reads again if another thread
    changed the usage in between."""
    while True:
        fill = table.usages(), loose.now
        tiers = {name: _usage(table, tier) for name, tier in _TIERS.items()}
        peak = loose.peak_device
        if fill == (table.usages(), loose.now):
            break
    device = tiers["device"]
    device["bytes"] += fill[1]
    device["peak_bytes"] = max(device["peak_bytes"], peak, device["bytes"])
    return tiers


def _usage(table: _C.ChunkTable, tier: _C.Tier) -> dict[str, int]:
    return {"bytes": table.usage(tier), "peak_bytes": table.peak(tier), "budget_bytes": table.budget(tier)}


TIERS = ("device", "host", "disk")
_handles: WeakSet[ManagedModel] = WeakSet()
_SHOWN_BYTES = ("bytes", "peak_bytes", "budget_bytes")


class ManagedModel:
    """A module with parameters in chunks, and everything that belongs to it. For one thread at a time.

    ``optimizers``: the GeminiOptimizers, each of some of the parameters. ``accumulates``: whether a
    :meth:`no_sync` block is open. ``add_up``: see :meth:`add_before_use`.
    """

    # Attributes that a wrapper exposes if its module has none of that name.
    EXPOSED: ClassVar = frozenset(
        ("device", "storage", "manager", "peers", "managed", "compiled", "optimizers", "accumulates")
    )

    def __init__(
        self,
        module: nn.Module,
        config: GeminiConfig,
        device: ComputeDevice,
        peers: ProcessGroupPeers | None,
        built: Built,
    ) -> None:
        """Take over ``module``, which has managed parameters already; place its buffers on the device."""
        self.module = module
        self.config = config
        self.device = device
        self.peers = peers
        self.storage, self.manager, self.search = built.storage, built.manager, built.search
        self._adopted = built.adopted
        self.optimizers: WeakSet[Any] = WeakSet()
        self.accumulates = False
        self.add_up: Callable[[], None] | None = None
        self.times_discarded = 0
        self._counted: dict[str, float] = {}
        # The plan's prediction for this rank, with the keys of measured_step(); None: no plan is run.
        self.predicted_step: Mapping[str, float] | None = None
        self.manager.set_precision(config.precision, self.storage.slots.values())
        self._first_passes = FirstPasses(module, config.precision)
        self.managed = ManagedParameters(module)
        self.compiled = CompiledBlocks(self.manager, module)
        place_buffers(module, device.torch_device, casts=config.precision is not None)
        self.passes = Passes()
        # Whether the next pass is the first of several in a row; None: single passes.
        self._is_first_of_row: bool | None = None
        self.tiled_heads = self._tiled_heads()
        self._entries: Entries | None = None
        self.plain_call: Callable[..., Any] = module  # runs a forward pass
        intercept_foreign_classes()
        self.search.report(printed=config.verbose)
        _handles.add(self)

    def _tiled_heads(self) -> TiledHeads | None:
        if not self.config.tiled_loss:
            return None
        manager = self.manager
        device_bytes = self.config.device_bytes or manager.chunks.table.budget(_C.Tier.DEVICE)
        return TiledHeads(self.module, self.config.tiled_loss, device_bytes, lambda: manager.step)

    def expecting_loss(self) -> AbstractContextManager[None]:
        """Return a context manager in which a model with a tiled loss makes lazy logits also without labels:
        the caller computes the loss."""
        return nullcontext() if self.tiled_heads is None else self.tiled_heads.expecting_loss()

    def runtime_attribute(self, name: str) -> Any:
        """Return a part of the model for inspection. ``device`` is a ``torch.device``, as users expect of a
        module."""
        return self.device.torch_device if name == "device" else getattr(self, name)

    def rank(self, *, aside: bool = False) -> Rank:
        """Return this process's rank among the processes that share the model. ``aside``: for use by a second
        thread beside training. Collective."""
        if self.peers is None:
            return Rank()
        return replace(_rank_among(self.peers, aside=aside), several_hosts=self.peers.on_several_hosts())

    def rank_of_parts(self, *, aside: bool = False) -> Rank:
        """Return :meth:`rank`, extended by the ranks that hold other parts of the model, for operations of
        all of them.

        Raises:
            ConfigError: ranks that share the model have experts of their own.
        """
        if self.divides_experts:
            raise ConfigError(
                "gemini.checkpoint writes each parameter once, but with ep_size each rank has "
                "different experts: call booster.save_model and booster.save_optimizer on all ranks, "
                "and load with load_model and load_optimizer of the booster"
            )
        rank, part = self.rank(aside=aside), self.manager.part
        return rank if part is None else replace(rank, parts=_rank_among(part.peers, aside=aside))

    @property
    def divides_experts(self) -> bool:
        """Whether ranks have experts of their own, so that no rank has the whole model."""
        return self.manager.sharding is not None and self.manager.sharding.divides_experts

    # -- training --------------------------------------------------------------------------------

    def follow_calls(self) -> None:
        """Make calls of the module, and of its large submodules, forward passes."""
        self._entries = Entries(self)
        self.plain_call = self._entries.plain_call

    @property
    def in_pass(self) -> bool:
        """Whether a forward pass is under way."""
        return self.passes.is_open

    def forward(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        alone: bool = True,
    ) -> Any:
        """Run ``call``, the module's own, as a forward pass; floating-point inputs are cast to the compute
        precision first. Without ``alone`` operators of other threads take turns with those of the pass.

        Raises:
            StateError: an update or a load failed halfway, so that weights are a mixture; a parameter is no
                longer managed; a CUDA graph is being captured; an optimizer awaits its step(); or another
                thread is in a call of this model.
        """
        if torch.compiler.is_compiling():
            return self.compiled.run_uncompiled(self.compiled, self._forward, (call, args, kwargs, alone), {})
        return self._forward(call, args, kwargs, alone)

    @in_one_thread("forward")
    def _forward(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], alone: bool
    ) -> Any:
        if self._is_first_of_row is False and self.manager.resident:
            with self.manager.shortage.watched(), self.passes.inside(self, True):
                return call(*args, **kwargs)
        self.manager.lock.refuse_all()
        if self.storage.mixture.reason:
            self.storage.mixture.refuse("forward")
        self.managed.refuse_exchanged("forward")
        self.compiled.refresh()
        intercept_foreign_classes()
        precision = self.config.precision
        if precision is not None:
            args, kwargs = map_tensors((args, kwargs), lambda tensor: cast_floating(tensor, precision))
        taking_turns = nullcontext() if alone else self.manager.threads.outside()
        lazy = self.tiled_heads.during(kwargs) if self.tiled_heads is not None else nullcontext()
        with self._forward_pass(call, args, kwargs), taking_turns, lazy:
            outputs = call(*args, **kwargs)
        if self._is_first_of_row:
            self._is_first_of_row = False
        if precision is not None and self.config.force_outputs_fp32:
            outputs = map_tensors(outputs, lambda tensor: cast_floating(tensor, torch.float32))
        return outputs

    @contextmanager
    def _forward_pass(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
        """Context of the forward pass of ``call``. A pass inside another is part of it: a trainer may call a
        training step that calls the module in turn."""
        manager, training = self.manager, torch.is_grad_enabled()
        if self.passes.is_open and training == manager.in_step:
            yield
            return
        self.compiled.begin_pass(training=training)
        activations = manager.activations if training else None
        saving = activations.saving(self.module) if activations is not None else nullcontext()
        watched = self.passes.inside(self, training)
        given = Call() if training else self._call(call, args, kwargs)
        first = self._first_passes
        single_dtype = first.watched(training) if first.may_look else nullcontext()
        with manager.shortage.watched(), watched, manager.forward_pass(training, given), saving, single_dtype:
            yield

    def _call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Call:
        """Return which module is called, and the number of elements of its first tensor input."""
        entry = getattr(call, "__self__", call)
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        given = next(tensors, None)
        if given is None:
            given = next(iter(tensors_in((args, kwargs))), None)
        numel = 1 if given is None else max(1, given.numel())
        return Call(id(entry) if isinstance(entry, nn.Module) and entry is not self.module else None, numel)

    def backward(self, loss: torch.Tensor) -> None:
        """Run ``loss.backward()``; gradients end up in chunks."""
        self.run_backward(loss.backward)

    @in_one_thread("backward")
    def run_backward(self, call: Callable[[], T]) -> T:
        """Run ``call``, a backward pass or a part of one, and return its result."""
        with self.manager.shortage.watched():
            return call()

    def add_before_use(self, add_up: Callable[[], None]) -> None:
        """Register ``add_up``, which adds the gradients that other pipeline stages computed for a shared
        weight. It runs after the backward passes and before gradients are used."""
        self.add_up = add_up

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank, in fp32, without an exchange; the next backward pass outside the
        block exchanges all of them. Whole gradients stay until then, on any tier. With one process it has no
        effect, except that an optimizer that updates in backward waits for the next pass outside the
        block."""
        sharding = self.manager.sharding
        before, self.accumulates = self.accumulates, True
        try:
            with sharding.local_gradients() if sharding is not None else nullcontext():
                yield
        finally:
            self.accumulates = before

    @contextmanager
    def passes_in_a_row(self) -> Iterator[None]:
        """Context for several forward and backward passes; their gradients are used only after the block. If
        the whole model stays on DEVICE, operators use its parameters without interception, autograd
        accumulates gradients without a hook for each, and the checks before a pass run before the first pass
        only."""
        if not self._runs_unobserved():
            yield
            return
        with collected_once(self.managed.params):
            self._is_first_of_row = True
            try:
                yield
            finally:
                self._is_first_of_row = None

    def _runs_unobserved(self) -> bool:
        """Say whether the runtime needs to see neither single operators nor single gradients."""
        manager = self.manager
        is_whole = manager.resident and not manager.cuts_tensors and manager.snapshot is NO_SNAPSHOT
        is_plain = not manager.mixes_dtypes and not manager.gradient_scale.is_in_use
        looks_on = self.tiled_heads or manager.activations or second_names or self.compiled.names
        return is_whole and is_plain and not looks_on

    @contextmanager
    def join(
        self,
        *,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """As :meth:`gemini.GeminiDDP.join`; no effect with one process."""
        sharding = self.manager.sharding
        if sharding is None or not enable:
            yield
            return
        with sharding.join(Joining(divide_by_initial_world_size, throw_on_early_termination)):
            yield
            with self.manager.threads.inside("join"):
                self.leave_passes()
                sharding.serve(self._discard_all)

    def gradient_state(self) -> tuple[int, int]:
        """Return how often gradients were discarded and how many arrived; clipping compares these numbers."""
        return self.times_discarded, self.manager.num_gradients

    @in_one_thread("zero_grad")
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients, or fill them with zeros. Also call this after a forward or backward pass
        that raised, before repeating it. Collective: every rank waits until the passes of all ranks are over,
        so that no gradient of an old pass reaches the next one."""
        self.discard_passes()
        self._discard_all(set_to_none=set_to_none)
        for param in self.module.parameters():
            if not isinstance(param, ManagedParameter) and param.grad is not None:  # added after wrapping
                param.grad = None if set_to_none else param.grad.zero_()

    def _discard_all(self, *, set_to_none: bool = True) -> None:
        self.times_discarded += 1
        self.discard_gradients(self.storage.slots.values(), set_to_none=set_to_none)

    def discard_passes(self) -> None:
        """Wait until the forward and backward passes of all ranks are over, to discard their gradients.

        Raises:
            StateError: the gradients are already used (overlap="backward"), or other ranks are about to use
                them.
        """
        self.leave_passes()
        if self.manager.sharding is not None:
            self.manager.sharding.discard_passes()

    def leave_passes(self) -> None:
        """End this rank's forward and backward passes after an exception. Raises StateError as
        :meth:`discard_passes`."""
        self.manager.lock.refuse_all()
        self.manager.recover()

    def discard_gradients(self, slots: Collection[ManagedSlot], *, set_to_none: bool = True) -> None:
        """Discard the gradients of ``slots``; over ranks, of all parameters. Waits for no other rank."""
        self.manager.recover()
        if self.manager.sharding is not None:
            self.manager.sharding.forget_gradients(keep=not set_to_none)
        with torch._C.DisableTorchFunctionSubclass():  # an exception may have kept a gradient from its chunk
            for param in (*self.managed.params, *second_names):
                if isinstance(param, ManagedParameter):
                    param.grad = None
        for slot in slots:
            if set_to_none:
                slot.free_grad()
            elif slot.grad is not None:
                slot.grad.fill_zero()
        if not any(slot.has_grad for slot in set(self.storage.slots.values()).difference(slots)):
            self.manager.gradient_scale.forget()

    def gradients_of_torch(self) -> list[SlotGradient]:
        """Return the gradients that plain torch would have now: it keeps gradients across steps."""
        found = [slot.grad for slot in self.storage.slots.values() if slot.grad is not None]
        return [grad for grad in found if grad.is_in_torch]

    def make_zeros(self) -> None:
        """Materialize the gradients that ``zero_grad(set_to_none=False)`` turned into zeros after a step had
        taken them. Collective, after the exchange."""
        for grad in self.gradients_of_torch():
            grad.make_zeros()

    # -- parameters added to the module, or removed --------------------------------------------------

    @in_one_thread("adopt")
    def adopt(self) -> list[str]:
        """Manage the parameters that were added to :attr:`module` since it was wrapped, like a new head or
        adapters; return their names. Parameters that left the module are removed from the optimizers as well;
        their chunks stay. A GeminiOptimizer calls this if it gets such parameters.

        The next step is recorded again. Existing gradients stay. Collective: all ranks call it with the same
        module; the values of the first rank count.

        Raises:
            ConfigError: a parameter cannot be managed, or the model was cut before it was wrapped.
            OutOfBudgetError: the tiers cannot hold it.
            StateError: a failed load or update left weights a mixture, or a backward pass is under way.
            IoError: the disk is full, or cannot be written. The parameters are ordinary ones in all cases.
        """
        storage, manager = self.storage, self.manager
        manager.refuse_closed()
        changes = manager.together(self._changes)
        if self.peers is not None:
            require_equal(self.peers, str(changes))
        adopted: Sequence[Adopted] = ()
        if changes is not None:
            manager.together(manager.run_pending)
            # The save covers the old parameters.
            manager.together(lambda: manager.snapshot.close(finish=True))
            numel = self.search.chunk_numel
            adopted = adopt_new(self.module, changes, self.config, numel, self.device, storage, manager)
            self._adopted = [*self._adopted, *adopted]
            self._follow_module()
        held = {param: name for name, param in self.module.named_parameters()}
        for optimizer in self.optimizers:
            optimizer.keep_only(held)
        return [entry.slot.name for entry in adopted]

    def _changes(self) -> Changes | None:
        """Return the changes that :meth:`adopt` must make; None: no changes. Raises as :meth:`adopt`."""
        changes = find_changes(self.module, self.config, self.storage, self.manager)
        if changes is None:
            return None
        self.storage.mixture.refuse("adopt")
        self.manager.lock.refuse_all()
        if self.manager.part is not None or self.divides_experts:
            raise ConfigError(
                "layers were added to or removed from a model that tensor or pipeline parallelism "
                "has divided, and the part of each rank is unknown; change the layers before you "
                "boost the model"
            )
        if torch._C._current_graph_task_id() != -1:
            raise StateError("adopt() cannot run during a backward pass; call it before the forward pass")
        return changes

    def _follow_module(self) -> None:
        """Update everything that is derived from the module's parameters, buffers, blocks and heads."""
        manager, compiled = self.manager, self.compiled
        self.managed = ManagedParameters(self.module)
        place_buffers(self.module, self.device.torch_device, casts=self.config.precision is not None)
        if manager.sharding is not None:
            for buffer in compiled.new_buffers():
                manager.sharding.agree_on(buffer)
        compiled.look_again()
        if manager.activations is not None and manager.activations.recompute is not None:
            manager.activations.recompute.begin(self.module)
        if self.tiled_heads is not None:
            self.tiled_heads.follow(self.module)

    # -- reports ---------------------------------------------------------------------------------

    def stats(self, *, flat: bool = False, since_last: bool = False) -> dict[str, Any]:
        """Return usage per tier and traffic per link as a plain dict (see docs/architecture.md for the keys).
        ``flat``: one number per name, like ``device/bytes``, for loggers. ``since_last``: count traffic and
        stalls since the last call with this option, or since construction. If a plan is run: also its
        ``"predicted"`` values, and the ``"measured"`` values of the last step."""
        stats = usage_and_traffic(self.storage, self.manager)
        if self.predicted_step is not None:
            stats["predicted"] = dict(self.predicted_step)
            stats["measured"] = measured_step(self.manager)
        stats["small_state_bytes"] = sum(each.small_state_bytes for each in tuple(self.optimizers))
        if since_last:
            before, self._counted = self._counted, counters(stats)
            stats = without(stats, before)
        return flattened(stats) if flat else stats

    def compare_with(self, predicted: Mapping[str, float]) -> None:
        """Show the plan's prediction for this rank in :meth:`stats`."""
        self.predicted_step = predicted

    def plan(self) -> PlanReport:
        """Return a report of where model data stays and why; ``print()`` it."""
        return self.manager.report()

    def timeline(self) -> list[dict[str, Any]]:
        """Return the fill of each tier at every moment of the last step: forward, backward, update. Runs
        pending updates first, unless called in a thread that does not train."""
        return moments_of_step(self.manager)

    def record_timeline(self, *, steps: int | None = None) -> TimelineRecorder:
        """Return a context manager that records all events in its block, or of ``steps`` steps::

        with model.record_timeline() as timeline:
            ...  # some training steps, after the first: that one only records the order
        timeline.save_html("timeline.html")
        """
        return TimelineRecorder(self.storage, self.manager, steps=steps)

    def memstats(self, kind: str = "train") -> Trace | None:
        """Return the recorded iteration of ``kind`` ``"train"`` or ``"eval"``, or None before the first one
        has ended.

        Its times and link speeds are final once an iteration has followed it.
        """
        if kind not in KINDS:
            raise ConfigError(f"there is no trace of kind {kind!r}; the kinds are {', '.join(KINDS)}")
        return self.manager.trace if kind == "train" else self.manager.eval_trace

    # -- end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Return all memory and the DISK file; the parameters are unusable afterwards. Idempotent.

        Pending updates run first, and an asynchronous save is finished, so that its failure is reported.

        Raises:
            OutOfBudgetError, IoError: an update, a transfer or a save failed. Everything has been returned.
            EvictedAccessError: raw memory of an evicted chunk was touched since the last operator. Everything
                has been returned.
        """
        with self.manager.threads.inside("close"):
            if self.peers is not None:
                self.peers.leave("closed the model")
            self.compiled.close()
            self.manager.close()

    @in_one_thread("release")
    def release(self) -> None:
        """Make :attr:`module` an ordinary module again. Its weights get memory of their own, on the device
        and in the dtype that they had before wrapping, with the values of fp32 masters. Buffers stay where
        they are. Gradients are discarded, and the optimizers can no longer be used. Collective: each rank
        gets the whole model.

        Raises:
            StateError: a failed load or update left weights a mixture.
            OutOfBudgetError, IoError: a chunk could not be read, or an update failed. Parameters that were
                not released yet stay managed; call it again to continue.
        """
        self.storage.mixture.refuse("release")
        self.manager.lock.refuse_all()
        if not self.manager.is_closed:
            self.manager.run_pending()
            self.manager.recover()
            release_adopted(self._adopted, self.module, self.manager)
        self._adopted = []
        self.managed.release()
        if self._entries is not None:
            self._entries.release()
            self.plain_call = self.module
        self.compiled.release()
        if self.tiled_heads is not None:
            self.tiled_heads.release()
        recompute = self.manager.activations.recompute if self.manager.activations is not None else None
        for block in recompute.blocks if recompute is not None else ():
            block.remove()
        self.close()

    def summary(self) -> str:
        """Return the fill of each tier in one line."""
        stats = self.stats()
        tiers = [(name.upper(), stats[name]["bytes"], stats[name]["budget_bytes"]) for name in TIERS]
        return ", ".join(f"{name} {format_bytes(now)} of {format_bytes(most)}" for name, now, most in tiers)

    def _repr_html_(self) -> str:
        """Return the fill of each tier as an HTML table for notebooks."""
        stats, kind = self.stats(), html.escape(type(self.module).__name__)
        rows = "".join(
            f"<tr><th>{name.upper()}</th>"
            + "".join(f"<td>{format_bytes(stats[name][key])}</td>" for key in _SHOWN_BYTES)
            + "</tr>"
            for name in TIERS
        )
        state = "warmup" if stats["warmup"] else f"step {stats['step']}"
        return (
            f"<table><caption>{kind}, managed: {format_bytes(stats['model_data_bytes'])} of model data, "
            f"{state}</caption><tr><th></th><th>now</th><th>peak</th><th>budget</th></tr>{rows}</table>"
        )

    def __repr__(self) -> str:
        return f"ManagedModel({type(self.module).__name__}: {self.summary()})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "the handle of a managed module cannot be copied or pickled, because its memory belongs "
            "to one budget; copy the module: the copy is ordinary and unmanaged"
        )

    def leave(self, kind: type[BaseException] | None, error: object) -> None:
        """Close the model at the end of a ``with`` block. After an exception of type ``kind`` pending updates
        are dropped, and errors of closing are not raised."""
        if self.peers is not None:
            self.peers.leave("closed the model" if kind is None else f"ended with {kind.__name__}: {error}")
        self.manager.close(run_pending=kind is None)

    def refuse_move(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise ConfigError if ``fn``, of ``double()``, ``to("meta")`` and the like, would change the dtype
        or the device of a parameter."""
        for param in self.module.parameters():
            probe = torch.empty(0, dtype=param.dtype, device=param.device)
            if (fn(probe).dtype, fn(probe).device) != (probe.dtype, probe.device):
                raise ConfigError(
                    f"a managed model stays {param.dtype} on {param.device}, because its memory is "
                    "laid out when it is wrapped; choose mixed_precision and device when you wrap it"
                )


def handle_of(model: nn.Module | ManagedModel) -> ManagedModel:
    """Return the handle of a GeminiDDP, or of a module that :func:`gemini.manage` manages. A handle is
    returned as it is.

    Raises:
        ConfigError: ``model`` is not managed.
    """
    handle = model if isinstance(model, ManagedModel) else getattr(model, "__dict__", {}).get("_gemini")
    if not isinstance(handle, ManagedModel):
        raise ConfigError(
            f"model is a {type(model).__name__}, not a GeminiDDP, nor managed by gemini.manage(): pass what "
            "GeminiDDP returned, or the module that was given to gemini.manage()"
        )
    return handle


def handle_around(model: nn.Module | ManagedModel) -> ManagedModel:
    """Return the handle as :func:`handle_of`, also for the module inside a GeminiDDP. Raises as
    :func:`handle_of`."""
    return next((each for each in _handles if each.module is model), None) or handle_of(model)


def handle_of_parameter(param: torch.Tensor) -> ManagedModel:
    """Return the handle of the model that owns a managed parameter. Raises ConfigError if no model owns
    it."""
    slot = slot_of(param)
    for handle in _handles:
        if handle.storage.slots.get(slot.name) is slot:
            return handle
    raise ConfigError(
        f"the parameter {slot.name!r} no longer belongs to a managed model; give a parameter of one"
    )


def _rank_among(peers: Peers, *, aside: bool) -> Rank:
    return Rank(peers.share.place, peers.share.world, peers.say_aside() if aside else peers.say)
