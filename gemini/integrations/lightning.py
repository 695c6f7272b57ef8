"""GeminiStrategy: Lightning with managed models. Only the import and the line that makes the Trainer change::

from gemini.integrations.lightning import GeminiStrategy

trainer = Trainer(max_epochs=1, strategy=GeminiStrategy(device_bytes="8GiB", disk_dir="/mnt/nvme"))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import (  # type: ignore[attr-defined, unused-ignore]
    default_pg_timeout,
)
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO, Precision
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from gemini.checkpoint import CheckpointReader, load, save
from gemini.checkpoint.directory import identity_of
from gemini.errors import CheckpointError, ConfigError, OutOfBudgetError
from gemini.integrations.whole_files import remove_whole, sweep, written_whole
from gemini.model.handle import ManagedModel, handle_of
from gemini.model.in_place import manage
from gemini.model.weights import LazyState, Peeking, lazy_weights
from gemini.optim import GeminiOptimizer
from gemini.runtime.config import GeminiConfig
from gemini.system.durable import restore
from gemini.system.files import io_errors

_DDP: Any = DDPStrategy  # methods are borrowed from it
FOLDER = "gemini"
REST = "lightning.ckpt"
_NAME = "gemini_checkpoint"  # key: the name of the checkpoint in FOLDER
_SAVE = "gemini_save"  # key: the identity of its save
_WEIGHTS = "gemini_weights"  # marks a dict of changes to the weights in FOLDER


class Streamed(dict[str, Any]):
    """Placeholder for optimizer states that are streamed to files; any access raises ConfigError."""

    def _refuse(self, *_args: Any, **_options: Any) -> NoReturn:
        raise ConfigError(
            "the optimizer's states of a managed module are streamed to files, and checkpoint"
            "['optimizer_states'] has none of them; a hook reads them with "
            "trainer.optimizers[0].state_dict(), and gives what it changes to load_state_dict() of that, "
            "before saving"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = _refuse
    get = items = keys = values = pop = popitem = setdefault = update = copy = _refuse


def packed(checkpoint: dict[str, Any], saved: Path) -> dict[str, Any]:
    """Return the contents of the file beside ``saved``. Of dicts of weights it contains only the changes by
    hooks.
    """

    def pack(state: LazyState) -> dict[str, Any]:
        return {_WEIGHTS: True, "removed": state.removed, "changed": state.changed}

    rest = replaced(checkpoint, LazyState, pack)
    return {**replaced(rest, Streamed, lambda _: {}), _NAME: saved.name, _SAVE: identity_of(saved)}


def saved_with(checkpoint: dict[str, Any], path: Path) -> Path:
    """Return the path of the checkpoint in ``path`` that belongs to ``checkpoint``, the contents of the file
    beside it. Raises CheckpointError.
    """
    name, save = checkpoint.pop(_NAME, None), checkpoint.pop(_SAVE, None)
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{path / REST} names no checkpoint in {path / FOLDER}")
    saved = path / FOLDER / name
    if not saved.is_dir():
        raise CheckpointError(
            f"{path / REST} belongs to {saved}, which is not there; copy all of a checkpoint"
        )
    if save is not None and identity_of(saved) != save:
        raise CheckpointError(
            f"{path / REST} belongs to another save than {saved}; copy all of a checkpoint, from one save"
        )
    return saved


def unpacked(checkpoint: dict[str, Any], reader: CheckpointReader, module: nn.Module) -> dict[str, Any]:
    """Return the checkpoint as hooks see it: dicts of weights read their values through ``reader``
    on access.
    """
    aliases = reader.manifest["aliases"]
    extra = reader.objects()["extra_states"]
    there = reader.weights.keys() | aliases.keys() | extra.keys()
    own = [name for name in module.state_dict(keep_vars=True) if name in there]
    names = [*own, *sorted(there - set(own))]

    def read(name: str) -> Any:
        return extra[name] if name in extra else reader.weight(aliases.get(name, name))

    def unpack(value: dict[str, Any]) -> Any:
        if _WEIGHTS not in value:
            return None
        state = LazyState(names, read)
        for name in value["removed"]:
            state.pop_unread(name)
        state.update(value["changed"])
        return state

    found = replaced(checkpoint, dict, unpack)
    if found.get("state_dict") == {}:  # the first files of this kind have an empty dict
        found["state_dict"] = LazyState(names, read)
    found["optimizer_states"] = [Streamed() for _ in found.get("optimizer_states", ())]
    return dict(found)


def replaced(value: Any, kind: type[Any], by: Callable[[Any], Any]) -> Any:
    """Return ``value`` with each ``kind`` in its dicts and lists replaced by ``by`` of it; None keeps it."""
    if isinstance(value, kind):
        other = by(value)
        if other is not None:
            return other
    if type(value) is dict:
        return {key: replaced(each, kind, by) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replaced(each, kind, by) for each in value)
    return value


def holds(value: Any, kind: type[Any]) -> bool:
    """Return whether the dicts and lists of ``value`` contain a ``kind``."""
    if isinstance(value, kind):
        return True
    parts: Iterable[Any] = ()
    if type(value) is dict:
        parts = value.values()
    elif type(value) in (list, tuple):
        parts = value
    return any(holds(each, kind) for each in parts)


class OutOfMemory(OutOfBudgetError, RuntimeError):
    """A step lacks memory. The message contains the words that Lightning looks for, so its batch size finder
    tries a smaller batch.
    """


@contextmanager
def _in_lightnings_words() -> Iterator[None]:
    try:
        yield
    except OutOfBudgetError as error:
        if isinstance(error, RuntimeError):
            raise
        raise OutOfMemory(f"{error} (as CUDA says it: out of memory)") from error


class GeminiStrategy(ParallelStrategy):  # type: ignore[misc, unused-ignore]
    """Trains a LightningModule in chunks, with the numbers of an unmanaged one, on one process or several.

    The module is managed in place when the Trainer sets it up, after ``precision`` has converted it, and
    stays managed. The optimizer from ``configure_optimizers`` is wrapped in a GeminiOptimizer, which clips.

    A checkpoint is a directory: the streamed format of :mod:`gemini.checkpoint`, and one file with
    Lightning's own data. Weights-only checkpoints are Lightning's files; those of other strategies can be
    loaded, too.

    Args:
        gemini_optimizer: options of :class:`gemini.GeminiOptimizer`, such as ``overlap``.
        cluster_environment, checkpoint_io, precision_plugin, process_group_backend: Lightning's own.
        options: those of :func:`gemini.manage`.

    Raises:
        ConfigError: an option is unknown; later, if ``precision`` scales gradients, or if the module is
            already managed with other options.
    """

    strategy_name = "gemini"

    # Process setup and communication are borrowed from DDPStrategy. This class is not derived from it:
    # Lightning would treat it as distributed and refuse features for one process (the batch size finder).
    num_nodes, num_processes = _DDP.num_nodes, _DDP.num_processes
    root_device, process_group_backend = _DDP.root_device, _DDP.process_group_backend
    distributed_sampler_kwargs = _DDP.distributed_sampler_kwargs
    set_world_ranks, barrier = _DDP.set_world_ranks, _DDP.barrier
    broadcast, reduce = _DDP.broadcast, _DDP.reduce
    determine_ddp_device_ids, model_to_device = (
        _DDP.determine_ddp_device_ids,
        _DDP.model_to_device,
    )
    _get_process_group_backend = _DDP._get_process_group_backend

    def __init__(
        self,
        *,
        gemini_optimizer: Mapping[str, Any] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._num_nodes, self._start_method = 1, "popen"  # read by DDPStrategy's methods
        self._process_group_backend, self._timeout = process_group_backend, default_pg_timeout
        self._options = options
        self._optimizer_options = dict(gemini_optimizer or {})
        self._saved: Path | None = None
        self._reader: CheckpointReader | None = None  # of _saved: hooks may read weights until the end

    @property
    def handle(self) -> ManagedModel:
        """The handle of the trained module: ``stats()``, ``plan()``, ``record_timeline()``."""
        return handle_of(self._module)

    @property
    def _module(self) -> LightningModule:
        module = self.lightning_module
        assert module is not None
        return module

    # -- setting up ------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return bool(self.num_processes * self.num_nodes > 1)

    def _configure_launcher(self) -> None:
        """Start the other processes, if there are several."""
        if self.is_distributed:
            _DDP._configure_launcher(self)

    def setup_environment(self) -> None:
        """Join the other ranks, if there are any."""
        super().setup_environment()
        self.set_world_ranks()
        if self.world_size > 1:
            _DDP.setup_distributed(self)

    def setup(self, trainer: Trainer) -> None:
        """Convert the module and manage it, then make the optimizers with states in chunks."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ConfigError(
                "precision='16-mixed' scales gradients that are not in chunks; choose 'bf16-mixed', or leave "
                "it out and give GeminiStrategy(mixed_precision='fp16')"
            )
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and self._layer_sync is not None and "_gemini" not in vars(self._module):
            self.model = self._layer_sync.apply(self._module)
        self.precision_plugin.convert_module(self._module)
        self._manage()
        self.model_to_device()  # moves buffers added since, and sets the module's device attribute
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _manage(self) -> None:
        handle = vars(self._module).get("_gemini")
        if handle is None:
            manage(self._module, device=self.root_device, **self._options)
            return
        handle.manager.shortage.forget()
        if self._options and handle.config != GeminiConfig.choose(None, **self._options):
            raise ConfigError(
                f"the module is already managed; leave the options {self._options!r} of GeminiStrategy out, "
                "or call gemini.handle_of(module).release() before"
            )

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Wrap the optimizers from ``configure_optimizers``; schedulers keep using their groups."""
        super().setup_optimizers(trainer)
        self.optimizers = [
            optimizer
            if isinstance(optimizer, GeminiOptimizer)
            else GeminiOptimizer(optimizer, self.handle, **self._optimizer_options)
            for optimizer in self.optimizers
        ]

    def setup_precision_plugin(self) -> None:
        """Make the precision plugin clip gradients in chunks."""
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        if not isinstance(plugin, _ClipsInChunks):
            kind: Any = type(plugin)
            plugin.__class__ = _clipping(kind)

    # -- steps -----------------------------------------------------------------------------------

    @_in_lightnings_words()
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward, backward and the update."""
        return super().optimizer_step(*args, **kwargs)

    @_in_lightnings_words()
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` as a forward pass of the managed module. With manual
        optimization each call of the module within it is a pass.
        """
        step = self._module.training_step
        with self.precision_plugin.train_step_context():
            if not self._module.automatic_optimization:
                return step(*args, **kwargs)
            return self.handle.forward(step, args, kwargs)

    @_in_lightnings_words()
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``validation_step`` as an evaluation of the managed module."""
        with self.precision_plugin.val_step_context():
            return self.handle.forward(self._module.validation_step, args, kwargs)

    @_in_lightnings_words()
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``test_step`` as an evaluation of the managed module."""
        with self.precision_plugin.test_step_context():
            return self.handle.forward(self._module.test_step, args, kwargs)

    @_in_lightnings_words()
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``predict_step`` as an evaluation of the managed module."""
        with self.precision_plugin.predict_step_context():
            return self.handle.forward(self._module.predict_step, args, kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass, through the optimizer if it scales losses or updates during backward."""
        inner = gemini_optimizer_of(optimizer)
        if inner is None or (inner.loss_scale is None and inner.overlap != "backward"):
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        loss = self.precision_plugin.pre_backward(closure_loss, self._module)
        inner.backward(loss)
        return self.precision_plugin.post_backward(loss, self._module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them."""
        with self.handle.no_sync():
            yield

    def teardown(self) -> None:
        """Release Lightning's resources. The module stays managed, so it can be tested or trained further."""
        self._forget_saved()
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            assert part is not None
            part.teardown()

    # -- files -----------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: values are loaded into chunks, which exist only after setup."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights; each is read on access, over ranks collectively."""
        return lazy_weights(self.handle)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the states of an optimizer; a placeholder if it is the only one, because its states are
        streamed.
        """
        if len(self.optimizers) == 1:
            return Streamed()
        states: dict[str, Any] = optimizer.state_dict()
        return states

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a directory; or one of Lightning's files for weights only or several optimizers. Collective.

        An existing checkpoint stays until the new one is complete.

        Raises:
            ConfigError: the path is not on a mounted file system.
        """
        path = _local(filepath)
        streams = len(self.optimizers) == 1 and holds(checkpoint.get("optimizer_states"), Streamed)
        content = checkpoint if streams else self._with_weights(checkpoint)
        with written_whole(path, self.handle.rank()) as made:
            target = made
            if streams:
                saved = save(made / FOLDER, self.handle, self._only_optimizer(), keep=1)
                content, target = packed(checkpoint, saved), made / REST
            with self._writing_at_once():
                super().save_checkpoint(content, target, storage_options)

    def _with_weights(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return ``checkpoint`` with ordinary dicts of weights on rank 0, including changes by hooks.
        Collective.
        """
        if not holds(checkpoint, LazyState):
            return checkpoint
        values: dict[str, Any] = self.handle.state_dict(only_rank_0=True)  # type: ignore[attr-defined]

        def plain(state: LazyState) -> dict[str, Any]:
            if state.is_as_read or not values:
                return values
            changed = state.changed
            return {name: changed[name] if name in changed else values[name] for name in state}

        found: dict[str, Any] = replaced(checkpoint, LazyState, plain)
        return found

    @contextmanager
    def _writing_at_once(self) -> Iterator[None]:
        """Bypass a plugin that writes in a thread of its own: the file is renamed right after the block."""
        plugin = inner = self.checkpoint_io
        while isinstance(inner, AsyncCheckpointIO) and inner.checkpoint_io is not None:
            inner = inner.checkpoint_io
        self.checkpoint_io = inner
        try:
            yield
        finally:
            self.checkpoint_io = plugin

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint; a partly removed one never keeps the name."""
        path = Path(filepath)
        if not (path / REST).is_file():
            super().remove_checkpoint(os.fspath(filepath))
        elif self.is_global_zero:
            remove_whole(path)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read Lightning's data; :meth:`load_model_state_dict` streams the rest of a directory.

        Raises:
            CheckpointError: the directory has files of several saves.
        """
        self._forget_saved()
        path = Path(checkpoint_path)
        if self.is_global_zero:
            with io_errors("look for the checkpoint", path):
                restore(path)
                sweep(path.parent)
        self.barrier()
        if not (path / REST).is_file():
            return super().load_checkpoint(os.fspath(checkpoint_path), weights_only)
        checkpoint = super().load_checkpoint(path / REST, weights_only)
        saved = saved_with(checkpoint, path)
        self._saved, self._reader = saved, CheckpointReader(saved)
        return unpacked(checkpoint, self._reader, self._module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into chunks, including changes by hooks; from a directory also the states, if there is
        an optimizer.
        """
        self.handle.manager.shortage.forget()  # the batch size finder ends with this call
        state = checkpoint["state_dict"]
        if self._saved is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        lazy = isinstance(state, LazyState)
        if self.optimizers:
            there = self._module.state_dict(keep_vars=True).keys()
            load(self._saved, self.handle, self._only_optimizer(), leave=there - state.keys())
            if lazy and state.is_as_read and there <= state.keys():
                return
        self._module.load_state_dict(Peeking(state) if lazy else state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load states from one of Lightning's files into chunks."""
        if self._saved is None:
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(state)

    def _forget_saved(self) -> None:
        reader, self._saved, self._reader = self._reader, None, None
        if reader is not None:
            reader.close()

    def _only_optimizer(self) -> GeminiOptimizer:
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"a directory has the states of one optimizer, and there are {len(self.optimizers)}; load a "
                "file that was saved with as many"
            )
        found = gemini_optimizer_of(self.optimizers[0])
        assert found is not None
        return found


class _ClipsInChunks(Precision):  # type: ignore[misc, unused-ignore]
    """A precision plugin that clips through the optimizer, because gradients are in chunks."""

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clamp gradients within the update."""
        inner = gemini_optimizer_of(optimizer)
        if inner is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            inner.clip_grad_by_value(clip_val)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Scale gradients within the update; 16-bit gradients by torch in their own dtype, as without
        management.
        """
        inner = gemini_optimizer_of(optimizer)
        if inner is None or _is_narrow(inner):
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            inner.clip_grad_by_norm(clip_val)


def _is_narrow(optimizer: GeminiOptimizer) -> bool:
    """Return whether torch's clipping should be used because it computes the norm in fewer bits than ours."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = optimizer.model.config.precision is None and optimizer.model.peers is None
    return own and any(param.dtype.itemsize < 4 for param in params)


@cache
def _clipping(plugin: type[Precision]) -> type[Precision]:
    """Return ``plugin`` combined with :class:`_ClipsInChunks`, under its own name, which Lightning's
    checkpoints contain.
    """
    names = {"__module__": plugin.__module__, "__qualname__": plugin.__qualname__}
    return type(plugin.__name__, (_ClipsInChunks, plugin), names)


def gemini_optimizer_of(optimizer: Any) -> GeminiOptimizer | None:
    """Return the GeminiOptimizer that Lightning has wrapped; None if it is another optimizer."""
    found = getattr(optimizer, "_optimizer", optimizer)
    return found if isinstance(found, GeminiOptimizer) else None


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise ConfigError(
            f"{os.fspath(path)} is on no mounted file system; save in a directory and copy it there"
        )
    return Path(path)
