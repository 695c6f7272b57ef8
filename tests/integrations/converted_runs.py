"""Run programs that ``gemini convert-config`` has printed: ``python converted_runs.py JOBS RESULTS``.

``JOBS`` is a JSON list of ``{"name", "program", "rows"}``: each program trains on so many rows, or batches of
its loop, in a directory of its own. ``RESULTS`` gets what every update had, by name.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import gemini
from gemini.cli.conversion import Target


class Output(NamedTuple):
    """What the model returns, for a loop and for a Trainer."""

    loss: torch.Tensor


class Model(nn.Module):
    """A small model with what programs expect of transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.recomputes = False

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """Note that it was called."""
        self.recomputes = True

    def forward(self, x: torch.Tensor) -> Output:
        """Return the loss over a batch."""
        return Output(loss=self.body(x.to(self.body[0].weight.dtype)).float().square().mean())


class Watch:
    """Notes the settings of every update."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []
        step = gemini.GeminiOptimizer.step

        def noted(optimizer: Any, *args: Any, **options: Any) -> Any:
            group = optimizer.param_groups[0]
            self.updates.append({key: group[key] for key in ("lr", "betas") if key in group})
            self.last = optimizer
            return step(optimizer, *args, **options)

        gemini.GeminiOptimizer.step = noted  # type: ignore[method-assign, assignment]


def run(job: dict[str, Any], watch: Watch) -> dict[str, Any]:
    """Run one program; return what it did."""
    watch.updates = []
    rows = torch.rand(job["rows"], 6, generator=torch.Generator().manual_seed(1))
    names: dict[str, Any] = {"model": Model()}
    if job["target"] == Target.TRAINER.value:
        names["train_dataset"] = [{"x": row} for row in rows]
    else:
        names["loader"] = [{"x": row.reshape(1, 6)} for row in rows]
    plain = names["model"]
    exec(compile(job["program"], job["name"], "exec"), names)
    group, model = watch.last.param_groups[0], watch.last.model
    trained = names["model"] if job["target"] == Target.LOOP.value else gemini.handle_of(names["model"])
    weights = trained.state_dict()  # fp32
    return {
        "updates": watch.updates,
        "weight_decay": [each.get("weight_decay") for each in watch.last.param_groups if each["params"]],
        "eps": group.get("eps"),
        "precision": str(model.config.precision),
        "steps": model.stats()["step"],
        "recomputes": plain.recomputes,
        "weights": sum(value.double().sum().item() for value in weights.values()),
    }


def main(jobs: Path, results: Path) -> None:
    """Run all programs."""
    watch, found = Watch(), {}
    for number, job in enumerate(json.loads(jobs.read_text())):
        folder = results.parent / f"{number}"
        folder.mkdir()
        os.chdir(folder)
        AcceleratorState._reset_state(reset_partial_state=True)  # of the program before
        GradientState._reset_state()
        found[job["name"]] = run(job, watch)
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
