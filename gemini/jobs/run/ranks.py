"""Starts the ranks of a job on this machine, watches them, and lets each rank find its place among them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from gemini import errors
from gemini.comm.heartbeats import meet_at_start
from gemini.comm.ranks import Rank, make_peers
from gemini.errors import ConfigError, GeminiError, StateError
from gemini.parallel.launch import launch_from_torch, shutdown
from gemini.parallel.launch.local_ranks import (
    end_with_starter,
    environment,
    first_error,
    leave_error,
    named_starter,
    quiet_torchrun,
    threads_per_rank,
)
from gemini.parallel.launch.torchrun import Node, Program, chosen_port, directory_of_ranks, run_ranks

_ERRORS = "GEMINI_RANK_ERRORS"  # names the directory in which a failed rank writes its error
_RESUME = (
    "The last complete checkpoint is unchanged: run the same command with --resume auto to continue from it"
)
_ENDING_SECONDS = 3600  # time to finish and save a step; torchrun's default of 30 s is too short


def num_ranks() -> int:
    """Return the number of ranks that torchrun or :func:`run_on_ranks` started; 1 without either."""
    ranks = os.environ.get("WORLD_SIZE", "")
    return int(ranks) if "RANK" in os.environ and ranks.isdigit() and int(ranks) > 1 else 1


@contextmanager
def place_among_ranks() -> Iterator[Rank]:
    """Join the other ranks, if there are any, and yield this rank."""
    if num_ranks() == 1:
        yield Rank()
        return
    launch_from_torch()
    meet_at_start()
    peers = make_peers(None)
    assert peers is not None
    try:
        yield Rank(peers.share.place, peers.share.world, peers.say, failure=StateError)
    except BaseException as error:
        peers.leave(f"ended with {type(error).__name__}: {error}")
        raise
    else:
        peers.leave("ended the job")
        shutdown()


def run_on_ranks(arguments: Sequence[str], ranks: int, way_out: str = _RESUME) -> int:
    """Run ``gemini ARGUMENTS`` on ``ranks`` ranks of this machine, and return the exit code.

    Ctrl-C, SIGTERM and SIGUSR1 reach all ranks. If a rank fails, the others are ended. ``way_out``: the
    remedy for the error message.

    Raises:
        GeminiError: the error of the first rank that failed.
        StateError: a rank ended in another way.
    """
    told: list[int] = []

    def tell(signum: int, frame: FrameType | None) -> None:
        told.append(signum)  # torchrun forwards SIGTERM to the ranks, but not SIGUSR1
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGUSR1, tell)
    try:
        with directory_of_ranks() as directory, quiet_torchrun():
            with environment(_variables(directory, ranks)):
                program = Program("gemini", tuple(arguments), module=True)
                ended = run_ranks(Node(str(ranks), port=chosen_port(None)), program)
            error = _first_error(directory)
    finally:
        signal.signal(signal.SIGUSR1, before)
    if not ended.code or (ended.code > 128 and not ended.reason):
        return 128 + told[0] if told and ended.code else ended.code
    if error is not None and ended.code < 128:
        raise error
    raise StateError(f"{ended.reason}; the other ranks were stopped. {way_out}")


@contextmanager
def errors_of_rank() -> Iterator[None]:
    """Context manager for a rank of :func:`run_on_ranks`. It writes the rank's error to a file for the
    starting process, which reports it once, and ends the rank with code 2. It also ends the rank when the
    starting process ends."""
    end_with_starter()
    try:
        yield
    except GeminiError as error:
        directory = os.environ.get(_ERRORS)
        if directory is None or not Path(directory).is_dir():
            raise
        leave_error(Path(directory), error)
        raise SystemExit(2) from error


def _variables(directory: Path, ranks: int) -> dict[str, str]:
    said = {
        "OMP_NUM_THREADS": threads_per_rank(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_ENDING_SECONDS),
    }
    open_yet = {name: value for name, value in said.items() if name not in os.environ}
    return {**open_yet, _ERRORS: str(directory), **named_starter()}


def _first_error(directory: Path) -> GeminiError | None:
    left = first_error(directory)
    if left is None:
        return None
    name, text = left
    kind = getattr(errors, name, StateError)
    if kind not in (ConfigError, errors.InputError, errors.CheckpointError, errors.OutOfBudgetError):
        kind = StateError
    return kind(text)
