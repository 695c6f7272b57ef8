"""Case ``quality``: a small GPT trained with compact optimizer states ends where fp32 states end."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from gemini.jobs.gpt.data import ByteCorpus
from gemini.jobs.gpt.model import GPT, GPTConfig, language_loss, num_parameters
from gemini.optim import CPUAdam
from gemini_bench.adam_measure import Settings, use_threads
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session

LOSS_DIFFERENCE = 0.01
STATE_DTYPES = ("fp32", "bf16", "int8")


SMALL = GPTConfig(layers=4, hidden=128, heads=4, seq=64)


@dataclass(frozen=True)
class Training:
    """The training job, on Python's own sources. ``last``: the number of last steps; their mean loss is the
    final loss.
    """

    model: GPTConfig = SMALL
    steps: int = 400
    last: int = 20
    batch: int = 16
    lr: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 1234


QUICK = Training(GPTConfig(layers=1, hidden=32, heads=2, seq=16), steps=4, last=2, batch=2)


def run(session: Session, settings: Settings) -> CaseResult:
    """Train once per type of state, each in its own process, on the same batches from the same start."""
    training = QUICK if session.quick else Training()
    options = {**dataclasses.asdict(training), "threads": max(settings.threads)}
    losses: dict[str, list[float]] = {}
    for state_dtype in STATE_DTYPES:
        session.progress(f"quality: {training.steps} steps with {state_dtype} states")
        found = session.run("adam_quality.train", {**options, "state_dtype": state_dtype}).data()
        losses[state_dtype] = found["losses"]
    measured = {"losses": losses, "num_parameters": num_parameters(training.model)}
    return CaseResult(quality_rows(losses, training.last), options, measured)


def quality_rows(losses: dict[str, list[float]], last: int) -> list[Row]:
    """Return the final losses, and the distance of those with compact states from that with fp32 states."""
    final = {name: statistics.fmean(found[-last:]) for name, found in losses.items()}
    steps = f"mean of steps {len(losses['fp32']) - last + 1} to {len(losses['fp32'])}"
    return [
        Row("fp32 states, first loss", losses["fp32"][0], "nats"),
        *(Row(f"{name} states, loss, {steps}", loss, "nats") for name, loss in final.items()),
        *(
            Row(
                f"{name} states, difference from fp32",
                abs(final[name] / final["fp32"] - 1),
                "share",
                LOSS_DIFFERENCE,
            )
            for name in STATE_DTYPES[1:]
        ),
    ]


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train with one type of state and return every loss."""
    use_threads(options["threads"])
    values = {field.name: options[field.name] for field in dataclasses.fields(Training)}
    training = Training(**{**values, "model": GPTConfig(**values["model"])})
    torch.manual_seed(training.seed)
    model = GPT(training.model)
    optimizer = CPUAdam(
        model.parameters(),
        lr=training.lr,
        weight_decay=training.weight_decay,
        state_dtype=options["state_dtype"],
    )
    corpus = ByteCorpus()
    losses = []
    for step in range(training.steps):
        inputs, targets = corpus.batch(step, batch=training.batch, seq=training.model.seq, seed=training.seed)
        loss = language_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses}


TASKS = {"train": train}
