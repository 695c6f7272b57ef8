"""Data loaders of a launched run."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset

from gemini.parallel.booster.distributed_loader import prepare_dataloader
from gemini.parallel.booster.ranks import Ranks, join_launched_group
from gemini.parallel.engine.initialize import data_group


def get_dataloader(
    dataset: Dataset[Any],
    *,
    batch_size: int = 1,
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **options: Any,
) -> DataLoader[Any]:
    """Return a loader that gives each rank of data parallelism its own part of ``dataset``; ranks with parts
    of one model get the same data. Without ``add_sampler`` every rank gets all of it.

    The order depends only on ``seed``, and every pass shuffles again. Further ``options`` are passed to
    :class:`torch.utils.data.DataLoader`.

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
        ranks=Ranks(data_group()),
        sampler_type=None,
        divides=add_sampler,
        options={"pin_memory": pin_memory, "num_workers": num_workers, **options},
    )
