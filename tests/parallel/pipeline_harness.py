"""What the tests of pipelines share: a model, training it in one process, and training it in stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from tensor_harness import LANGUAGE_PLAN, Language
from torch import Tensor, nn

from gemini import CPUAdam
from gemini.parallel import Booster, HybridParallelPlugin

ADAM = {"lr": 1e-2, "eps": 1e-6}
MAX_NORM = 0.05  # less than any gradient has: clipping is active
CHUNKS: dict[str, Any] = {"min_chunk_size_mb": 0.004, "search_range_mb": 0.004, "non_model_bytes": 0}
BATCH = 16  # samples of a step, on all ranks together


@dataclass
class Trained:
    """``moved``: bytes that left DEVICE; ``peak``: the most that was there; ``more``: the bytes of gradients
    that were ``"sent"``, and those of ``"one exchange"`` of all between two ranks."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    moved: int = 0
    peak: int = 0
    more: dict[str, Any] = field(default_factory=dict)


def language(*, tied: bool = True) -> nn.Module:
    """Four blocks between an embedding and a head, which may be one weight."""
    torch.manual_seed(21)
    return Language(tied=tied)


def batch_of(step: int) -> Tensor:
    """The tokens of a step, of all ranks."""
    return torch.randint(37, (BATCH, 6), generator=torch.Generator().manual_seed(step))


def loss_of(output: Tensor, ids: Tensor) -> Tensor:
    """The mean loss of some sequences: each token is to be the next one."""
    return nn.functional.cross_entropy(output[:, :-1].reshape(-1, output.shape[-1]), ids[:, 1:].reshape(-1))


def train_whole(steps: int, *, tied: bool = True, max_norm: float = MAX_NORM) -> Trained:
    """Train in one process, with plain PyTorch."""
    model = language(tied=tied)
    return train_alone(model, lambda step: loss_of(model(batch_of(step)), batch_of(step)), steps, max_norm)


def train_alone(
    model: nn.Module, loss_of_step: Callable[[int], Tensor], steps: int, max_norm: float = MAX_NORM
) -> Trained:
    """Train any model so."""
    optimizer = CPUAdam(model.parameters(), **ADAM)
    found = Trained([], [], {})
    for step in range(steps):
        loss = loss_of_step(step)
        loss.backward()
        found.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
    found.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return found


def train_staged(
    steps: int, style: str, sizes: dict[str, int], tied: bool = True, options: dict[str, Any] | None = None
) -> Trained:
    """Train over the ranks; return what this rank has. ``options``: of the plugin, and ``batches``, into
    which that of a step is cut beforehand, all but the last of them under ``no_sync``."""
    options = {
        "tp_plan": LANGUAGE_PLAN,
        "num_microbatches": 4,
        "max_norm": MAX_NORM,
        **CHUNKS,
        **(options or {}),
    }
    batches, no_sync = options.pop("batches", 1), options.pop("no_sync", False)
    plugin = HybridParallelPlugin(pp_style=style, **sizes, **options)
    booster = Booster(plugin=plugin)
    model = language(tied=tied)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    ranks, found = plugin.data_ranks, Trained([], [], {})
    for step in range(steps):
        parts = batch_of(step).chunk(ranks.size)[ranks.number].chunk(batches)
        for index, part in enumerate(parts):
            waits = no_sync and index < batches - 1
            with booster.no_sync(model) if waits else nullcontext():
                out = booster.execute_pipeline(iter([part]), model, loss_of, optimizer)
        optimizer.step()
        found.losses.append(float(out["loss"]))
        found.norms.append(optimizer.get_grad_norm())
    partition = plugin.parts[model].partition
    found.weights = {
        k: v.clone() for k, v in partition.gather_state(model.state_dict(keep_vars=True)).items()
    }
    stats = model.stats()
    found.moved, found.peak = stats["d2h"]["bytes"], stats["device"]["peak_bytes"]
    if model.peers is not None:
        found.more["sent"] = model.peers.traffic.reduced
        found.more["one exchange"] = sum(group.grad.spec.nbytes for group in model.storage.groups) // 2
    model.manager.chunks.table.check_invariants()
    if plugin.mesh is not None:
        plugin.mesh.leave("ended the test")
    model.close()
    return found
