"""LowLevelZeroOptimizer: ZeRO stages 1 and 2 for any element-wise torch optimizer, stage 0 for any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from gemini.comm.peers import ModelRanks, Peers, Topic, digest_of
from gemini.errors import ConfigError, StateError
from gemini.optim.gradients import INITIAL_SCALE, LossScale, LossScaleConfig, loss_scale_for
from gemini.optim.rule_choice import refuse_closure, steps_by_element
from gemini.optim.shared_step import GivenLoss, Inseparable, mean_like, number_of
from gemini.optim.wrapped_optimizer import WrappedOptimizer, refuse_states_of, step_within
from gemini.parallel.expert_ranks import DividedExperts
from gemini.parallel.zero.options import (
    check_norm,
    check_optimizer,
    check_options,
    check_wire,
    choose_stage,
    described,
    parse_precision,
    whole_unless,
)
from gemini.parallel.zero.params import ParamShard, ShardedParams
from gemini.parallel.zero.reducer import GradientReducer
from gemini.parallel.zero.replica_collectives import Collectives, Traffic
from gemini.parallel.zero.state import (
    StatesByParam,
    StateShard,
    any_overflow,
    count_zeros,
    export_state,
    exported_groups,
    import_state,
    state_shards,
    total_norm,
    whole_tensor,
)
from gemini.runtime.intercept.mixed_dtypes import run_backward
from gemini.system.device import first_device

T = TypeVar("T")

_SCALE_DEFAULTS = LossScaleConfig(growth_interval=2000, max_scale=2**24)


class LowLevelZeroOptimizer(WrappedOptimizer):
    """Shard optimizer states (and with stage 2 gradients) over data-parallel ranks.

    Wraps ``optimizer``; its parameters become this rank's parts of the masters. Make it on all ranks in the
    same way, before or after the optimizer's first step; every rank starts with the weights of the first. It
    shares the parameter groups and hooks of ``optimizer``, so schedulers may hold either.

    Gradients are held here until :meth:`step` consumes them; until then ``param.grad`` raises. All methods
    are collective, except :meth:`no_sync`, :meth:`state_shards` and the properties, which do not communicate.

    Args:
        optimizer: a torch optimizer that updates each element by itself (Adam, SGD, CPUAdam, ...). With stage
            0, and if every rank has the whole model, any torch optimizer.
        stage: 1 keeps the buffers of whole gradients from step to step; 2 frees each after it is sent and
            keeps this rank's part. Both give the same numbers with the same traffic. ``partition_grad=True``
            is another way to write ``stage=2``. 0 shards nothing: every rank has the mean gradients and all
            states, and updates whole parameters.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or a torch dtype. Parameters are cast to it here, after
            fp32 masters were made from their original values. ``None`` keeps their types.
        keep_fp32: parameters that ``precision`` does not change: they are their own masters.
        initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale: the
            loss scale, for fp16 parameters; others are not scaled.
        clip_grad_norm, norm_type: clip the global gradient norm in every step; 0 does not.
        log_num_zeros_in_grad: count in every step the gradient elements that are 0, for
            :meth:`get_num_zeros_in_grad`.
        reduce_bucket_size: the number of elements sent at a time; a larger parameter is sent by itself.
        communication_dtype: the dtype in which gradients are sent. ``None``: their own, and fp32 after local
            accumulation. They are summed in fp32 in any case.
        overlap_communication: send gradients during backward.
        cpu_offload: keep masters and optimizer states in CPU memory. No effect on the CPU.
        dp_process_group: ``None``: the default group if there is one, else one process.
        model_ranks: the ranks with the other parts of a model that was cut before
            (``parallelize(...).model_ranks``, see docs/parallel.md). Gradients have one norm over all parts,
            and a step is skipped on all of them.
        experts: the parameters of experts that these ranks have divided (``divide_experts``). Each is sharded
            over the ranks that have it, and its gradient divided by the number of all ranks. State dicts
            contain this rank's experts.

    Raises:
        ConfigError: an option is out of range, an optimizer that is not element-wise would update parts, or
            the ranks' parameters differ.
    """

    # State of the current gradients: the scale of their losses, the number of arrivals when they were
    # clipped, and their norm before clipping.
    _scale: float | None
    _settled_at: int | None
    _measured: float | None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        stage: int | None = None,
        partition_grad: bool | None = None,
        precision: str | torch.dtype | None = None,
        keep_fp32: Iterable[torch.Tensor] = (),
        initial_scale: float = INITIAL_SCALE,
        min_scale: float = 1,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        max_scale: float = 2**24,
        clip_grad_norm: float = 0.0,
        norm_type: float = 2.0,
        log_num_zeros_in_grad: bool = False,
        reduce_bucket_size: int = 1024 * 1024,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = False,
        cpu_offload: bool = False,
        dp_process_group: dist.ProcessGroup | None = None,
        model_ranks: ModelRanks | None = None,
        experts: DividedExperts | None = None,
    ) -> None:
        stage = choose_stage(stage, partition_grad)
        scale = LossScaleConfig(
            initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale
        )
        check_options(clip_grad_norm, norm_type, reduce_bucket_size, communication_dtype)
        check_wire(communication_dtype, parse_precision(precision), optimizer)
        if isinstance(optimizer, WrappedOptimizer):
            raise ConfigError("the optimizer is already wrapped")
        self._cut_unless = whole_unless(cuts=stage > 0, parted=model_ranks is not None)
        check_optimizer(optimizer, self._cut_unless)
        self.stage = stage
        self.clip_grad_norm = clip_grad_norm
        self.norm_type = norm_type
        self._counts_zeros = log_num_zeros_in_grad
        device = first_device(param for group in optimizer.param_groups for param in group["params"])
        self.collectives = Collectives(dp_process_group, device, cuts=stage > 0)
        self._model_ranks = model_ranks
        self._experts = experts
        self._of_experts = self._copies_of(experts)
        self._has_tried_closure = False
        self._copies: list[tuple[ParamShard, Peers]] = []
        self.collectives.attend()
        if self._of_experts is not self.collectives:
            self._of_experts.attend()
        self.sharded = ShardedParams(
            optimizer,
            self.collectives,
            dtype=parse_precision(precision),
            kept=keep_fp32,
            home=torch.device("cpu") if cpu_offload else None,
            ranks_of=self._ranks_of,
        )
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optim = optimizer
        self.share_groups()
        self.share_hooks(optimizer)
        self._is_closed = False
        refuse_states_of(optimizer, self, lambda wrapper: not wrapper._is_closed)
        halves = any(shard.param.dtype == torch.float16 for shard in self.sharded.shards)
        self.loss_scale = loss_scale_for(scale, _SCALE_DEFAULTS, fp16=halves)
        self._reducer = GradientReducer(
            self.sharded.shards,
            self.collectives,
            bucket_numel=reduce_bucket_size,
            wire_dtype=communication_dtype,
            overlap=overlap_communication,
            partition=stage == 2,
            scaled=halves,
        )
        self._forget_scale()
        earlier = self.sharded.take_earlier_state()
        if earlier is not None:
            import_state(self, earlier)

    # -- one iteration ---------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """Compute the gradients of ``loss``, scaled under fp16, and reduce them unless inside
        :meth:`no_sync`.
        """
        scaled = loss if self.loss_scale is None else loss.float() * self._hold_scale(self.loss_scale)
        self._run_backward(scaled, None, inputs, retain_graph)

    def backward_by_grad(
        self, tensor: torch.Tensor, grad: torch.Tensor, inputs: Any = None, retain_graph: bool = False
    ) -> None:
        """Run backward from ``tensor`` with its gradient. Under fp16 the gradient must come from a loss that
        was scaled by this scale.
        """
        if self.loss_scale is not None:
            self._hold_scale(self.loss_scale)
        self._run_backward(tensor, grad, inputs, retain_graph)

    def run_backward(self, call: Callable[[float | None], T]) -> T:
        """Run ``call(scale)`` and return its result. It must run a backward pass, or a part of one, of a loss
        multiplied by ``scale``: the loss scale under fp16, else None. For pipelines, where the loss is on
        another rank. Gradients are reduced at the end unless inside :meth:`no_sync`.
        """
        scale = None if self.loss_scale is None else self._hold_scale(self.loss_scale)
        with self._reducer.backward():
            return call(scale)

    def add_up_copies(self, param: torch.Tensor, ranks: Peers) -> None:
        """From now on sum the gradients of ``param`` over ``ranks``, which include this one and each have a
        copy of it (stages of a pipeline). The copies are sharded the same way. Collective over ``ranks``, in
        the same order.
        """
        self._copies.append((self.sharded.shard_of(param), ranks))

    def no_sync(self) -> AbstractContextManager[None]:
        """Sum the gradients of the backward passes inside locally, in fp32. The next backward outside, or
        :meth:`step`, sends the sum.
        """
        return self._reducer.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients. ``set_to_none`` must be True: there are no gradient tensors to zero."""
        if not set_to_none:
            raise ConfigError(
                "zero_grad(set_to_none=False): a sharded gradient is discarded, never zeroed; call "
                "zero_grad()"
            )
        self._reducer.forget()
        self._forget_scale()

    def clip_grad_by_norm(self, max_norm: float, norm_type: float | None = None) -> torch.Tensor:
        """Scale the gradients so that their norm over all ranks is at most ``max_norm``; return the norm
        before scaling, without loss scale. Under fp16 it may be infinite or NaN; the step is then skipped.
        """
        norm_type = self.norm_type if norm_type is None else norm_type
        check_norm(max_norm, norm_type)
        self._require_same(f"clip_grad_by_norm({float(max_norm)}, {float(norm_type)})")
        self._settle()
        norm = total_norm(
            self._gradients(),
            norm_type,
            self.collectives,
            self._model_ranks,
            self._expert_norm,
            self.sharded.home,
        )
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self._measured = float(norm)
        for bucket in self._reducer.buckets:
            if bucket.mean is not None:
                bucket.mean.mul_(factor)
        self._clipped = True
        return norm

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every element of the mean gradients to ``[-clip_value, clip_value]``, without loss scale."""
        self._require_same(f"clip_grad_by_value({float(clip_value)})")
        self._settle()
        for bucket in self._reducer.buckets:
            if bucket.mean is not None:
                bucket.mean.clamp_(-clip_value, clip_value)
        self._clipped = True

    def get_param_grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the whole gradient of ``param``, as the update will use it: the mean over all
        ranks in the master's dtype, without loss scale, clipped if it was. None if no rank has one. Gradients
        that :meth:`no_sync` kept are sent now.

        Raises:
            ConfigError: the optimizer does not update ``param``.
            StateError: ``param`` is in several stages, and its gradients were not clipped yet.
        """
        shard = self.sharded.shard_of(param)
        if self._settled_at is None:
            if any(shard is each for each, _ in self._copies):
                raise StateError(
                    f"{shard.label} is shared by several stages, and its gradients are summed only when they "
                    "are clipped; call get_param_grad() after clip_grad_by_norm()"
                )
            self._reducer.reduce_rest()
        else:
            self._settle()
        own = {each: grad for each, grad in self._gradients()}
        if shard not in own:
            return None
        whole = whole_tensor(shard, own[shard], shard.master_dtype)
        scale = self._scale if self._settled_at is None else None
        return whole if scale is None else whole.div_(scale)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parts of all parameters with a gradient on any rank, and gather whole
        parameters.

        ``closure`` runs once, before the update. If the class of the wrapped optimizer is unknown, its step
        gets a closure that returns the mean of the ranks' losses.

        Under fp16 a step with an infinity or NaN on any rank is skipped on all ranks; only the loss scale
        changes.

        Raises:
            ConfigError: the wrapped optimizer was given more parameters, or its class runs the closure more
                than once, not at all, or after it has changed weights.
            StateError: gradients arrived after they were clipped, 16-bit weights were changed without their
                masters, or hyper-parameters differ between ranks; nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.sharded.refuse_others(self.param_groups)
        scale = self.loss_scale and self.loss_scale.scale
        settings = f"{described(self.param_groups)}, clip_grad_norm={self.clip_grad_norm}, loss scale {scale}"
        settings += ", zeros counted" if self._counts_zeros else ""
        settings += "" if closure is None else ", a closure"
        self._require_same(f"step with {settings}")
        given = None if closure is None else self._given_loss(loss)
        self._settle()
        self.sharded.check_as_noted()
        if self.clip_grad_norm > 0 and not self._clipped:
            self.clip_grad_by_norm(self.clip_grad_norm)
        overflowed, self._grad_norm = self._overflowed, self._measured
        self._num_zeros_in_grad = None
        if not overflowed:
            if self._counts_zeros:
                self._num_zeros_in_grad = count_zeros(
                    self._gradients(), self.collectives, self._model_ranks, self._expert_norm
                )
            self._update(given)
        self.zero_grad()
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed)
        self.tell_schedulers()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raise: ``torch.amp.GradScaler`` reads this before it looks for gradients in the groups."""
        raise ConfigError(
            "torch.amp.GradScaler cannot scale for a LowLevelZeroOptimizer: it looks for overflow in whole "
            "gradients, but each rank has only a part. Use LowLevelZeroOptimizer(precision='fp16') and "
            "optimizer.backward(loss), which do the same, or compute in bf16, and make the scaler with "
            "enabled=False"
        )

    # -- weights and state -----------------------------------------------------------------------

    def update_master_params(self) -> None:
        """Copy weights that were written into 16-bit parameters to the masters, for example after the model's
        ``load_state_dict``.
        """
        for shard in self.sharded.shards:
            shard.refresh_master()

    def state_dict(self, *, only_rank_0: bool = False) -> dict[str, Any]:
        """Return the whole state in the format of the wrapped optimizer, on every rank; with ``only_rank_0``
        the other ranks take part and get ``{}``.

        It can be loaded by any number of ranks, and by the wrapped optimizer's class without ZeRO. It also
        has ``"masters"``, the fp32 masters of 16-bit parameters by parameter number, and ``"loss_scale"``
        under fp16. It takes the memory of the whole state; :meth:`state_shards` does not.
        """
        return self._hooked_state(partial(export_state, self, only_rank_0))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of the wrapped optimizer. If it has masters, weights are set too.

        Raises:
            ConfigError: groups or shapes do not match; nothing has changed.
        """
        import_state(self, self._before_load(state_dict))
        self._after_load()

    def state_shards(self) -> Iterator[StateShard]:
        """Yield this rank's part of the state, one parameter at a time; tensors are the optimizer's own."""
        return state_shards(self)

    def load_state_shards(self, shards: Iterable[StateShard], groups: list[dict[str, Any]]) -> None:
        """Load parts that any number of ranks saved; parts that this rank does not need are skipped.

        ``groups`` is the ``state_dict()["param_groups"]`` or :meth:`exported_groups` of the time when the
        parts were saved.

        Raises:
            ConfigError: a needed part is missing or does not match; nothing has changed.
        """
        import_state(self, {"param_groups": groups}, shards)

    def exported_groups(self) -> list[dict[str, Any]]:
        """Return only ``state_dict()["param_groups"]``; not collective."""
        return exported_groups(self)

    @property
    def traffic(self) -> Traffic:
        """The bytes that this rank has sent since this object was made."""
        return self.collectives.traffic

    def gradient_bytes(self) -> tuple[int, int]:
        """Return the bytes held by local gradients and by this rank's part of the mean."""
        buckets = self._reducer.buckets
        means = sum(bucket.mean.nbytes for bucket in buckets if bucket.mean is not None)
        return sum(bucket.local_bytes() for bucket in buckets), means

    def close(self) -> None:
        """Release the parameters: autograd stores their gradients again. Idempotent."""
        self._is_closed = True
        self._reducer.forget()
        self._reducer.close()
        self.leave("closed its optimizer")

    def leave(self, why: str) -> None:
        """Tell the other ranks that this rank makes no further calls, and ``why``. Idempotent."""
        self.collectives.leave(why)
        self._of_experts.leave(why)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ConfigError: parameters are sharded once, in the constructor."""
        if hasattr(self, "optim"):
            raise ConfigError(
                "a parameter group cannot be added after wrapping; add it to the optimizer first"
            )
        super().add_param_group(param_group)

    # -- internal --------------------------------------------------------------------------------

    def _copies_of(self, experts: DividedExperts | None) -> Collectives:
        """Return the collectives of the ranks with the same experts as this one."""
        if experts is None:
            return self.collectives
        group, device = experts.copies, self.collectives.device
        alone, traffic = group is None, self.collectives.traffic
        return Collectives(group, device, cuts=self.stage > 0, alone=alone, traffic=traffic)

    def _ranks_of(self, param: torch.Tensor) -> Collectives:
        is_expert = self._experts is not None and self._experts.has(param)
        return self._of_experts if is_expert else self.collectives

    @property
    def _expert_norm(self) -> ModelRanks | None:
        """The further ranks to sum a norm over: those that divide experts, with stage 0, where
        ``collectives`` shard nothing.
        """
        return self._experts.model_ranks if self._experts is not None and self.stage == 0 else None

    def _run_backward(
        self, tensor: torch.Tensor, grad: torch.Tensor | None, inputs: Any, retain_graph: bool
    ) -> None:
        halves = any(shard.has_master for shard in self.sharded.shards)
        with self._reducer.backward():
            if halves and inputs is None:
                run_backward(tensor, grad, (), retain_graph)
            else:
                torch.autograd.backward(tensor, grad, retain_graph=retain_graph, inputs=inputs)

    def _hold_scale(self, loss_scale: LossScale) -> float:
        """Record and return the scale of these gradients: the scale may differ by the time of step()."""
        if self._scale is not None and self._scale != loss_scale.scale:
            raise StateError(
                f"the loss scale changed from {self._scale} to {loss_scale.scale} between two backward "
                "passes of one step; call zero_grad() after loading a state"
            )
        self._scale = loss_scale.scale
        return self._scale

    def _require_same(self, doing: str) -> None:
        """Raise StateError on all ranks if they are not about to make the same call."""
        self.collectives.require_same(doing)
        if self._model_ranks is None:
            return
        said = self._model_ranks.peers.exchange(Topic.SETTINGS, [digest_of(doing)])
        if different := [rank for rank, digest in enumerate(said) if digest != said[0]]:
            raise StateError(
                f"ranks {different} of those that hold the parts of one model make another call than the "
                f"first, or with other settings; this one makes: {doing}"
            )

    def _settle(self) -> None:
        """Complete the gradients. The first time, also check for overflow and remove the loss scale."""
        if self._settled_at is None:
            self._reducer.reduce_rest()
            for shard, ranks in self._copies:
                self._reducer.add_up(shard, ranks)
        elif self._settled_at == self._reducer.num_arrivals:
            return
        else:
            raise StateError("gradients arrived after they were clipped; clip once, right before step()")
        self._settled_at = self._reducer.num_arrivals
        if self.loss_scale is None:
            return
        buckets = self._reducer.buckets
        self._overflowed = any_overflow(buckets, self.collectives, self._model_ranks)
        if self._scale is not None and not self._overflowed:
            for bucket in buckets:
                if bucket.mean is not None:
                    bucket.mean.div_(self._scale)

    def _gradients(self) -> list[tuple[ParamShard, torch.Tensor | None]]:
        """Return, in parameter order, those with a gradient on any rank, and this rank's part of it."""
        buckets = {shard: bucket for bucket in self._reducer.buckets for shard in bucket.shards}
        return [
            (shard, buckets[shard].own_mean(shard))
            for shard in self._reducer.shards
            if shard in self._reducer.used
        ]

    def _given_loss(self, loss: Any) -> GivenLoss | None:
        """Return the result for a closure of the wrapped optimizer's step: the mean of ``loss`` over the
        ranks; None if its class is known to ignore it.
        """
        if steps_by_element(self.optim):
            return None
        if not self._has_tried_closure:
            groups = zip(self.param_groups, self.sharded.groups, strict=True)
            of_model = [{**group, "params": [shard.param for shard in shards]} for group, shards in groups]
            refuse_closure(self.optim, of_model, self._cut_unless)
            self._has_tried_closure = True
        every = self.collectives.objects(number_of(loss))
        if len(every) > 1 and None not in every:
            loss = mean_like(loss, sum(every) / len(every))
        return GivenLoss(loss)

    def _step_inner(self, given: GivenLoss | None) -> None:
        if given is None:
            step_within(self.optim)
            return
        try:
            with given.closure([shard.master for shard in self.sharded.shards]) as closure:
                step_within(self.optim, closure)
        except Inseparable as reason:
            raise StateError(
                f"{type(self.optim).__name__} cannot update the gradients that the closure left: {reason}; "
                "weights may have changed, so load a checkpoint before you continue"
            ) from reason

    def _update(self, given: GivenLoss | None) -> None:
        try:
            for shard, grad in self._gradients():
                shard.master.grad = None if grad is None else shard.like_master(grad)
            self._step_inner(given)
        finally:
            for shard in self.sharded.shards:
                shard.master.grad = None
        self.sharded.gather(
            [bucket for bucket in self._reducer.buckets if not self._reducer.used.isdisjoint(bucket.shards)]
        )

    def _forget_scale(self) -> None:
        self._scale = self._settled_at = None
        self._clipped = self._overflowed = False
        self._measured = None

    def gather_all(self) -> None:
        """Set all parameters from the masters. Collective."""
        self.sharded.gather(self._reducer.buckets)

    def share_groups(self) -> None:
        """Use the groups and states of the wrapped optimizer as this object's."""
        self.param_groups = self.optim.param_groups
        self.state = StatesByParam(self.optim.state, self.sharded.shards)  # type: ignore[assignment]
