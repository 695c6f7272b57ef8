"""Updates by the CPU of chunks on HOST."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from gemini.chunk import ChunkManager
from gemini.chunk.chunk import CutChunk, StateSpec, host_tensor
from gemini.errors import StateError
from gemini.optim.kernels import AdamHyper, AdamRow, AdamStep, GradScale, run_rows
from gemini.optim.rule import Part, UpdateRule, UpdateStep
from gemini.runtime.gate.gradients import MASTER, StatePiece
from gemini.runtime.storage.model_storage import ChunkGroup, ManagedSlot

# Smallest and largest trial: four tensors of 8 MiB or 128 MiB each, the latter beyond the caches of servers.
_TRIED_ELEMENTS = 2**21, 2**25


class HostPart(NamedTuple):
    """A parameter with elements in a piece, its step, and whether to copy the parameter to its master first
    because user code wrote it.
    """

    slot: ManagedSlot
    step: UpdateStep
    rewritten: bool


def prepare_on_host(
    chunks: ChunkManager,
    group: ChunkGroup,
    piece: StatePiece,
    parts: Sequence[HostPart],
    rule_and_states: tuple[UpdateRule, tuple[StateSpec, ...]],
    aside: bool,
) -> Callable[[], None]:
    """Return a function that updates ``parts`` of a piece in place on HOST.

    The chunks of the piece, the parameters and the gradients must stay pinned on HOST until it has run. It
    first waits for copies to them. The arithmetic is that of DEVICE: placement changes no bit
    (docs/notes/adam.md).

    Args:
        chunks: the manager of the chunks.
        group: the chunk group of the piece.
        piece: the state piece.
        parts: the parameters to update.
        rule_and_states: the update rule, and the states that it keeps.
        aside: whether the function runs on another thread than the training thread.
    """
    param_chunk, grad_chunk, first = group.updated
    if grad_chunk is None or isinstance(param_chunk, CutChunk) or isinstance(grad_chunk, CutChunk):
        raise StateError("a group that is frozen, or cut, has no update on HOST")
    rule, states = rule_and_states
    kept = [piece.chunks[state.key] for state in states]
    used = [param_chunk, grad_chunk, *kept, *([piece.chunks[MASTER]] if piece.has_master else [])]
    tensors = {chunk.id: host_tensor(chunk) for chunk in used}
    values, grads = tensors[param_chunk.id], tensors[grad_chunk.id]

    def run() -> None:
        for chunk in used:
            chunks.wait_host(chunk, aside=aside)
        found: list[Part] = []
        for part in parts:
            start, stop = part.slot.overlapping(piece)
            flat = {
                state.name: tensors[chunk.id][part.slot.place_in(piece, state)]
                for state, chunk in zip(states, kept, strict=True)
            }
            place = slice(start - first, stop - first)
            param, half_out = values[place], None
            if piece.has_master:
                masters = tensors[piece.chunks[MASTER].id]
                param, half_out = masters[start - piece.start : stop - piece.start], param
                if part.rewritten:
                    param.copy_(half_out)
            found.append(Part(param, grads[place], flat, half_out, part.step, start - part.slot.start))
        rule.prepare(found, "cpu", chunks.device.processors)()

    return run


@cache
def elements_per_second(processors: tuple[int, ...] = (), numel: int = _TRIED_ELEMENTS[1]) -> float:
    """Measure how many elements the CPU updates per second with torch's threads, on ``processors`` if given.

    Measured once, in a fraction of a second, on memory that was touched before. ``numel``: the elements that
    a step updates; a smaller number makes the trial smaller.
    """
    least, most = _TRIED_ELEMENTS
    tried = max(least, min(numel, most))
    tensors = [torch.zeros(tried, dtype=torch.float32, device="cpu") for _ in range(4)]
    param, grad, exp_avg, exp_avg_sq = tensors
    step = AdamStep(AdamHyper(lr=0.0), 1, GradScale())
    row = AdamRow(param, grad, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})
    run_rows([row], [step], "cpu", processors)
    began = time.perf_counter()
    run_rows([row], [step], "cpu", processors)
    return tried / (time.perf_counter() - began)
