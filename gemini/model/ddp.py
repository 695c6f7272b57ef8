"""GeminiDDP: a module whose model data lives in chunks on DEVICE, HOST and DISK. It wraps a module and hides
nothing of it, also as a part of a larger one: what torch loads has the names of what is wrapped.
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

from gemini.chunk import ComputeDevice
from gemini.comm.peers import ModelRanks, OwnExperts
from gemini.comm.ranks import ProcessGroupPeers, make_peers
from gemini.errors import ConfigError
from gemini.memstats import Trace
from gemini.model.handle import ManagedModel
from gemini.model.retry import retry_step
from gemini.model.tiled_heads import fit_heads
from gemini.model.weights import export_shards, export_weights, import_weights
from gemini.placement import PlacementPolicy, PlanReport
from gemini.runtime import ManagedTensor
from gemini.runtime.build import build_runtime
from gemini.runtime.config import GeminiConfig, open_device, prepared
from gemini.runtime.gate.guards import in_one_thread
from gemini.timeline import TimelineRecorder

T = TypeVar("T")


_HELPER = "torch.distributed.checkpoint.state_dict"


class Wrapper(nn.Module):
    """Wraps :attr:`module`: an attribute that the wrapper itself does not have is the module's, to read and,
    where the module has it, to set."""

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
    """A wrapper whose state has the names of the module that it wraps, its ``module``."""

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell torch.distributed.checkpoint that ``module`` is no part of names; where each begins there."""
        inner = cast("nn.Module", self.module)
        return dict.fromkeys(("", *inner._modules, *inner._parameters, *inner._buffers), "module")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As a module's. To torch.distributed.checkpoint without ``module``, which it takes off for torch's
        own wrapper only: it looks for the states of an optimizer under the names of weights."""
        if torchs_checkpoint_asks():
            return cast("nn.Module", self.module).named_parameters(*args, **kwargs)
        return super().named_parameters(*args, **kwargs)


class LoadsAsPart(NamedAsWrapped):
    """A wrapper whose state has the names of the module that it wraps, and is loaded under them."""

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
        """Have all of the wrapped module loaded, as ``load_state_dict`` of the wrapper does; what an outer
        module's ``load_state_dict`` calls."""
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        refuse_assign(bool(local_metadata.get("assign_to_params_buffers")))
        _end_load(self)  # of one that was interrupted
        own: Any = OrderedDict(
            (key[len(prefix) :], state_dict[key]) for key in state_dict if key.startswith(prefix)
        )
        own._metadata = {"": local_metadata}
        # torch goes on with our parts, under names that begin with theirs, and tells only those what version
        # of each the state is of. So they note it, and the hook that comes after them loads.
        self.__dict__["_part_load"] = _PartLoad(own, prefix, strict, self._modules)
        self._modules = _Listener(self._gemini.module, prefix, own._metadata)._modules


@dataclass(frozen=True)
class _PartLoad:
    """A load of a wrapper that has begun, and what is in the wrapper."""

    state: Mapping[str, Any]
    prefix: str
    strict: bool
    modules: dict[str, nn.Module | None]


class _Listener(nn.Module):
    """Stands for a module while torch loads what it is in; notes ``metadata`` by name below ``prefix``."""

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


def torchs_checkpoint_asks() -> bool:
    """Say whether the caller of the function that asks is torch.distributed.checkpoint's own."""
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
            current GPU, or the CPU where there is none.
        placement_policy: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"const"`` or an object with the same two
            methods.
        pin_memory: whether HOST memory of a GPU is page-locked, which its copies need to run beside
            computing; ``None``: yes. Without a GPU ``True`` only logs that there is none.
        search_range_mb, hidden_dim, min_chunk_size_mb: the chunk-size search; the minimum is lowered where
            ``device_bytes`` could not hold the chunks of one update.
        mixed_precision: ``None`` (parameters keep their dtype), ``"bf16"`` or ``"fp16"`` (fp32 masters are
            kept). Buffers keep their type (docs/notes/precision.md).
        device_bytes, host_bytes, disk_bytes: hard budgets, an int or text such as ``"512MiB"``.
        disk_dir: directory of the DISK tier's file; ``None`` means no DISK tier.
        non_model_bytes: DEVICE bytes to keep free of model data; ``None`` measures them in the first step.
        force_outputs_fp32: cast floating-point outputs to fp32 under mixed precision.
        activation_offload: True puts what autograd saves in forward into chunks, which leave DEVICE where it
            is short; ``"auto"`` only what would not stay there (docs/notes/activations.md).
        activation_recompute: blocks (members of the module's lists) may compute their activations again in
            backward where a simulated step is faster; needs ``activation_offload="auto"``.
        tiled_loss: True computes the loss of a language model's head by tiles of rows, so that its logits
            never exist at once; ``"auto"`` only where they would take more than a sixteenth of DEVICE
            (docs/tiled-loss.md).
        strict_ddp_mode: every rank runs the same operators in the same order; where one does not, StateError
            is raised on all. Without it ranks may differ.
        process_group: the ranks among which every chunk is cut (ZeRO-3): a ProcessGroup, a DeviceMesh of one
            dimension, or ``None`` for all ranks where torch.distributed is initialized, else this process
            alone. On a DeviceMesh of two dimensions the ranks of each row hold a copy of the model (hybrid
            sharding: a row per node, say). The first rank's weights and buffers are taken.
        model_ranks: those that hold the other parts of a model whose parameters were cut before
            (``parallelize(...).model_ranks``, see docs/parallel.md): gradients have one norm over all parts,
            and a step is skipped on all.
        experts: which parameters are experts that this rank has and others do not (``ep_size=`` of plugins):
            their chunks are cut among the ranks with the same ones.
        gather_bytes: what parameter chunks that are whole for use may take on DEVICE, where no operator needs
            more; ``None``: a quarter of ``device_bytes`` and at most half of all parameters.
        reduce_dtype: what gradients are sent in: ``None`` for fp32, ``"bf16"`` or ``"fp16"`` for half the
            bytes. They are accumulated, and added up, in fp32 in any case.
        keep_fp32: parameters, or modules with them, that stay in fp32 under ``mixed_precision``, by name or
            a part of it: ``["router", "lm_head.weight"]``. Batch norm, and what the model itself says
            (``_keep_in_fp32_modules``), need no naming.
        memstats: the :class:`gemini.memstats.Trace` of an earlier run: chunks follow its execution order, and
            warmup is skipped when it was recorded with this layout.
        optimizer_rule: what will train the model, ``"adam"``, ``"lion"``, ``"sgd"``, ``"muon"``, or
            ``"none"``: where the budgets cannot hold its gradients and states beside the parameters, wrapping
            is refused. ``None``: only making the optimizer is, and the model may be evaluated; wrapping warns
            where Adam would not fit. ``"muon"`` keeps hidden matrices in chunks without other parameters: so
            :class:`gemini.Muon` has one state of them, and two of the others.
        config: a :class:`GeminiConfig` in place of all options that it has a field for; those must then be
            left at their defaults.
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
        peers = make_peers(process_group)
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
        """Give ``module`` its chunks; a rehearsal (gemini.forecast) gives it chunks without memory."""
        model_ranks, experts = parts
        built = build_runtime(module, config, peers, device, model_ranks, experts=experts)
        return ManagedModel(module, config, device, peers, built)

    def _open_device(self, device: torch.device | str | int | None, pin_memory: bool | None) -> ComputeDevice:
        """Return what operators run on; a rehearsal (gemini.forecast) and tests have others."""
        return open_device(device, pin_memory=pin_memory)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module or, where it has none, a part of the runtime."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in ManagedModel.SHOWN or "_gemini" not in self.__dict__:
                raise
        return self._gemini.shown(name)

    # -- training --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; floating-point inputs are cast to the compute precision first.

        Raises:
            StateError: an update or a load failed half-way, so that weights do not belong together, a
                parameter is no longer managed, a CUDA graph is captured, an optimizer awaits its step(), or
                another thread is in a call of this model.
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
        """Call ``step``, a whole training step or an evaluation, and return what it does. Where the device
        runs out of memory in it, call it once more, from the same state and with less model data on DEVICE:
        see :func:`gemini.model.retry.retry_step`."""
        return retry_step(self._gemini, step)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on each rank, in fp32, without an exchange; the backward pass that follows
        exchanges all of them. Whole gradients stay until then, on any tier. With one process it changes
        nothing, except for an optimizer that updates in backward: that waits for the pass which follows."""
        return self._gemini.no_sync()

    def join(
        self,
        *,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Let ranks train on different numbers of batches within the block, as DistributedDataParallel's: one
        that comes to its end first serves the others until they do, with no gradients of its own::

            with model.join():
                for batch in loader:
                    optimizer.backward(loss_of(model(batch)))
                    optimizer.step()

        Gradients are divided by the number of all ranks or, without ``divide_by_initial_world_size``, of
        those that still train. ``throw_on_early_termination``: all raise StateError as soon as one has come
        to the end. What ranks save or load together comes after the block (docs/notes/zero.md).
        """
        return self._gemini.join(
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Give up all gradients, or fill them with zeros; also what to call after a forward or backward pass
        that raised, before repeating it. All ranks call it together: each waits until the others' passes are
        over, so that no gradient of before comes to those of the next."""
        self._gemini.zero_grad(set_to_none)

    # -- weights ---------------------------------------------------------------------------------

    @in_one_thread("state_dict")
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's state as ordinary full tensors (fp32 for managed weights), under the module's
        own names.

        Streamed: one parameter at a time is on DEVICE. With a DISK tier the tensors are mapped from a file
        there, so that the result needs no more memory than the kernel has to spare; otherwise they are copies
        in memory. ``only_rank_0``: other ranks take part and get ``{}``; the other arguments are those of
        ``nn.Module.state_dict``.

        Raises:
            StateError: a failed load or update left weights a mixture, or a parameter is no longer managed.
        """
        self._ask_before(keep_vars=bool(kwargs.get("keep_vars")))
        return export_weights(self._gemini, *args, **kwargs)

    def _ask_before(self, *, keep_vars: bool) -> None:
        """Run the hooks that torch runs before a state dict is made."""
        for hook in self._state_dict_pre_hooks.values():
            hook(self, "", keep_vars)

    def state_dict_shard(
        self, max_shard_size: int | str = "1GiB", *, only_rank_0: bool = False
    ) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield what is in :meth:`state_dict` in shards of at most so many bytes, each with its bytes; a
        larger parameter comes alone, all names of a tied one together. Copies in memory, one shard at a time.

        Over ranks all of them go through it, and with ``only_rank_0`` others get no shard.

        Raises:
            ConfigError: ``max_shard_size`` is none; StateError: as :meth:`state_dict`, or there was a step
                between two shards.
        """
        self._ask_before(keep_vars=False)
        return export_shards(self._gemini, max_shard_size, only_rank_0)

    @in_one_thread("load_state_dict")
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy weights into the chunks, one parameter at a time; fp32 masters take the values before any
        cast. Hooks of the module and its parts run as in torch. Over ranks all call it, with the same values.

        Raises:
            ConfigError: with ``assign=True``, or for a shape that does not match; nothing was changed.
            RuntimeError: names are missing or unexpected and ``strict``, as in torch. Nothing was changed,
                unless there are hooks after loading, which run first: weights are a mixture then.
            OutOfBudgetError, IoError: a chunk could not be had: weights are a mixture until they are loaded.
            CheckpointError: it failed on another rank.
        """
        refuse_assign(assign)
        return import_weights(self._gemini, state_dict, strict=strict)

    # -- what happened ---------------------------------------------------------------------------

    def stats(self, *, flat: bool = False, since_last: bool = False) -> dict[str, Any]:
        """Return usage per tier and traffic per link as a plain dict (see docs/architecture.md for the
        keys). ``flat``: one number per name, ``device/bytes``, as loggers take them. ``since_last``: traffic
        and stalls since the last call with it, or since the beginning."""
        return self._gemini.stats(flat=flat, since_last=since_last)

    def plan(self) -> PlanReport:
        """Return what stays where and why; ``print()`` it."""
        return self._gemini.plan()

    def timeline(self) -> list[dict[str, Any]]:
        """Return the fill of each tier at every moment of the last step: forward, backward, update. Runs
        what is pending of the update, except in another thread than the one that trains."""
        return self._gemini.timeline()

    def record_timeline(self, *, steps: int | None = None) -> TimelineRecorder:
        """Return what records everything that happens while it is entered, or for so many ``steps``::

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

        Pending updates run first, and an asynchronous save is finished, so that one that fails is not lost in
        silence.

        Raises:
            OutOfBudgetError, IoError: an update, a transfer or a save failed. Everything has been returned.
            EvictedAccessError: raw memory of an evicted chunk was touched since the last operator; the same.
        """
        self._gemini.close()

    def __enter__(self) -> GeminiDDP:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _trace: object) -> None:
        self._gemini.leave(kind, error)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GeminiDDP:
        """Refuse ``double()``, ``to("meta")`` and the like before anything changes; what would change nothing
        is allowed."""
        self._gemini.refuse_move(fn)
        # A gradient, which may have another type, or be exchanged, changes with its parameter: not at all.
        super()._apply(  # type: ignore[no-untyped-call]
            lambda tensor: tensor if isinstance(tensor, ManagedTensor) else fn(tensor), recurse
        )
        return self

    def extra_repr(self) -> str:
        """Say what is where."""
        return f"managed: {self._gemini.summary()}" if "_gemini" in vars(self) else ""

    def _repr_html_(self) -> str:
        return self._gemini._repr_html_()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "a GeminiDDP cannot be copied or pickled: its memory is under one budget; model.module can, and "
            "copy.deepcopy(model.module) gives an ordinary, unmanaged model"
        )
