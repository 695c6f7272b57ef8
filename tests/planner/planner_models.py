"""Small models and machines that searches are tried on."""

from __future__ import annotations

import random

import torch
from torch import nn

from gemini.forecast.machine import MachineSpeeds
from gemini.memstats.collectives import KINDS, CollectiveSpeed, CollectiveSpeeds, Figure
from gemini.memstats.trace import LinkSpeed
from gemini.parallel.layout_plan import Run
from gemini.parallel.sequence.outline import SequenceOutline
from gemini.planner.chunks import StageCapacity
from gemini.planner.search import Question
from gemini.planner.space import Pins

GIB = 2**30


class Block(nn.Module):
    """A residual layer of any width inside."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Net(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, inner: tuple[int, ...], width: int = 16, words: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, each) for each in inner)
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def net(*inner: int, width: int = 16) -> Net:
    """Return one on ``meta``."""
    with torch.device("meta"):
        return Net(inner, width).train()


def run_of(samples: int, length: int = 8) -> Run:
    """Return what runs a net on a micro-batch."""

    def run(model: nn.Module, sequence: SequenceOutline | None) -> torch.Tensor:
        ids = torch.empty(samples, length, dtype=torch.int64, device="meta")
        batch = {"input_ids": ids, "labels": ids}
        if sequence is not None:
            batch = sequence.cut(batch)
        loss: torch.Tensor = nn.functional.cross_entropy(
            model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        )
        return loss

    return run


def machine(seed: int = 0, *, faster: float = 1.0) -> MachineSpeeds:
    """Return a machine of random speeds, whose links between ranks are ``faster`` by a factor."""
    draw = random.Random(seed)

    def rate(low: float, high: float) -> float:
        return low * (high / low) ** draw.random()

    collectives = tuple(
        CollectiveSpeed(kind, ranks, Figure(rate(1e-6, 1e-3) / faster), Figure(rate(1e6, 1e10) * faster))
        for kind in KINDS
        for ranks in (2, 4)
    )
    links = tuple(
        LinkSpeed(name, rate(1e6, 1e10), rate(1e-6, 1e-4))
        for name in ("h2d", "d2h", "disk_read", "disk_write")
    )
    return MachineSpeeds(
        "drawn",
        {"fp32": rate(1e9, 1e13)},
        rate(1e9, 1e12),
        rate(1e8, 1e11),
        rate(1e-7, 1e-4),
        links,
        collectives=CollectiveSpeeds(collectives),
    )


def question(num_ranks: int = 4, batch: int = 8, seed: int = 0, **changed: object) -> Question:
    """Return a question about one of the machines."""
    given: dict[str, object] = {
        "machine": machine(seed),
        "capacity": StageCapacity(GIB),
        "pins": Pins({}),
        **changed,
    }
    return Question(num_ranks, batch, **given)  # type: ignore[arg-type]
