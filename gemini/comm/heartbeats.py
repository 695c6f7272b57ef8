"""Heartbeats of ranks: each rank publishes its state in a store, so that a rank that waits in vain can name
the rank that is missing. See docs/notes/zero.md.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from gemini.comm.pulse import PulseQuestions, own_pulse
from gemini.comm.rank_state import LastSeen, RankState, computed_seconds, own_place
from gemini.errors import ConfigError, StateError
from gemini.system.threads import start_thread, wait_until_idle

logger = logging.getLogger(__name__)

PATIENCE_VARIABLE = "GEMINI_RANK_PATIENCE"
_PATIENCE_SECONDS = 60.0
_BEATS = 30  # heartbeats within the patience
_LONGEST_BEAT_SECONDS = 1.0
_MISSED_BEATS = 3  # after a broken connection, a rank that misses this many is gone

_GLOO_THREADS = "pt_gloo_runloop"  # torch's name for them
_GLOO_SECONDS = 1.0

_SLOWEST_BYTES_PER_S = 2**20  # slower than any network used for training

_SILENT = "has given no sign of life for"
_BROKEN = "ranks lost the connection to each other"
_START_AGAIN = "Start all ranks again; training continues from its last checkpoint (gemini.checkpoint.load)"
_UNEVEN = (
    "All ranks must make the calls that ranks make together as often and in the same order; where one has "
    "fewer batches, train within `with model.join():` (GeminiDDP), end the loop on all after the smallest "
    "number (all_reduce it with MIN before), or use DistributedSampler(drop_last=True) (docs/notes/zero.md)"
)
_EVERY: weakref.WeakSet[Heartbeats] = weakref.WeakSet()  # all objects of this process
_EVERY_LOCK = threading.Lock()  # guards _EVERY: heartbeat threads read it


class Heartbeats:
    """Publishes this rank's state in a store with each heartbeat, and reads the states of the other ranks
    while this rank waits long.

    A thread of its own talks to the store, because the store may be unreachable without an error; a waiting
    rank uses the states read last. A rank that left, or gives no sign for the patience, is named at once. A
    rank that is alive elsewhere may take as long as it needs, unless all ranks wait for each other. The same
    holds for a rank with its interpreter blocked in one long call: its process answers for it.
    """

    def __init__(self, store: Any, place: int, count: int, group: dist.ProcessGroup) -> None:
        """``group``: the process group of these ranks; heartbeats end when it is destroyed."""
        self._store, self._place, self._count, self._group = store, place, count, group
        self.patience_s = patience_seconds()
        self._beat_s = min(_LONGEST_BEAT_SECONDS, self.patience_s / _BEATS)
        self._beat = self._calls = 0
        self._doing, self._left, self._waits = RankState().doing, "", False
        self._clock = _own_clock()
        self._at = own_place()
        self._seen: dict[int, LastSeen] = {}
        self._questions = PulseQuestions()
        self._warned_of_busy_s = 0.0
        self._broke = ""  # the message made when a connection broke
        self._looks_until = self._since_s = self._waits_since_s = 0.0
        self._world = dist.group.WORLD if count == dist.get_world_size() else None  # None: only some ranks
        with _EVERY_LOCK:
            _EVERY.add(self)
        self._wake, self._left_published = threading.Event(), threading.Event()
        end_gloo_gently()
        self._publish()
        beats = threading.Thread(
            target=_give_beats, args=(weakref.ref(self), self._wake, self._beat_s), daemon=True
        )
        start_thread(beats, "the heartbeats of a rank")
        weakref.finalize(self, self._wake.set)
        weakref.finalize(self, self._questions.close)
        gone = weakref.finalize(self, atexit.unregister, _tell_at_exit(weakref.ref(self)))
        gone.atexit = False  # at exit the callback must run, to report the end of the program

    # -- what this rank does ---------------------------------------------------------------------

    def begin(self) -> None:
        """Count a collective call that :meth:`wait` will wait for later. Its count shows how far this rank
        has come.
        """
        self._calls += 1

    def wait(
        self,
        work: Any,
        doing: str,
        break_off: Callable[[], None],
        *,
        of_all: bool = True,
        begun: bool = False,
    ) -> None:
        """Wait for ``work``: the next collective call or, with ``begun``, one that :meth:`begin` counted.

        Args:
            work: torch's handle of the operation.
            doing: a description for messages.
            break_off: makes the operation fail if it would never end.
            of_all: False for a message between two ranks. It is not a collective call: a rank that has left
                will neither send nor receive it, however many calls it made.
            begun: the call was already counted.

        Raises:
            StateError: a rank has left, gives no sign, or waits for something else; or a connection broke.
        """
        self._calls += of_all and not begun
        self._doing, self._at, self._clock = doing, own_place(), _own_clock()
        self._waits = True
        self._waits_since_s = time.monotonic()
        try:
            while not self._is_over(work):
                trouble = self._find_trouble(of_all)
                if trouble:
                    self.leave(f"gave up ({trouble})")
                    break_off()
                    raise StateError(self._message(trouble))
        finally:
            self._waits = False

    def explain(self, error: Exception) -> StateError:
        """Return the error for a connection that failed with ``error``. Waits a few heartbeats to find out
        which rank is gone.
        """
        text = str(error).partition("\n")[0]
        if self._broke:
            return StateError(self._broke)
        ends = time.monotonic() + (_MISSED_BEATS + 1) * self._beat_s
        self._ask_for_states()
        found = self._find_gone(math.inf, of_all=False)  # a rank that left closed the connection
        while not found and time.monotonic() < ends:
            time.sleep(self._beat_s / 2)
            found = self._find_gone(_MISSED_BEATS * self._beat_s, of_all=False)
        self._broke = self._message(f"{found or _BROKEN} ({text})")
        return StateError(self._broke)

    def longest_transfer(self, nbytes: int) -> timedelta:
        """Return the time after which a transfer of ``nbytes`` counts as lost. All ranks agree on a transfer
        before it starts.
        """
        return timedelta(seconds=2 * self.patience_s + nbytes / _SLOWEST_BYTES_PER_S)

    def leave(self, why: str) -> None:
        """Tell the other ranks ``why`` this rank has stopped making calls. Idempotent."""
        if not self._left:
            self._left = why
            self._wake.set()
            self._left_published.wait(
                _MISSED_BEATS * self._beat_s
            )  # not longer: the store may be unreachable

    def beat(self) -> bool:
        """Publish this rank's state and, while a caller waits, read the other ranks'. Return whether to go
        on. Only for the heartbeat thread.
        """
        if not self._left and not _exists(self._group):
            self._left = "destroyed its process group"
        left = bool(self._left)
        own_pulse().beat()
        self._publish()
        if time.monotonic() < self._looks_until:
            self._look()
        if left:
            self._left_published.set()
        return not left

    # -- what the others do ----------------------------------------------------------------------

    def _is_over(self, work: Any) -> bool:
        limit = timedelta(seconds=self._beat_s)
        try:
            work.wait(limit)
        except RuntimeError:
            if not work.is_completed():
                return False
            try:
                work.wait(limit)  # again: it may have succeeded since the first wait timed out
            except RuntimeError as error:
                raise self.explain(error) from error
        return True

    def _ask_for_states(self) -> None:
        """Make the heartbeat thread read the others' states for a while, the first time at once."""
        now = time.monotonic()
        if now > self._looks_until:
            for seen in self._seen.values():
                seen.restart_times(now)
            self._since_s = now
            self._looks_until = math.inf
            self._wake.set()
        self._looks_until = now + (_MISSED_BEATS + 2) * self._beat_s + self.patience_s

    def _find_trouble(self, of_all: bool) -> str:
        self._ask_for_states()
        trouble = self._find_gone(self.patience_s, of_all=of_all) or self._find_apart()
        return trouble or self._find_all_apart()

    def _find_gone(self, silence_s: float, *, of_all: bool = True) -> str:
        """Describe a rank that has left before this call (without ``of_all``: at any time) or has given no
        sign for ``silence_s``; "" if there is none.
        """
        now = time.monotonic()
        for rank in range(self._count):
            if rank == self._place:
                continue
            seen = self._seen.get(rank) or LastSeen.at(self._since_s)
            if seen.state.left and (seen.state.calls < self._calls or not of_all):
                return f"rank {rank} will not come: it {seen.state.left}"
            if not seen.state.left and now - seen.alive_s > silence_s:
                return (
                    f"rank {rank} {_SILENT} {now - seen.alive_s:.3g} s: its process was "
                    "stopped or killed, or its machine is gone"
                )
        return ""

    def _find_apart(self) -> str:
        """Describe a deadlock in which every rank of this group has waited for the patience, but in different
        calls; "" if there is none.
        """
        others = list(self._seen.copy().items())
        if not self._all_wait([seen for _, seen in others]):
            return ""
        here = (self._calls, self._doing)
        apart = [
            rank
            for rank, seen in others
            if not seen.state.waits or (seen.state.calls, seen.state.doing) != here
        ]
        return (
            f"ranks {apart} wait in something else than rank {self._place}, for each other" if apart else ""
        )

    def _all_wait(self, seen: list[LastSeen]) -> bool:
        """Return whether all other ranks are alive and have waited for the patience. A rank that was stopped
        while waiting does not count: it is reported for its silence.
        """
        now, patience_s, begun = time.monotonic(), self.patience_s, self._collectives_begun()
        return len(seen) + 1 == self._count and all(
            each.state.is_stuck(begun)
            and now - each.progress_s > patience_s
            and now - each.beat_s < patience_s / 2
            for each in seen
        )

    def _find_all_apart(self) -> str:
        """Describe a deadlock across groups: all ranks of the program have waited for the patience, each for
        some of the others, in different calls. The ranks of this group alone cannot detect it. "" if there is
        none.
        """
        world = dist.group.WORLD
        of_all = next((one for one in self._others() if one._world is world and not one._left), None)
        if of_all is None or world is None:
            return ""
        of_all._ask_for_states()
        seen = list(of_all._seen.copy().values())
        waits_s = time.monotonic() - self._waits_since_s
        if waits_s < self.patience_s or not of_all._all_wait(seen):
            return ""
        found = sorted({each.state.what for each in seen} - {self._doing})
        return (
            f"all ranks wait for each other: this one {self._doing}, others {' or '.join(found)}"
            if found
            else ""
        )

    def _look(self) -> None:
        others = [rank for rank in range(self._count) if rank != self._place]
        found, now = self._read(others), time.monotonic()
        answers = self._questions.answers()
        for rank in others:
            seen = self._seen.setdefault(rank, LastSeen.at(now))
            if rank in answers:
                seen.answer(now)
            if not seen.take(found.get(rank, seen.state), now):
                self._questions.ask(rank, seen.state.pulse)
        self._warn_of_busy(now)

    def _warn_of_busy(self, now: float) -> None:
        """Log, once per patience, the ranks that keep this one waiting because their interpreter is blocked
        in one call.
        """
        busy = {
            rank: now - seen.beat_s
            for rank, seen in self._seen.items()
            if not seen.state.left and now - seen.beat_s > self.patience_s > now - seen.alive_s
        }
        if self._waits and busy and now - self._warned_of_busy_s > self.patience_s:
            self._warned_of_busy_s = now
            each = "; ".join(f"rank {rank} ({seconds:.0f} s)" for rank, seconds in busy.items())
            logger.warning(
                "rank %d waits (%s) for ranks whose process is alive, but busy in one call that keeps the "
                "interpreter: %s",
                self._place,
                self._doing,
                each,
            )

    def _read(self, ranks: list[int]) -> dict[int, RankState]:
        """Return the states of those ``ranks`` that have published one; {} if the store is gone."""
        try:
            # Check first: a get of a missing key blocks, and with it all other users of this connection.
            if not self._store.check([str(rank) for rank in ranks]):
                ranks = [rank for rank in ranks if self._store.check([str(rank)])]
            said = self._store.multi_get([str(rank) for rank in ranks])
            return {rank: RankState(**json.loads(each)) for rank, each in zip(ranks, said, strict=True)}
        except (RuntimeError, ValueError):  # the rank that keeps the store is gone
            return {}

    def _message(self, trouble: str) -> str:
        said = {self._place: str(replace(self._own_state(), left=""))}
        said |= {rank: self._describe(seen) for rank, seen in self._seen.copy().items()}
        each = "; ".join(f"rank {rank} {said[rank]}" for rank in sorted(said))
        is_lost = any(mark in trouble for mark in (_SILENT, _BROKEN))
        return f"{trouble}. By rank: {each}. {_START_AGAIN if is_lost else _UNEVEN}"

    def _describe(self, seen: LastSeen) -> str:
        state, silent_s = seen.state, time.monotonic() - seen.beat_s
        text = str(state)
        if state.left:
            return text
        if not state.waits and not state.other and state.begun > self._collectives_begun():
            text += ", in a collective of the program's own since then"
        if seen.alive_s > seen.beat_s and silent_s > _MISSED_BEATS * self._beat_s:
            text += f", busy in one call for {silent_s:.3g} s"
        return text

    def _own_state(self) -> RankState:
        return RankState(
            self._beat,
            self._calls,
            self._doing,
            self._waits,
            self._at,
            self._calls_in_other_groups() if self._world is not None else "",
            self._collectives_begun(),
            0 if self._waits else int(10 * computed_seconds(self._clock)),
            own_pulse().where,
            self._left,
        )

    def _collectives_begun(self) -> int:
        """Return how many collectives over all ranks this rank has begun, in any part of the program."""
        world = dist.group.WORLD
        if world is None or self._world is None:
            return 0
        try:
            return int(world._get_sequence_number_for_group())  # type: ignore[attr-defined]
        except RuntimeError:  # the backend does not count, or the group was destroyed
            return 0

    def _calls_in_other_groups(self) -> str:
        """Describe the calls in other groups that this process waits for."""
        found = (f"{one._doing} (call {one._calls})" for one in self._others() if one._waits)
        return "; ".join(sorted(found))

    def _others(self) -> list[Heartbeats]:
        """Return the other Heartbeats objects of this process, for other groups."""
        with _EVERY_LOCK:
            return [one for one in _EVERY if one is not self]

    def _publish(self) -> None:
        self._beat += 1
        try:
            self._store.set(str(self._place), json.dumps(asdict(self._own_state())))
        except RuntimeError as error:  # the store is gone: the other ranks will notice the silence
            logger.debug("rank %d cannot publish its state: %s", self._place, error)


def patience_seconds() -> float:
    """Return the time that a rank may be silent, or that all ranks may wait for each other. Raises
    ConfigError.
    """
    said = os.environ.get(PATIENCE_VARIABLE, "")
    try:
        seconds = float(said) if said else _PATIENCE_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{PATIENCE_VARIABLE} is {said!r}; give a number of seconds, 60 for example")
    return seconds


def meet_at_start() -> None:
    """Wait for all ranks of the default group, right after it was made. From then on they see each other's
    heartbeats; before, a dead rank would be waited for until torch's timeout.

    Raises:
        StateError: a rank did not come within the patience.
    """
    if dist.get_backend() != dist.Backend.GLOO:
        return  # its timeout ends the wait
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=patience_seconds()))
    except RuntimeError as error:
        raise StateError(
            f"a rank has joined and is gone, or took longer than {patience_seconds():g} s to begin "
            f"({PATIENCE_VARIABLE}): {str(error).partition(chr(10))[0]}. Start all ranks again"
        ) from error


def _own_clock() -> int:
    return time.pthread_getcpuclockid(threading.get_ident())


def _exists(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_backend(group)
    except (ValueError, RuntimeError):  # it was destroyed
        return False
    return True


def _give_beats(heartbeats: weakref.ref[Heartbeats], wake: threading.Event, seconds: float) -> None:
    goes_on = True
    while goes_on:
        wake.wait(seconds)
        wake.clear()
        found = heartbeats()
        goes_on = found is not None and found.beat()
        del found


@cache
def end_gloo_gently() -> None:
    """At exit, wait until gloo's threads have released their tensors: if such a thread frees a tensor of
    Python after the interpreter has ended, the process aborts.
    """
    atexit.register(wait_until_idle, _GLOO_THREADS, _GLOO_SECONDS)


def _tell_at_exit(heartbeats: weakref.ref[Heartbeats]) -> Callable[[], None]:
    """Register an exit handler that tells the other ranks that this program ended, and with which exception;
    return it.
    """

    def tell() -> None:
        found = heartbeats()
        if found is not None:
            error = getattr(sys, "last_value", None)
            found.leave("ended" if error is None else f"ended with {type(error).__name__} ({error})")

    return atexit.register(tell)
