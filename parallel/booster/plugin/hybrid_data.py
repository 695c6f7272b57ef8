"""Data parallelism over a rank's part of a model: chunks (ZeRO 3), or replicas (ZeRO 0 to 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gemini.errors import ConfigError
from gemini.model.ddp import GeminiDDP
from gemini.model.handle import ManagedModel, handle_of
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.kernel_adam import CPUAdam
from gemini.parallel.booster.checkpoint.parts import Parts
from gemini.parallel.booster.mixed_precision import Precision
from gemini.parallel.booster.plugin.base import with_precision
from gemini.parallel.pipeline.engine import Trained
from gemini.parallel.zero import LowLevelZeroModel, LowLevelZeroOptimizer
from gemini.parallel.zero.model import kept_in_fp32, spread_rest
from gemini.parallel.zero.options import parse_precision
from gemini.placement import PlacementPolicy
from gemini.runtime.intercept.precision import compute_types
from gemini.system.config import keyword_names, refuse_unknown
from gemini.system.device import current_device

T = TypeVar("T")

_GIVEN = frozenset(("module", "process_group", "model_ranks", "experts", "config", "placement_policy"))
_CHUNKED = keyword_names(GeminiDDP) - _GIVEN
_UPDATED = keyword_names(GeminiOptimizer) - {"optim", "model"}
_SCALES = frozenset(("initial_scale", "min_scale", "max_scale", "hysteresis", "growth_interval"))
_SCALES |= {"growth_factor", "backoff_factor"}
_SENT = frozenset(("communication_dtype", "overlap_communication", "cpu_offload", "reduce_bucket_size_in_m"))
_REPLICATED = (
    _SCALES
    | _SENT
    | {"max_norm", "norm_type", "log_num_zeros_in_grad", "mixed_precision", "keep_fp32", "cast_inputs"}
)


class Wrapped(NamedTuple):
    """A rank's part of a model and its optimizer, wrapped, and how a pipeline trains them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    trained: Trained


Group = dist.ProcessGroup | DeviceMesh | None
Wrap = Callable[[nn.Module, torch.optim.Optimizer | None, Parts, Group], Wrapped]


class DataParallelism(Protocol):
    """Wraps a rank's part of a model over the ranks that have the same part."""

    def set_budgets(self, budgets: Mapping[str, Any]) -> None:
        """Use the budgets of this rank instead of the common ones, if there are chunks."""
        ...

    def prepared(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, precision: Precision | None
    ) -> Wrap:
        """Return the function that wraps this rank's part, to call after the ranks have cut ``model``. Raises
        ConfigError for what it cannot train; nothing was changed.
        """
        ...

    def types(self, model: nn.Module, precision: Precision | None) -> dict[int, torch.dtype]:
        """Return the dtypes in which the parameters of ``model`` will compute, by their ids."""
        ...


def choose_data_parallelism(
    zero_stage: int, policy: str | PlacementPolicy, options: Mapping[str, Any], *, alone: bool
) -> DataParallelism:
    """Return the data parallelism for ``zero_stage``; ``alone``: no other rank has a part of the model.

    Raises:
        TypeError: no stage has such an option.
        ConfigError: this stage does not have it.
    """
    refuse_unknown("HybridParallelPlugin", options, _CHUNKED | _UPDATED | _REPLICATED)
    if zero_stage not in (0, 1, 2, 3) or isinstance(zero_stage, bool):
        raise ConfigError(
            f"zero_stage is {zero_stage!r}; it is 0 (gradients are averaged), 1 (states are cut), 2 "
            "(gradients too) or 3 (GeminiDDP: weights too, in chunks)"
        )
    if zero_stage == 3:
        if strange := sorted(options.keys() - _CHUNKED - _UPDATED):
            raise ConfigError(
                f"{', '.join(strange)} with zero_stage=3: GeminiDDP exchanges chunks and has other options "
                "(reduce_dtype, gather_bytes, budgets); leave these out, or choose zero_stage 0, 1 or 2"
            )
        return Chunks(policy, options, strict=not alone)
    strange = sorted(options.keys() - _REPLICATED)
    if policy != "auto":
        strange = ["placement_policy", *strange]
    if strange:
        raise ConfigError(
            f"{', '.join(strange)} with zero_stage={zero_stage}: each rank keeps the weights of its part in "
            "plain memory, and has no chunks to place, budget or gather; leave out the options of chunks, "
            "or choose zero_stage=3 (cpu_offload=True keeps states in CPU memory beside a GPU)"
        )
    return Replicas(zero_stage, options)


class Chunks:
    """ZeRO 3: GeminiDDP and GeminiOptimizer. With ``strict``, ranks check that they run the same operators in
    the same order.
    """

    def __init__(self, policy: str | PlacementPolicy, options: Mapping[str, Any], *, strict: bool) -> None:
        self._model_options = {key: value for key, value in options.items() if key in _CHUNKED}
        self._model_options["placement_policy"] = policy
        if strict:
            self._model_options.setdefault("strict_ddp_mode", True)
        self._optimizer_options = {key: value for key, value in options.items() if key in _UPDATED}

    def set_budgets(self, budgets: Mapping[str, Any]) -> None:
        """See :class:`DataParallelism`. Without a DISK budget no file is made."""
        self._model_options = {**self._model_options, **budgets}
        if not budgets.get("disk_bytes"):
            self._model_options.pop("disk_dir", None)
            self._model_options.pop("disk_bytes", None)

    def prepared(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, precision: Precision | None
    ) -> Wrap:
        """See :class:`DataParallelism`."""
        model_options, optimizer_options = with_precision(
            "HybridParallelPlugin", "mixed_precision", self._model_options, self._optimizer_options, precision
        )
        if optimizer is not None and not isinstance(optimizer, CPUAdam):
            raise ConfigError(
                "HybridParallelPlugin with zero_stage=3 updates chunks with gemini's Adam, not with "
                f"{type(optimizer).__name__}; make the optimizer gemini.HybridAdam(model.parameters(), ...), "
                "or choose zero_stage 0, 1 or 2"
            )
        if optimizer is not None:
            model_options = {"optimizer_rule": "adam", **model_options}

        def wrap(
            part: nn.Module,
            optimizer: torch.optim.Optimizer | None,
            parts: Parts,
            group: Group,
        ) -> Wrapped:
            managed = GeminiDDP(
                part,
                process_group=group,
                model_ranks=parts.model_ranks,
                experts=None if parts.experts is None else parts.experts.own,
                **model_options,
            )
            boosted = None if optimizer is None else GeminiOptimizer(optimizer, managed, **optimizer_options)
            parts.tied.watch(handle_of(managed))
            return Wrapped(managed, boosted, _ManagedPart(handle_of(managed), boosted))

        return wrap

    def types(self, model: nn.Module, precision: Precision | None) -> dict[int, torch.dtype]:
        """See :class:`DataParallelism`."""
        options, _ = with_precision(
            "HybridParallelPlugin", "mixed_precision", self._model_options, self._optimizer_options, precision
        )
        dtype = parse_precision(options.get("mixed_precision"))
        return compute_types(model, dtype, options.get("keep_fp32") or (), strict=False)


class _ManagedPart:
    """A part that GeminiDDP manages, for the pipeline."""

    def __init__(self, handle: ManagedModel, optimizer: GeminiOptimizer | None) -> None:
        self._handle, self._optimizer = handle, optimizer

    def forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._handle.forward(call, args, kwargs)

    def run_backward(self, call: Callable[[float | None], T]) -> T:
        if self._optimizer is None:
            return self._handle.run_backward(lambda: call(None))
        return self._optimizer.run_backward(call)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._handle.no_sync() if self._handle.peers is not None else nullcontext()

    def passes_in_a_row(self) -> AbstractContextManager[None]:
        return self._handle.passes_in_a_row()

    def leave(self, why: str) -> None:
        if self._handle.peers is not None:
            self._handle.peers.leave(why)


class Replicas:
    """ZeRO 0 to 2: each rank holds its part's weights whole; LowLevelZeroOptimizer."""

    def __init__(self, stage: int, options: Mapping[str, Any]) -> None:
        options = dict(options)
        parse_precision(options.get("mixed_precision"))
        self._model_options = {"mixed_precision": options.pop("mixed_precision", None)}
        self._keep_fp32 = tuple(options.pop("keep_fp32", ()))
        self._cast_inputs: bool = options.pop("cast_inputs", True)
        self._stage = stage
        options["clip_grad_norm"] = options.pop("max_norm", 0.0)
        if "reduce_bucket_size_in_m" in options:
            options["reduce_bucket_size"] = options.pop("reduce_bucket_size_in_m") * 2**20
        self._optimizer_options: dict[str, Any] = options

    def set_budgets(self, budgets: Mapping[str, Any]) -> None:
        """Ignore the budgets: replicas are in plain memory."""

    def prepared(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, precision: Precision | None
    ) -> Wrap:
        """See :class:`DataParallelism`."""
        model_options, optimizer_options = with_precision(
            "HybridParallelPlugin", "mixed_precision", self._model_options, self._optimizer_options, precision
        )
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise ConfigError(
                f"the model is on 'meta', but zero_stage={self._stage} needs weights in plain memory; build "
                "it on 'cpu', or choose zero_stage=3, which makes each rank's part from 'meta'"
            )
        dtype = parse_precision(model_options["mixed_precision"] or "fp32")

        def wrap(
            part: nn.Module,
            optimizer: torch.optim.Optimizer | None,
            parts: Parts,
            group: Group,
        ) -> Wrapped:
            over = group.get_group() if isinstance(group, DeviceMesh) else group
            part.to(current_device())
            cut = None
            if optimizer is not None:
                cut = LowLevelZeroOptimizer(
                    optimizer,
                    stage=self._stage,
                    precision=dtype,
                    keep_fp32=kept_in_fp32(part, dtype, self._keep_fp32),
                    dp_process_group=over,
                    model_ranks=parts.model_ranks,
                    experts=parts.experts,
                    **optimizer_options,
                )
                parts.tied.add_up_in(cut)
            spread_rest(part, cut, over, apart=() if parts.experts is None else parts.experts.params)
            model = LowLevelZeroModel(
                part, dtype, keep_fp32=self._keep_fp32, cast_inputs=self._cast_inputs, stage=self._stage
            )
            return Wrapped(model, cut, _ReplicatedPart(model, cut, len(parts.staged.stages)))

        return wrap

    def types(self, model: nn.Module, precision: Precision | None) -> dict[int, torch.dtype]:
        """See :class:`DataParallelism`."""
        options, _ = with_precision(
            "HybridParallelPlugin", "mixed_precision", self._model_options, self._optimizer_options, precision
        )
        dtype = parse_precision(options["mixed_precision"] or "fp32")
        return compute_types(model, dtype, self._keep_fp32, strict=False)


class _ReplicatedPart:
    """A part with a LowLevelZeroOptimizer, for the pipeline. Each of its stages ends with a backward pass of
    its own; the last of these exchanges the gradients of all.
    """

    def __init__(
        self, model: LowLevelZeroModel, optimizer: LowLevelZeroOptimizer | None, num_stages: int
    ) -> None:
        self._model, self._optimizer, self._num_stages = model, optimizer, num_stages
        self._accumulates, self._num_ended = False, 0

    def forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._model.run(call, args, kwargs)

    def run_backward(self, call: Callable[[float | None], T]) -> T:
        if self._optimizer is None:
            return call(None)
        waits = self._accumulates
        if not waits:
            self._num_ended = (self._num_ended + 1) % self._num_stages
            waits = self._num_ended > 0
        with self._optimizer.no_sync() if waits else nullcontext():
            return self._optimizer.run_backward(call)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def passes_in_a_row(self) -> AbstractContextManager[None]:
        return nullcontext()

    def leave(self, why: str) -> None:
        if self._optimizer is not None:
            self._optimizer.leave(why)
