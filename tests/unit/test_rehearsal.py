"""A rehearsed step is a real one without memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from forecast_models import MIB, SEQ, Buffers, FrozenHead, config, loss_of, source, tiny_gpt
from torch import nn

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer
from gemini.forecast.rehearsal import Recipe, Rehearsal, rehearse
from gemini.memstats import Trace
from gemini.runtime.build import Outline, draw_blueprint
from gemini.runtime.config import GeminiConfig

MEASURED = {"seconds", "non_model_bytes", "links"}
STRUCTURE = [field.name for field in fields(Trace) if field.name not in MEASURED]


def rehearsed(
    build: Callable[[], nn.Module], options: GeminiConfig, accumulation: int, clip: bool
) -> Rehearsal:
    example = source(build).example(2)
    recipe = Recipe(loss_of, accumulation, clip)
    blueprint = draw_blueprint(example.module, options)
    return rehearse(example.module, example.inputs, recipe, options, blueprint)


def recorded(build: Callable[[], nn.Module], options: GeminiConfig, accumulation: int, clip: bool) -> Trace:
    """Return the trace of a real step on random tokens."""
    torch.manual_seed(0)
    with GeminiDDP(build(), config=options) as model:
        adam = CPUAdam(model.parameters())
        # Gradients of 2 times the usual scale do not fit fp16: the update would be skipped.
        optimizer = GeminiOptimizer(adam, model, max_norm=float(clip), initial_scale=2**8)
        tokens = torch.randint(0, 64, (2, SEQ))
        for _ in range(accumulation):
            optimizer.backward(loss_of(model(tokens), (tokens,)))
        optimizer.step()
        trace = model.memstats()
    assert trace is not None
    return trace


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("build", "accumulation", "clip"),
    [
        (tiny_gpt, 1, True),
        (tiny_gpt, 2, False),
        (partial(tiny_gpt, checkpointing=True), 1, False),
        (partial(tiny_gpt, checkpointing=True), 2, True),
        (FrozenHead, 1, True),
        (Buffers, 2, True),
    ],
)
def test_a_rehearsal_records_what_a_real_step_records(
    tmp_path: Path,
    build: Callable[[], nn.Module],
    accumulation: int,
    clip: bool,
    precision: torch.dtype | None,
) -> None:
    options = config(MIB, disk_dir=str(tmp_path), precision=precision)
    rehearsal = rehearsed(build, options, accumulation, clip).trace
    real = recorded(build, options, accumulation, clip)
    assert {name: getattr(rehearsal, name) for name in STRUCTURE} == {
        name: getattr(real, name) for name in STRUCTURE
    }


def test_non_model_bytes_grow_with_the_batch_and_shrink_with_checkpointing() -> None:
    def peak(batch: int, checkpointing: bool) -> int:
        options = config(MIB)
        example = source(partial(tiny_gpt, checkpointing)).example(batch)
        blueprint = draw_blueprint(example.module, options)
        trace = rehearse(example.module, example.inputs, Recipe(loss_of), options, blueprint).trace
        return max(trace.non_model_bytes)

    assert peak(4, False) > 1.8 * peak(2, False)
    assert peak(4, True) < peak(4, False)


class Unlike(nn.Module):
    """Layers of torch, and parameters whose use only a forward pass shows."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(3))
        self.each = nn.ParameterList([torch.zeros(3), torch.zeros(3)])
        self.attention = nn.MultiheadAttention(4, 2, bias=False)
        self.layer = nn.Linear(4, 4)


def test_operators_that_are_known_before_a_step_are_those_of_torchs_layers() -> None:
    assert Outline.of(Unlike(), config(MIB)).operators == (
        ("attention", ("attention.in_proj_weight", "attention.out_proj.weight")),
        ("attention.out_proj", ("attention.out_proj.weight",)),
        ("layer", ("layer.weight", "layer.bias")),
    )


@pytest.mark.dear("a model of seventy billion parameters is laid out")
def test_rehearsing_seventy_billion_parameters_takes_less_than_a_gigabyte_and_a_half() -> None:
    script = f"""
from gemini.cli.plan_model import ModelOptions, find_model
from gemini.forecast.forecast import forecast_batch, Settings
from gemini.runtime.config import GeminiConfig
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from forecast_models import machine
import torch
source = find_model("gpt:layers=80,hidden=8448,heads=64,vocab=32000", ModelOptions(2048, True))
options = GeminiConfig(device_bytes=80 << 30, disk_dir="nowhere", precision=torch.bfloat16)
forecast = forecast_batch(source, Settings(1, options, machine()), 1)
assert sum(spec.layout.used_numel for spec in forecast.blueprint.groups) > 68e9
# Not ru_maxrss: that of a process begins with its parent's.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.5 * 2**20  # KiB
