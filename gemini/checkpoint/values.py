"""A parameter's weight and moments as sources of a file: its elements come from the pinned chunk."""

from __future__ import annotations

from functools import partial

import torch

from gemini.checkpoint.tensor_file import Sink, TensorSource
from gemini.chunk import ChunkKind
from gemini.ddp import GeminiDDP
from gemini.runtime import ManagedSlot, refresh_master


def weight_source(model: GeminiDDP, slot: ManagedSlot) -> TensorSource:
    """Return the source of a weight: of its fp32 master if it has one, else in its type but at least fp32."""
    own = slot.param_view.dtype
    dtype = own if own.itemsize > 4 else torch.float32
    return TensorSource(slot.name, dtype, tuple(slot.param_view.shape), partial(_stream_weight, model, slot))


def moment_source(model: GeminiDDP, slot: ManagedSlot, kind: ChunkKind) -> TensorSource:
    """Return the source of an fp32 moment."""
    shape = tuple(slot.param_view.shape)
    return TensorSource(slot.name, torch.float32, shape, partial(_stream_state, model, slot, kind))


@torch.no_grad()
def _stream_weight(model: GeminiDDP, slot: ManagedSlot, sink: Sink) -> None:
    if any(piece.has(ChunkKind.MASTER) for piece in slot.group.pieces):
        refresh_master(slot, model.manager)
        _stream_state(model, slot, ChunkKind.MASTER, sink)
        return
    with model.manager.operator(slot.param_ref.tensors):
        view = slot.param_view
        sink(view.float() if view.dtype.itemsize < 4 else view)


@torch.no_grad()
def _stream_state(model: GeminiDDP, slot: ManagedSlot, kind: ChunkKind, sink: Sink) -> None:
    contiguous = slot.param_view.is_contiguous()
    # Elements lie in a chunk in the order of the parameter's memory; a file wants rows.
    shuffled = None if contiguous else torch.empty_strided(slot.param_view.shape, slot.param_view.stride())
    for piece in slot.group.pieces:
        start, stop = slot.overlapping(piece)
        if start >= stop:
            continue
        with model.manager.operator((piece.tensors[kind],)):
            values = piece.flat(kind, start, stop)
            if shuffled is None:
                sink(values)
            else:
                flat = torch.as_strided(shuffled, (shuffled.numel(),), (1,))
                flat[start - slot.start : stop - slot.start] = values
    if shuffled is not None:
        sink(shuffled)
