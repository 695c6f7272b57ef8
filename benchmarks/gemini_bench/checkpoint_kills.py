"""Case ``kills``: ``kill -9`` at random moments of a real training; every resume continues it exactly."""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gemini import checkpoint
from gemini.errors import GeminiError
from gemini.model.ddp import GeminiDDP
from gemini.optim import GeminiAdamOptimizer
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session

KILLS, QUICK_KILLS = 300, 3
SAVE_EVERY = 2
_KIB = 1024
_MESSAGE = struct.Struct("<cqd")  # what, step, loss
_RESUMED, _STEP, _SAVED = b"r", b"s", b"c"
_LONGEST_LIFE_SECONDS = 60.0
_FEWEST_STEPS = 12  # of the whole run, on a machine so busy that processes are killed while they start, too


class KillError(GeminiError):
    """A resume failed or did not continue the training."""


@dataclass
class Lives:
    """Totals of the processes' messages: losses by step (from 0), and the numbers of saves and resumes."""

    losses: dict[int, float] = field(default_factory=dict)
    saved: int = 0
    resumes: int = 0
    mid_save: int = 0


def run(session: Session, *, kills: int | None = None) -> CaseResult:
    """Kill and resume in a separate process; a resume that fails fails the case."""
    kills = kills or (QUICK_KILLS if session.quick else KILLS)
    session.progress(f"kills: {kills} times kill -9, with a checkpoint every {SAVE_EVERY} steps")
    options = {"kills": kills, "disk_dir": os.fspath(session.disk_dir)}
    found = session.run("checkpoint_kills.kills", options).data()
    rows = [
        Row("kills", found["kills"], "kills"),
        Row("resumes", found["resumes"], "resumes"),
        Row("losses that differ from an undisturbed run's", found["different"], "losses", 0),
        Row("kills while a checkpoint was being written", found["mid_save"], "kills"),
        Row("steps trained", found["steps"], "steps"),
    ]
    return CaseResult(rows, {"kills": kills}, found)


def kill_and_resume(place: Path, kills: int, *, seed: int = 0) -> dict[str, Any]:
    """Train in forked processes that are killed, ``kills`` times; compare all losses with one run's.

    Raises:
        KillError: a process could not resume, or resumed before a checkpoint that was complete.
    """
    dice, lives = random.Random(seed), Lives()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process has none but its own
    try:
        model, optimizer = _build(place)  # brings modules that every process would have to load
        _step(model, optimizer)
        model.close()
        life = _live(place, lives, lambda said: said >= 8)
        for _ in range(kills):
            end = time.perf_counter() + dice.uniform(0, 2 * life)
            _live(place, lives, lambda _said, end=end: time.perf_counter() >= end)  # type: ignore[misc]
            lives.mid_save += bool(list((place / "run").glob("*.partial")))
        # The last kill, too, must have left a checkpoint that can be resumed.
        _live(place, lives, lambda said: said >= 4 and len(lives.losses) >= _FEWEST_STEPS)
        steps = max(lives.losses) + 1
        want = Lives()
        _live(place / "undisturbed", want, lambda _said: len(want.losses) >= steps, every=0)
    finally:
        torch.set_num_threads(threads)
    different = sum(want.losses[step] != loss for step, loss in lives.losses.items())
    return {
        "kills": kills,
        "different": different,
        "steps": steps,
        "resumes": lives.resumes,
        "mid_save": lives.mid_save,
    }


def _live(place: Path, lives: Lives, is_over: Callable[[int], bool], *, every: int = SAVE_EVERY) -> float:
    """Train in a forked process until ``is_over(messages)``; kill it; return how many seconds it lived."""
    place.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        _child(place, writing, every)
    os.close(writing)
    os.set_blocking(reading, False)
    said, taken = b"", 0
    try:
        while not is_over(len(said) // _MESSAGE.size):
            if time.perf_counter() - started > _LONGEST_LIFE_SECONDS:
                raise KillError(f"a process has trained nothing in {_LONGEST_LIFE_SECONDS:.0f} s")
            said += _read(reading)
            taken = _take(said, taken, lives)
            if os.waitpid(child, os.WNOHANG)[0]:
                child = 0
                raise KillError(f"a process ended by itself: {_error(place)}")
            time.sleep(0.0005)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        said += _read(reading)
        os.close(reading)
    _take(said, taken, lives)
    return time.perf_counter() - started


def _take(said: bytes, taken: int, lives: Lives) -> int:
    """Record the messages of a process after its first ``taken`` bytes; return the number of bytes now."""
    end = len(said) // _MESSAGE.size * _MESSAGE.size
    for what, step, loss in _MESSAGE.iter_unpack(said[taken:end]):
        if what == _RESUMED:
            if step < lives.saved:
                raise KillError(
                    f"resumed at step {step}, although a checkpoint of {lives.saved} was complete"
                )
            lives.resumes += 1
        elif what == _SAVED:
            lives.saved = max(lives.saved, step)
        elif lives.losses.setdefault(step, loss) != loss:
            raise KillError(
                f"step {step} had loss {lives.losses[step]!r} before a kill and {loss!r} after it"
            )
    return end


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


def _error(place: Path) -> str:
    try:
        return (place / "error.txt").read_text()
    except OSError:
        return "it left no message"


def _child(place: Path, report: int, every: int) -> None:
    """Train forever; never returns."""
    try:
        _train(place, lambda *message: os.write(report, _MESSAGE.pack(*message)), every)
    except BaseException as error:
        (place / "error.txt").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(1)


def _train(place: Path, say: Callable[..., object], every: int) -> None:
    """Resume if there is a checkpoint, then train; alternate between synchronous and asynchronous saves."""
    model, optimizer = _build(place)
    step, run = 0, place / "run"
    if checkpoint.is_complete(run):
        step = int(checkpoint.load(run, model, optimizer)["step"])
        say(_RESUMED, step, 0.0)
    handle, handle_step = None, 0
    while True:
        say(_STEP, step, _step(model, optimizer))
        step += 1
        if handle is not None and handle.done():
            handle.wait()
            say(_SAVED, handle_step, 0.0)
            handle = None
        if every and step % every == 0:
            if step % (2 * every):
                checkpoint.save(run, model, optimizer, extra={"step": step})
                say(_SAVED, step, 0.0)
                handle = None
            else:
                handle = checkpoint.save_async(run, model, optimizer, extra={"step": step})
                handle_step = step


def _build(place: Path) -> tuple[GeminiDDP, GeminiAdamOptimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 48)]
    model = GeminiDDP(
        nn.Sequential(*layers, nn.LayerNorm(48), nn.Linear(48, 9)),
        "cpu",
        placement_policy="cpu",
        mixed_precision="bf16",
        device_bytes=160 * _KIB,
        host_bytes=32 * _KIB,
        non_model_bytes=0,
        min_chunk_size_mb=0.01,
        search_range_mb=0,
        disk_dir=os.fspath(place),
    )
    return model, GeminiAdamOptimizer(model, lr=1e-2)


def _step(model: GeminiDDP, optimizer: GeminiAdamOptimizer) -> float:
    """Train on a batch from the generator that checkpoints restore; return its loss."""
    x, y = torch.randn(8, 48), torch.randint(0, 9, (8,))
    loss = F.cross_entropy(model(x).float(), y)
    optimizer.backward(loss)
    optimizer.step()
    return loss.item()


def _kills(options: dict[str, Any]) -> dict[str, Any]:
    return kill_and_resume(Path(options["disk_dir"]), options["kills"])


TASKS = {"kills": _kills}
