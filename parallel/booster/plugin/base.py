"""The interface between a booster and its plugins, and the mixed precision of plugins that cast the model."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from gemini.errors import ConfigError
from gemini.parallel.booster.checkpoint import model_files, optimizer_files
from gemini.parallel.booster.checkpoint.sources import Names
from gemini.parallel.booster.checkpoint.writing import FileLayout
from gemini.parallel.booster.distributed_loader import prepare_dataloader
from gemini.parallel.booster.mixed_precision import (
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    Precision,
)
from gemini.parallel.booster.ranks import Ranks, join_launched_group
from gemini.parallel.pipeline.pipeline import Executed

Criterion = Callable[..., Any]
Path = str | os.PathLike[str]


class Boosted(NamedTuple):
    """The result of :meth:`Plugin.configure`: model, optimizer and loss function, wrapped."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    criterion: Criterion | None


class Plugin(ABC):
    """A way to train a model: over processes, and in which memory."""

    process_group: dist.ProcessGroup | None = None
    divides_experts = False  # whether ranks may hold different experts

    @property
    def ranks(self) -> Ranks:
        """The processes that train the model together."""
        return Ranks(self.process_group)

    @abstractmethod
    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        criterion: Criterion | None,
        precision: Precision | None,
    ) -> Boosted:
        """Wrap model, optimizer and loss function. Raises ConfigError if the plugin cannot train them."""

    @abstractmethod
    def no_sync(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> AbstractContextManager[Any]:
        """Return a context in which backward passes accumulate gradients without synchronizing ranks."""

    @property
    def data_ranks(self) -> Ranks:
        """The processes that divide the data. Ranks outside this group use the same data as a rank in it."""
        return self.ranks

    def execute_pipeline(
        self, batch: Any, model: nn.Module, criterion: Criterion | None, **options: Any
    ) -> Executed:
        """Run a batch through the stages of a model; see :meth:`Booster.execute_pipeline`. Raises ConfigError
        if the plugin has no stages.
        """
        raise ConfigError(
            f"{type(self).__name__} has no pipeline stages; call model(...) and booster.backward(loss, "
            "optimizer), or use HybridParallelPlugin, which also runs execute_pipeline() with pp_size=1"
        )

    def save_model(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        checkpoint: Path,
        layout: FileLayout,
    ) -> None:
        """Write the weights of a model, boosted or not; see :meth:`Booster.save_model`."""
        model_files.save_model(model, optimizer, checkpoint, layout, self.ranks)

    def load_model(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        checkpoint: Path,
        ranks: Ranks | None,
        *,
        strict: bool,
    ) -> None:
        """Read weights into a model; ``ranks``: None if it is not boosted. See :meth:`Booster.load_model`."""
        model_files.load_model(model, optimizer, checkpoint, ranks, strict=strict)

    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, names: Names, checkpoint: Path, layout: FileLayout
    ) -> None:
        """Write the state of a boosted optimizer; see :meth:`Booster.save_optimizer`. ``names`` are those of
        its parameters.
        """
        optimizer_files.save_optimizer(optimizer, names, checkpoint, layout, self.ranks)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, names: Names, checkpoint: Path) -> None:
        """Read the state of a boosted optimizer; see :meth:`Booster.load_optimizer`."""
        optimizer_files.load_optimizer(optimizer, names, checkpoint, self.ranks)

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        *,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type[DistributedSampler[Any]] | None = None,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """Return a loader that gives each rank its own part of ``dataset``; on one process, all of it.

        The order, and the random numbers of workers, depend only on ``seed`` and the rank. Every pass
        shuffles again; ``loader.sampler.set_epoch(number)`` chooses the next order.

        Args:
            batch_size: samples per batch of one rank.
            shuffle, seed: whether and how to shuffle.
            drop_last: leave out the last batch if it is not full; without it, ranks repeat a few samples so
                that all have the same number.
            distributed_sampler_cls: the class of the sampler, instead of :class:`PassSampler`.
            kwargs: further arguments of :class:`torch.utils.data.DataLoader`.

        Raises:
            ConfigError: the dataset cannot be divided over ranks.
        """
        join_launched_group()
        return prepare_dataloader(
            dataset,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            ranks=self.data_ranks,
            sampler_type=distributed_sampler_cls,
            options={"pin_memory": pin_memory, "num_workers": num_workers, **kwargs},
        )


_SCALER = frozenset(
    (
        "initial_scale",
        "min_scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "hysteresis",
        "max_scale",
        "log_num_zeros_in_grad",
    )
)


def with_precision(
    plugin: str, key: str, options: dict[str, Any], scaler: dict[str, Any], precision: Precision | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``options`` and ``scaler`` with the booster's ``precision`` added, for a plugin that casts the
    whole model. ``key`` is the plugin's own argument for the precision.

    Raises:
        ConfigError: the plugin and the booster were given different values, or a setting of autocast.
    """
    if precision is None:
        return options, scaler
    settings = precision.settings
    if isinstance(settings, FP16TorchMixedPrecision):
        raise ConfigError(
            f"FP16TorchMixedPrecision is autocast, but {plugin} casts the whole model; pass "
            "mixed_precision='fp16', or FP16NaiveMixedPrecision(...) to set the loss scale"
        )
    name = "bf16" if precision.name == "bf16" else "fp16"
    if options.get(key) not in (None, name, precision.dtype):
        raise ConfigError(
            f"{plugin} got {key}={options[key]!r} and the booster got mixed_precision={precision.name!r}; "
            "set the precision in one of them"
        )
    if isinstance(settings, FP16NaiveMixedPrecision):
        if twice := sorted(scaler.keys() & _SCALER):
            raise ConfigError(
                f"{', '.join(twice)} were given to {plugin} and to FP16NaiveMixedPrecision; set each in one "
                "of them"
            )
        scaler = {**scaler, **vars(settings)}
    return {**options, key: name}, scaler
