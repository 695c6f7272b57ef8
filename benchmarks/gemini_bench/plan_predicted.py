"""Case ``predicted``: steps as the planner predicts them, beside the same steps over ranks of this
machine."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gemini.errors import ConfigError
from gemini.forecast.machine import MachineSpeeds, measure_machine
from gemini.model.ddp import GeminiDDP
from gemini.optim import CPUAdam
from gemini.parallel import Booster, HybridParallelPlugin, ParallelPlan
from gemini.parallel.collective_speeds import measure_collectives
from gemini.planner.chunks import StageCapacity
from gemini.planner.plans import plan_of
from gemini.planner.search import Found, Question, search_each
from gemini.system.threads import usable_processors
from gemini_bench import plan_jobs as jobs
from gemini_bench.paired import AbsentRow, Spread, in_turn, spread_row
from gemini_bench.parallel_ranks import fork_ranks
from gemini_bench.parallel_turns import require_same_losses
from gemini_bench.programs_model import require_packages
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

ERROR = 0.12
REGRET = 0.02
REGRET_OF_BEST = 0.005
BEST_OF = 3
MISSED = 0.1  # 3 of 30 models

_CAPACITY = StageCapacity(4 * 2**30)
_SAMPLE_SECONDS = 8.0
_LR = 1e-4


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the case: ``rounds`` are counted, one more warms up. In its turn a layout runs
    ``steps`` steps. Only the last is counted; the others bring its data back into the caches.
    """

    ranks: int = 2
    rounds: int = 9
    models: tuple[str, ...] = tuple(name for name in jobs.MODELS if name != jobs.QUICK_MODEL)
    seq: int = jobs.SEQ
    steps: int = 2


def run(session: Session, settings: Settings) -> CaseResult:
    """Predict and measure every layout of every model.

    Raises:
        ConfigError: transformers is missing.
        StateError: the losses of layouts differ: then they do not train the same.
    """
    require_packages("predicted", "transformers")
    if session.quick:
        settings = dataclasses.replace(
            settings, models=(jobs.QUICK_MODEL,), rounds=1, steps=1, seq=jobs.QUICK_SEQ
        )
    found = {name: _of_model(session, settings, name) for name in settings.models}
    rows = [row for name, each in found.items() for row in _rows(name, each)]
    judged = len(usable_processors()) >= settings.ranks
    return CaseResult(rows + summary(found, judged=judged), dataclasses.asdict(settings), found)


def _of_model(session: Session, settings: Settings, name: str) -> dict[str, Any]:
    """Predict the layouts of one model, then measure them; return both by layout."""
    session.progress(f"predicted: {name}, {settings.ranks} ranks: speeds of this machine, plans")
    options = {
        "model": name,
        "ranks": settings.ranks,
        "seq": settings.seq,
        "place": os.fspath(session.disk_dir),
    }
    planned = session.run("plan_predicted.predict", {**options, "quick": session.quick}).data()
    session.progress(f"predicted: {name}, {settings.ranks} ranks: {', '.join(planned['predicted'])}")
    options |= {"files": planned["files"], "rounds": settings.rounds, "steps": settings.steps}
    measured = session.run("plan_predicted.measure", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    require_same_losses(measured["losses"])
    return {
        "predicted": planned["predicted"],
        "refused": planned["refused"],
        "seconds": measured["seconds"],
    }


# -- figures -------------------------------------------------------------------------------------


def _rows(model: str, found: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for layout, prediction in found["predicted"].items():
        seconds, predicted = Spread.of(found["seconds"][layout]), prediction["step_seconds"]
        what = f"{model}, {layout}"
        errors = [predicted / each - 1 for each in (seconds.median, seconds.high, seconds.low)]
        rows.append(Row(f"{what}: predicted", predicted, "s"))
        rows.append(spread_row(f"{what}: measured", seconds, "s"))
        rows.append(spread_row(f"{what}: error", Spread(*errors), "share"))
    rows += [AbsentRow(f"{model}, {layout}: {why}") for layout, why in found["refused"].items()]
    return rows


@dataclasses.dataclass(frozen=True)
class Choice:
    """How good a choice among the layouts of a model is. ``regret``: by how much what was predicted to be the
    fastest takes longer than the fastest; ``regret_of_best``: the same where the first few are measured."""

    errors: tuple[float, ...]
    regret: float
    regret_of_best: float

    @classmethod
    def of(cls, predicted: Mapping[str, float], measured: Mapping[str, float]) -> Choice:
        """Judge the predictions of some layouts."""
        ranked = sorted(predicted, key=lambda name: predicted[name])
        fastest = min(measured.values())
        return cls(
            tuple(abs(predicted[name] / measured[name] - 1) for name in ranked),
            measured[ranked[0]] / fastest - 1,
            min(measured[name] for name in ranked[:BEST_OF]) / fastest - 1,
        )


def summary(found: Mapping[str, Mapping[str, Any]], *, judged: bool) -> list[Row]:
    """Return the results over all models. Ranks that share a core are not ``judged``, because operators were
    timed on a core without sharing.
    """
    choices = [
        Choice.of(
            {layout: each["step_seconds"] for layout, each in model["predicted"].items()},
            {layout: statistics.median(seconds) for layout, seconds in model["seconds"].items()},
        )
        for model in found.values()
    ]
    errors = Spread.of([error for choice in choices for error in choice.errors])
    regrets = [choice.regret for choice in choices]
    best = [choice.regret_of_best for choice in choices]
    hits = sum(regret == 0 for regret in regrets) / len(regrets)
    missed = sum(regret > REGRET for regret in regrets) / len(regrets)
    mean = statistics.fmean(error for choice in choices for error in choice.errors)
    targets = (ERROR, MISSED, REGRET, REGRET_OF_BEST) if judged else (None,) * 4
    return [
        Row("layouts that were measured", sum(len(choice.errors) for choice in choices), "layouts"),
        Row("mean absolute error", mean, "share", targets[0]),
        spread_row("median absolute error", errors, "share"),
        Row("models whose fastest layout is the one predicted", hits, "share"),
        Row(f"models whose pick takes {REGRET:.0%} longer than the fastest", missed, "share", targets[1]),
        Row("regret of the pick, mean", statistics.fmean(regrets), "share", targets[2]),
        Row("regret of the pick, highest", max(regrets), "share"),
        Row(f"regret with the best {BEST_OF} measured, mean", statistics.fmean(best), "share", targets[3]),
        Row(f"regret with the best {BEST_OF} measured, highest", max(best), "share"),
    ]


# -- in the workers ------------------------------------------------------------------------------


def predict(options: dict[str, Any]) -> dict[str, Any]:
    """Measure this machine and plan every layout. Return the predictions, and the files of plans."""
    torch.set_num_threads(1)
    ranks, seq, quick = options["ranks"], options["seq"], options["quick"]
    with torch.device("meta"):
        model = jobs.build(options["model"])
    pins = jobs.layouts(ranks)
    question = Question(
        ranks,
        jobs.BATCH,
        jobs.supposed_machine() if quick else _this_machine(ranks),
        _CAPACITY,
        sample_seconds=0.0 if quick else _SAMPLE_SECONDS,
    )
    found = search_each(model, lambda samples: jobs.run_of(samples, seq), question, list(pins.values()))
    predicted, refused, files = {}, {}, {}
    for number, (name, each) in enumerate(zip(pins, found, strict=True)):
        if not each.prices:
            refused[name] = _why(each)
            continue
        plan = plan_of(each, question, model, "fp32")
        file = Path(options["place"], f"{options['model']} {number}.json")
        plan.save(file)
        predicted[name] = dataclasses.asdict(plan.predicted)
        files[name] = os.fspath(file)
    if not predicted:
        raise ConfigError(f"no layout of {options['model']} can be: {refused}")
    return {"predicted": predicted, "refused": refused, "files": files}


def _this_machine(ranks: int) -> MachineSpeeds:
    machine = measure_machine(torch.float32, ())
    return dataclasses.replace(machine, collectives=measure_collectives(ranks))


def _why(found: Found) -> str:
    return "; ".join(found.left_out.values()) or "it does not fit"


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each step that counts (of the slowest rank) and all losses (the mean over the
    ranks), by layout."""
    import transformers  # once, before the ranks are forked  # noqa: F401

    names, runs = list(options["files"]), fork_ranks(partial(_alternate, options), options["ranks"])
    columns = {name: [run.result["seconds"][name] for run in runs] for name in names}
    losses = {name: [run.result["losses"][name] for run in runs] for name in names}
    return {
        "seconds": {name: [max(each) for each in zip(*columns[name], strict=True)] for name in names},
        "losses": {
            name: [statistics.fmean(each) for each in zip(*losses[name], strict=True)] for name in names
        },
    }


def _alternate(options: dict[str, Any], _rank: int) -> dict[str, Any]:
    """Train all layouts as one rank; the first layout changes from round to round."""
    trainees = {name: _Trainee(options["model"], file) for name, file in options["files"].items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainees}
    losses: dict[str, list[float]] = {name: [] for name in trainees}
    for number in range(1 + options["rounds"]):
        for name in in_turn(list(trainees), number):
            for step in range(options["steps"]):
                batch = jobs.batch_of(options["model"], number * options["steps"] + step, options["seq"])
                dist.barrier()
                start = time.perf_counter()
                losses[name].append(trainees[name].step(batch))
                elapsed = time.perf_counter() - start
            if number:
                seconds[name].append(elapsed)
    dist.barrier()
    for trainee in trainees.values():
        trainee.close()
    return {"seconds": seconds, "losses": losses}


class _Trainee:
    """A model that trains by a plan."""

    def __init__(self, model: str, file: str) -> None:
        self._plugin = HybridParallelPlugin(plan=ParallelPlan.load(file))
        self._booster, module = Booster(plugin=self._plugin), jobs.build(model)
        self._model, self._optimizer, *_ = self._booster.boost(module, CPUAdam(module.parameters(), lr=_LR))

    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        """Train on this rank's samples; return their loss."""
        ranks = self._plugin.data_ranks
        part = {name: tensor.chunk(ranks.size)[ranks.number] for name, tensor in batch.items()}
        out = self._booster.execute_pipeline(iter([part]), self._model, _loss_of, self._optimizer)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(out["loss"])

    def close(self) -> None:
        """Release the model's chunks."""
        if isinstance(self._model, GeminiDDP):
            self._model.close()


def _loss_of(out: Any, _batch: Any) -> torch.Tensor:
    loss: torch.Tensor = out.loss
    return loss


TASKS = {"predict": predict, "measure": measure}
