"""Case ``offload``: a part of the model data on DEVICE, the rest on HOST, against computing and the links."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemini.errors import StateError
from gemini_bench.gpu_copies import bare_rates
from gemini_bench.gpu_device import BenchDevice, open_bench_device
from gemini_bench.gpu_settings import TINY, TINY_CHUNKS, TINY_LINKS, LinkSettings
from gemini_bench.gpu_trainee import (
    MODEL_DATA_BYTES_PER_PARAMETER,
    ManagedTrainee,
    fitted,
    make_batches,
    require_same_losses,
)
from gemini_bench.llama import LlamaConfig, num_parameters
from gemini_bench.paired import Spread, in_turn, spread_row, wall_seconds
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

FLOOR_RATIO = 1 / 0.9
RESIDENT, OFFLOADED = "resident", "offloaded"
_LINKS = ("h2d", "d2h")


@dataclass(frozen=True)
class Settings(LinkSettings):
    """Two equal models take turns: one resident, one with ``share`` of its model data on DEVICE.

    A turn is one step that does not count, so that the other's leave nothing behind, and ``turn_steps`` that
    do.
    """

    share: float = 0.4
    max_norm: float = 1.0
    warmup_steps: int = 6
    rounds: int = 5
    turn_steps: int = 4

    @property
    def num_steps(self) -> int:
        """The steps of each model."""
        return self.warmup_steps + self.rounds * (1 + self.turn_steps)


QUICK = Settings(
    TINY,
    batch=1,
    seq=16,
    warmup_steps=4,
    rounds=2,
    turn_steps=1,
    keywords=TINY_CHUNKS,
    **TINY_LINKS,
)


def run(session: Session, device: str) -> CaseResult:
    """Train both models in one process, then measure the links there."""
    settings = dataclasses.asdict(QUICK if session.quick else Settings())
    session.progress("offload: resident and offloaded, alternating turns in one process")
    options = {**settings, "device": device}
    found = session.run("gpu_offload.train", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    return CaseResult(rows(found, settings["turn_steps"]), settings, found)


def rows(found: Mapping[str, Any], turn_steps: int) -> list[Row]:
    """Return times, traffic, the floor and the ratio to it.

    ``found`` has, per turn, the seconds of both models' steps together and what the links carried for the
    one that is offloaded; and the links' bytes per second, each alone and both at once.
    """
    turns, rates = found["turns"], found["bytes_per_second"]
    data, budget = found["model_data_bytes"], found["device_bytes"]
    computing = [turn["seconds"] / turn_steps for turn in turns[RESIDENT]]
    steps = [turn["seconds"] / turn_steps for turn in turns[OFFLOADED]]
    links = [links_seconds(turn, rates) / turn_steps for turn in turns[OFFLOADED]]
    floors = [max(pair) for pair in zip(computing, links, strict=True)]
    table: list[Row] = [
        Row("parameters", found["num_parameters"], "parameters"),
        Row("model data", data, "bytes"),
        Row("of which on DEVICE at most", budget, "bytes"),
        Row("and the rest, the least that is to come and go", data - budget, "bytes"),
        Row("highest on DEVICE", found["device_peak_bytes"], "bytes", budget),
        _milliseconds("step, resident: what computing takes", computing),
        _milliseconds("step, offloaded", steps),
        _milliseconds(
            "of which operators waited", [t["stall_seconds"] / turn_steps for t in turns[OFFLOADED]]
        ),
    ]
    for link in _LINKS:
        carried = [turn[link] / turn_steps for turn in turns[OFFLOADED]]
        table.append(spread_row(f"{link} per step", Spread.of(carried), "bytes"))
    table += [Row(f"{way}, torch", rate / 1e9, "GB/s") for way, rate in rates.items()]
    ratios = [step / floor for step, floor in zip(steps, floors, strict=True)]
    slower = [step / alone for step, alone in zip(steps, computing, strict=True)]
    return [
        *table,
        _milliseconds("what the links take at that", links),
        _milliseconds("floor: the longer of computing and links", floors),
        spread_row("step, offloaded / resident", Spread.of(slower), "x"),
        spread_row("step, offloaded / floor", Spread.of(ratios), "x", FLOOR_RATIO),
    ]


def links_seconds(turn: Mapping[str, float], rates: Mapping[str, float]) -> float:
    """Return the least that the links can take for the bytes of a turn: each alone, and both together."""
    alone = (turn[link] / rates[link] for link in _LINKS)
    return max(*alone, sum(turn[link] for link in _LINKS) / rates["both ways"])


def _milliseconds(what: str, seconds: Sequence[float]) -> Row:
    return spread_row(what, Spread.of([1e3 * each for each in seconds]), "ms")


# -- in the worker -------------------------------------------------------------------------------


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train both models on the same batches, in turns.

    Raises:
        ConfigError: too little memory is free.
        StateError: the losses differ, or what should be resident is not, or the other way round.
    """
    settings = Settings.from_options(options)
    device = open_bench_device(options["device"])
    model = fitted(
        settings.model,
        settings.batch * settings.seq,
        device_bytes_each=(1 + settings.share) * MODEL_DATA_BYTES_PER_PARAMETER,
        host_bytes_each=MODEL_DATA_BYTES_PER_PARAMETER,
        free_bytes=device.compute.free_bytes(),
    )
    model_data = MODEL_DATA_BYTES_PER_PARAMETER * num_parameters(model)
    budget = int(settings.share * model_data)
    trainees = {
        # First: the other one's default is what is free then.
        OFFLOADED: ManagedTrainee(
            model,
            device,
            max_norm=settings.max_norm,
            device_bytes=budget,
            non_model_bytes=0,
            **settings.keywords,
        ),
        RESIDENT: ManagedTrainee(model, device, max_norm=settings.max_norm, **settings.keywords),
    }
    turns, losses = _train_in_turns(trainees, settings, device, model)
    trainees[RESIDENT].require_resident()
    if trainees[OFFLOADED].model.manager.resident:
        raise StateError(f"all model data stayed on DEVICE within {budget} bytes")
    peak = trainees[OFFLOADED].model.stats()["device"]["peak_bytes"]
    for trainee in trainees.values():
        trainee.close()
    rates = bare_rates(device, settings.link_chunk_bytes, settings.link_bytes, settings.link_repeats)
    return {
        "turns": turns,
        "losses": losses,
        "model": dataclasses.asdict(model),
        "num_parameters": num_parameters(model),
        "model_data_bytes": model_data,
        "device_bytes": budget,
        "device_peak_bytes": peak,
        "bytes_per_second": rates,
    }


def _train_in_turns(
    trainees: Mapping[str, ManagedTrainee], settings: Settings, device: BenchDevice, model: LlamaConfig
) -> tuple[dict[str, list[dict[str, float]]], dict[str, list[float]]]:
    batches = make_batches(model, device, count=settings.num_steps, shape=(settings.batch, settings.seq))
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in trainees}
    losses: dict[str, list[Any]] = {name: [] for name in trainees}
    for name, trainee in trainees.items():
        losses[name] += [trainee.step(batch) for batch in batches[: settings.warmup_steps]]
    for number in range(settings.rounds):
        begin = settings.warmup_steps + number * (1 + settings.turn_steps)
        batch, *counted = batches[begin : begin + 1 + settings.turn_steps]
        for name in in_turn(list(trainees), number):
            losses[name].append(trainees[name].step(batch))
            turns[name].append(_turn(trainees[name], counted, losses[name], device))
    as_floats = {name: [float(loss) for loss in found] for name, found in losses.items()}
    require_same_losses(as_floats)
    return turns, as_floats


def _turn(
    trainee: ManagedTrainee, batches: Sequence[Any], losses: list[Any], device: BenchDevice
) -> dict[str, float]:
    """Train on each batch, from idle links to idle links; return the seconds and the bytes on the links."""

    def steps() -> None:
        losses.extend([trainee.step(batch) for batch in batches])
        trainee.settle()

    trainee.settle()
    device.compute.synchronize()
    before = trainee.model.stats()
    seconds = wall_seconds(steps, device.compute.synchronize)
    after = trainee.model.stats()
    carried = {link: after[link]["bytes"] - before[link]["bytes"] for link in _LINKS}
    stalled = after["stall_seconds"] - before["stall_seconds"]
    return {"seconds": seconds, "stall_seconds": stalled, **carried}


TASKS = {"train": train}
