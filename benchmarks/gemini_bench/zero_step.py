"""Case ``fsdp2``: a step of GPT-2 124M cut among two ranks, against torch's FSDP2 and DDP."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gemini.errors import StateError
from gemini.jobs.gpt.model import GPT, GPTConfig, language_loss, num_parameters
from gemini.model.ddp import GeminiDDP
from gemini.optim import CPUAdam, GeminiOptimizer
from gemini_bench.paired import Spread, in_turn, spread_row
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session
from gemini_bench.trainee import GPT2_124M, Batch
from gemini_bench.zero_ranks import rank_of, run_ranks

TIME_RATIO = 0.85
MEMORY_RATIO = 0.75
# Losses of those who do the same differ by the order of additions.
_TOLERANCE = 1e-3
_SEED = 1234
_LEARNING_RATE = 1e-4
_PARTS = ("forward", "backward", "update")


@dataclass(frozen=True)
class Settings:
    """The settings of the case. ``batch``: sequences of ``seq`` tokens on each rank."""

    model: GPTConfig = GPT2_124M
    world: int = 2
    batch: int = 2
    seq: int = 128
    warmup_steps: int = 2
    measured_steps: int = 3


QUICK = Settings(GPTConfig(layers=2, hidden=64, heads=2), seq=32, measured_steps=2)


class Optimizer(Protocol):
    """The operations that each contender's optimizer must offer after backward."""

    def step(self) -> object: ...

    def zero_grad(self) -> None: ...


@dataclass(frozen=True)
class Wrapped:
    """A model over the ranks and the optimizer that trains it. ``close`` releases its memory."""

    model: nn.Module
    optimizer: Optimizer
    backward: Callable[[Tensor], object]
    close: Callable[[], None]


def run(session: Session, rounds: int) -> CaseResult:
    """Run every contender once per round, each time in processes of its own; compare within the rounds.

    Raises:
        StateError: their losses differ: then the times compare nothing.
    """
    settings = QUICK if session.quick else Settings()
    options = dataclasses.asdict(settings)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in CONTENDERS}
    for number in range(rounds):
        for kind in in_turn(list(CONTENDERS), number):
            session.progress(f"fsdp2: {kind}, round {number + 1} of {rounds}")
            ranks = run_ranks(session, "zero_step.train", {**options, "kind": kind}, settings.world)
            result = ranks[0].data()
            found[kind].append({**result, "peak_rss_bytes": max(rank.peak_rss_bytes for rank in ranks)})
    _require_same_losses(found)
    measured = {"runs": found, "num_parameters": num_parameters(settings.model)}
    return CaseResult(_rows(found), {**options, "rounds": rounds}, measured)


def _require_same_losses(found: dict[str, list[dict[str, Any]]]) -> None:
    want = found["FSDP2"][0]["losses"]
    for kind, runs in found.items():
        for each in runs:
            apart = max(abs(a - b) for a, b in zip(each["losses"], want, strict=True))
            if not apart <= _TOLERANCE:
                raise StateError(
                    f"the losses of {kind!r} differ from FSDP2's by up to {apart:g} "
                    f"(allowed: {_TOLERANCE:g}): {each['losses']} against {want}"
                )


def _rows(found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    steps = {kind: [statistics.median(each["seconds"]) for each in runs] for kind, runs in found.items()}
    peaks = {kind: [each["peak_rss_bytes"] for each in runs] for kind, runs in found.items()}
    rows: list[Row] = []
    for kind, runs in found.items():
        rows.append(spread_row(f"{kind}: step", Spread.of(steps[kind]), "s"))
        for part in _PARTS:
            seconds = [statistics.median(each[part]) for each in runs]
            rows.append(spread_row(f"{kind}: {part}", Spread.of(seconds), "s"))
        rows.append(spread_row(f"{kind}: peak resident memory of a rank", Spread.of(peaks[kind]), "bytes"))
    for kind in OURS:
        for peer in ("FSDP2", "DDP"):
            judged = peer == "FSDP2" and kind == "ours"
            time_target, memory_target = (TIME_RATIO, MEMORY_RATIO) if judged else (None, None)
            rows.append(_ratio(f"{kind} / {peer}: step", steps[kind], steps[peer], time_target))
            rows.append(_ratio(f"{kind} / {peer}: peak", peaks[kind], peaks[peer], memory_target))
    return rows


def _ratio(what: str, mine: Sequence[float], theirs: Sequence[float], target: float | None) -> Row:
    return spread_row(what, Spread.of([a / b for a, b in zip(mine, theirs, strict=True)]), "x", target)


# -- in the worker -------------------------------------------------------------------------------


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train ``options["kind"]`` as one rank; return losses and the seconds of each measured step."""
    values = {field.name: options[field.name] for field in dataclasses.fields(Settings)}
    settings = Settings(**{**values, "model": GPTConfig(**values["model"])})
    with rank_of(options) as rank:
        torch.manual_seed(_SEED)
        wrapped = CONTENDERS[options["kind"]](GPT(settings.model), settings.world)
        batch = _batch(settings, rank)
        times: dict[str, list[float]] = {name: [] for name in ("seconds", *_PARTS)}
        losses = []
        for number in range(settings.warmup_steps + settings.measured_steps):
            loss, seconds = _timed_step(wrapped, batch)
            losses.append(loss)
            if number >= settings.warmup_steps:
                times["seconds"].append(sum(seconds))
                for part, each in zip(_PARTS, seconds, strict=True):
                    times[part].append(each)
        wrapped.close()
    return {"losses": losses, **times}


def _batch(settings: Settings, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(_SEED + rank)
    shape = (settings.batch, settings.seq + 1)
    tokens = torch.randint(settings.model.vocab, shape, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _timed_step(wrapped: Wrapped, batch: Batch) -> tuple[float, list[float]]:
    marks = [time.perf_counter()]
    loss = language_loss(wrapped.model(batch[0]), batch[1])
    marks.append(time.perf_counter())
    wrapped.backward(loss)
    marks.append(time.perf_counter())
    wrapped.optimizer.step()
    wrapped.optimizer.zero_grad()
    marks.append(time.perf_counter())
    return float(loss.detach()), [after - before for before, after in itertools.pairwise(marks)]


def _managed(module: nn.Module, _world: int, **options: Any) -> Wrapped:
    model = GeminiDDP(module, "cpu", **options)
    optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=_LEARNING_RATE), model)
    return Wrapped(model, optimizer, optimizer.backward, model.close)


def _few_whole(module: nn.Module, world: int) -> Wrapped:
    return _managed(module, world, gather_bytes=1)


def _fsdp2(module: nn.Module, world: int) -> Wrapped:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    assert isinstance(module, GPT)
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return _plain(module)


def _ddp(module: nn.Module, _world: int) -> Wrapped:
    return _plain(nn.parallel.DistributedDataParallel(module))


def _plain(model: nn.Module) -> Wrapped:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0, fused=True)
    return Wrapped(model, optimizer, Tensor.backward, lambda: None)


OURS = ("ours", "ours, few whole")
CONTENDERS: dict[str, Callable[[nn.Module, int], Wrapped]] = {
    "ours": _managed,
    "ours, few whole": _few_whole,
    "FSDP2": _fsdp2,
    "DDP": _ddp,
}
TASKS = {"train": train}
