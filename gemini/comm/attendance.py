"""Attendance: what ranks let each other see of themselves, so that one that waits in vain can say for whom.

See docs/notes/zero.md.
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
from gemini.comm.sign import Seen, Sign, computed_seconds, own_place
from gemini.errors import ConfigError, StateError
from gemini.system.threads import start_thread, wait_until_idle

logger = logging.getLogger(__name__)

PATIENCE_VARIABLE = "GEMINI_RANK_PATIENCE"
_PATIENCE_SECONDS = 60.0
_BEATS = 30  # within the patience
_LONGEST_BEAT_SECONDS = 1.0
_MISSED_BEATS = 3  # after which a rank is gone, once a connection has broken

_GLOO_THREADS = "pt_gloo_runloop"  # as torch names them
_GLOO_SECONDS = 1.0

_SLOWEST_BYTES_PER_S = 2**20  # of a network that anybody would train over

_SILENT = "has given no sign of life for"
_BROKEN = "ranks have lost each other"
_START_AGAIN = "Start all ranks again; training goes on from its last checkpoint (gemini.checkpoint.load)"
_UNEVEN = (
    "All ranks must make the calls that ranks make together as often and in the same order; where one has "
    "fewer batches, train within `with model.join():` (GeminiDDP), end the loop on all after the smallest "
    "number (all_reduce it with MIN before), or use DistributedSampler(drop_last=True) (docs/notes/zero.md)"
)
_EVERY: weakref.WeakSet[Attendance] = weakref.WeakSet()  # of this process
_EVERY_LOCK = threading.Lock()  # threads of signs look at it


class Attendance:
    """Publishes this rank's signs in a store, beside training, and reads the others' where it waits long.

    A thread of its own talks to the store, which may be out of reach without an error: a rank that waits
    looks at what was read last. A rank that left, or gives no sign for the patience, is named at once. One
    that is alive elsewhere may take its time, as long as not all ranks wait for each other. So may one whose
    interpreter is in a single call: its process answers for it.
    """

    def __init__(self, store: Any, place: int, count: int, group: dist.ProcessGroup) -> None:
        """``group``: whose ranks they are; the signs end with it."""
        self._store, self._place, self._count, self._group = store, place, count, group
        self.patience_s = patience_seconds()
        self._beat_s = min(_LONGEST_BEAT_SECONDS, self.patience_s / _BEATS)
        self._beat = self._calls = 0
        self._doing, self._left, self._waits = Sign().doing, "", False
        self._clock = _own_clock()
        self._at = own_place()
        self._seen: dict[int, Seen] = {}
        self._questions = PulseQuestions()
        self._told_of_busy = 0.0
        self._broke = ""  # what was found when a connection broke
        self._looks_until = self._since_s = self._waits_since_s = 0.0
        self._world = dist.group.WORLD if count == dist.get_world_size() else None  # None: some ranks alone
        with _EVERY_LOCK:
            _EVERY.add(self)
        self._wake, self._told = threading.Event(), threading.Event()
        end_gloo_gently()
        self._publish()
        beats = threading.Thread(
            target=_give_beats, args=(weakref.ref(self), self._wake, self._beat_s), daemon=True
        )
        start_thread(beats, "the signs of a rank")
        weakref.finalize(self, self._wake.set)
        weakref.finalize(self, self._questions.close)
        gone = weakref.finalize(self, atexit.unregister, _tell_at_exit(weakref.ref(self)))
        gone.atexit = False  # at the end there is something to tell

    # -- what this rank does ---------------------------------------------------------------------

    def begin(self) -> None:
        """Count a call that ranks make together and that :meth:`wait` waits for later: a rank that has begun
        several is elsewhere than one that has not."""
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
        """Wait for the collective ``work``, the next call that ranks make together, or one that was
        ``begun``; ``break_off`` makes it fail where it never ends. Without ``of_all`` it is a message between
        two of them, which is no such call: a rank that has left will not send or take it, however many calls
        it made.

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
        """Return what to raise where a connection to another rank has failed with ``error``: who it was is
        seen a few beats later."""
        text = str(error).partition("\n")[0]
        if self._broke:
            return StateError(self._broke)
        ends = time.monotonic() + (_MISSED_BEATS + 1) * self._beat_s
        self._ask_for_signs()
        found = self._find_gone(math.inf, of_all=False)  # who has left since broke it, after any call
        while not found and time.monotonic() < ends:
            time.sleep(self._beat_s / 2)
            found = self._find_gone(_MISSED_BEATS * self._beat_s, of_all=False)
        self._broke = self._message(f"{found or _BROKEN} ({text})")
        return StateError(self._broke)

    def longest_transfer(self, nbytes: int) -> timedelta:
        """Return after how long a transfer counts as lost; all ranks have agreed on it before."""
        return timedelta(seconds=2 * self.patience_s + nbytes / _SLOWEST_BYTES_PER_S)

    def leave(self, why: str) -> None:
        """Tell the others that this rank makes no more calls, and ``why``. Idempotent."""
        if not self._left:
            self._left = why
            self._wake.set()
            self._told.wait(_MISSED_BEATS * self._beat_s)  # no longer: the store may be out of reach

    def beat(self) -> bool:
        """Give a sign and, while somebody waits, look at the others'; say whether this rank goes on. For the
        thread of the signs alone."""
        if not self._left and not _exists(self._group):
            self._left = "destroyed its process group"
        left = bool(self._left)
        own_pulse().beat()
        self._publish()
        if time.monotonic() < self._looks_until:
            self._look()
        if left:
            self._told.set()
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
                work.wait(limit)  # again: it may have ended well since the first wait was given up
            except RuntimeError as error:
                raise self.explain(error) from error
        return True

    def _ask_for_signs(self) -> None:
        """Have the others' signs read from now on for a while, for the first time at once."""
        now = time.monotonic()
        if now > self._looks_until:
            for seen in self._seen.values():
                seen.forgive(now)
            self._since_s = now
            self._looks_until = math.inf
            self._wake.set()
        self._looks_until = now + (_MISSED_BEATS + 2) * self._beat_s + self.patience_s

    def _find_trouble(self, of_all: bool) -> str:
        self._ask_for_signs()
        trouble = self._find_gone(self.patience_s, of_all=of_all) or self._find_apart()
        return trouble or self._find_all_apart()

    def _find_gone(self, silence_s: float, *, of_all: bool = True) -> str:
        """Return which rank has left before this call (``of_all``, else at any time), or given no sign for so
        long; nothing: none."""
        now = time.monotonic()
        for rank in range(self._count):
            if rank == self._place:
                continue
            seen = self._seen.get(rank) or Seen.at(self._since_s)
            if seen.sign.left and (seen.sign.calls < self._calls or not of_all):
                return f"rank {rank} will not come: it {seen.sign.left}"
            if not seen.sign.left and now - seen.alive_s > silence_s:
                return (
                    f"rank {rank} {_SILENT} {now - seen.alive_s:.3g} s: its process was "
                    "stopped or killed, or its machine is gone"
                )
        return ""

    def _find_apart(self) -> str:
        """Return who waits for what if every rank waits, and has for the patience, but not in one call."""
        others = list(self._seen.copy().items())
        if not self._all_wait([seen for _, seen in others]):
            return ""
        here = (self._calls, self._doing)
        apart = [
            rank for rank, seen in others if not seen.sign.waits or (seen.sign.calls, seen.sign.doing) != here
        ]
        return (
            f"ranks {apart} wait in something else than rank {self._place}, for each other" if apart else ""
        )

    def _all_wait(self, seen: list[Seen]) -> bool:
        """Say whether all other ranks are alive, wait, and have for the patience. One that was stopped while
        it waited is not: it is named for its silence."""
        now, patience_s, begun = time.monotonic(), self.patience_s, self._collectives_begun()
        return len(seen) + 1 == self._count and all(
            each.sign.is_stuck(begun)
            and now - each.state_s > patience_s
            and now - each.beat_s < patience_s / 2
            for each in seen
        )

    def _find_all_apart(self) -> str:
        """Return who waits for what where all ranks of the program wait, each with some of the others, and
        have for the patience, but for different things: those that this one waits with cannot tell."""
        world = dist.group.WORLD
        of_all = next((one for one in self._others() if one._world is world and not one._left), None)
        if of_all is None or world is None:
            return ""
        of_all._ask_for_signs()
        seen = list(of_all._seen.copy().values())
        waits_s = time.monotonic() - self._waits_since_s
        if waits_s < self.patience_s or not of_all._all_wait(seen):
            return ""
        found = sorted({each.sign.what for each in seen} - {self._doing})
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
            seen = self._seen.setdefault(rank, Seen.at(now))
            if rank in answers:
                seen.answer(now)
            if not seen.take(found.get(rank, seen.sign), now):
                self._questions.ask(rank, seen.sign.pulse)
        self._tell_of_busy(now)

    def _tell_of_busy(self, now: float) -> None:
        """Say once a patience which ranks keep this one waiting by a single call."""
        busy = {
            rank: now - seen.beat_s
            for rank, seen in self._seen.items()
            if not seen.sign.left and now - seen.beat_s > self.patience_s > now - seen.alive_s
        }
        if self._waits and busy and now - self._told_of_busy > self.patience_s:
            self._told_of_busy = now
            each = "; ".join(f"rank {rank} ({seconds:.0f} s)" for rank, seconds in busy.items())
            logger.warning(
                "rank %d waits (%s) for ranks whose process is alive, but busy in one call that keeps the "
                "interpreter: %s",
                self._place,
                self._doing,
                each,
            )

    def _read(self, ranks: list[int]) -> dict[int, Sign]:
        """Return the signs of those ``ranks`` that have given one; where the store is gone, none new."""
        try:
            # A get waits for its key, and would keep the others of this process from the store.
            if not self._store.check([str(rank) for rank in ranks]):
                ranks = [rank for rank in ranks if self._store.check([str(rank)])]
            said = self._store.multi_get([str(rank) for rank in ranks])
            return {rank: Sign(**json.loads(each)) for rank, each in zip(ranks, said, strict=True)}
        except (RuntimeError, ValueError):  # who keeps the store is gone
            return {}

    def _message(self, trouble: str) -> str:
        said = {self._place: str(replace(self._sign(), left=""))}
        said |= {rank: self._describe(seen) for rank, seen in self._seen.copy().items()}
        each = "; ".join(f"rank {rank} {said[rank]}" for rank in sorted(said))
        is_lost = any(mark in trouble for mark in (_SILENT, _BROKEN))
        return f"{trouble}. By rank: {each}. {_START_AGAIN if is_lost else _UNEVEN}"

    def _describe(self, seen: Seen) -> str:
        sign, silent_s = seen.sign, time.monotonic() - seen.beat_s
        text = str(sign)
        if sign.left:
            return text
        if not sign.waits and not sign.other and sign.begun > self._collectives_begun():
            text += ", in a collective of the program's own since then"
        if seen.alive_s > seen.beat_s and silent_s > _MISSED_BEATS * self._beat_s:
            text += f", busy in one call for {silent_s:.3g} s"
        return text

    def _sign(self) -> Sign:
        return Sign(
            self._beat,
            self._calls,
            self._doing,
            self._waits,
            self._at,
            self._what_else() if self._world is not None else "",
            self._collectives_begun(),
            0 if self._waits else int(10 * computed_seconds(self._clock)),
            own_pulse().where,
            self._left,
        )

    def _collectives_begun(self) -> int:
        """Return how many collectives of all ranks this one has begun, of whatever part of the program."""
        world = dist.group.WORLD
        if world is None or self._world is None:
            return 0
        try:
            return int(world._get_sequence_number_for_group())  # type: ignore[attr-defined]
        except RuntimeError:  # a backend that does not count, or a group that was destroyed
            return 0

    def _what_else(self) -> str:
        """Return what this process waits for with some of the ranks alone."""
        found = (f"{one._doing} (call {one._calls})" for one in self._others() if one._waits)
        return "; ".join(sorted(found))

    def _others(self) -> list[Attendance]:
        """Return those of this process, for other ranks."""
        with _EVERY_LOCK:
            return [one for one in _EVERY if one is not self]

    def _publish(self) -> None:
        self._beat += 1
        try:
            self._store.set(str(self._place), json.dumps(asdict(self._sign())))
        except RuntimeError as error:  # who keeps the store is gone: they see that nothing comes
            logger.debug("rank %d cannot give a sign: %s", self._place, error)


def patience_seconds() -> float:
    """Return for how long a rank may give no sign, or all may wait for each other. Raises ConfigError."""
    said = os.environ.get(PATIENCE_VARIABLE, "")
    try:
        seconds = float(said) if said else _PATIENCE_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{PATIENCE_VARIABLE} is {said!r}; give a number of seconds, 60 for example")
    return seconds


def meet_at_start() -> None:
    """Wait for all ranks of the default group, which have joined it. From here on they see each other's
    signs; until here one that is gone would be waited for as long as torch waits.

    Raises:
        StateError: a rank has not come within the patience.
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


def _give_beats(attendance: weakref.ref[Attendance], wake: threading.Event, seconds: float) -> None:
    goes_on = True
    while goes_on:
        wake.wait(seconds)
        wake.clear()
        found = attendance()
        goes_on = found is not None and found.beat()
        del found


@cache
def end_gloo_gently() -> None:
    """See to it that gloo's threads have let go of what they worked on when this program ends. One that is
    the last to hold a tensor of Python frees it, which aborts a process whose interpreter has ended."""
    atexit.register(wait_until_idle, _GLOO_THREADS, _GLOO_SECONDS)


def _tell_at_exit(attendance: weakref.ref[Attendance]) -> Callable[[], None]:
    """See to it that the others hear of the end of this program, and of the exception that ended it; return
    what was registered for that."""

    def tell() -> None:
        found = attendance()
        if found is not None:
            error = getattr(sys, "last_value", None)
            found.leave("ended" if error is None else f"ended with {type(error).__name__} ({error})")

    return atexit.register(tell)
