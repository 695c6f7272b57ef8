"""Case ``bound``: 7 billion parameters, enough tokens that computing bounds a step, states on HOST, the norm
clipped: against the same step on a GPU with memory for all, and against its floors.

No GPU of today has that memory. The step it would take is what is left of it: forward and backward on this
GPU, and the update of as many elements as fit, for all of them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemini.jobs.gpt.model import language_loss
from gemini.optim.host_update import elements_per_second
from gemini.system.device import free_memory_bytes
from gemini_bench.adam_peers import HYPER
from gemini_bench.gpu_copies import bare_rates
from gemini_bench.gpu_device import SIMULATED, BenchDevice, open_bench_device
from gemini_bench.gpu_settings import TINY, TINY_CHUNKS, TINY_LINKS, LinkSettings
from gemini_bench.gpu_trainee import ManagedTrainee, fitted, make_batches
from gemini_bench.llama import LLAMA_7B, Llama, LlamaConfig, num_parameters
from gemini_bench.paired import Spread, spread_row, wall_seconds
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

SHARE = 0.9
# Of a parameter in bf16, or of its gradient, as it travels; states that stay on HOST.
_SENT_BYTES, _STATE_BYTES = 2, 12
_HOST_SHARE = 0.9  # of what is free there
_DRAWN_STEPS = 2  # in the picture
_FLOORS = {
    "F0": "the longest of computing, links and the CPU's updates",
    "F1": "updates end before the next step",
    "F2": "updates wait for the norm, beside the next forward pass",
}


@dataclass(frozen=True)
class Settings(LinkSettings):
    """Trained are ``warmup_steps``, then ``turns`` of ``turn_steps``. ``updated``: elements of the update
    that is tried on the GPU."""

    model: LlamaConfig = LLAMA_7B
    batch: int = 16
    seq: int = 2048
    max_norm: float = 1.0
    warmup_steps: int = 3
    turns: int = 3
    turn_steps: int = 2
    updated: int = 2**28


QUICK = Settings(
    dataclasses.replace(TINY, checkpointing=True),
    batch=1,
    seq=16,
    warmup_steps=3,
    turns=2,
    turn_steps=1,
    updated=2**16,
    keywords=TINY_CHUNKS,
    **TINY_LINKS,
)


def run(session: Session, device: str) -> CaseResult:
    """Train the managed model, then measure the references, each in its own process."""
    settings = dataclasses.asdict(QUICK if session.quick else Settings())
    picture = session.record and os.fspath(session.record.with_suffix("")) + "_timeline.html"
    options = {**settings, "device": device, "timeline": picture}
    session.progress("bound: managed, states on HOST; initializing takes a minute")
    worker = session.run("gpu_bound.managed", options, sample_seconds=TIMING_SAMPLE_SECONDS)
    managed = {**worker.data(), "peak_rss_bytes": worker.peak_rss_bytes}
    options["model"] = managed["model"]
    session.progress("bound: forward and backward alone, the update alone, links and processors")
    limits = session.run("gpu_bound.limits", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    found = {"managed": managed, **limits}
    return CaseResult(rows(found), settings, found)


def rows(found: Mapping[str, Any]) -> list[Row]:
    """Return the managed step, the one with memory for all, their ratio, and the floors."""
    managed, numel = found["managed"], found["managed"]["num_parameters"]
    steps = managed["step_seconds"]
    forward, backward = Spread.of(found["forward"]).median, Spread.of(found["backward"]).median
    infinite = forward + backward + Spread.of(found["update_seconds"]).median * numel / found["updated"]
    floors = floor_seconds(found, forward, backward)
    # What no schedule can reach is nobody's fault.
    target = SHARE if floors["F0"] <= infinite / SHARE else None
    table: list[Row] = [
        Row("parameters", numel, "parameters"),
        Row("tokens in a step", managed["tokens"], "tokens"),
        spread_row("step, managed", Spread.of([1e3 * each for each in steps]), "ms"),
        Row("of which operators waited, at most", 1e3 * max(managed["stall_seconds"]), "ms"),
        Row("tokens per second, managed", managed["tokens"] / Spread.of(steps).median, "1/s"),
        Row("forward and backward alone", 1e3 * (forward + backward), "ms"),
        Row("step with memory for all", 1e3 * infinite, "ms"),
        spread_row(
            "step with memory for all / managed",
            Spread.of([infinite / each for each in steps]),
            "x",
            target,
            at_least=True,
        ),
    ]
    for name, seconds in floors.items():
        table.append(Row(f"{name}: {_FLOORS[name]}", 1e3 * seconds, "ms"))
        ratios = Spread.of([each / seconds for each in steps])
        table.append(spread_row(f"step, managed / {name}", ratios, "x"))
    return [
        *table,
        Row("elements updated by the CPU per second", found["cpu_elements_per_second"], "1/s"),
        Row("peak resident memory of the process", managed["peak_rss_bytes"], "bytes"),
        Row("highest on HOST", managed["host_peak_bytes"], "bytes"),
        Row("highest on DEVICE", managed["device_peak_bytes"], "bytes"),
    ]


def floor_seconds(found: Mapping[str, Any], forward: float, backward: float) -> dict[str, float]:
    """Return what a step takes at least if the CPU makes all updates: F0 under any schedule, F1 if updates
    end before the next step begins, F2 if they wait for the norm and run beside the next forward pass.

    Gradients and parameters, 2 bytes each, travel once; the update goes at the CPU's rate. F1 ends with the
    gradient that comes last, F2 has the next forward pass wait for the first group, then each for its own.
    """
    numel, layer = found["managed"]["num_parameters"], found["managed"]["largest_group"]
    down = _SENT_BYTES / found["bytes_per_second"]["d2h"]
    up = _SENT_BYTES / found["bytes_per_second"]["h2d"]
    update = 1 / found["cpu_elements_per_second"]
    computing = forward + backward
    resources = max(computing, numel * down, numel * up, numel * update)
    first = layer * (update + up)
    return {
        "F0": resources,
        "F1": max(resources, computing + layer * down + first),
        "F2": max(resources, backward + max(forward + first, numel * update + forward * layer / numel)),
    }


# -- in the workers ------------------------------------------------------------------------------


def managed(options: dict[str, Any]) -> dict[str, Any]:
    """Train; return the seconds per step of each turn, from an idle GPU to an idle one.

    Raises:
        ConfigError: too little memory is free.
    """
    settings = Settings.from_options(options)
    device = open_bench_device(options["device"])
    tokens = settings.batch * settings.seq
    model = fitted(
        settings.model,
        tokens,
        device_bytes_each=2 * _SENT_BYTES,
        host_bytes_each=_STATE_BYTES + 2 * _SENT_BYTES,
        free_bytes=device.compute.free_bytes(),
    )
    trainee = ManagedTrainee(
        model,
        device,
        max_norm=settings.max_norm,
        gpu_margin_mem_ratio=0.0 if options["device"] == SIMULATED else "auto",
        host_bytes=int(_HOST_SHARE * free_memory_bytes()),
        **settings.keywords,
    )
    count = settings.warmup_steps + settings.turns * settings.turn_steps
    shape = (settings.batch, settings.seq)
    batches = make_batches(model, device, count=count + _DRAWN_STEPS, shape=shape)
    losses = [trainee.step(batch) for batch in batches[: settings.warmup_steps]]
    turns, stalls = [], []
    for begin in range(settings.warmup_steps, count, settings.turn_steps):
        turn = batches[begin : begin + settings.turn_steps]
        stalled = trainee.model.stats()["stall_seconds"]

        def steps(turn: list[Any] = turn) -> None:
            losses.extend([trainee.step(batch) for batch in turn])

        device.compute.synchronize()
        turns.append(wall_seconds(steps, device.compute.synchronize) / settings.turn_steps)
        stalls.append((trainee.model.stats()["stall_seconds"] - stalled) / settings.turn_steps)
    stats = trainee.model.stats()
    if options["timeline"] is not None:
        with trainee.model.record_timeline() as timeline:
            losses.extend([trainee.step(batch) for batch in batches[count:]])
        timeline.save_html(options["timeline"])
    found = {
        "step_seconds": turns,
        "stall_seconds": stalls,
        "losses": [float(loss) for loss in losses],
        "tokens": tokens,
        "model": dataclasses.asdict(model),
        "num_parameters": num_parameters(model),
        "largest_group": max(group.param.spec.numel for group in trainee.model.storage.groups),
        "host_peak_bytes": stats["host"]["peak_bytes"],
        "device_peak_bytes": stats["device"]["peak_bytes"],
    }
    trainee.close()
    return found


def limits(options: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of forward and of backward, and of an update, on the GPU; what the links carry and
    the processors update per second."""
    settings = Settings.from_options(options)
    device = open_bench_device(options["device"])
    forward, backward = _computing(settings, device)
    return {
        "forward": forward,
        "backward": backward,
        "update_seconds": _updates(settings, device),
        "updated": settings.updated,
        "bytes_per_second": bare_rates(
            device, settings.link_chunk_bytes, settings.link_bytes, settings.link_repeats
        ),
        "cpu_elements_per_second": elements_per_second(tuple(device.compute.processors)),
    }


def _computing(settings: Settings, device: BenchDevice) -> tuple[list[float], list[float]]:
    where = device.compute.torch_device
    with where:
        model = Llama(settings.model).to(torch.bfloat16)
    shape = (settings.batch, settings.seq)
    count = 1 + settings.turns * settings.turn_steps
    seconds: tuple[list[float], list[float]] = ([], [])
    loss: Tensor = torch.empty(0)
    for batch in make_batches(settings.model, device, count=count, shape=shape):

        def forward(batch: Any = batch) -> None:
            nonlocal loss
            loss = language_loss(model(batch[0]), batch[1])

        seconds[0].append(wall_seconds(forward, device.compute.synchronize))
        seconds[1].append(wall_seconds(lambda: loss.backward(), device.compute.synchronize))
        model.zero_grad()
    return seconds[0][1:], seconds[1][1:]  # the first one loads kernels


def _updates(settings: Settings, device: BenchDevice) -> list[float]:
    """Return the seconds of updates of ``settings.updated`` elements: norm, fp32 gradient, AdamW, copy."""
    where = device.compute.torch_device
    master = torch.zeros(settings.updated, device=where)
    param = torch.zeros(settings.updated, device=where, dtype=torch.bfloat16)
    grad = torch.ones_like(param)
    adam = torch.optim.AdamW([master], lr=HYPER.lr, betas=HYPER.betas, eps=HYPER.eps, fused=True)

    def update() -> None:
        master.grad = grad.float().mul_(1 / torch.linalg.vector_norm(grad))
        adam.step()
        param.copy_(master)

    update()
    return [wall_seconds(update, device.compute.synchronize) for _ in range(settings.turns)]


TASKS = {"managed": managed, "limits": limits}
