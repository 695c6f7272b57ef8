"""Data loaders that give every rank its own part of the data, in an order that depends only on the seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from gemini.errors import ConfigError
from gemini.parallel.booster.ranks import Ranks


class PassSampler(DistributedSampler[Any]):
    """A DistributedSampler that shuffles differently in every pass: each pass advances the epoch by one.

    :meth:`set_epoch` before a pass still chooses the epoch.
    """

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        self.epoch += 1
        return order


def prepare_dataloader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    ranks: Ranks,
    sampler_type: type[DistributedSampler[Any]] | None,
    options: dict[str, Any],
    divides: bool = True,
) -> DataLoader[Any]:
    """Build the loader of :meth:`Plugin.prepare_dataloader`. Without ``divides`` every rank gets all the
    data, in the same order.
    """
    sampler = None
    if divides:
        sampler = _sampler(dataset, ranks, sampler_type, shuffle=shuffle, seed=seed, drop_last=drop_last)
    # In every pass torch draws the base seed of the workers' generators from this one. The seed differs by
    # rank, or all ranks would augment alike.
    generator = torch.Generator()
    generator.manual_seed(seed + ranks.number * divides)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle if sampler is None else None,
        sampler=sampler,
        drop_last=drop_last,
        generator=options.pop("generator", generator),
        **options,
    )


def _sampler(
    dataset: Dataset[Any],
    ranks: Ranks,
    sampler_type: type[DistributedSampler[Any]] | None,
    *,
    shuffle: bool,
    seed: int,
    drop_last: bool,
) -> Sampler[Any] | None:
    """Return the sampler that divides the data; None for one process without a sampler class."""
    if not ranks.is_group and sampler_type is None:
        return None
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{type(dataset).__name__} is an IterableDataset, which has no indices to divide over "
            f"{ranks.size} ranks; let its __iter__ skip the samples of other ranks, and pass it to a plain "
            "torch.utils.data.DataLoader"
        )
    return (sampler_type or PassSampler)(
        dataset,
        num_replicas=ranks.size,
        rank=ranks.number,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
