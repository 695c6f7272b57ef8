"""What a booster asks of a plugin."""

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
from gemini.parallel.booster import checkpoint as files
from gemini.parallel.booster.dataloader import prepare_dataloader
from gemini.parallel.booster.mixed_precision import Precision
from gemini.parallel.booster.ranks import Ranks, join_launched_group
from gemini.parallel.pipeline import Executed

Criterion = Callable[..., Any]
Path = str | os.PathLike[str]


class Boosted(NamedTuple):
    """What a plugin makes of a model, its optimizer and its loss function."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    criterion: Criterion | None


class Plugin(ABC):
    """How a model is trained: over processes, and in which memory."""

    process_group: dist.ProcessGroup | None = None

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
        """Wrap model, optimizer and loss function. Raises ConfigError for what the plugin cannot do."""

    @abstractmethod
    def no_sync(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> AbstractContextManager[Any]:
        """Return a context in which backward passes accumulate gradients without synchronizing ranks."""

    @property
    def data_ranks(self) -> Ranks:
        """The processes that divide the data; others get the same as one of them."""
        return self.ranks

    def execute_pipeline(
        self, batch: Any, model: nn.Module, criterion: Criterion | None, **options: Any
    ) -> Executed:
        """Run a batch through the stages of a model; see :meth:`Booster.execute_pipeline`. Raises ConfigError
        for a plugin without stages."""
        raise ConfigError(
            f"{type(self).__name__} has no stages: call model(...) and booster.backward(loss, optimizer), or "
            "use HybridParallelPlugin, which runs with pp_size=1 too"
        )

    def save_model(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        checkpoint: Path,
        layout: files.Layout,
    ) -> None:
        """Write the weights of a model, boosted or not; see :meth:`Booster.save_model`."""
        files.save_model(model, optimizer, checkpoint, layout, self.ranks)

    def load_model(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        checkpoint: Path,
        ranks: Ranks | None,
        *,
        strict: bool,
    ) -> None:
        """Read weights into a model; ``ranks``: None: it is not boosted. See :meth:`Booster.load_model`."""
        files.load_model(model, optimizer, checkpoint, ranks, strict=strict)

    def save_optimizer(
        self, optimizer: torch.optim.Optimizer, names: files.Names, checkpoint: Path, layout: files.Layout
    ) -> None:
        """Write the state of a boosted optimizer; ``names``: of its parameters. See
        :meth:`Booster.save_optimizer`."""
        files.save_optimizer(optimizer, names, checkpoint, layout, self.ranks)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, names: files.Names, checkpoint: Path) -> None:
        """Read the state of a boosted optimizer; see :meth:`Booster.load_optimizer`."""
        files.load_optimizer(optimizer, names, checkpoint, self.ranks)

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

        The order, and what workers draw at random, depend on ``seed`` and the rank alone. Every pass shuffles
        anew; ``loader.sampler.set_epoch(number)`` chooses which order comes next.

        Args:
            batch_size: samples per batch of one rank.
            shuffle, seed: whether and how to shuffle.
            drop_last: leave out the last batch if it is not full; without it, ranks repeat a few samples so
                that all have the same number.
            distributed_sampler_cls: the class of the sampler, in place of our own.
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
