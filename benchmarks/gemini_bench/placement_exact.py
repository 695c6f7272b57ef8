"""The shortest steady step of a tiny iteration, by exhaustive search over what a chunk table could do.

The search is over all decisions, at every tick of a clock: which absent chunk to fetch when that link is
idle, which clean chunk to drop for its room, which written chunk to copy below when that link is idle, or to
wait. All chunks have one size, every operator takes one tick and one chunk, transfers take whole ticks.

Times to reach each state at the end of step n + k become those at the end of step n plus a constant (the
state graph is a matrix over minimum and plus); that constant over k is the exact mean of the best steady
steps, whatever their period is and whatever they start from.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gemini.errors import StateError
from gemini.memstats.trace import LinkSpeed
from gemini.placement.problem import Iteration, Machine

_UNIT = 1000  # bytes of a chunk
_MOST_STEPS = 64  # until the times repeat


@dataclass(frozen=True)
class Tiny:
    """An iteration of ``uses`` (chunk, whether it is written). ``room``: how many chunks fit DEVICE."""

    uses: tuple[tuple[int, bool], ...]
    room: int
    read_ticks: int
    write_ticks: int

    @property
    def num_chunks(self) -> int:
        """How many chunks the step uses at most."""
        return max(chunk for chunk, _ in self.uses) + 1

    def iteration(self) -> Iteration:
        """Return the same as the planner takes it; a tick is a second."""
        moments = len(self.uses)
        return Iteration(
            chunk_bytes=(_UNIT,) * self.num_chunks,
            accesses=tuple((chunk,) for chunk, _ in self.uses),
            modes=tuple("m" if writes else "r" for _, writes in self.uses),
            frees=((),) * moments,
            seconds=(1.0,) * moments,
            reserve_bytes=(0,) * moments,
        )

    def machine(self) -> Machine:
        """Return a machine with HOST for every chunk."""
        links = (
            LinkSpeed("h2d", _UNIT / self.read_ticks, 0.0),
            LinkSpeed("d2h", _UNIT / self.write_ticks, 0.0),
        )
        return Machine(self.room * _UNIT, self.num_chunks * _UNIT, 0, links)


def random_tiny(seed: int, *, chunks: int = 5, moments: int = 16, room: int = 3) -> Tiny:
    """Draw an instance; a third of the uses write."""
    chance = random.Random(seed)
    uses = tuple((chance.randrange(chunks), chance.random() < 1 / 3) for _ in range(moments))
    return Tiny(uses, room, read_ticks=chance.randint(1, 2), write_ticks=chance.randint(1, 3))


_IDLE = (-1, 0)


@dataclass(frozen=True)
class _State:
    """Where the tiers and links are at a tick, when no operator runs.

    ``there``, ``dirty``: bit sets of chunks on DEVICE and of those among them that were written. ``read``,
    ``write``: the chunk under way and the ticks it still needs; a copy that was overwritten has no chunk.
    """

    there: int
    dirty: int
    read: tuple[int, int] = _IDLE
    write: tuple[int, int] = _IDLE

    def after_tick(self) -> _State:
        """Let the links work for one tick."""
        there, dirty, read, write = self.there, self.dirty, self.read, self.write
        if read[1]:
            read = (read[0], read[1] - 1)
            if not read[1]:
                there, read = there | 1 << read[0], _IDLE
        if write[1]:
            write = (write[0], write[1] - 1)
            if not write[1]:
                dirty, write = dirty & ~(1 << write[0]) if write[0] >= 0 else dirty, _IDLE
        return _State(there, dirty, read, write)


def shortest_step(tiny: Tiny) -> float:
    """Return the ticks of the best steady step. Raises StateError if the times never repeat."""
    times: dict[_State, int] = {_State(0, 0): 0}
    seen: list[dict[_State, int]] = []
    passed: list[int] = []
    for _ in range(_MOST_STEPS):
        times = _run_step(tiny, times)
        first = min(times.values())
        passed.append(first)
        times = {state: ticks - first for state, ticks in times.items()}
        if times in seen:
            period = passed[seen.index(times) + 1 :]
            return sum(period) / len(period)
        seen.append(times)
    raise StateError(f"the times of {tiny} do not repeat within {_MOST_STEPS} steps")


def _run_step(tiny: Tiny, times: dict[_State, int]) -> dict[_State, int]:
    """Return when each state can be reached at the end of a step, from when it could at the start."""
    for chunk, writes in tiny.uses:
        times = _run_operator(tiny, times, chunk, writes=writes)
    return times


def _run_operator(tiny: Tiny, times: dict[_State, int], chunk: int, *, writes: bool) -> dict[_State, int]:
    """Wait for a chunk and use it for a tick."""
    waiting: dict[int, set[_State]] = {}
    for state, ticks in times.items():
        waiting.setdefault(ticks, set()).add(state)
    visited: set[_State] = set()
    reached: dict[_State, int] = {}
    while waiting:
        now = min(waiting)
        for state in waiting.pop(now) - visited:
            visited.add(state)
            for decided in _decisions(tiny, state):
                if decided.there >> chunk & 1:
                    done = _used(decided, chunk, writes=writes)
                    reached[done] = min(now + 1, reached.get(done, now + 1))
                else:
                    waiting.setdefault(now + 1, set()).add(decided.after_tick())
    return reached


def _used(state: _State, chunk: int, *, writes: bool) -> _State:
    if not writes:
        return state.after_tick()
    if state.write[0] == chunk:  # what is being copied is overwritten
        state = replace(state, write=(-1, state.write[1]))
    after = state.after_tick()
    return replace(after, dirty=after.dirty | 1 << chunk)


def _decisions(tiny: Tiny, state: _State) -> Iterator[_State]:
    """Yield the state itself, and all that starting transfers makes of it."""
    started = [state]
    if not state.write[1]:
        dirty = (chunk for chunk in range(tiny.num_chunks) if state.dirty >> chunk & 1)
        started += [replace(state, write=(chunk, tiny.write_ticks)) for chunk in dirty]
    for given in started:
        yield given
        if given.read[1]:
            continue
        for dropped in _with_room(tiny, given):
            for chunk in range(tiny.num_chunks):
                if not given.there >> chunk & 1:
                    yield replace(given, there=dropped, read=(chunk, tiny.read_ticks))


def _with_room(tiny: Tiny, state: _State) -> Iterator[int]:
    """Yield the sets of chunks on DEVICE that leave room for one more."""
    if state.there.bit_count() < tiny.room:
        yield state.there
        return
    clean = state.there & ~state.dirty
    for chunk in range(tiny.num_chunks):
        if clean >> chunk & 1:
            yield state.there & ~(1 << chunk)
