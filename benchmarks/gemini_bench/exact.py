"""``gemini bench exact``: the distance of training from plain torch, for this runtime and for other
libraries.

The reference is one process of plain torch that takes the same global batches in the same precision. Where a
contender has parts of its own (its Adam, its norm, its order of sums), a plain loop with these parts is a
second reference, its twin: it tells what is theirs from what the rest of the contender adds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemini_bench.cases import choose, run_cases
from gemini_bench.exact_contenders import CONTENDERS, DEEPSPEED, FSDP2, OUR_ADAM, OURS, PLAIN
from gemini_bench.exact_plain import Recipe, train_plain
from gemini_bench.exact_settings import JOB, QUICK, SETTINGS, Job, NotOffered, Setting, Task
from gemini_bench.io_peers import silent_deepspeed
from gemini_bench.parallel_ranks import RankFailed, fork_ranks
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

REFERENCE = "reference"
# Who must have the bits of the reference on one rank; over ranks, and with its own Adam, those of its twin.
_JUDGED = (PLAIN, OURS, OUR_ADAM)
_REASON_CHARS = 300


@dataclass(frozen=True)
class Difference:
    """How far two runs are apart: the mean loss of a step and the final weights, at most. Losses are relative
    to the reference's of that step, weights to its largest one."""

    loss: float
    loss_relative: float
    weights: float
    weights_relative: float
    same_bits: bool


class ExactRow(Row):
    """The difference of the weights, and everything else beside it."""

    def __init__(self, what: str, found: Difference, *, judged: bool, twin: str = "") -> None:
        # Nothing but the same bits is 0: a loss may differ where no weight does.
        value = 0.0 if found.same_bits else max(found.weights, found.loss, 5e-324)
        super().__init__(what, value, "", 0.0 if judged else None)
        self._extra = {"twin": twin, **dataclasses.asdict(found)}

    def to_dict(self) -> dict[str, Any]:
        """Return the row as it stands in the JSON record."""
        return {**super().to_dict(), **self._extra}


class NoNumber(Row):
    """A contender that has no number here, with the reason."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, math.nan, "")
        self._reason = reason

    def to_dict(self) -> dict[str, Any]:
        """Return the row as it stands in the JSON record; its value is null."""
        return {**super().to_dict(), "value": None, "absent": self._reason}


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return the settings to run, in the table's order; None is all. Raise ConfigError for an unknown one."""
    return choose(SETTINGS, names)


def contenders(names: Sequence[str] | None) -> list[str]:
    """Return the contenders, in the table's order; None is all. Raise ConfigError for an unknown one."""
    return choose(CONTENDERS, names)


def run(
    session: Session, names: Sequence[str], command: Sequence[str], whom: Sequence[str] = tuple(CONTENDERS)
) -> dict[str, Any]:
    """Run the named settings and return one plain dict; one that fails leaves its error, the others go on."""
    if any(CONTENDERS[who].module == DEEPSPEED for who in whom) and importlib.util.find_spec(DEEPSPEED):
        session.progress("DeepSpeed: its kernels, which are compiled once")
        session.run("exact_deepspeed.compile", {}, sample_seconds=TIMING_SAMPLE_SECONDS)
    cases: dict[str, Callable[[Session], CaseResult]] = {name: partial(compare, name, whom) for name in names}
    return run_cases("exact", session, cases, command)


def compare(name: str, whom: Sequence[str], session: Session) -> CaseResult:
    """Train one setting with every contender, and compare each with plain torch. Raises WorkerFailed if plain
    torch or this runtime fails.
    """
    setting, job = SETTINGS[name], QUICK if session.quick else JOB
    session.progress(f"{name}: {setting.title}")
    options = {
        "job": dataclasses.asdict(job),
        "setting": name,
        "names": list(whom),
        "directory": str(session.disk_dir),
    }
    found = session.run("exact.train", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    rows: list[Row] = []
    for who in whom:
        rows += _rows(who, setting, found["runs"], session.disk_dir)
    settings = {"job": dataclasses.asdict(job), "setting": dataclasses.asdict(setting)}
    return CaseResult(rows, settings, found)


def _rows(who: str, setting: Setting, runs: Mapping[str, Any], directory: Path) -> list[Row]:
    """Return the row of a contender, and that of its twin."""
    mine, twin = runs[who], runs[who].get("twin")
    if mine.get("absent"):
        return [NoNumber(who, mine["absent"])]
    judged = who in _JUDGED
    rows: list[Row] = [
        ExactRow(who, difference(mine, runs[REFERENCE], directory), judged=judged and not twin)
    ]
    if twin is not None:
        parts = twin["recipe"]
        rows.append(
            ExactRow(
                f"{who}, from plain torch with its parts ({parts})",
                difference(mine, twin, directory),
                judged=judged,
                twin=parts,
            )
        )
    return rows


def difference(mine: Mapping[str, Any], wanted: Mapping[str, Any], directory: Path) -> Difference:
    """Compare two runs with their weights in ``directory``."""
    pairs = [
        (statistics.fmean(each), statistics.fmean(other))
        for each, other in zip(mine["losses"], wanted["losses"], strict=True)
    ]
    apart = [abs(one - other) for one, other in pairs]
    weights, others = (_read(Path(directory, run["weights"])) for run in (mine, wanted))
    differ = (weights.double() - others.double()).abs().max()
    return Difference(
        loss=max(apart),
        loss_relative=max(each / abs(other) for each, (_, other) in zip(apart, pairs, strict=True)),
        weights=float(differ),
        weights_relative=float(differ / others.double().abs().max()),
        same_bits=mine["digest"] == wanted["digest"] and max(apart) == 0,
    )


def _read(path: Path) -> Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)


# -- in the worker -------------------------------------------------------------------------------


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train the reference and the named contenders one after the other. Each runs in its own forked
    processes, which import what it needs. Return by name the losses of each step over ranks and
    micro-batches, and the file and digest of the weights, or the reason for a failure.
    """
    job, setting = Job.of(options["job"]), SETTINGS[options["setting"]]
    directory = Path(options["directory"])
    runs: dict[str, Any] = {REFERENCE: _train_plain(job, setting, Recipe(), directory, REFERENCE)}
    for number, name in enumerate(options["names"]):
        if CONTENDERS[name].module == DEEPSPEED:
            _import_deepspeed()
        own = directory / str(number)
        own.mkdir()
        found = _train(job, setting, name, own)
        if not found.get("absent"):
            found["weights"] = f"{number}/{found['weights']}"
            recipe = CONTENDERS[name].other_twin(setting)
            if recipe is not None:
                twin = _train_plain(job, setting, recipe, directory, f"{number}/twin")
                found["twin"] = {**twin, "recipe": str(recipe)}
        runs[name] = found
    return {"runs": runs, "versions": _versions()}


def _import_deepspeed() -> None:
    """Import it for all processes that are forked from now on: it takes longer than to train. Those of others
    come before. Where it cannot be imported, its processes say why."""
    with contextlib.suppress(ImportError, RuntimeError, OSError):
        silent_deepspeed()


def _versions() -> dict[str, str]:
    modules = [kind.module for kind in CONTENDERS.values() if kind.module]
    return {name: importlib.metadata.version(name) for name in modules if importlib.util.find_spec(name)}


def _train(job: Job, setting: Setting, name: str, directory: Path) -> dict[str, Any]:
    """Train a contender; if the setting resumes, other processes train the second half of the steps."""
    kind = CONTENDERS[name]
    if kind.module and importlib.util.find_spec(kind.module) is None:
        return {"absent": f"is not installed: pip install {kind.module}"}
    half = job.steps // 2 if setting.resumes else 0
    losses: list[list[float]] = []
    last: dict[str, Any] = {}
    for start, stop in [(0, half), (half, job.steps)] if half else [(0, job.steps)]:
        call = partial(_be_contender, job, setting, name, str(directory), (start, stop))
        try:
            ranks = [run.result for run in fork_ranks(call, 1 if name == PLAIN else setting.ranks)]
        except RankFailed as error:
            if not (kind.module or name == FSDP2):
                raise
            return {"absent": f"does not work here: {_last_line(error)}"}
        last = ranks[0]
        if last.get("absent"):
            return last
        steps = zip(*(rank["losses"] for rank in ranks), strict=True)
        losses += [[loss for rank in step for loss in rank] for step in steps]
    return {**last, "losses": losses}


def _last_line(error: Exception) -> str:
    """Return the exception from the text of a traceback."""
    return str(error).strip().splitlines()[-1][:_REASON_CHARS]


def _be_contender(
    job: Job, setting: Setting, name: str, directory: str, steps: tuple[int, int], rank: int
) -> dict[str, Any]:
    """Train some steps as one rank of a contender."""
    start, stop = steps
    saved = Path(directory, "saved")
    saved.mkdir(exist_ok=True)
    try:
        contender = CONTENDERS[name].make(Task(job, setting, rank, directory, resumes=start > 0))
    except NotOffered as reason:
        return {"absent": str(reason)}
    if start > 0:
        contender.load(str(saved))
    losses = [contender.step(job.micro_batches(setting, step, rank)) for step in range(start, stop)]
    if stop < job.steps:
        contender.save(str(saved))
        return {"losses": losses}
    weights = contender.weights()
    return {"losses": losses, **(_write(weights, Path(directory, "weights")) if rank == 0 else {})}


def _train_plain(job: Job, setting: Setting, recipe: Recipe, directory: Path, name: str) -> dict[str, Any]:
    """Train a plain loop in its own process."""
    call = partial(_be_plain, job, setting, recipe, directory / name)
    found: dict[str, Any] = fork_ranks(call, 1)[0].result
    return {**found, "weights": name}


def _be_plain(job: Job, setting: Setting, recipe: Recipe, path: Path, _rank: int) -> dict[str, Any]:
    losses, weights = train_plain(job, setting, recipe)
    return {"losses": losses, **_write(weights, path)}


def _write(weights: Mapping[str, Tensor], path: Path) -> dict[str, str]:
    """Write weights in fp32 to a file, in the order of their names; return its name and digest."""
    flat = torch.cat([weights[name].detach().flatten().float() for name in sorted(weights)])
    data = flat.numpy().tobytes()
    path.write_bytes(data)
    return {"weights": path.name, "digest": hashlib.sha256(data).hexdigest()}


TASKS = {"train": train}
