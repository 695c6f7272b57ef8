"""GeminiOptimizer runs an optimizer over a managed model's chunks, one state piece at a time.
GeminiAdamOptimizer makes HybridAdam and GeminiOptimizer in one call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.autograd.graph import increment_version

from gemini.errors import ConfigError, StateError
from gemini.memstats.trace import OPTIMIZER
from gemini.model.handle import ManagedModel, handle_of
from gemini.optim.backward_updates import BackwardUpdates
from gemini.optim.chunk_update import ChunkUpdate, Completeness
from gemini.optim.gradients import (
    INITIAL_SCALE,
    Clipping,
    LossScale,
    LossScaleConfig,
    all_finite,
    count_zeros,
    loss_scale_for,
    scaled,
    then_clamp,
    then_multiply,
    total_norm,
    visit_gradients,
    whole_gradient,
)
from gemini.optim.kernel_adam import HybridAdam
from gemini.optim.kernels import GradScale
from gemini.optim.managed_groups import (
    ManagedGroups,
    Margin,
    Overlap,
    check_mode,
    check_optimizer,
    check_several,
    checked_max_norm,
)
from gemini.optim.rule import UpdateStep
from gemini.optim.self_managed import SelfManaged
from gemini.optim.shared_step import GivenLoss, mean_like, number_of
from gemini.optim.state_exchange import (
    TORCH_FLAGS,
    CheckedState,
    checked_state,
    export_state,
    export_to_first,
    import_together,
    take_over_state,
)
from gemini.runtime import GeminiManager, ManagedParameter
from gemini.runtime.gate.gradients import ScaledLosses
from gemini.runtime.gate.guards import in_one_thread
from gemini.runtime.storage.model_storage import HALF_LOADED, ChunkGroup, ManagedSlot, ModelStorage, slot_of
from gemini.system.config import keyword_names, refuse_unknown
from gemini.system.process import paused_collector

T = TypeVar("T")


class GeminiOptimizer(ManagedGroups):
    """Run the updates of ``optim`` on the chunks of ``model``, bit-identical to ``optim`` on plain
    parameters.

    Shares the parameter groups and hooks of ``optim``, so schedulers may hold either. :meth:`step` consumes
    the gradients: their memory is freed and ``param.grad`` is None afterwards.

    Args:
        optim: an optimizer over parameters of ``model``, made before or after wrapping. Ours and torch's are
            supported except LBFGS and SparseAdam; other classes if their step treats each parameter
            independently. Such a class, Lamb, Muon and Adafactor need whole parameters: they refuse a model
            that was cut before it was wrapped (``model_ranks``).
        max_norm, norm_type: clip the global gradient norm to ``max_norm`` in every step; 0 does not clip.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: the
            loss scale under ``mixed_precision="fp16"``; fp32 and bf16 do not scale.
        gpu_margin_mem_ratio: on a GPU, which optimizer states stay on HOST and are updated there by the CPU,
            with the same bits (docs/notes/gpu.md). None: none. A number from 0 to 1: all except those of the
            first chunks that fit this share of the room that parameters and non-model data leave on DEVICE.
            ``"auto"``: as many as shorten the step, by the measured speeds of links and CPU. With a DISK
            tier, a number or ``"auto"`` needs a HOST that can hold all model data.
        log_num_zeros_in_grad: count in every step the gradient elements that are 0, for
            :meth:`get_num_zeros_in_grad`.
        overlap: whether :meth:`step` may defer the update of a chunk until just before its next use, so that
            its states are read and written during the next forward pass. Everything that reads the model
            sees the same bits either way. ``"backward"``: :meth:`backward` updates a chunk as soon as its
            gradients are complete, and frees them; :meth:`step` must follow, and clipping is not possible.
            If all model data fits DEVICE, all values do the same (docs/notes/overlap.md).
        elementwise: for an ``optim`` of an unknown class: declares that the update of an element depends on
            that element alone, so ``step`` may run over pieces of parameters. This is tested on every shape
            of its parameters; an operator that is not element-wise is refused.
        whole: for an ``optim`` of an unknown class: declares that the update of a parameter depends only on
            that parameter, its state, settings and attributes; ``step`` then runs over one parameter at a
            time. Without either flag, trial steps find this out; set it if an operator over several
            parameters does not affect the result.

    Raises:
        ConfigError: ``optim`` is not supported, or holds parameters that ``model`` does not manage.
        OutOfBudgetError, IoError: the budgets cannot hold gradients and states beside the parameters.
    """

    update_type: ClassVar[type[ChunkUpdate]] = ChunkUpdate

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        model: nn.Module | ManagedModel,
        *,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        initial_scale: float = INITIAL_SCALE,
        min_scale: float = 1,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        gpu_margin_mem_ratio: Margin = "auto",
        log_num_zeros_in_grad: bool = False,
        overlap: Overlap = True,
        elementwise: bool = False,
        whole: bool = False,
    ) -> None:
        model = handle_of(model)
        self.model = model
        self._adopt(optim.param_groups)
        self.rule = check_optimizer(optim, model, elementwise=elementwise, whole=whole)
        fp16 = model.config.precision == torch.float16
        several = model.peers is not None
        modes = {"clips": max_norm != 0, "counts": log_num_zeros_in_grad, "scales": fp16}
        check_mode(overlap, **modes, several_ranks=several, defers=self.rule.defers)
        super().__init__(optim.param_groups, optim.defaults)
        self.refuse_second_names()
        self.stand_for(optim)
        self.overlap = overlap
        self.gpu_margin_mem_ratio = gpu_margin_mem_ratio
        self.steps: dict[ManagedSlot, int] = {}
        self.small: dict[ManagedSlot, dict[str, Any]] = {}
        self._kept = {}
        self._refuse_others()
        self.make_first_states(optim)
        model.optimizers.add(self)
        self.max_norm = checked_max_norm(max_norm)
        self.norm_type = norm_type
        self._counts_zeros = log_num_zeros_in_grad
        scale = LossScaleConfig(
            initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale
        )
        self.loss_scale = loss_scale_for(scale, LossScaleConfig(), fp16=fp16)
        self._losses = ScaledLosses()
        self._clipping = Clipping(model, self.loss_scale)
        self._completeness = Completeness(model.storage.mixture)
        self._in_backward: BackwardUpdates | None = None
        if overlap == "backward":
            self._in_backward = BackwardUpdates(
                model.manager, model.storage, self._start_update, self._completeness
            )
        model.storage.watch_gradients(self._in_backward)
        if model.manager.sharding is not None:
            model.manager.sharding.follow_with(self._follow)
        model.manager.order.update_in_backward(self._in_backward is not None)
        take_over_state(self, optim)

    @property
    def _gemini(self) -> ManagedModel:
        return self.model  # also works on a trainer's proxy class that lacks the attributes

    # -- one iteration ---------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss``, scaled under fp16.

        With ``overlap="backward"`` parameters are updated during the pass, except under ``model.no_sync()``.
        If such a pass raises or is interrupted by Ctrl-C, load a checkpoint before going on.

        Raises:
            StateError: with ``overlap="backward"``: the previous backward pass was not followed by step(), or
                a parameter is used again after its update.
        """
        if self._in_backward is not None:
            self.require_complete("backward")
            with self._in_backward.backward_pass(last=not self.model.accumulates):
                self.model.backward(loss)
        else:
            with self._scaled_pass() as scale:
                self.model.backward(loss if scale is None else loss.float() * scale)

    def run_backward(self, call: Callable[[float | None], T]) -> T:
        """Run ``call``, which runs a backward pass or a part of one, and return its result.

        ``call`` gets the factor for its loss: the loss scale under fp16, else None. For losses that this rank
        does not compute (pipelines); use :meth:`backward` for all others.

        Raises:
            ConfigError: with ``overlap="backward"``, which must know where a pass ends.
        """
        if self._in_backward is not None:
            raise ConfigError("overlap='backward' updates only in backward(loss); choose overlap=True")
        with self._scaled_pass() as scale:
            return self.model.run_backward(lambda: call(scale))

    @contextmanager
    def _scaled_pass(self) -> Iterator[float | None]:
        """Context for a backward pass; yields the factor to multiply losses by, or None if there is no loss
        scale.
        """
        if self.loss_scale is None:
            yield None
            return
        self._begin_losses(self.loss_scale)
        with self._losses.backward_pass(self.loss_scale.scale):
            yield self.loss_scale.scale

    @in_one_thread("zero_grad")
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients, or zero them, except those of other optimizers. Collective: every rank must
        call it.
        """
        self.model.discard_passes()
        self.discard_gradients(set_to_none=set_to_none)
        self.run_own_zero_grad(set_to_none)

    @in_one_thread("clip_grad_by_norm", shown_as="clip")
    def clip_grad_by_norm(self, max_norm: float, norm_type: float | None = None) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before.

        Same numbers as ``torch.nn.utils.clip_grad_norm_`` on fp32 and float64 gradients. The factor is
        applied during the update; the gradients themselves are not written.
        """
        checked_max_norm(max_norm)
        self._start_clipping("clip_grad_by_norm", max_norm=max_norm, norm_type=norm_type)
        norm = self._global_norm(self.norm_type if norm_type is None else norm_type)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self._clipping.note_norm(float(norm))
        self._clipping.note(then_multiply(self._clipping.scale, float(factor)))
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every gradient element to ``[-clip_value, clip_value]``."""
        if not clip_value >= 0:
            raise ConfigError(f"clip_value is {clip_value}; give a number that is not negative")
        self._start_clipping("clip_grad_by_value", clip_value=clip_value)
        if self._are_scaled:
            self._clipping.note_overflow(not self._all_finite())
        before = self._clipping.scale
        after = then_clamp(before, clip_value)
        if after is None:
            visit_gradients(*self._chunks, lambda _slot, grad: grad.copy_(scaled(grad, before)), writes=True)
            after = GradScale(1.0, clip_value, 1.0)
        self._clipping.note(after)

    def get_param_grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the gradient of ``param`` as the update will see it, in CPU memory, fp32 or
        float64.

        It is the mean over all ranks, without loss scale, clipped if clipping was requested; None if the
        parameter has no gradient. Collective: every rank must call it after its backward passes.

        Raises:
            ConfigError: the optimizer does not update ``param``, or updates run in backward.
        """
        slot = self.slot_of(param)
        self._start_clipping("get_param_grad", param=slot.name)
        return whole_gradient(slot, self.model.manager, self._clipping.scale)

    @in_one_thread("step")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; end the iteration.

        With ``overlap`` the update of a chunk may stay pending until the chunk is used; it then applies the
        learning rate, norm and loss scale of this call. ``param.grad`` is None afterwards in any case. Under
        fp16 a step with overflowed gradients is skipped and the loss scale backs off.

        Raises:
            IoError, OutOfBudgetError: a chunk could not be fetched. If updates run inside the step, the
                parameters updated before the error stay updated; load a checkpoint, or states of model and
                optimizer, before going on. A pending update raises in the call that needs it and stays
                pending: free space and repeat that call.
            StateError: an earlier step or load failed half-way, gradients arrived after they were clipped, or
                a parameter is no longer managed.
        """
        self.model.managed.refuse_exchanged("step")
        loss, given = None, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            given = GivenLoss(loss)
        self.model.manager.raw.settle()  # writes by address must land before the update reads
        if self._in_backward is None or not self._in_backward.awaits_step:
            self.require_complete("step", parts=False)
        mean = self._finish_gradients("step", number_of(loss) if self.model.peers is not None else None)
        if mean is not None:  # all ranks must decide alike: use the loss of the whole batch
            given = GivenLoss(mean_like(loss, mean))
        self._clipping.check()
        if self.max_norm > 0 and not self._clipping.done:
            self.clip_grad_by_norm(self.max_norm)
        overflowed = self._are_scaled and (self._clipping.overflowed or not self._all_finite())
        num_zeros = self._count_zeros() if self._counts_zeros and not overflowed else None
        for losses in self.model.manager.gradient_scale.losses:
            losses.note_step(overflowed)
        taken = self.model.gradients_of_torch()
        update: Callable[[], None] = partial(self._update, given)
        if overflowed:
            update = _nothing
        if self._in_backward is not None:
            self._in_backward.finish(update, self.hypers())
        else:
            update()
        self._grad_norm, self._num_zeros_in_grad = self._clipping.measured, num_zeros
        self.discard_gradients(set_to_none=True)
        for grad in taken:
            grad.note_taken()
        self._losses = ScaledLosses()
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed)
        self.model.manager.end_step()
        self.tell_schedulers()
        return loss

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self, *, only_rank_0: bool = False) -> dict[str, Any]:
        """Return the state in the format of torch's optimizer (AdamW's, SGD's), plus the loss scale under
        fp16.

        States are streamed like :meth:`GeminiDDP.state_dict`. With ``only_rank_0`` the other ranks take part
        and get ``{}``.
        """
        export = partial(export_to_first if only_rank_0 else export_state, self)
        return self._hooked_state(lambda: self.with_own_entries(export()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in the format of torch's optimizer. Collective: every rank must call it.

        After an update or a load that failed half-way, the model's weights must be loaded too, before or
        after this call.

        Raises:
            ConfigError: groups or shapes do not match; nothing was changed.
            CheckpointError: it failed on another rank.
        """
        self.model.manager.lock.refuse_all()
        rank = self.model.rank()

        def check() -> tuple[CheckedState, dict[str, Any]]:
            given = self._before_load(state_dict)
            return checked_state(self, given), self.from_own_entries(given)

        loaded, attributes = rank.together(check)
        with self._completeness.load_states():
            import_together(self, loaded, rank)
        if self._driven_optim is not None:
            vars(self._driven_optim).update(attributes)
        self._clipping.forget()
        if self.loss_scale is not None and loaded.loss_scale is not None:
            self.loss_scale.load_state_dict(loaded.loss_scale)
        self._after_load()

    # -- inside ----------------------------------------------------------------------------------

    def require_complete(self, doing: str, *, parts: bool = True) -> None:
        """Run pending updates, with ``parts`` also those of single parts of a group. Raises StateError if an
        update or a load failed half-way, so that only some values are new.
        """
        self.model.manager.lock.refuse_all()
        if not self._completeness.broken:
            self.model.manager.run_pending(parts=parts)
        if self._completeness.broken:
            states = "states of model and optimizer (load_state_dict of both)"
            if self._completeness.lacks_weights_alone:
                states = "the model's weights (model.load_state_dict) like the optimizer's states"
            raise StateError(
                f"{doing}: {self.incomplete}; load a checkpoint (gemini.checkpoint.load), or "
                f"{states}, before you continue"
            )

    @property
    def incomplete(self) -> str:
        """Describe the update or load that failed half-way, so that values do not belong together; "" if
        there is none, or if step() comes next and completes it.
        """
        awaits_step = self._in_backward is not None and self._in_backward.awaits_step
        return "" if awaits_step else self._completeness.broken

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Mark the optimizer incomplete during the block, which replaces all weights and states. If the block
        raises, it stays incomplete until :meth:`mark_complete`.
        """
        with self._completeness.change(HALF_LOADED):
            yield

    def mark_complete(self) -> None:
        """Clear the mark of a failed update or load: weights and states have been loaded since."""
        self._completeness.clear()
        self._clipping.forget()

    def _refuse_others(self) -> None:
        """Raise ConfigError if this optimizer cannot share the model with the model's other optimizers."""
        others = self.model.optimizers
        everyone = [self, *(each for each in others if self.slots.isdisjoint(each.slots))]
        if len(everyone) > 1:
            margins = {each.gpu_margin_mem_ratio for each in everyone}
            check_several(self.model, {each.overlap for each in everyone}, margins)

    def discard_gradients(self, *, set_to_none: bool = True) -> None:
        """Discard all gradients without waiting for other ranks; the caller knows that every rank's passes
        are over.
        """
        others: set[ManagedSlot] = set()
        for optimizer in self.model.optimizers:
            others |= optimizer.slots
        others -= self.slots
        slots = [slot for slot in self.model.storage.slots.values() if slot not in others]
        self.model.discard_gradients(slots, set_to_none=set_to_none)
        self._clipping.forget()

    def _begin_losses(self, loss_scale: LossScale) -> None:
        """Start a new count of scaled losses if a step (perhaps of another model's optimizer) has used the
        last one.
        """
        before = self._losses
        if before.overflowed is None:
            return
        if before.overflowed and before not in self.model.manager.gradient_scale.losses:
            loss_scale.update(True)  # no step of this optimizer will report it
        self._losses = ScaledLosses()

    @property
    def _are_scaled(self) -> bool:
        """Whether gradients may be those of a scaled loss. The same on all ranks once gradients
        are finished.
        """
        return self.loss_scale is not None or self.model.manager.gradient_scale.value is not None

    def _start_clipping(self, call: str, **arguments: Any) -> None:
        """Finish the gradients so that they can be clipped or read.

        Raises:
            ConfigError: with ``overlap="backward"``, which has already consumed them.
        """
        if self._in_backward is not None:
            raise ConfigError(
                "with overlap='backward' gradients cannot be clipped or read, because backward "
                "discards each one after its update; choose overlap=True"
            )
        self._finish_gradients(call, **arguments)
        self._clipping.check()
        self.model.manager.shortage.retry(self.model.make_zeros)

    def _finish_gradients(self, call: str, loss: float | None = None, **arguments: Any) -> float | None:
        """Complete all gradients, over ranks too. Return the mean of ``loss`` over the ranks, None if none
        has one.
        """
        sharding, add_up = self.model.manager.sharding, self.model.add_up
        if sharding is None and add_up is not None:
            add_up()
        if sharding is not None:
            scale = self.loss_scale and self.loss_scale.scale
            doing = f"{call}({', '.join(f'{name}={value}' for name, value in arguments.items())})"
            if call == "step":
                doing = f"step with {self.settings}, max_norm={self.max_norm}, loss scale {scale}"
                doing += ", zeros counted" if self._counts_zeros else ""
            described = json.dumps([call, arguments, self.exported_settings()], default=float)
            return sharding.finish_gradients(doing, described, add_up, loss)
        return None

    def _follow(self, described: str) -> None:
        """Repeat a gradient call that another rank described, with that rank's settings."""
        call, arguments, settings = json.loads(described)
        self.apply_settings(settings)
        if call == "get_param_grad":
            params = (param for group in self.param_groups for param in group["params"])
            arguments["param"] = next(p for p in params if p._slot.name == arguments["param"])
        getattr(self, call)(**arguments)

    @property
    def _chunks(self) -> tuple[ModelStorage, GeminiManager]:
        return self.model.storage, self.model.manager

    def _all_finite(self) -> bool:
        return self.model.manager.shortage.retry(lambda: all_finite(*self._chunks))

    def _count_zeros(self) -> int:
        return self.model.manager.shortage.retry(lambda: count_zeros(*self._chunks))

    def _global_norm(self, norm_type: float) -> torch.Tensor:
        params = self.model.module.parameters()
        order = [slot_of(param) for param in params if isinstance(param, ManagedParameter)]
        (storage, manager), scale = self._chunks, self._clipping.scale
        return manager.shortage.retry(lambda: total_norm(storage, manager, order, norm_type, scale))

    def _update(self, loss: GivenLoss | None) -> None:
        """Update all groups that have gradients: now, or deferred until their next use."""
        manager = self.model.manager
        if manager.sharding is not None:
            manager.sharding.close_all()
        manager.shortage.retry(self.model.make_zeros)
        deferred = self.overlap and self._in_backward is None and self.can_defer_updates
        updates = self._chunk_updates(self.model.storage.trainable_groups(), by_part=deferred)
        updated = {slot: None for update in updates for slot in update.steps}
        self.rule.begin(self.param_groups, loss)
        with self._completeness.change():
            for update in updates:
                self._count(update)
            if deferred:
                manager.pending.add(updates)
                for slot in updated:
                    slot.trainable_grad.retire_aliases()
            else:
                manager.enter(OPTIMIZER)
                for update in updates:
                    update.run_now()
            self.rule.end(self.param_groups)
        self._note_written(updated)

    def _start_update(self, group: ChunkGroup) -> ChunkUpdate | None:
        """Return the update of ``group`` and count it as made; None if the group has no gradient."""
        updates = self._chunk_updates([group])
        for update in updates:
            self._count(update)
            self._note_written(update.steps)
        return updates[0] if updates else None

    def _count(self, update: ChunkUpdate) -> None:
        """Record the steps of ``update`` as made: step numbers, used gradients, and the dicts that the update
        fills with small states.
        """
        for slot, step in update.steps.items():
            self.steps[slot] = step.number
            slot.trainable_grad.note_taken()
            slot.trainable_grad.hand_over()
            if self.rule.keeps_small:
                self.small[slot] = step.after

    def _note_written(self, slots: Collection[ManagedSlot]) -> None:
        """Increment the version counters, as torch's optimizers do, so that backward over an older graph
        raises.
        """
        with torch._C.DisableTorchFunctionSubclass():
            increment_version([p for group in self.param_groups for p in group["params"] if p._slot in slots])

    @paused_collector()
    def _chunk_updates(self, groups: Iterable[ChunkGroup], *, by_part: bool = False) -> list[ChunkUpdate]:
        """Return the updates of those ``groups`` that have gradients, in forward order. Changes nothing.

        ``by_part``: return one update for each part of a cut group.
        """
        scale, hypers = self._clipping.scale, self.hypers()
        alike = not self.rule.keeps_small
        step_of = self._like_steps(hypers, scale) if alike else self._own_steps(hypers, scale)
        updates = []
        for group in groups:
            steps = {
                slot: step_of(slot, self.steps.get(slot, 0) + 1)
                for slot in group.slots
                if slot.has_grad and slot in hypers
            }
            if steps:
                room = self.model.storage.room
                about = self.model.manager, group, group.number, steps, self._completeness, self.rule, room
                if by_part and self._goes_by_part(group):
                    updates += [self.update_type(*about, part) for part in range(len(group.parts))]
                else:
                    updates.append(self.update_type(*about))
        return updates

    def _own_steps(
        self, hypers: Mapping[ManagedSlot, Any], scale: GradScale
    ) -> Callable[[ManagedSlot, int], UpdateStep]:
        """Return a function (slot, number) -> UpdateStep for rules that keep data per parameter."""
        marks, small = self.marks(), self.small
        return lambda slot, number: UpdateStep(
            hypers[slot], number, scale, small.get(slot), {}, *marks[slot], self.states_of(slot)
        )

    def _like_steps(
        self, hypers: Mapping[ManagedSlot, Any], scale: GradScale
    ) -> Callable[[ManagedSlot, int], UpdateStep]:
        """Return a function (slot, number) -> UpdateStep that shares one object among parameters with equal
        settings and states.
        """
        known: dict[tuple[int, int, int], UpdateStep] = {}

        def step_of(slot: ManagedSlot, number: int) -> UpdateStep:
            hyper, states = hypers[slot], self.states_of(slot)
            key = id(hyper), number, id(states)
            if key not in known:
                known[key] = UpdateStep(hyper, number, scale, states=states)
            return known[key]

        return step_of

    def _goes_by_part(self, group: ChunkGroup) -> bool:
        """Whether the parts of a cut group may be updated separately, some of them steps later."""
        in_chunks = all(slot.grad is None or not slot.grad.loose_bytes for slot in group.slots)
        return bool(group.parts) and in_chunks and not (self.rule.whole or self.rule.keeps_small)


def _nothing() -> None:
    """The update of a skipped step: none."""


SelfManaged.be_driven_by(GeminiOptimizer)  # set here: self_managed cannot import this file, which imports it
_OWN = keyword_names(GeminiOptimizer) - {"optim", "model"}
_ADAM = keyword_names(HybridAdam) - {"params"} | TORCH_FLAGS.keys()


class GeminiAdamOptimizer(GeminiOptimizer):
    """HybridAdam over all trainable parameters of a wrapped model:
    ``GeminiAdamOptimizer(model, lr=1e-3, max_norm=1.0)``.
    """

    def __init__(self, model: nn.Module | ManagedModel, **defaults: Any) -> None:
        """Split the keywords between HybridAdam and GeminiOptimizer; an unknown keyword raises TypeError."""
        refuse_unknown(type(self).__name__, defaults, _OWN | _ADAM)
        own = {name: defaults.pop(name) for name in list(defaults) if name in _OWN}
        handle = handle_of(model)
        params = [param for param in handle.module.parameters() if param.requires_grad]
        super().__init__(HybridAdam(params, **defaults), handle, **own)
