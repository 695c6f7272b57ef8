"""GeminiDDP: wraps a module and keeps its model data in chunks on DEVICE, HOST and DISK.

The wrapper shows all attributes of the module. torch saves and loads the wrapper, also inside a larger
module, under the names of the wrapped module's state.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import nn

from gemini.chunk.memory import ComputeDevice
from gemini.comm.peers import ModelRanks, OwnExperts
from gemini.comm.ranks import ProcessGroupPeers, make_peers
from gemini.errors import ConfigError
from gemini.memstats import Trace
from gemini.model.handle import ManagedModel
from gemini.model.retry import retry_step
from gemini.model.tiled_heads import fit_heads
from gemini.model.weights import export_shards, export_weights, import_weights
from gemini.placement import PlacementPolicy, PlanReport
from gemini.runtime.build import build_runtime
from gemini.runtime.config import GeminiConfig, open_device, prepared
from gemini.runtime.gate.guards import in_one_thread
from gemini.runtime.intercept.tensors import ManagedTensor
from gemini.timeline.event_recorder import TimelineRecorder

T = TypeVar("T")


_HELPER = "torch.distributed.checkpoint.state_dict"


class Wrapper(nn.Module):
    """Wraps :attr:`module`. Attributes that the wrapper lacks are read from the module, and set on the module
    if it has them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self._wrapped()
            if module is None or (name.startswith("__") and name.endswith("__")):
                raise
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self._wrapped()
        if module is None or self._is_own(name) or not hasattr(module, name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        module = self._wrapped()
        if module is None or self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(module, name)

    def __dir__(self) -> list[str]:
        module = self._wrapped()
        own = super().__dir__()  # type: ignore[no-untyped-call]
        return sorted({*own, *(dir(module) if module is not None else ())})

    def _wrapped(self) -> nn.Module | None:
        parts: dict[str, nn.Module | None] = self.__dict__.get("_modules", {})
        return parts.get("module")

    def _is_own(self, name: str) -> bool:
        held = (self.__dict__, self._parameters, self._buffers, self._modules)
        return hasattr(type(self), name) or any(name in names for names in held)


class NamedAsWrapped(Wrapper):
    """A wrapper with the state dict keys of its ``module``, without a prefix."""

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell torch.distributed.checkpoint that names omit ``module``. Returns the first part of each name,
        mapped to the attribute to step through."""
        inner = cast("nn.Module", self.module)
        return dict.fromkeys(("", *inner._modules, *inner._parameters, *inner._buffers), "module")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield named parameters like ``nn.Module``, but without the ``module.`` prefix if
        torch.distributed.checkpoint asks: it looks up optimizer states by these names and strips the prefix
        of torch's own wrapper only."""
        if called_by_torch_checkpoint():
            return cast("nn.Module", self.module).named_parameters(*args, **kwargs)
        return super().named_parameters(*args, **kwargs)


class LoadsAsPart(NamedAsWrapped):
    """A wrapper that also loads its state under the names of its ``module`` if it is part of a larger
    module."""

    _gemini: ManagedModel

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_load_part)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the whole wrapped module, like the wrapper's own ``load_state_dict``. torch calls this from
        ``load_state_dict`` of an outer module."""
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        refuse_assign(bool(local_metadata.get("assign_to_params_buffers")))
        _end_load(self)  # of a load that was interrupted
        own: Any = OrderedDict(
            (key[len(prefix) :], state_dict[key]) for key in state_dict if key.startswith(prefix)
        )
        own._metadata = {"": local_metadata}
        # torch visits our submodules next, and passes the version metadata of each to that submodule only.
        # The listeners record it; _load_part runs after them and loads.
        self.__dict__["_part_load"] = _PartLoad(own, prefix, strict, self._modules)
        self._modules = _Listener(self._gemini.module, prefix, own._metadata)._modules


@dataclass(frozen=True)
class _PartLoad:
    """A load of a wrapper in progress: the state under its own names, and the wrapper's real ``modules``,
    which listeners replace meanwhile."""

    state: Mapping[str, Any]
    prefix: str
    strict: bool
    modules: dict[str, nn.Module | None]


class _Listener(nn.Module):
    """Replaces a module while torch loads an outer module; records torch's ``metadata`` by name below
    ``prefix``."""

    def __init__(self, module: nn.Module, prefix: str, metadata: dict[str, Any]) -> None:
        super().__init__()
        self._start = len(prefix)
        self._metadata = metadata
        for name, part in module._modules.items():
            self._modules[name] = None if part is None else _Listener(part, prefix, metadata)

    def _load_from_state_dict(self, _state: Any, prefix: str, local_metadata: Any, *_rest: Any) -> None:
        self._metadata[prefix[self._start : -1]] = local_metadata


def _end_load(wrapper: LoadsAsPart) -> _PartLoad | None:
    load: _PartLoad | None = wrapper.__dict__.pop("_part_load", None)
    if load is not None:
        wrapper._modules = load.modules
    return load


def _load_part(wrapper: LoadsAsPart, keys: Any) -> None:
    load = _end_load(wrapper)
    if load is None:
        return
    found = import_weights(wrapper._gemini, load.state, strict=False)
    if load.strict:
        keys.missing_keys.extend(load.prefix + key for key in found.missing_keys)
        keys.unexpected_keys.extend(load.prefix + key for key in found.unexpected_keys)


def called_by_torch_checkpoint() -> bool:
    """Say whether the caller's caller is torch.distributed.checkpoint."""
    return sys._getframe(2).f_globals.get("__name__") == _HELPER


def refuse_assign(assign: bool) -> None:
    """Raise ConfigError for ``load_state_dict(assign=True)``."""
    if assign:
        raise ConfigError("load_state_dict(assign=True) cannot re-point managed parameters; use assign=False")


class GeminiDDP(LoadsAsPart):
    """Train ``module`` within byte budgets: its parameters, gradients and optimizer states move between tiers
    as needed.

    The module is changed in place: its parameters keep their identity and become managed. Use the wrapper
    like the module; ``loss.backward()`` is legal. Pair it with :class:`gemini.GeminiOptimizer`. May be used
    as a context manager.

    Args:
        module: the model, on ``cpu``, on the computing device, or on ``meta`` (see :func:`gemini.init_on`).
        device: the computing device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or a GPU's index. ``None``: the
            current GPU, or the CPU if there is no GPU.
        placement_policy: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"const"`` or an object with the same two
            methods.
        pin_memory: whether HOST memory beside a GPU is page-locked, which copies need to overlap with
            computing; ``None``: yes. Without a GPU ``True`` has no effect, and a log message says so.
        search_range_mb, hidden_dim, min_chunk_size_mb: options of the chunk-size search. The minimum is
            lowered if ``device_bytes`` cannot hold the chunks of one update.
        mixed_precision: ``None`` (parameters keep their dtype), ``"bf16"`` or ``"fp16"`` (fp32 masters are
            kept). Buffers keep their type (docs/notes/precision.md).
        device_bytes, host_bytes, disk_bytes: hard budgets, an int or text such as ``"512MiB"``.
        disk_dir: directory of the DISK tier's file; ``None`` means no DISK tier.
        non_model_bytes: DEVICE bytes to keep free of model data; ``None`` measures them in the first step.
        force_outputs_fp32: cast floating-point outputs to fp32 under mixed precision.
        activation_offload: True keeps the tensors that autograd saves in forward in chunks, which are evicted
            if DEVICE is short; ``"auto"`` keeps only those in chunks that would not stay on DEVICE
            (docs/notes/activations.md).
        activation_recompute: blocks (members of the module's lists) may recompute their activations in
            backward if a simulated step is faster; needs ``activation_offload="auto"``.
        tiled_loss: True computes the loss of a language model's head by tiles of rows, so that all logits
            never exist at once; ``"auto"`` does so only if they would take more than a sixteenth of DEVICE
            (docs/tiled-loss.md).
        strict_ddp_mode: require that every rank runs the same operators in the same order; if one does not,
            all ranks raise StateError. Without it ranks may differ.
        process_group: the ranks that share every chunk (ZeRO-3): a ProcessGroup, a DeviceMesh of one
            dimension, or ``None`` for all ranks if torch.distributed is initialized, else this process alone.
            On a DeviceMesh of two dimensions the ranks of each row hold a copy of the model (hybrid sharding:
            a row per node, say). The first rank's weights and buffers are taken.
        model_ranks: the ranks that hold the other parts of a model with parameters that were cut before
            (``parallelize(...).model_ranks``, see docs/parallel.md): gradients have one norm over all parts,
            and all ranks skip a step together.
        experts: which parameters are experts of this rank that other ranks do not have (``ep_size=`` of
            plugins): their chunks are cut among the ranks with the same experts.
        gather_bytes: DEVICE bytes for gathered (whole) parameter chunks, unless an operator needs more;
            ``None``: a quarter of ``device_bytes`` and at most half of all parameters.
        reduce_dtype: the dtype in which gradients are sent: ``None`` for fp32, ``"bf16"`` or ``"fp16"`` for
            half the bytes. They are always accumulated and added up in fp32.
        keep_fp32: parameters, or modules with their parameters, that stay in fp32 under ``mixed_precision``,
            by name or part of a name: ``["router", "lm_head.weight"]``. Batch norm, and modules that the
            model lists in ``_keep_in_fp32_modules``, stay in fp32 without being named.
        memstats: the :class:`gemini.memstats.Trace` of an earlier run: chunks follow its execution order, and
            warmup is skipped if the trace was recorded with this layout.
        optimizer_rule: the optimizer that will train the model, ``"adam"``, ``"lion"``, ``"sgd"``,
            ``"muon"``, or ``"none"``: wrapping is refused if the budgets cannot hold its gradients and states
            beside the parameters. ``None``: only creating the optimizer is refused then, and the model can be
            evaluated; wrapping warns if Adam would not fit. ``"muon"`` keeps hidden matrices in chunks
            without other parameters, so that :class:`gemini.Muon` keeps one state for these and two for the
            others.
        config: a :class:`GeminiConfig` with all options that it has a field for; these must then be left at
            their defaults here.
        verbose: print the result of the chunk-size search, which is logged at INFO in any case.

    Raises:
        OutOfBudgetError: the model cannot fit the budgets; nothing was changed.
        ConfigError, IoError: see the message.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | int | None = None,
        placement_policy: str | PlacementPolicy = "auto",
        *,
        pin_memory: bool | None = None,
        search_range_mb: float = 32,
        hidden_dim: int | None = None,
        min_chunk_size_mb: float = 32,
        mixed_precision: str | torch.dtype | None = None,
        device_bytes: int | str | None = None,
        host_bytes: int | str | None = None,
        disk_dir: str | None = None,
        disk_bytes: int | str | None = None,
        non_model_bytes: int | str | None = None,
        force_outputs_fp32: bool = False,
        activation_offload: bool | str = False,
        activation_recompute: bool = False,
        tiled_loss: bool | str = False,
        strict_ddp_mode: bool = False,
        process_group: object | None = None,
        model_ranks: ModelRanks | None = None,
        experts: OwnExperts | None = None,
        gather_bytes: int | str | None = None,
        reduce_dtype: str | torch.dtype | None = None,
        keep_fp32: Iterable[str] = (),
        memstats: Trace | None = None,
        optimizer_rule: str | None = None,
        config: GeminiConfig | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ConfigError(f"GeminiDDP wraps an nn.Module, not {type(module).__name__}")
        peers = self._find_peers(process_group)
        choose = partial(
            GeminiConfig.choose,
            config,
            placement_policy=placement_policy,
            search_range_mb=search_range_mb,
            hidden_dim=hidden_dim,
            min_chunk_size_mb=min_chunk_size_mb,
            mixed_precision=mixed_precision,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            disk_dir=disk_dir,
            disk_bytes=disk_bytes,
            non_model_bytes=non_model_bytes,
            gather_bytes=gather_bytes,
            reduce_dtype=reduce_dtype,
            strict_ddp_mode=strict_ddp_mode,
            force_outputs_fp32=force_outputs_fp32,
            activation_offload=activation_offload,
            activation_recompute=activation_recompute,
            tiled_loss=tiled_loss,
            keep_fp32=keep_fp32,
            memstats=memstats,
            optimizer_rule=optimizer_rule,
            verbose=verbose,
        )
        computing, chosen = prepared(
            peers, lambda: self._open_device(device, pin_memory), choose, model_ranks
        )
        if chosen.tiled_loss:
            fit_heads(module, chosen.tiled_loss)  # before anything changes
        self._gemini = self._manage(module, chosen, peers, computing, (model_ranks, experts))
        self._gemini.follow_calls()
        self.module = module

    def _manage(
        self,
        module: nn.Module,
        config: GeminiConfig,
        peers: ProcessGroupPeers | None,
        device: ComputeDevice,
        parts: tuple[ModelRanks | None, OwnExperts | None],
    ) -> ManagedModel:
        """Move ``module`` into chunks. A rehearsal (gemini.forecast) overrides this to use chunks without
        memory."""
        model_ranks, experts = parts
        built = build_runtime(module, config, peers, device, model_ranks, experts=experts)
        return ManagedModel(module, config, device, peers, built)

    def _find_peers(self, process_group: object | None) -> ProcessGroupPeers | None:
        """Return the other ranks. A rehearsal (gemini.forecast) has none, even within a rank."""
        return make_peers(process_group)

    def _open_device(self, device: torch.device | str | int | None, pin_memory: bool | None) -> ComputeDevice:
        """Open the computing device. A rehearsal (gemini.forecast) and tests override this."""
        return open_device(device, pin_memory=pin_memory)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module or, if it has none of that name, a part of the runtime."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in ManagedModel.EXPOSED or "_gemini" not in self.__dict__:
                raise
        return self._gemini.runtime_attribute(name)

    # -- training --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; floating-point inputs are cast to the compute precision first.

        Raises:
            StateError: an update or a load failed halfway, so that weights are a mixture; a parameter is no
                longer managed; a CUDA graph is being captured; an optimizer awaits its step(); or another
                thread is in a call of this model.
        """
        return self._gemini.forward(self._gemini.plain_call, args, kwargs)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile each block of the model (members of its lists) with the arguments of torch.compile.

        A compiled block is one operator: its parameters are on DEVICE all at once.
        """
        self._gemini.compiled.compile(*args, **options)

    def backward(self, loss: torch.Tensor) -> None:
        """Run ``loss.backward()``; gradients end up in chunks."""
        self._gemini.backward(loss)

    def retry_step(self, step: Callable[[], T]) -> T:
        """Call ``step``, a whole training step or an evaluation, and return its result. If the device runs
        out of memory in it, restore the state, give model data less of DEVICE and call it once more: see
        :func:`gemini.model.retry.retry_step`."""
        return retry_step(self._gemini, step)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on each rank, in fp32, without an exchange; the next backward pass outside the
        block exchanges all of them. Whole gradients stay until then, on any tier. With one process it has no
        effect, except that an optimizer that updates in backward waits for the next pass outside the
        block."""
        return self._gemini.no_sync()

    def join(
        self,
        *,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Let ranks train on different numbers of batches within the block, like DistributedDataParallel's
        join. A rank that ends first serves the collectives of the others until they end; it adds no
        gradients::

            with model.join():
                for batch in loader:
                    optimizer.backward(loss_of(model(batch)))
                    optimizer.step()

        Gradients are divided by the number of all ranks or, without ``divide_by_initial_world_size``, by the
        number of ranks that still train. With ``throw_on_early_termination`` all ranks raise StateError as
        soon as one has ended. Save and load collectively only after the block (docs/notes/zero.md).
        """
        return self._gemini.join(
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients, or fill them with zeros. Also call this after a forward or backward pass
        that raised, before repeating it. Collective: every rank waits until the passes of all ranks are over,
        so that no gradient of an old pass reaches the next one."""
        self._gemini.zero_grad(set_to_none)

    # -- weights ---------------------------------------------------------------------------------

    @in_one_thread("state_dict")
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's state as ordinary full tensors (fp32 for managed weights), under the module's
        own names.

        Streamed: one parameter at a time is on DEVICE. With a DISK tier the tensors are mapped from a file
        there, so the result needs no memory of its own beyond the page cache; otherwise they are copies in
        memory. ``only_rank_0``: the other ranks take part and get ``{}``. All other arguments are those of
        ``nn.Module.state_dict``.

        Raises:
            StateError: a failed load or update left weights a mixture, or a parameter is no longer managed.
        """
        self._ask_before(keep_vars=bool(kwargs.get("keep_vars")))
        return export_weights(self._gemini, *args, **kwargs)

    def _ask_before(self, *, keep_vars: bool) -> None:
        """Run the state dict pre-hooks of the wrapper."""
        for hook in self._state_dict_pre_hooks.values():
            hook(self, "", keep_vars)

    def state_dict_shard(
        self, max_shard_size: int | str = "1GiB", *, only_rank_0: bool = False
    ) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the content of :meth:`state_dict` in shards of at most ``max_shard_size`` bytes, each with
        its size in bytes. A larger parameter is a shard of its own; all names of a tied parameter are in one
        shard. The values are copies in memory, one shard at a time.

        Collective: all ranks must exhaust the iterator. With ``only_rank_0`` the other ranks get no shard.

        Raises:
            ConfigError: ``max_shard_size`` is not a positive size.
            StateError: as :meth:`state_dict`, or a step ran between two shards.
        """
        self._ask_before(keep_vars=False)
        return export_shards(self._gemini, max_shard_size, only_rank_0)

    @in_one_thread("load_state_dict")
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy weights into the chunks, one parameter at a time; fp32 masters take the values before any
        cast. Hooks of the module and its submodules run as in torch. Collective: all ranks call it with the
        same values.

        Raises:
            ConfigError: with ``assign=True``, or for a shape that does not match; nothing was changed.
            RuntimeError: with ``strict``, names are missing or unexpected, as in torch. Nothing was changed,
                unless there are hooks that run after loading: these run first, and weights are a mixture
                then.
            OutOfBudgetError, IoError: a chunk could not be fetched: weights are a mixture until they are
                loaded.
            CheckpointError: it failed on another rank.
        """
        refuse_assign(assign)
        return import_weights(self._gemini, state_dict, strict=strict)

    # -- reports ---------------------------------------------------------------------------------

    def stats(self, *, flat: bool = False, since_last: bool = False) -> dict[str, Any]:
        """Return usage per tier and traffic per link as a plain dict (see docs/architecture.md for the keys).
        ``flat``: one number per name, like ``device/bytes``, for loggers. ``since_last``: count traffic and
        stalls since the last call with this option, or since construction."""
        return self._gemini.stats(flat=flat, since_last=since_last)

    def plan(self) -> PlanReport:
        """Return a report of where model data stays and why; ``print()`` it."""
        return self._gemini.plan()

    def timeline(self) -> list[dict[str, Any]]:
        """Return the fill of each tier at every moment of the last step: forward, backward, update. Runs
        pending updates first, unless called in a thread that does not train."""
        return self._gemini.timeline()

    def record_timeline(self, *, steps: int | None = None) -> TimelineRecorder:
        """Return a context manager that records all events in its block, or of ``steps`` steps::

        with model.record_timeline() as timeline:
            ...  # some training steps, after the first: that one only records the order
        timeline.save_html("timeline.html")
        """
        return self._gemini.record_timeline(steps=steps)

    def memstats(self, kind: str = "train") -> Trace | None:
        """Return the recorded iteration of ``kind`` ``"train"`` or ``"eval"``, or None before the first one
        has ended.

        Its times and link speeds are final once an iteration has followed it.
        """
        return self._gemini.memstats(kind)

    # -- end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Return all memory and the DISK file; the parameters are unusable afterwards. Idempotent.

        Pending updates run first, and an asynchronous save is finished, so that its failure is reported.

        Raises:
            OutOfBudgetError, IoError: an update, a transfer or a save failed. Everything has been returned.
            EvictedAccessError: raw memory of an evicted chunk was touched since the last operator. Everything
                has been returned.
        """
        self._gemini.close()

    def __enter__(self) -> GeminiDDP:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _trace: object) -> None:
        self._gemini.leave(kind, error)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GeminiDDP:
        """Refuse ``double()``, ``to("meta")`` and the like before anything changes; a call that would change
        nothing is allowed."""
        self._gemini.refuse_move(fn)
        # Skip managed tensors. A gradient may have another dtype or be exchanged with other ranks, so fn must
        # not see it.
        super()._apply(  # type: ignore[no-untyped-call]
            lambda tensor: tensor if isinstance(tensor, ManagedTensor) else fn(tensor), recurse
        )
        return self

    def extra_repr(self) -> str:
        """Return the fill of each tier in one line."""
        return f"managed: {self._gemini.summary()}" if "_gemini" in vars(self) else ""

    def _repr_html_(self) -> str:
        return self._gemini._repr_html_()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "a GeminiDDP cannot be copied or pickled, because its memory belongs to one budget; "
            "copy.deepcopy(model.module) gives an ordinary, unmanaged model"
        )
