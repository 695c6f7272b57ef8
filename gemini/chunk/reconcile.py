"""Making memory what the chunk table says, after an exception left a decision perhaps half carried out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gemini import _C
from gemini.chunk.chunk import Chunk
from gemini.chunk.memory import AnyMemory
from gemini.errors import DeviceFullError

_WAIT_SECONDS = 1.0  # wakes a waiter now and then so that Ctrl-C is seen


def reconcile(
    table: _C.ChunkTable,
    chunks: Sequence[Chunk],
    memory: AnyMemory,
    unmap: Callable[[Chunk, _C.Tier], None],
) -> set[int]:
    """Make memory what ``table`` says after an exception, Ctrl-C included, at any point of carrying out its
    actions. ``unmap`` takes the memory of one copy back.

    Transfers under way end first and count as aborted: their source is as before. May be interrupted and
    repeated. Returns the chunks for which the device has no memory: the table counts them as there, but their
    first use was interrupted, so they have no content.
    """
    while memory.num_in_flight:
        memory.wait_any(_WAIT_SECONDS)
        memory.poll()
    memory.poll()
    for chunk in chunks:
        flight = table.flight_id(chunk.id)
        if flight:
            table.abort(flight)
    held = [table.held_tiers(chunk.id) for chunk in chunks]
    for chunk, tiers in zip(chunks, held, strict=True):
        for tier in (_C.Tier.DEVICE, _C.Tier.HOST):
            if tier not in tiers:
                unmap(chunk, tier)
    unfounded = set()
    for chunk, tiers in zip(chunks, held, strict=True):
        # Its first use was interrupted: it has no content yet.
        if _C.Tier.DEVICE in tiers and not chunk.window.mapped:
            try:
                memory.map(chunk.window, zero=chunk.spec.kind.starts_at_zero)
            except DeviceFullError:
                unfounded.add(chunk.id)
        if _C.Tier.HOST in tiers and not chunk.host.mapped:
            memory.map_host(chunk.host)
    return unfounded


def idle_tensors(table: _C.ChunkTable, chunks: set[int]) -> list[int]:
    """Return the tensors of ``chunks`` that count as having content and are not in use."""
    tensors = range(table.num_tensors()) if chunks else ()
    return [
        tensor
        for tensor in tensors
        if table.chunk_of(tensor) in chunks and table.tensor_state(tensor) == _C.TensorState.HOLD
    ]
