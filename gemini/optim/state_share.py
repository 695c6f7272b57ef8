"""Which optimizer states of a managed model are stowed in a file: the share that its Adam was made with."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gemini.chunk import Chunk
from gemini.optim.kernel_adam import KernelAdam
from gemini.optim.managed_optimizer import ManagedOptimizer


def choose_share(states: Iterable[tuple[Chunk, int]], fraction: float) -> list[tuple[Chunk, int]]:
    """Choose ``fraction`` of the bytes of ``states``, up to one chunk more, evenly over their order: so what
    is read and written is hidden behind the updates of the others."""
    chosen, seen_bytes, chosen_bytes = [], 0, 0
    for chunk, tensor in states:
        seen_bytes += chunk.spec.nbytes
        if chosen_bytes < fraction * seen_bytes:
            chosen.append((chunk, tensor))
            chosen_bytes += chunk.spec.nbytes
    return chosen


def stow_share(optimizer: ManagedOptimizer, optim: torch.optim.Optimizer) -> frozenset[int]:
    """Have the states of ``optimizer`` be stowed as far as ``optim``, which it drives, asks for it, and no
    others but those of the model's other optimizers; return the tensors.

    Raises:
        ConfigError, IoError: the file cannot be made; OutOfBudgetError: states of an earlier optimizer that
            are to be stowed no more do not fit the tiers.
    """
    model, mine = optimizer.model, optimizer.slots
    states = [
        (chunk, piece.tensors[kind])
        for group in model.storage.trainable_groups()
        for piece in group.pieces
        if any(slot in mine and slot.start < piece.stop and piece.start < slot.stop for slot in group.slots)
        for kind, chunk in piece.chunks.items()
    ]
    adam = optim if isinstance(optim, KernelAdam) else None
    chosen = choose_share(states, adam.disk_fraction if adam is not None else 0.0)
    wanted = frozenset(tensor for _, tensor in chosen)
    manager, chunks = model.manager, model.manager.chunks
    if chosen or chunks.stow is not None:  # what was on DEVICE for good may be no longer
        manager.end_residence()
    others = [each.stowed for each in model.optimizers if each is not optimizer]
    if chunks.stow is not None:
        kept = wanted.union(*others)
        chunks.stow.remove([tensor for _, tensor in states if tensor in chunks.stow and tensor not in kept])
    if chosen and adam is not None:
        directory = chunks.budgets.disk_dir
        directories = adam.disk_directories or ([directory] if directory is not None else None)
        chunks.open_stow().add(chosen, directories, checksums=adam.disk_checksums)
    return wanted
