"""Case ``volume``: bytes that a rank sends and bytes that it holds, counted, against those of ZeRO-3."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from gemini.jobs.gpt.model import GPT, GPTConfig, language_loss, num_parameters
from gemini.model.ddp import GeminiDDP
from gemini.optim import CPUAdam, GeminiOptimizer
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session
from gemini_bench.trainee import GPT2_124M, MODEL_DATA_BYTES_PER_PARAMETER
from gemini_bench.zero_ranks import rank_of, run_ranks

# What chunks add: padding to equal parts, once per chunk.
VOLUME_RATIO = 1.0
MEMORY_RATIO = 1.05
_ITEM_BYTES = 4  # fp32


@dataclass(frozen=True)
class Settings:
    """The settings of the case. Tokens are few: neither bytes sent nor bytes of model data depend on them."""

    model: GPTConfig = GPT2_124M
    worlds: tuple[int, ...] = (2, 4)
    seq: int = 16
    warmup_steps: int = 2
    counted_steps: int = 2


QUICK = Settings(GPTConfig(layers=2, hidden=64, heads=2))


def run(session: Session, _rounds: int) -> CaseResult:
    """Count once for every number of ranks: a repetition would count the same."""
    settings = QUICK if session.quick else Settings()
    options = dataclasses.asdict(settings)
    rows: list[Row] = []
    measured: dict[str, Any] = {"num_parameters": num_parameters(settings.model)}
    for world in settings.worlds:
        session.progress(f"volume: {world} ranks")
        ranks = [run.data() for run in run_ranks(session, "zero_volume.count", options, world)]
        measured[f"{world} ranks"] = ranks
        rows += rows_of(ranks, num_parameters(settings.model))
    return CaseResult(rows, options, measured)


def rows_of(ranks: list[dict[str, Any]], numel: int) -> list[Row]:
    """Return the figures of the rank that sends, or holds, most."""
    world = len(ranks)
    once = _ITEM_BYTES * numel * (world - 1) / world
    gathered, reduced = (max(rank[name] for rank in ranks) for name in ("gathered_bytes", "reduced_bytes"))
    sent = max(rank["gathered_bytes"] + rank["reduced_bytes"] for rank in ranks)
    kept = MODEL_DATA_BYTES_PER_PARAMETER * numel / world
    held = max(rank["peak_bytes"] for rank in ranks)
    whole = max(rank["gather_room_bytes"] + rank["gradient_room_bytes"] for rank in ranks)
    return [
        Row(f"{world} ranks: sent by gathers, per step", gathered, "bytes"),
        Row(f"{world} ranks: sent by exchanges of gradients, per step", reduced, "bytes"),
        Row(f"{world} ranks: sent / two gathers and one reduction", sent / (3 * once), "x", VOLUME_RATIO),
        Row(f"{world} ranks: rounds per step", max(rank["rounds"] for rank in ranks), "rounds"),
        Row(f"{world} ranks: total / {world}", kept, "bytes"),
        Row(f"{world} ranks: room for what is whole", whole, "bytes"),
        Row(f"{world} ranks: peak of model data", held, "bytes"),
        Row(
            f"{world} ranks: peak / (total / {world} + room for what is whole)",
            held / (kept + whole),
            "x",
            MEMORY_RATIO,
        ),
    ]


def count(options: dict[str, Any]) -> dict[str, Any]:
    """Train as one rank with as few whole chunks as operators allow; return the counts."""
    values = {field.name: options[field.name] for field in dataclasses.fields(Settings)}
    settings = Settings(**{**values, "model": GPTConfig(**values["model"])})
    with rank_of(options) as rank:
        torch.manual_seed(rank)
        model = GeminiDDP(GPT(settings.model), "cpu", gather_bytes=1)
        optimizer = GeminiOptimizer(CPUAdam(model.parameters()), model)
        tokens = torch.randint(settings.model.vocab, (1, settings.seq + 1))
        before = (0, 0, 0)
        for number in range(settings.warmup_steps + settings.counted_steps):
            if number == settings.warmup_steps:
                before = _traffic(model)
            optimizer.backward(language_loss(model(tokens[:, :-1]), tokens[:, 1:]))
            optimizer.step()
        steps = settings.counted_steps
        gathered, reduced, rounds = (
            (after - start) / steps for after, start in zip(_traffic(model), before, strict=True)
        )
        sharding = model.manager.sharding
        assert sharding is not None
        gradients = [group.grad.spec.nbytes for group in model.storage.trainable_groups() if group.grad]
        result = {
            "gathered_bytes": gathered,
            "reduced_bytes": reduced,
            "rounds": rounds,
            "peak_bytes": model.stats()["device"]["peak_bytes"],
            "gather_room_bytes": sharding.gather_bytes,
            # One is made while another is exchanged, whose parts arrive beside it.
            "gradient_room_bytes": 3 * max(gradients),
        }
        model.close()
    return result


def _traffic(model: GeminiDDP) -> tuple[int, int, int]:
    assert model.peers is not None
    traffic = model.peers.traffic
    return traffic.gathered, traffic.reduced, traffic.rounds


TASKS = {"count": count}
