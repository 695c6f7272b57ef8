"""Case ``many``: what a model of many small parameters takes per parameter, and how many files of the runtime
it takes to do the usual."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import gemini
from gemini import checkpoint
from gemini.errors import StateError
from gemini_bench.paired import Spread, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

PER_PARAMETER_US = 60.0
LINEAR = 1.25
ENTERED: Mapping[str, int] = {"wrap": 30, "forward": 8, "save": 26, "load": 32}
_JUDGED = ("wrap", "first step", "state_dict")
_CHAIN = 1000  # parameters that come one behind the other
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Settings:
    """``counts`` of parameters of ``numel`` elements, each in ``runs`` processes of its own."""

    counts: tuple[int, ...] = (25_000, 100_000)
    numel: int = 64
    runs: int = 3
    steady_steps: int = 3


QUICK = Settings(counts=(500, 2000), runs=1, steady_steps=1)


class _Chains(nn.Module):
    """A product of parameters, element by element, in chains side by side."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(count)
        draws = (torch.randn(numel, generator=generator) for _ in range(count))
        self.factors = nn.ParameterList(nn.Parameter(1 + 0.01 * draw) for draw in draws)

    def forward(self, x: Tensor) -> Tensor:
        factors = list(self.factors)
        products = []
        for begin in range(0, len(factors), _CHAIN):
            product = x
            for factor in factors[begin : begin + _CHAIN]:
                product = product * factor
            products.append(product)
        return torch.stack(products).sum()


def run(session: Session) -> CaseResult:
    """Measure every count, plain and managed in turn within a process; then count the files."""
    settings = QUICK if session.quick else Settings()
    options = dataclasses.asdict(settings)
    found: dict[str, list[dict[str, Any]]] = {}
    for count in settings.counts:
        for number in range(settings.runs):
            session.progress(f"many: {count} parameters, run {number + 1} of {settings.runs}")
            request = {**options, "count": count}
            run = session.run("many.measure", request, sample_seconds=TIMING_SAMPLE_SECONDS)
            found.setdefault(str(count), []).append(run.data())
    entered = session.run("many.entered", {}, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    return CaseResult(rows(found, entered), options, {"runs": found, "files_entered": entered})


def rows(found: Mapping[str, Sequence[Mapping[str, Any]]], entered: Mapping[str, int]) -> list[Row]:
    """Return microseconds per parameter by count, how they grow, and the files entered."""
    table: list[Row] = []
    for count, runs in found.items():
        for what in runs[0]["plain"]:
            plain = [each["plain"][what] for each in runs]
            table.append(
                spread_row(f"{int(count):,} parameters: {what}, plain torch", Spread.of(plain), "us")
            )
        for what in runs[0]["managed"]:
            managed = Spread.of([each["managed"][what] for each in runs])
            target = PER_PARAMETER_US if what in _JUDGED else None
            table.append(spread_row(f"{int(count):,} parameters: {what}", managed, "us", target))
    few, *_, many = found
    for what in _JUDGED:
        growth = [
            a["managed"][what] / b["managed"][what] for a, b in zip(found[many], found[few], strict=True)
        ]
        name = f"{what}: {int(many):,} / {int(few):,}, per parameter"
        table.append(spread_row(name, Spread.of(growth), "x", LINEAR))
    return table + [
        Row(f"files entered: {what}", entered[what], "files", most) for what, most in ENTERED.items()
    ]


# -- in the worker -------------------------------------------------------------------------------


class _Clock:
    """Takes down what one contender's doings took, in microseconds per parameter."""

    def __init__(self, count: int) -> None:
        self.took: dict[str, float] = {}
        self._count = count

    def time(self, what: str, do: Callable[[], _Result]) -> _Result:
        """Do it, and note its time; of what is done again the last time counts."""
        begin = time.perf_counter()
        result = do()
        self.took[what] = 1e6 * (time.perf_counter() - begin) / self._count
        return result

    def train(self, model: nn.Module, optimizer: Any, x: Tensor, steady_steps: int) -> float:
        """Train some steps; return the first loss."""
        backward = getattr(optimizer, "backward", Tensor.backward)

        def step() -> float:
            loss = model(x)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        first = self.time("first step", step)
        for _ in range(steady_steps):
            self.time("step", step)
        return first


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return microseconds per parameter of a plain model, then of a managed one.

    Raises:
        StateError: their first losses differ.
    """
    count, numel, steady_steps = options["count"], options["numel"], options["steady_steps"]
    torch.set_num_threads(1)
    x = torch.ones(numel)
    plain, managed = _Clock(count), _Clock(count)
    losses = [_train_plain(plain, count, x, steady_steps), _train_managed(managed, count, x, steady_steps)]
    if losses[0] != losses[1]:
        raise StateError(f"the first losses differ: {losses}")
    return {"plain": plain.took, "managed": managed.took}


def _train_plain(clock: _Clock, count: int, x: Tensor, steady_steps: int) -> float:
    model = _Chains(count, x.numel())
    loss = clock.train(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), x, steady_steps)
    clock.time("state_dict", model.state_dict)
    return loss


def _train_managed(clock: _Clock, count: int, x: Tensor, steady_steps: int) -> float:
    module = _Chains(count, x.numel())
    budget = 4 * 16 * count * x.numel()  # four times what there is: no parameter leaves
    model = clock.time("wrap", lambda: gemini.GeminiDDP(module, device_bytes=budget, non_model_bytes=0))
    adam = gemini.CPUAdam(model.parameters(), lr=1e-4)
    optimizer = clock.time("make the optimizer", lambda: gemini.GeminiOptimizer(adam, model))
    loss = clock.train(model, optimizer, x, steady_steps)
    clock.time("state_dict", model.state_dict)
    return loss


def entered(_options: dict[str, Any]) -> dict[str, int]:
    """Return how many files of the runtime's Python it takes to wrap eight linear layers, for a forward pass
    of the third step, to save and to load."""
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    x = torch.randn(2, 16)
    found: dict[str, int] = {}
    model, found["wrap"] = _files_of(lambda: gemini.GeminiDDP(net))
    optimizer = gemini.GeminiOptimizer(gemini.CPUAdam(net.parameters()), model)
    for _ in range(3):
        loss, found["forward"] = _files_of(lambda: model(x))
        optimizer.backward(loss.sum())
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        _, found["save"] = _files_of(lambda: checkpoint.save(path, model, optimizer))
        _, found["load"] = _files_of(lambda: checkpoint.load(path, model, optimizer))
    return found


def _files_of(do: Callable[[], _Result]) -> tuple[_Result, int]:
    package = f"{Path(gemini.__file__).parent}{os.sep}"
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        result = do()
    finally:
        sys.setprofile(None)
    return result, len(seen)


TASKS = {"measure": measure, "entered": entered}
