"""Booster: one training program for every way to train."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from gemini.checkpoint.contents import Scheduler
from gemini.errors import ConfigError
from gemini.parallel.booster.checkpoint import optimizer_files, writing
from gemini.parallel.booster.checkpoint.sources import Names, parameter_names
from gemini.parallel.booster.mixed_precision import MixedPrecision, choose_precision
from gemini.parallel.booster.plugin import Plugin, TorchDDPPlugin
from gemini.parallel.booster.plugin.base import Criterion
from gemini.parallel.booster.ranks import join_launched_group
from gemini.parallel.moe.divide import divided_experts
from gemini.parallel.pipeline.batches import ENDED

logger = logging.getLogger(__name__)
Path = str | os.PathLike[str]
_Reference = Callable[[], torch.optim.Optimizer | None]


class Backward(Protocol):
    """The method that the optimizers returned by :meth:`Booster.boost` add."""

    def backward(self, loss: torch.Tensor) -> None: ...


class _Names:
    """The names of a model's parameters. A parameter that was removed keeps its last name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = ref(model)
        self._names = parameter_names(model)

    def now(self) -> Names:
        model = self._model()
        if model is not None:
            self._names |= parameter_names(model)
        return self._names


class Booster:
    """Give a model, its optimizer and the objects that belong to them the features of a plugin::

        booster = Booster(plugin=GeminiPlugin(device_bytes="4GiB"))
        model, optimizer, criterion, _, _ = booster.boost(model, optimizer, criterion)
        ...
        booster.backward(criterion(model(batch), target), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()

    The same program runs on one process without a launcher, and under ``torchrun``.

    Args:
        mixed_precision: None (fp32), ``"fp16"``, ``"bf16"``, ``"fp16_naive"`` or an object of
            :mod:`gemini.parallel.booster.mixed_precision`. A plugin that replicates the model computes under
            torch's autocast; the others cast the model and keep fp32 masters.
        plugin: how to train; None means TorchDDPPlugin().

    Raises:
        ConfigError: the mixed precision is unknown, or ``plugin`` is not a Plugin.
    """

    def __init__(
        self, mixed_precision: str | MixedPrecision | None = None, plugin: Plugin | None = None
    ) -> None:
        if plugin is not None and not isinstance(plugin, Plugin):
            raise ConfigError(
                f"plugin is {plugin!r}; pass an object of a class in gemini.parallel.booster.plugin, such as "
                "GeminiPlugin() or TorchDDPPlugin()"
            )
        self.plugin = plugin or TorchDDPPlugin()
        self._precision = choose_precision(mixed_precision)
        self._warned_of_pickle = False
        # Weak keys: boost()'s results. Optimizers keep their models alive, so they must not be values here.
        self._models: WeakKeyDictionary[nn.Module, _Reference] = WeakKeyDictionary()
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, _Names] = WeakKeyDictionary()

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Criterion | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, Any, Any, Any, Any]:
        """Return all five arguments, boosted if the plugin changes them; None for those not given.

        The model is changed in place; use it only through the returned object. A scheduler made for
        ``optimizer`` keeps working.

        Raises:
            ConfigError: the plugin cannot train these.
            OutOfBudgetError: they do not fit the given budgets.
        """
        self._check_new(model, optimizer)
        join_launched_group()
        if lr_scheduler is not None:
            _check_scheduler(lr_scheduler, optimizer)
        if dataloader is not None:
            self._check_dataloader(dataloader)
        boosted = self.plugin.configure(model, optimizer, criterion, self._precision)
        self._models[boosted.model] = lambda: None
        if boosted.optimizer is not None:
            self._models[boosted.model] = ref(boosted.optimizer)
            self._optimizers[boosted.optimizer] = _Names(boosted.model)
        return boosted.model, boosted.optimizer, boosted.criterion, dataloader, lr_scheduler

    def backward(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Compute the gradients of ``loss``, scaled as the mixed precision requires."""
        self._require_boosted(optimizer)
        cast(Backward, optimizer).backward(loss)

    def no_sync(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which backward passes accumulate gradients without synchronizing ranks. Do not
        step inside it.
        """
        if model not in self._models:
            raise ConfigError("no_sync() takes a model that boost() of this booster returned")
        return self.plugin.no_sync(model, optimizer or self._models[model]())

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        return_loss: bool = True,
        return_outputs: bool = False,
        count: Callable[[Any], float] | None = None,
    ) -> dict[str, Any]:
        """Take the next batch, cut it into micro-batches and run them through the stages of the model,
        forward and backward; without an ``optimizer``, forward only. For models that HybridParallelPlugin
        boosted, with one stage or several. All ranks call it. Afterwards call ``optimizer.step()``, or pass
        another batch, which adds its gradients.

        A batch is a dict of the model's keywords, a tensor, or a tuple of the model's input and anything else
        that ``criterion(outputs, micro_batch)`` needs. The criterion returns the mean loss of a micro-batch.
        All stages of a pipeline must get the same batch.

        Args:
            return_loss: put ``"loss"`` into the result on every rank: the mean over micro-batches and ranks.
            return_outputs: put ``"outputs"`` into the result, a list by micro-batch, on ranks with the last
                stage (None on the others).
            count: returns the weight of a micro-batch's loss, for example its number of tokens; None weights
                all equally.

        Raises:
            ConfigError: the batch cannot be cut, or the plugin has no stages.
            StateError: another rank has failed; the message says where and why.
            StopIteration: ``data_iter`` has ended, on all ranks.
        """
        if model not in self._models:
            raise ConfigError("execute_pipeline() takes a model that boost() of this booster returned")
        if optimizer is not None:
            self._names_of(optimizer)
        with torch.set_grad_enabled(optimizer is not None):
            done = self.plugin.execute_pipeline(
                next(data_iter, ENDED),
                model,
                criterion,
                count=count,
                return_loss=return_loss,
                return_outputs=return_outputs,
            )
        return {"loss": done.loss, "outputs": done.outputs}

    # -- files -----------------------------------------------------------------------------------

    def save_model(
        self,
        model: nn.Module,
        checkpoint: Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = True,
    ) -> None:
        """Write the weights to ``checkpoint``: a file, or with ``shard`` a directory that transformers reads.

        All ranks must call it; the first one writes. It keeps one tensor at a time in memory besides the
        model. The previous checkpoint stays loadable until the new one is complete. For 16-bit weights with
        fp32 masters the masters are written.

        Args:
            gather_dtensor: write whole tensors; must be True.
            prefix: the beginning of the file names in the directory.
            size_per_shard: the largest file in MB (2**20 bytes); a larger tensor gets a file of its own.
            use_safetensors: files are safetensors in any case, because nothing here is pickled. False logs a
                warning, once per booster, and writes the same files.

        Raises:
            IoError: the files cannot be written.
            CheckpointError: the model holds something that a file cannot.
        """
        layout = writing.layout(shard, prefix, size_per_shard)
        writing.require_true("gather_dtensor", gather_dtensor, "files hold whole tensors")
        if not use_safetensors and not self._warned_of_pickle and self.plugin.ranks.is_first:
            self._warned_of_pickle = True
            logger.warning(
                "save_model(use_safetensors=False): %s is written as safetensors, which load_model() and "
                "transformers read; torch.save(model.state_dict(), ...) writes the pickled format",
                os.fspath(checkpoint),
            )
        self.plugin.save_model(model, self._optimizer_of(model), checkpoint, layout)

    def load_model(self, model: nn.Module, checkpoint: Path, strict: bool = True) -> None:
        """Read weights into a model, boosted or not. For a boosted model all ranks must call it.

        ``checkpoint`` is a safetensors file, a file of ``torch.save`` (read without running any code), a
        directory of :meth:`save_model` or of transformers, or one of :mod:`gemini.checkpoint`. Without
        ``strict``, names that only one side has are skipped.

        Raises:
            CheckpointError: it is none of these, damaged, or made for another model, here or, for a boosted
                model, on another rank; nothing was changed.
        """
        ranks = self.plugin.ranks if model in self._models else None
        self.plugin.load_model(model, self._optimizer_of(model), checkpoint, ranks, strict=strict)

    def save_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        checkpoint: Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
    ) -> None:
        """Write the optimizer's state, groups and loss scale; arguments and guarantees as for
        :meth:`save_model`.

        States are whole tensors, stored by parameter name. They can be loaded by any number of ranks, with
        stages and parts of other sizes, and by the other plugins with an optimizer of the same kind.
        """
        names = self._require_boosted(optimizer)
        layout = writing.layout(shard, prefix, size_per_shard)
        writing.require_true("gather_dtensor", gather_dtensor, "files hold whole tensors")
        self.plugin.save_optimizer(optimizer, names, checkpoint, layout)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
        """Read the files of :meth:`save_optimizer`. All ranks must call it.

        Raises:
            CheckpointError: it is damaged or made for other parameters, here or on another rank; nothing was
                changed.
        """
        names = self._require_boosted(optimizer)
        self.plugin.load_optimizer(optimizer, names, checkpoint)

    def save_lr_scheduler(self, lr_scheduler: Scheduler, checkpoint: Path) -> None:
        """Write the scheduler's state to a file. All ranks must call it; the first one writes."""
        optimizer_files.save_scheduler(lr_scheduler, checkpoint, self.plugin.ranks)

    def load_lr_scheduler(self, lr_scheduler: Scheduler, checkpoint: Path) -> None:
        """Read the file of :meth:`save_lr_scheduler`. All ranks must call it.

        Raises:
            CheckpointError: it is damaged, here or on another rank; nothing was changed.
        """
        optimizer_files.load_scheduler(lr_scheduler, checkpoint, self.plugin.ranks)

    # -- internal --------------------------------------------------------------------------------

    def _optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer | None:
        return self._models[model]() if model in self._models else None

    def _require_boosted(self, optimizer: torch.optim.Optimizer) -> Names:
        return self._names_of(optimizer).now()

    def _names_of(self, optimizer: torch.optim.Optimizer) -> _Names:
        try:
            return self._optimizers[optimizer]
        except (KeyError, TypeError):
            raise ConfigError(
                f"this {type(optimizer).__name__} was not returned by boost() of this booster; write model, "
                "optimizer, ... = booster.boost(model, optimizer, ...)"
            ) from None

    def _check_new(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}; boost() takes the model first")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer is a {type(optimizer).__name__}; boost() takes model, optimizer, criterion, "
                "dataloader, lr_scheduler in this order"
            )
        if model in self._models or (optimizer is not None and optimizer in self._optimizers):
            raise ConfigError("this model or optimizer is already boosted")
        experts = divided_experts(model)
        if experts is not None and not self.plugin.divides_experts:
            raise ConfigError(
                f"the experts of the model were divided among {experts.ranks.size} ranks when it was built, "
                f"but {type(self.plugin).__name__} would average their gradients over all ranks; pass "
                f"LowLevelZeroPlugin(ep_size={experts.ranks.size}), or launch without moe"
            )
        if optimizer is not None:
            _check_parameters(model, optimizer)

    def _check_dataloader(self, dataloader: DataLoader[Any]) -> None:
        ranks, sampler = self.plugin.data_ranks, getattr(dataloader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            if (sampler.num_replicas, sampler.rank) != (ranks.size, ranks.number):
                logger.warning(
                    "the dataloader's sampler gives this rank part %d of %d, but it needs part %d of %d: "
                    "ranks that hold parts of one model take the same batches; make the loader with "
                    "plugin.prepare_dataloader(...), or its sampler with "
                    "num_replicas=plugin.data_ranks.size, rank=plugin.data_ranks.number",
                    *(sampler.rank, sampler.num_replicas, ranks.number, ranks.size),
                )
        elif ranks.size > 1:
            logger.warning(
                "the dataloader does not divide its data over the %d ranks along dp; make it with "
                "plugin.prepare_dataloader(...), unless the dataset divides the data itself",
                ranks.size,
            )


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if the optimizer updates no parameter of the model. Other parameters in it, such as a
    criterion's, are allowed.
    """
    own = {id(param) for param in model.parameters()}
    updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if own and not own & updated:
        raise ConfigError(
            f"the optimizer updates no parameter of this {type(model).__name__}; make it from "
            "model.parameters() of the model passed to boost(), after the model is complete"
        )


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ConfigError if the scheduler belongs to another optimizer."""
    driven = getattr(scheduler, "optimizer", None)
    if isinstance(driven, torch.optim.Optimizer) and driven is not optimizer:
        raise ConfigError(
            "lr_scheduler was made for another optimizer; pass the scheduler and its optimizer to the same "
            "boost()"
        )
