"""Case ``resident``: a step with everything on DEVICE, against plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from gemini_bench.gpu_device import open_bench_device
from gemini_bench.gpu_settings import TINY, TINY_CHUNKS, ModelSettings
from gemini_bench.gpu_trainee import (
    MODEL_DATA_BYTES_PER_PARAMETER,
    ManagedTrainee,
    PlainTrainee,
    Trainee,
    fitted,
    make_batches,
    require_same_losses,
)
from gemini_bench.llama import num_parameters
from gemini_bench.paired import WARMUP_ROUNDS, Contender, Timings, run_paired, spread_row, wall_seconds
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

TIME_RATIO = 1.03
PLAIN, MANAGED = "plain torch", "managed"
# Both models at once, and the fp32 gradients of plain torch.
_BYTES_PER_PARAMETER = 2 * MODEL_DATA_BYTES_PER_PARAMETER + 4


@dataclass(frozen=True)
class Settings(ModelSettings):
    """Both models take ``repeats`` turns of ``turn_steps``; two more turns of each warm up."""

    turn_steps: int = 4
    repeats: int = 9
    memory_steps: int = 4

    @property
    def num_steps(self) -> int:
        """The steps of each model, when they are timed."""
        return (WARMUP_ROUNDS + self.repeats) * self.turn_steps


QUICK = Settings(TINY, batch=1, seq=16, turn_steps=2, repeats=1, memory_steps=2, keywords=TINY_CHUNKS)


def run(session: Session, device: str) -> CaseResult:
    """Time both models in one process, in alternating turns; then measure the peak memory of each in one of
    its own."""
    settings = dataclasses.asdict(QUICK if session.quick else Settings())
    options = {**settings, "device": device}
    session.progress("resident: plain torch and managed, alternating turns in one process")
    timing = session.run("gpu_resident.paired", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    options["model"] = timing["model"]
    peaks = {}
    for kind in (PLAIN, MANAGED):
        session.progress(f"resident: peak memory, {kind}")
        peaks[kind] = session.run("gpu_resident.memory", {**options, "kind": kind}).data()
    found = {**timing, "peaks": peaks}
    return CaseResult(rows(found, settings["turn_steps"]), settings, found)


def rows(found: dict[str, Any], turn_steps: int) -> list[Row]:
    """Return the times of a step, their ratio turn by turn, and the peaks."""
    times = Timings(found["timings"])
    peaks = {kind: peak["allocator_bytes"] + peak["chunks_bytes"] for kind, peak in found["peaks"].items()}
    table: list[Row] = [Row("parameters", found["num_parameters"], "parameters")]
    for kind in (PLAIN, MANAGED):
        turn = times.milliseconds(kind)
        step = dataclasses.replace(
            turn, median=turn.median / turn_steps, low=turn.low / turn_steps, high=turn.high / turn_steps
        )
        table.append(spread_row(f"step, {kind}", step, "ms"))
    table.append(spread_row("step, managed / plain", times.ratio(MANAGED, PLAIN), "x", TIME_RATIO))
    table += [Row(f"peak of the device's memory, {kind}", peaks[kind], "bytes") for kind in (PLAIN, MANAGED)]
    table.append(Row("peak of the device's memory, managed / plain", peaks[MANAGED] / peaks[PLAIN], "x"))
    return table


def paired(options: dict[str, Any]) -> dict[str, Any]:
    """Train both models on the same batches, in turns.

    Raises:
        ConfigError: too little memory is free.
        StateError: the losses differ, or not everything stayed on DEVICE.
    """
    settings = Settings.from_options(options)
    device = open_bench_device(options["device"])
    model = fitted(
        settings.model,
        settings.batch * settings.seq,
        device_bytes_each=_BYTES_PER_PARAMETER,
        host_bytes_each=4,
        free_bytes=device.compute.free_bytes(),
    )
    shape = (settings.batch, settings.seq)
    batches = make_batches(model, device, count=settings.num_steps, shape=shape)
    plain = PlainTrainee(model, device)
    managed = ManagedTrainee(model, device, **settings.keywords)
    losses: dict[str, list[Any]] = {PLAIN: [], MANAGED: []}
    contenders = []
    for kind, trainee in ((PLAIN, plain), (MANAGED, managed)):
        turns = _turns(trainee, batches, settings.turn_steps, losses[kind])
        contenders.append(Contender(kind, partial(next, turns), 0.0))
    timed = partial(wall_seconds, synchronize=device.compute.synchronize)
    timings = run_paired(contenders, settings.repeats, timed=timed)
    managed.require_resident()
    as_floats = {kind: [float(loss) for loss in found] for kind, found in losses.items()}
    require_same_losses(as_floats)
    stats = managed.model.stats()
    managed.close()
    return {
        "timings": timings,
        "losses": as_floats,
        "model": dataclasses.asdict(model),
        "num_parameters": num_parameters(model),
        "chunks": stats["num_chunks"],
        "wasted_bytes": stats["wasted_bytes"],
    }


def _turns(trainee: Trainee, batches: list[Any], turn_steps: int, losses: list[Any]) -> Iterator[None]:
    """Train on the next ``turn_steps`` batches at every turn."""
    for number, batch in enumerate(batches, start=1):
        losses.append(trainee.step(batch))
        if number % turn_steps == 0:
            trainee.settle()
            yield


def memory(options: dict[str, Any]) -> dict[str, Any]:
    """Train one model, ``options["kind"]``; return the peak device memory of its process: of torch's
    allocator, and of chunks, sampled after every step.
    """
    settings = Settings.from_options(options)
    device = open_bench_device(options["device"])
    monitor = device.monitor()
    monitor.start_period()
    trainee: Trainee
    if options["kind"] == PLAIN:
        trainee = PlainTrainee(settings.model, device)
    else:
        trainee = ManagedTrainee(settings.model, device, **settings.keywords)
    chunks_bytes = 0
    shape = (settings.batch, settings.seq)
    for batch in make_batches(settings.model, device, count=settings.memory_steps, shape=shape):
        trainee.step(batch)
        chunks_bytes = max(chunks_bytes, trainee.model_data_bytes())
    device.compute.synchronize()
    taken = monitor.end_period()
    monitor.close()
    return {"allocator_bytes": taken, "chunks_bytes": chunks_bytes}


TASKS = {"paired": paired, "memory": memory}
