"""Tensors to be written, as streams of pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from gemini.checkpoint.tensor_file import TensorSpec, require_strided
from gemini.parallel.booster.data_parallel import whole

Sink = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written: ``stream(sink)`` hands all its elements, row by row, to ``sink`` in pieces of
    the type of ``spec``.

    A piece is used before ``sink`` returns; it may be a view of memory that is only borrowed. A stream that
    gathers its tensor from all ranks must run on all of them.
    """

    spec: TensorSpec
    stream: Callable[[Sink], None]


def whole_source(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[], torch.Tensor]
) -> TensorSource:
    """Return the source of a tensor that ``read`` returns whole, on any device, when it is written."""

    def stream(sink: Sink) -> None:
        sink(read().detach().to("cpu", dtype))

    return TensorSource(TensorSpec(name, dtype, shape), stream)


def copied_source(name: str, tensor: torch.Tensor) -> TensorSource:
    """Return the source of a tensor that may be on a GPU; it is copied from there when it is written. A
    DTensor is gathered then. Raises CheckpointError for one that is no array."""
    if isinstance(tensor, DTensor):
        return whole_source(name, tensor.dtype, tuple(tensor.shape), lambda: whole(tensor))
    require_strided(name, tensor)
    return whole_source(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)
