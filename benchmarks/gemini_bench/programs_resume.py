"""Case ``resume``: saving and resuming with transformers' Trainer while the states are on DISK.

Three kinds of processes train the same model on the same rows: one that nothing stops, one that also saves,
and one that goes on from there. They are compared bit for bit, and by their peaks of memory.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini_bench.cases import require_space
from gemini_bench.paired import Spread, spread_row
from gemini_bench.programs_model import LlamaSizes, require_packages
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session

EXTRA_MB = 100.0
KINDS = ("undisturbed", "saving", "resumed")
_DISK_BYTES_PER_PARAMETER = 40  # the DISK tier, and a checkpoint beside the weights in transformers' format


@dataclass(frozen=True)
class Settings(LlamaSizes):
    """A LLaMA-like model with bf16 weights and fp32 masters and moments; AdamW, ``steps`` steps of which
    ``save_step`` is saved. ``rounds``: processes of each kind."""

    hidden: int = 768
    intermediate: int = 2048
    layers: int = 12
    heads: int = 12
    vocab: int = 16_000
    batch: int = 1
    seq: int = 64
    steps: int = 5
    save_step: int = 3
    device_bytes: str = "192MiB"
    host_bytes: str = "64MiB"
    rounds: int = 2


QUICK = Settings(
    hidden=32,
    intermediate=64,
    layers=2,
    heads=4,
    vocab=96,
    seq=10,
    device_bytes="64KiB",
    host_bytes="16KiB",
    rounds=1,
)


def run(session: Session) -> CaseResult:
    """Train in fresh processes: undisturbed, saving, resumed; in every round each once.

    Raises:
        ConfigError: transformers is missing, or the disk is too small.
    """
    settings = QUICK if session.quick else Settings()
    require_packages("resume", "transformers", "accelerate")
    need = _DISK_BYTES_PER_PARAMETER * settings.num_parameters
    require_space("resume", need, session.disk_dir, "name another --disk-dir")
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(settings.rounds):
        place = session.disk_dir / f"round-{number}"
        for kind in KINDS:
            session.progress(f"resume: {kind}, round {number + 1} of {settings.rounds}")
            options = {**dataclasses.asdict(settings), "kind": kind, "place": os.fspath(place)}
            # The case has a watch of its own, phase by phase.
            found[kind].append(session.run("programs_resume.train", options, sample_seconds=0.1).data())
        shutil.rmtree(place)
    return CaseResult(_rows(settings, found), dataclasses.asdict(settings), _without_digests(found))


def _rows(settings: Settings, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Row]:
    first = found["undisturbed"][0]
    rows = [
        Row("parameters", first["num_parameters"], ""),
        Row("Adam's moments", first["moment_bytes"], "bytes"),
        Row("model data on DISK at the end, at least", _least(found, "disk_bytes"), "bytes"),
        Row("training: peak resident memory", max(_peaks(found["undisturbed"], "resident")), "bytes"),
    ]
    for kind, what in (("saving", "save"), ("resumed", "resume")):
        rows += [
            spread_row(
                f"{what}: resident memory beyond training's", _extra(found, kind, "resident"), "MB", EXTRA_MB
            ),
            spread_row(
                f"{what}: the same without pages of mapped files", _extra(found, kind, "unmapped"), "MB"
            ),
        ]
    for kind, what in (("saving", "saved at"), ("resumed", "resumed from")):
        pairs = zip(found["undisturbed"], found[kind], strict=True)
        odd = [name for want, got in pairs for name in unlike(want, got)]
        some = f", such as {odd[0]}" if odd else ""
        rows.append(
            Row(
                f"{what} step {settings.save_step}, at step {settings.steps}: of "
                f"{len(first['digests'])} weights and states and the losses, other bits than without{some}",
                len(odd),
                "",
                0,
            )
        )
    return rows


def unlike(want: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    """Return the names of weights, states and losses of a run that are not those of another; losses of steps
    that it has not trained are left out."""
    names = sorted({*want["digests"], *got["digests"]})
    odd = [name for name in names if want["digests"].get(name) != got["digests"].get(name)]
    losses = got["losses"]
    return odd + [f"the loss of step {step}" for step in losses if want["losses"].get(step) != losses[step]]


def _extra(found: Mapping[str, Sequence[Mapping[str, Any]]], kind: str, which: str) -> Spread:
    """Return the megabytes by which processes peak higher than the undisturbed one of their round."""
    pairs = zip(_peaks(found[kind], which), _peaks(found["undisturbed"], which), strict=True)
    return Spread.of([(mine - other) / 1e6 for mine, other in pairs])


def _peaks(runs: Sequence[Mapping[str, Any]], which: str) -> list[int]:
    return [max(one[which].values()) for one in runs]


def _least(found: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> int:
    return min(int(one[name]) for runs in found.values() for one in runs)


def _without_digests(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return readings for the record; whether digests agree is in its rows."""
    kept = {}
    for kind, runs in found.items():
        kept[kind] = [{key: value for key, value in one.items() if key != "digests"} for one in runs]
    return kept


def _train(options: dict[str, Any]) -> dict[str, Any]:
    from gemini_bench.programs_trainer import train

    kind, place = options.pop("kind"), Path(options.pop("place"))
    return train(Settings(**options), kind, place)


TASKS = {"train": _train}
