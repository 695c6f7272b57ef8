"""GeminiAccelerator: Accelerate for managed models.
``from gemini.integrations.accelerate import GeminiAccelerator``
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn

from gemini import checkpoint
from gemini.errors import ConfigError
from gemini.integrations import other_engines
from gemini.model.handle import ManagedModel
from gemini.model.in_place import manage
from gemini.model.weights import LazyState, lazy_weights
from gemini.optim import GeminiOptimizer
from gemini.system import rng

_FOLDER = "gemini"


class GeminiAccelerator(Accelerator):  # type: ignore[misc, unused-ignore]
    """An Accelerator that supports managed models: it wraps them in no DistributedDataParallel, clips through
    the optimizer (gradients are in chunks), and saves their states in the streamed format. Everything else,
    and every other model, works as with Accelerate's own class.

    With ``gemini={...}``, options of :func:`gemini.manage`, :meth:`prepare` manages the models that it gets,
    each with its own budgets, and makes their optimizers update chunks.
    """

    _models: list[Any]
    _optimizers: list[Any]
    _manage_options: dict[str, Any] | None = None
    _optimizer_options: dict[str, Any] | None = None

    _saves_lazily = False  # True while save_state() passes lazy weight dicts to hooks

    def __init__(
        self,
        *args: Any,
        gemini: dict[str, Any] | None = None,
        gemini_optimizer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Make an accelerator; further arguments are those of Accelerate's own.

        Args:
            gemini: options of :func:`gemini.manage` for models that are not managed yet; None: they stay
                unmanaged.
            gemini_optimizer: options of :class:`gemini.GeminiOptimizer` for their optimizers.

        Raises:
            ConfigError: ``gemini_optimizer`` without ``gemini``, or models are also given to DeepSpeed, FSDP
                or another engine.
        """
        if gemini is None and gemini_optimizer is not None:
            raise ConfigError(
                f"gemini_optimizer={gemini_optimizer!r} is for optimizers of models that prepare() manages; "
                "give gemini={...}, too, or make the GeminiOptimizer yourself"
            )
        if gemini is not None:
            other_engines.refuse_in_options(options)
            other_engines.refuse_in_environment("accelerate")
        super().__init__(*args, **options)
        self._manage_options, self._optimizer_options = gemini, gemini_optimizer

    def prepare(self, *args: Any, **options: Any) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order.

        Raises:
            OutOfBudgetError, ConfigError: as in :func:`gemini.manage` and :class:`gemini.GeminiOptimizer`.
        """
        if self._manage_options is not None:
            for each in args:
                if isinstance(each, nn.Module) and managed(each) is None:
                    manage(each, **self._manage_options)
            models = [each for each in (*args, *self._models) if managed(each) is not None]
            args = tuple(self._updating(each, models) for each in args)
        return super().prepare(*args, **options)

    def _updating(self, given: Any, models: list[Any]) -> Any:
        """Return a GeminiOptimizer for the optimizer of one of ``models``; return everything else
        unchanged.
        """
        if not isinstance(given, torch.optim.Optimizer) or isinstance(
            given, (GeminiOptimizer, AcceleratedOptimizer)
        ):
            return given
        params = {id(param) for group in given.param_groups for param in group["params"]}
        for model in models:
            if any(id(param) in params for param in model.parameters()):
                return GeminiOptimizer(given, model, **(self._optimizer_options or {}))
        return given

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Apply only autocast and the compiler, if requested, to a managed model. Each of its blocks is
        compiled, as by :meth:`gemini.GeminiDDP.compile`.
        """
        handle = managed(model)
        if handle is None:
            return super().prepare_model(model, device_placement, evaluation_mode)
        if "_is_accelerate_prepared" not in vars(model):
            model._is_accelerate_prepared = False  # over ranks the class attribute says True, for other users
        with self._without_compiler() as compiler:
            prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        model._is_accelerate_prepared = True
        if compiler.backend != DynamoBackend.NO and not handle.compiled.names:
            handle.compiled.compile(**compiler.to_kwargs())
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer; the states of a managed model's optimizer are not moved.

        Raises:
            ConfigError: under fp16: Accelerate's GradScaler looks for gradients outside chunks.
        """
        if isinstance(unwrap_optimizer(optimizer), GeminiOptimizer):
            if self.scaler is not None:
                raise ConfigError(
                    "Accelerate's fp16 scales gradients that are not in chunks; manage the model with "
                    "mixed_precision='fp16' and leave Accelerate's out, or use bf16 there"
                )
            device_placement = False
        return super().prepare_optimizer(optimizer, device_placement)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Compute the gradients of ``loss``; with ``mixed_precision="fp16"`` of a managed model they are
        scaled.
        """
        scaling = [each for _, each in self._pairs() if each.loss_scale is not None]
        if not scaling:
            super().backward(loss, **options)
            return
        scaled = super().backward
        scaling[0].run_backward(
            lambda scale: scaled(loss.float() * (1.0 if scale is None else scale), **options)
        )

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients by norm, for a managed model within the update; return the norm before."""
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizer = self.optimizer_of(params)
        if optimizer is None:
            return super().clip_grad_norm_(params, max_norm, norm_type)
        return optimizer.clip_grad_by_norm(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp gradients, for a managed model within the update."""
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizer = self.optimizer_of(params)
        if optimizer is None:
            super().clip_grad_value_(params, clip_value)
        else:
            optimizer.clip_grad_by_value(clip_value)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any
    ) -> Any:
        """Save everything; managed models and their optimizers through gemini.checkpoint. Collective.

        Hooks get all models and a dict of weights for each; a managed model's weights are read when a hook
        accesses them. A hook may remove a managed model's dict as a whole, and load the model itself in
        :meth:`load_state`.

        Raises:
            ConfigError: a hook changed weights in a managed model's dict, which would have no effect.
        """
        others = len([model for model in self._models if managed(model) is None])

        def take_out(_models: Any, weights: list[Any], _directory: str) -> None:
            changed = any(isinstance(state, LazyState) and not state.is_as_read for state in weights)
            weights[:] = [state for state in weights if not isinstance(state, LazyState)]
            if changed or len(weights) > others:
                raise ConfigError(
                    "a hook of save_state() has changed the weights of a managed model, which are streamed "
                    "from chunks, not from the dict that it was given; take them out as a whole "
                    "(weights.pop()) and write what is to be saved, or change the model before saving"
                )

        self._saves_lazily = True
        try:
            with self._other_optimizers_only(), _removed(self.register_save_state_pre_hook(take_out)):
                directory = super().save_state(output_dir, safe_serialization, **options)
        finally:
            self._saves_lazily = False
        for number, (model, optimizer) in enumerate(self._pairs()):
            checkpoint.save(_folder(directory, number), model, optimizer, keep=1)
        return directory

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Load a state from :meth:`save_state`; by default the last one that Accelerate has named.

        Raises:
            ConfigError: Accelerate's own Accelerator saved it.
            CheckpointError: it has no complete checkpoint.
        """
        pairs, given, directory = self._pairs(), set[int](), ""

        def look(_models: Any, found: str) -> None:
            nonlocal directory
            directory = found
            if pairs and not _folder(directory, 0).is_dir() and _is_accelerates(Path(directory)):
                raise ConfigError(
                    f"{directory} was saved by Accelerate's own Accelerator, and has no {_FOLDER}/ "
                    "with the states of managed models; give its weights (model.safetensors) to "
                    "load_state_dict() of the managed model, or make a directory of them for "
                    "gemini.from_pretrained(); the optimizer then restarts"
                )
            for number in range(len(pairs)):
                checkpoint.latest(_folder(directory, number))

        def take_out(models: list[Any], _directory: str) -> None:
            given.update(id(managed(model)) for model in models)
            models[:] = [model for model in models if managed(model) is None]

        first = self.register_load_state_pre_hook(look)
        self._load_model_state_pre_hook.move_to_end(first.id, last=False)  # before anything is loaded
        last = self.register_load_state_pre_hook(take_out)
        with self._other_optimizers_only(), _removed(first), _removed(last):
            super().load_state(input_dir, load_kwargs, **options)
        for number, (model, optimizer) in enumerate(pairs):
            # If a hook removed this model, the hook has loaded its weights.
            own = () if id(model) in given else model.module.state_dict(keep_vars=True).keys()
            load_keeping_random(_folder(directory, number), model, optimizer, leave=own)

    def optimizer_of(self, params: Iterable[Any]) -> GeminiOptimizer | None:
        """Return the optimizer that updates managed ``params``; None if they are unmanaged.

        Raises:
            ConfigError: they are managed, but no GeminiOptimizer was prepared for them.
        """
        slots = {param._slot for param in params if hasattr(param, "_slot")}
        if not slots:
            return None
        for _model, optimizer in self._pairs():
            if not slots.isdisjoint(optimizer.slots):
                return optimizer
        raise ConfigError(
            "these parameters are managed and accelerator.prepare() was not given the GeminiOptimizer that "
            "updates them"
        )

    def _pairs(self) -> list[tuple[ManagedModel, GeminiOptimizer]]:
        """Return each managed model with its optimizer, in the order in which the optimizers were
        prepared.
        """
        optimizers = [unwrap_optimizer(optimizer) for optimizer in self._optimizers]
        return [(each.model, each) for each in optimizers if isinstance(each, GeminiOptimizer)]

    @contextmanager
    def _without_compiler(self) -> Iterator[TorchDynamoPlugin]:
        """Turn Accelerate's compiler off within the block; yield the requested settings."""
        asked = self.state.dynamo_plugin
        self.state.dynamo_plugin = copy.copy(asked)
        self.state.dynamo_plugin.backend = DynamoBackend.NO
        try:
            yield asked
        finally:
            self.state.dynamo_plugin = asked

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return a model's weights. For hooks of :meth:`save_state` a managed model's are read on access."""
        handle = managed(model)
        if self._saves_lazily and handle is not None:
            return lazy_weights(handle)
        return super().get_state_dict(model, unwrap)

    @contextmanager
    def _other_optimizers_only(self) -> Iterator[None]:
        """Hide the optimizers of managed models from Accelerate within the block."""
        optimizers = self._optimizers
        self._optimizers = [o for o in optimizers if not isinstance(unwrap_optimizer(o), GeminiOptimizer)]
        try:
            yield
        finally:
            self._optimizers = optimizers


@contextmanager
def _removed(hook: Any) -> Iterator[None]:
    """Remove ``hook`` at the end of the block."""
    try:
        yield
    finally:
        hook.remove()


def managed(model: Any) -> ManagedModel | None:
    """Return the handle of a managed module or of a GeminiDDP; None for others."""
    handle = getattr(model, "__dict__", {}).get("_gemini")
    return handle if isinstance(handle, ManagedModel) else None


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate has wrapped."""
    while not isinstance(optimizer, GeminiOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def load_keeping_random(
    directory: str | os.PathLike[str],
    model: ManagedModel,
    optimizer: GeminiOptimizer,
    leave: Collection[str] = (),
) -> None:
    """Load a checkpoint without the states of random generators, which Accelerate restores itself."""
    state = rng.capture()
    try:
        checkpoint.load(directory, model, optimizer, leave=leave)
    finally:
        rng.restore(rng.parse(state))


def _is_accelerates(directory: Path) -> bool:
    """Return whether the directory has weights saved by Accelerate itself."""
    return any(file.is_file() for file in (*directory.glob("model*"), *directory.glob("pytorch_model*")))


def _folder(directory: str | os.PathLike[str], number: int) -> Path:
    return Path(directory) / (_FOLDER if number == 0 else f"{_FOLDER}_{number}")
