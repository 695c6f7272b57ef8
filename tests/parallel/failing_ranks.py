"""A program that has ranks fail: ``python failing_ranks.py DIRECTORY '[["gather", "stop"], ...]'``.

It forks two ranks for each row, a few rows at a time: importing torch takes longer than all of them. A rank
trains as any program does, without anything around it that would catch an error, and ends as an interpreter
does. ``DIRECTORY/outcomes.json`` says what became of each.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first optimizer would import
from pipeline_harness import ADAM, CHUNKS, batch_of, language, loss_of
from torch import distributed as dist

from gemini import CPUAdam, GeminiOptimizer
from gemini.checkpoint.sealed_file import SealedFile
from gemini.comm.heartbeats import PATIENCE_VARIABLE
from gemini.comm.ranks import ProcessGroupPeers
from gemini.parallel import Booster, HybridParallelPlugin
from gemini.parallel.pipeline import engine

PATIENCE_SECONDS = 3.0
ENDS_SECONDS = 30.0  # after the failure, by which every rank is gone
AT_ONCE = 5  # rows

_STAGES: dict[str, Any] = {"pp_size": 2, "num_microbatches": 4}
_SPLIT: dict[str, Any] = {**_STAGES, "pp_style": "zero_bubble", "num_model_chunks": 2}
_COPIES: dict[str, Any] = {"num_microbatches": 1, "gather_bytes": 1}

# By row: the plugin's options, the rank that fails, the class or module whose function it fails in, at which
# call of it.
PLACES: dict[str, tuple[dict[str, Any], int, Any, str, int]] = {
    "forward": (_STAGES, 1, engine._Run, "_forward", 3),
    "backward": (_STAGES, 1, engine._Run, "_backward", 3),
    "weights": (_SPLIT, 1, engine, "backward_weights", 3),
    "gather": (_COPIES, 1, ProcessGroupPeers, "gather", 5),
    "exchange": (_COPIES, 1, ProcessGroupPeers, "scatter_all", 2),
    "update": (_COPIES, 1, GeminiOptimizer, "_update", 2),
    "update of a stage": (_STAGES, 1, GeminiOptimizer, "_update", 2),
    "save": (_COPIES, 0, SealedFile, "write", 2),
    "save of stages": (_STAGES, 0, SealedFile, "write", 2),
}


def _fail(how: str, place: Path) -> None:
    (place / "failed").write_text(str(time.monotonic()))
    if how == "raise":
        raise ValueError("a bad sample")
    os.kill(os.getpid(), signal.SIGKILL if how == "die" else signal.SIGSTOP)


def _set_trap(owner: Any, name: str, number: int, how: str, place: Path) -> None:
    """Fail at the ``number``-th call of a function."""
    real: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def trapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            _fail(how, place)
        return real(*args, **kwargs)

    setattr(owner, name, trapped)


def _be_rank(row: str, how: str, rank: int, place: Path) -> None:
    sizes, odd, owner, name, number = PLACES[row]
    for stream in (1, 2):
        os.dup2(os.open(place / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    if rank == odd:
        _set_trap(owner, name, number, how, place)
    store = dist.FileStore(str(place / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    booster, model = Booster(plugin=HybridParallelPlugin(overlap=False, **sizes, **CHUNKS)), language()
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    for step in range(3):
        booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)
        optimizer.step()
    booster.save_model(model, place / "model", shard=True)
    (place / f"survived-{rank}").touch()


def _outcomes(pids: dict[tuple[str, str, int], int], directory: Path) -> dict[str, Any]:
    """Wait for ranks; return how each ended. One that was stopped goes on once the other one has ended."""
    codes: dict[tuple[str, str, int], int | None] = dict.fromkeys(pids)
    ended: dict[tuple[str, str, int], float] = {}
    until = time.monotonic() + 3 * ENDS_SECONDS
    while None in codes.values() and time.monotonic() < until:
        for key in [key for key, code in codes.items() if code is None]:
            pid, status = os.waitpid(pids[key], os.WNOHANG)
            if pid:
                codes[key], ended[key] = os.waitstatus_to_exitcode(status), time.monotonic()
                row, how, rank = key
                if how == "stop" and rank != PLACES[row][1]:
                    with suppress(ProcessLookupError):
                        os.kill(pids[row, how, 1 - rank], signal.SIGCONT)
        time.sleep(0.02)
    found: dict[str, Any] = {}
    for (row, how, rank), code in codes.items():
        place = directory / f"{row}-{how}"
        key = (row, how, rank)
        if code is None:
            os.kill(pids[key], signal.SIGKILL)
            os.waitpid(pids[key], 0)
        since = float((place / "failed").read_text()) if (place / "failed").exists() else 0.0
        found.setdefault(f"{row}, {how}", {})[str(rank)] = {
            "code": code,
            "seconds": ended.get(key, until) - since,
            "failed": since > 0,
            "said": (place / f"rank-{rank}.txt").read_text(errors="replace"),
            "left": sorted(path.name for path in (place / "model").glob("*")),
        }
    return found


def main() -> None:
    """Run all rows."""
    directory, rows = Path(sys.argv[1]), json.loads(sys.argv[2])
    os.environ[PATIENCE_VARIABLE] = str(PATIENCE_SECONDS)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    gc.freeze()  # what is here stays as it is, in every rank to its end
    outcomes: dict[str, Any] = {}
    for start in range(0, len(rows), AT_ONCE):
        pids = {}
        for row, how in rows[start : start + AT_ONCE]:
            place = directory / f"{row}-{how}"
            place.mkdir()
            for rank in range(2):
                pid = os.fork()
                if pid == 0:
                    _be_rank(row, how, rank, place)
                    return
                pids[row, how, rank] = pid
        outcomes |= _outcomes(pids, directory)
    (directory / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
