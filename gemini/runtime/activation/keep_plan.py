"""KeepPlan: which saved tensors stay where they are, learnt from what became of them in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gemini import _C


class Fate:
    """What became of saved bytes until backward asked for them."""

    __slots__ = ("stayed",)

    def __init__(self) -> None:
        self.stayed: bool | None = None  # None: nobody has asked yet

    def settle(self, table: _C.ChunkTable, chunk: int) -> None:
        """Note at the first use whether they never left DEVICE: then there is no other copy of them."""
        if self.stayed is None:
            self.stayed = table.is_dirty(chunk) and not table.in_flight(chunk)


class KeepPlan:
    """Which of the tensors that a step saves stay where they are, by their place in the order.

    In the first steps all go into chunks, and OPT decides which chunks leave DEVICE. The others were copied
    for nothing: from then on they stay. A tensor other than the one expected in its place goes into a chunk.
    """

    def __init__(self) -> None:
        self._fates: list[tuple[int, Fate]] = []  # (bytes, fate) of what this step has put into chunks
        self._plan: list[tuple[int, bool]] | None = None  # (bytes, stays)
        self._next = 0

    @property
    def decided(self) -> bool:
        """Whether a step has shown what can stay."""
        return self._plan is not None

    @property
    def keeps_all(self) -> bool:
        """Whether nothing that is expected goes into a chunk."""
        return self._plan is not None and all(stays for _, stays in self._plan)

    def next_stays(self, nbytes: int) -> bool:
        """Say whether the tensor that is saved next stays where it is."""
        place = self._next
        self._next += 1
        if self._plan is None or place >= len(self._plan):
            return False
        return self._plan[place] == (nbytes, True)

    def note(self, nbytes: int, fate: Fate) -> None:
        """Say what the fate of the tensor is that the last call asked for."""
        if self._plan is None:
            self._fates.append((nbytes, fate))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward pass; one that raises will be repeated, so what it has saved does not count."""
        fates, place = len(self._fates), self._next
        try:
            yield
        except BaseException:
            del self._fates[fates:]
            self._next = place
            raise

    def end_step(self, *, on_trace: bool) -> bool:
        """Begin the next step; make the plan if this one followed a recorded order. Return whether that
        changes what goes into chunks."""
        fates, self._fates = self._fates, []
        self._next = 0
        if self.decided or not on_trace or not fates:
            return False
        self._plan = [(nbytes, bool(fate.stayed)) for nbytes, fate in fates]
        return any(stays for _, stays in self._plan)
