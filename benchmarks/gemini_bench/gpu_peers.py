"""Case ``peers``: a step with all states in host memory, against other libraries that can do this."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gemini.errors import StateError
from gemini.system.device import free_memory_bytes
from gemini_bench.gpu_device import BenchDevice, open_bench_device
from gemini_bench.gpu_offloaders import OFFLOADERS, Offloader, OffloaderAbsent, open_offloader
from gemini_bench.gpu_settings import TINY, TINY_CHUNKS, ModelSettings
from gemini_bench.gpu_trainee import ManagedTrainee, fitted, make_batches, require_same_losses
from gemini_bench.llama import LlamaConfig, num_parameters
from gemini_bench.paired import Spread, spread_row, unmeasured_row, wall_seconds
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session, WorkerFailed
from gemini_bench.trainee import Batch

OURS = "ours"
# Slower than nobody, more memory than nobody.
TIME_RATIO = MEMORY_RATIO = 1.0
# fp32 parameters on the GPU with their gradients; on the host 16 bytes, and as much again while it begins.
_DEVICE_BYTES, _HOST_BYTES = 12, 32


@dataclass(frozen=True)
class Settings(ModelSettings):
    """Every contender runs ``warmup_steps``, then ``steps`` that are counted."""

    warmup_steps: int = 6
    steps: int = 12


QUICK = Settings(TINY, batch=1, seq=16, warmup_steps=4, steps=2, keywords=TINY_CHUNKS)


class OurTrainee:
    """GeminiDDP with all states on HOST, however much the GPU could take."""

    def __init__(self, config: LlamaConfig, device: BenchDevice, keywords: Mapping[str, Any]) -> None:
        self._trainee = ManagedTrainee(config, device, gpu_margin_mem_ratio=0.0, **keywords)

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch and return its loss."""
        return self._trainee.step(batch)

    def close(self) -> None:
        """Release the memory."""
        self._trainee.close()


def run(session: Session, device: str) -> CaseResult:
    """Train the same model with each, one after the other, each in its own processes."""
    settings = dataclasses.asdict(QUICK if session.quick else Settings())
    options = {**settings, "device": device}
    found: dict[str, Any] = {}
    for name in (OURS, *OFFLOADERS):
        session.progress(f"peers: {name}")
        worker = session.run(
            "gpu_peers.train", {**options, "name": name}, sample_seconds=TIMING_SAMPLE_SECONDS
        )
        try:
            found[name] = worker.data()
        except WorkerFailed as error:
            if name == OURS:
                raise
            found[name] = {"absent": f"it failed: {str(error).splitlines()[-1][:300]}"}
        if name == OURS:
            options["model"] = found[OURS]["model"]
        elif found[name]["absent"] is None:
            found[name]["absent"] = _other_losses(name, found)
    return CaseResult(rows(found), settings, found)


def _other_losses(name: str, found: Mapping[str, Any]) -> str | None:
    """Return why the times of a peer compare nothing, if they do not: the others are told all the same."""
    try:
        require_same_losses({OURS: found[OURS]["losses"], name: found[name]["losses"]})
    except StateError as error:
        return str(error)
    return None


def rows(found: Mapping[str, Any]) -> list[Row]:
    """Return times and host memory of each, and the ratios to those that are here."""
    ours = found[OURS]
    table: list[Row] = [Row("parameters", ours["num_parameters"], "parameters")]
    for name, peer in found.items():
        if peer["absent"] is None:
            table.append(
                spread_row(f"step, {name}", Spread.of([1e3 * each for each in peer["step_seconds"]]), "ms")
            )
            table.append(Row(f"host memory, {name}", peer["host_bytes"], "bytes"))
    for name in OFFLOADERS:
        peer, step, memory = found[name], f"step, {OURS} / {name}", f"host memory, {OURS} / {name}"
        if peer["absent"] is not None:
            table.append(unmeasured_row(step, "x", TIME_RATIO, peer["absent"]))
            table.append(unmeasured_row(memory, "x", MEMORY_RATIO, peer["absent"]))
            continue
        typical = Spread.of(peer["step_seconds"]).median
        ratios = Spread.of([each / typical for each in ours["step_seconds"]])
        table.append(spread_row(step, ratios, "x", TIME_RATIO))
        table.append(Row(memory, ours["host_bytes"] / peer["host_bytes"], "x", MEMORY_RATIO))
    return table


# -- in the workers ------------------------------------------------------------------------------


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train with ``options["name"]``; return the seconds of steps, from an idle GPU to an idle one, and how
    much less memory the host has free after one than before it all, at most. That counts what is page-locked,
    which the resident memory of a process does not, and not what only building the model takes.

    Raises:
        ConfigError: too little memory is free.
    """
    settings = Settings.from_options(options)
    device = open_bench_device(options["device"])
    model = fitted(
        settings.model,
        settings.batch * settings.seq,
        device_bytes_each=_DEVICE_BYTES,
        host_bytes_each=_HOST_BYTES,
        free_bytes=device.compute.free_bytes(),
    )
    count = settings.warmup_steps + settings.steps
    batches = make_batches(model, device, count=count, shape=(settings.batch, settings.seq))
    device.compute.synchronize()
    free = free_memory_bytes()
    try:
        trainee = _open(options["name"], model, device, settings)
    except OffloaderAbsent as absent:
        return {"absent": str(absent)}
    losses: list[float] = []
    seconds, least_free = [], free
    for batch in batches:

        def step(batch: Batch = batch) -> None:
            losses.append(float(trainee.step(batch)))

        seconds.append(wall_seconds(step, device.compute.synchronize))
        least_free = min(least_free, free_memory_bytes())
    trainee.close()
    return {
        "absent": None,
        "model": dataclasses.asdict(model),
        "num_parameters": num_parameters(model),
        "losses": losses,
        "step_seconds": seconds[settings.warmup_steps :],
        "host_bytes": max(1, free - least_free),
    }


def _open(name: str, model: LlamaConfig, device: BenchDevice, settings: Settings) -> Offloader:
    if name == OURS:
        return OurTrainee(model, device, settings.keywords)
    return open_offloader(name, model, device, settings.batch)


TASKS = {"train": train}
