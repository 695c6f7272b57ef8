"""Tensors to write, as streams of pieces."""

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
    """A tensor to write. ``stream(sink)`` passes all its elements to ``sink``, row by row, in pieces of the
    dtype of ``spec``.

    ``sink`` must use a piece before it returns, because the piece may be a view of borrowed memory. A stream
    that gathers its tensor from all ranks must run on all of them.
    """

    spec: TensorSpec
    stream: Callable[[Sink], None]


def whole_source(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[], torch.Tensor]
) -> TensorSource:
    """Return the source of a tensor that ``read`` returns, on any device, when the stream runs."""

    def stream(sink: Sink) -> None:
        sink(read().detach().to("cpu", dtype))

    return TensorSource(TensorSpec(name, dtype, shape), stream)


def copied_source(name: str, tensor: torch.Tensor) -> TensorSource:
    """Return the source of a tensor. It is copied from a GPU, or gathered if it is a DTensor, when it is
    written. Raises CheckpointError for a tensor that is no dense array.
    """
    if isinstance(tensor, DTensor):
        return whole_source(name, tensor.dtype, tuple(tensor.shape), lambda: whole(tensor))
    require_strided(name, tensor)
    return whole_source(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)
