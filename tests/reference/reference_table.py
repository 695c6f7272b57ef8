"""A simple model of the chunk table, written from its contract and not from its code.

The table may choose which chunk to give up. Everything else is determined: the model judges each action
it is shown, keeps its own books, and says what must hold afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gemini import _C

DEVICE, HOST, DISK = _C.Tier.DEVICE, _C.Tier.HOST, _C.Tier.DISK
FREE, HOLD, COMPUTE = _C.TensorState.FREE, _C.TensorState.HOLD, _C.TensorState.COMPUTE
Kind = _C.ActionKind
ROUTES = {
    Kind.FETCH: [(HOST, DEVICE)],
    Kind.LOAD: [(DISK, DEVICE)],
    Kind.EVICT: [(DEVICE, HOST)],
    Kind.SPILL: [(DEVICE, DISK)],
}


@dataclass
class Flight:
    """A transfer under way."""

    source: _C.Tier
    destination: _C.Tier
    new_bytes: bool
    stale: bool = False
    doomed: bool = False

    @property
    def leaves_device(self) -> bool:
        return self.source == DEVICE or self.doomed


@dataclass
class Chunk:
    """Copies of one chunk; ``extent``: it owns bytes on DISK."""

    nbytes: int
    valid: set[_C.Tier] = field(default_factory=set)
    extent: bool = False
    flight: Flight | None = None
    pins: int = 0

    @property
    def absent(self) -> bool:
        """Has content that nothing is bringing to DEVICE."""
        return bool(self.valid) and DEVICE not in self.valid and self.flight is None


@dataclass
class Tensor:
    """State of one tensor and how often it is accessed at present."""

    chunk: int
    state: _C.TensorState = FREE
    uses: int = 0


class ReferenceTable:
    """The books of a table; every ``assert`` is a clause of the contract."""

    def __init__(self, device_bytes: int, host_bytes: int, disk_bytes: int) -> None:
        self.budgets = {DEVICE: device_bytes, HOST: host_bytes, DISK: disk_bytes}
        self.chunks: list[Chunk] = []
        self.tensors: list[Tensor] = []
        self.flights: dict[int, int] = {}  # action id -> chunk

    # --- derived ---
    def held(self, chunk: Chunk) -> set[_C.Tier]:
        ends = {chunk.flight.source, chunk.flight.destination} if chunk.flight else set()
        return chunk.valid | ends | ({DISK} if chunk.extent else set())

    def usage(self, tier: _C.Tier) -> int:
        return sum(c.nbytes for c in self.chunks if tier in self.held(c))

    def room(self, tier: _C.Tier) -> int:
        return self.budgets[tier] - self.usage(tier)

    def pinned_bytes(self) -> int:
        return sum(c.nbytes for c in self.chunks if c.pins)

    def missing_bytes(self, wanted: Iterable[int]) -> int:
        chunks = [self.chunks[i] for i in set(wanted)]
        return sum(c.nbytes for c in chunks if DEVICE not in c.valid and not self.arriving(c))

    @staticmethod
    def arriving(chunk: Chunk) -> bool:
        flight = chunk.flight
        return flight is not None and flight.destination == DEVICE and not flight.doomed

    def coming_free(self) -> int:
        total = 0
        for chunk in (self.chunks[i] for i in self.flights.values()):
            flight = chunk.flight
            assert flight is not None
            on_device = DEVICE in (flight.source, flight.destination)
            live = flight.source == DEVICE and not flight.stale and not chunk.pins
            total += chunk.nbytes if (flight.doomed and on_device) or live else 0
        return total

    def any_leaving(self) -> bool:
        return any(c.flight is not None and c.flight.leaves_device for c in self.chunks)

    def host_duplicates(self) -> int:
        return sum(c.nbytes for c in self.chunks if HOST in c.valid and len(c.valid) > 1 and not c.flight)

    def spare_extents(self) -> int:
        """Bytes on DISK whose content is void or elsewhere too."""
        idle = [c for c in self.chunks if c.extent and c.valid != {DISK} and not self.uses_disk(c)]
        return sum(c.nbytes for c in idle)

    def uses_disk(self, chunk: Chunk) -> bool:
        """Whether a transfer reads or writes its place, or will give it back."""
        flight = chunk.flight
        return flight is not None and (flight.doomed or DISK in (flight.source, flight.destination))

    def movable(self, chunk: Chunk) -> bool:
        if DEVICE not in chunk.valid or chunk.pins or chunk.flight:
            return False
        on_disk = chunk.extent or chunk.nbytes <= self.room(DISK) + self.spare_extents()
        return len(chunk.valid) > 1 or on_disk or chunk.nbytes <= self.room(HOST) + self.host_duplicates()

    def ready(self, tensors: Sequence[int], limit: int) -> bool:
        if any(DEVICE not in self.chunks[self.tensors[t].chunk].valid for t in tensors):
            return False
        stuck = not self.any_leaving() and not any(self.movable(c) for c in self.chunks)
        return self.usage(DEVICE) <= limit or stuck

    def must_refuse(self, wanted: Iterable[int]) -> bool:
        return self.missing_bytes(wanted) > 0 and self.pinned_bytes() > self.budgets[DEVICE]

    def may_refuse(self, wanted: Iterable[int]) -> bool:
        """Whether chunks nobody wants could be unable to leave; never where DISK can take them all, beside
        what only DISK has of those that are wanted."""
        idle = [c for c in self.chunks if c.valid and not c.pins and HOST not in c.valid]
        only_there = [c for c in self.chunks if c.pins and c.valid == {DISK}]
        on_disk = sum(c.nbytes for c in (*idle, *only_there))
        return not self.flights and self.missing_bytes(wanted) > 0 and on_disk > self.budgets[DISK]

    # --- actions ---
    def judge(self, action: _C.Action, then: Sequence[_C.Action] = ()) -> None:
        """Check that an action is legal now, and account it; ``then``: those that come with it, behind it."""
        chunk = self.chunks[action.chunk]
        assert action.nbytes == chunk.nbytes
        drops_place = action.kind == Kind.DROP and action.from_tier == DISK
        assert not self.uses_disk(chunk) if drops_place else chunk.flight is None
        if action.kind == Kind.ALLOCATE:
            assert (action.from_tier, action.to_tier, action.id) == (DEVICE, DEVICE, 0)
            assert not chunk.valid
            assert chunk.pins
            chunk.valid = {DEVICE}
        elif drops_place:
            assert action.id == 0
            assert chunk.extent
            assert chunk.valid != {DISK}, "the only copy is dropped"
            spill = next((a for a in then if (a.kind, a.from_tier) != (Kind.DROP, DISK)), None)
            assert spill is not None
            assert spill.kind == Kind.SPILL, "a place is given up for nothing"
            assert self.room(DISK) < spill.nbytes, "a place is given up without need"
            chunk.extent = False
            chunk.valid.discard(DISK)
        elif action.kind == Kind.DROP:
            assert action.id == 0
            assert action.from_tier in chunk.valid - {DISK}
            assert len(chunk.valid) > 1, "the only copy is dropped"
            assert action.from_tier == HOST or not chunk.pins
            chunk.valid.remove(action.from_tier)
        else:
            self._start(action, chunk)
        for tier, budget in self.budgets.items():
            assert self.usage(tier) <= budget

    def _start(self, action: _C.Action, chunk: Chunk) -> None:
        source, destination = action.from_tier, action.to_tier
        assert (source, destination) in ROUTES[action.kind]
        assert action.id > max(self.flights, default=0)
        assert source in chunk.valid
        assert destination not in chunk.valid
        if source == DEVICE:
            assert chunk.valid == {DEVICE}, "a clean chunk is copied"
            assert not chunk.pins
        else:
            assert action.kind == Kind.FETCH or HOST not in chunk.valid, "loaded although HOST has it"
        chunk.flight = Flight(source, destination, new_bytes=destination not in self.held(chunk))
        chunk.extent |= destination == DISK
        self.flights[action.id] = action.chunk

    def end(self, action_id: int, *, succeeded: bool) -> tuple[bool, bool, bool]:
        """Account the end of a transfer; the three fields of its Completion."""
        chunk = self.chunks[self.flights.pop(action_id)]
        flight, chunk.flight = chunk.flight, None
        assert flight is not None
        if flight.doomed:
            chunk.extent = False
            return True, True, True
        if not succeeded:
            chunk.extent &= not (flight.destination == DISK and flight.new_bytes)
            return False, flight.new_bytes, False
        if flight.stale:
            return False, flight.destination != DISK, False
        chunk.valid.add(flight.destination)
        if flight.source != DEVICE or chunk.pins:
            return False, False, False
        chunk.valid.remove(DEVICE)
        return True, False, False

    # --- tensors ---
    def access(self, tensors: Sequence[int]) -> None:
        for tensor in (self.tensors[t] for t in tensors):
            tensor.state = COMPUTE
            tensor.uses += 1
            self.chunks[tensor.chunk].pins += 1

    def release(self, tensors: Sequence[int], *, dirty: bool) -> set[tuple[int, _C.Tier]]:
        """Return the copies that must be dropped, as (chunk, tier)."""
        drops: set[tuple[int, _C.Tier]] = set()
        for tensor in (self.tensors[t] for t in tensors):
            chunk = self.chunks[tensor.chunk]
            if dirty and DEVICE in chunk.valid:
                drops |= {(tensor.chunk, HOST)} if HOST in chunk.valid else set()
                chunk.valid = {DEVICE}
                if chunk.flight:
                    chunk.flight.stale = True
            chunk.pins -= 1
            tensor.uses -= 1
            if tensor.uses == 0:
                tensor.state = HOLD if chunk.valid else FREE
        return drops

    def free(self, tensors: Sequence[int]) -> set[tuple[int, _C.Tier]]:
        drops: set[tuple[int, _C.Tier]] = set()
        for tensor in (self.tensors[t] for t in tensors):
            tensor.state = FREE
            chunk = self.chunks[tensor.chunk]
            if any(t.state != FREE for t in self.tensors if t.chunk == tensor.chunk):
                continue
            ends = {chunk.flight.source, chunk.flight.destination} if chunk.flight else set()
            drops |= {(tensor.chunk, tier) for tier in chunk.valid - {DISK} - ends}
            chunk.valid = set()
            chunk.extent &= DISK in ends
            if chunk.flight:
                chunk.flight.doomed = True
        return drops
