"""DiskFile: the file of the DISK tier, with a place for each chunk, and the disk space that it takes."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Set
from contextlib import suppress
from dataclasses import replace

from gemini import _C
from gemini.chunk.memory import TierBudgets
from gemini.errors import ConfigError, IoError
from gemini.offload.async_file import AsyncFile, checked_directory
from gemini.system.config import format_bytes


class DiskFile:
    """A file with a place for every chunk; no file if there is no DISK tier.

    If the budget is smaller than the file, each chunk still has its place, but only chunks that the table
    admits take disk space. A chunk that no longer uses its place gives the space back.
    """

    def __init__(
        self, budgets: TierBudgets, chunk_bytes: int, table: _C.ChunkTable, expected_bytes: int = 0
    ) -> None:
        """Create the file for existing chunks of ``chunk_bytes`` in total, for expected ones of
        ``expected_bytes``, and for the spare places of the budgets.

        Raises:
            ConfigError: the directory is missing or read-only; or its file system cannot punch holes and the
                chunks need more than the budget.
            IoError: the disk has too little space.
        """
        self.file: AsyncFile | None = None
        self._table = table
        self._budgets = budgets
        self._chunk_bytes = max(chunk_bytes, 1)  # a model may have no parameters
        self._expected_bytes = expected_bytes  # of chunks that do not exist yet
        self._reserved_bytes = 0  # reserved bytes at the beginning of the file
        self._file_bytes = self._chunk_bytes + expected_bytes + budgets.spare_disk_bytes
        self._places: list[tuple[int, int]] = []  # offset and bytes of each chunk
        self._placed_bytes = 0
        self._taken: set[int] = set()  # chunks with disk space
        if budgets.disk_dir is None or budgets.disk_bytes == 0:
            return
        checked_directory(budgets.disk_dir)
        if budgets.reads_files:  # nearly all chunks stay in the user's files
            self.file = AsyncFile(budgets.disk_dir, self._file_bytes, reserve=False)
            return
        reserve = _reserves(budgets, self._file_bytes)
        if reserve and expected_bytes:  # else expected chunks are checked when they are added
            reserve = lacking_space(budgets, chunk_bytes + expected_bytes, reserve=True) is None
        self._reserved_bytes = self._file_bytes if reserve else 0
        lack = lacking_space(budgets, chunk_bytes, reserve=reserve)
        if lack is not None:
            raise IoError(errno.ENOSPC, lack, budgets.disk_dir)
        self.file = AsyncFile(budgets.disk_dir, self._file_bytes, reserve=reserve)
        if not reserve and not self.file.can_discard:
            self._keep_places_within_budget(budgets.disk_dir)

    def _keep_places_within_budget(self, directory: str) -> None:
        """Limit the places for later chunks to the rest of the budget, so that no space is given back."""
        if self._chunk_bytes > self._budget_bytes:
            self.close()
            raise self._keeps_all(directory, self._chunk_bytes)
        self._file_bytes = min(self._file_bytes, self._budget_bytes)

    @property
    def _budget_bytes(self) -> int:
        return self._budgets.disk_bytes

    def _keeps_all(self, directory: str, nbytes: int) -> ConfigError:
        takes, budget = format_bytes(nbytes), format_bytes(self._budget_bytes)
        return ConfigError(
            f"disk_dir {directory!r}: its file system cannot give back parts of a file, so the DISK tier "
            f"would come to take {takes} where disk_bytes is {budget}; raise disk_bytes to that, or name "
            "another disk_dir"
        )

    def has_place(self, nbytes: int) -> bool:
        """Say whether chunks of ``nbytes`` in total have a place that is not reserved for expected chunks."""
        return self.file is None or self._placed_bytes + self._expected_bytes + nbytes <= self._file_bytes

    def lacking_place(self, nbytes: int, expected_bytes: int) -> str | None:
        """Return an error text if additional chunks of ``nbytes`` (``expected_bytes`` of these were expected)
        have no place or the disk has too little space; None if they fit."""
        if self.file is None:
            return None
        left = self._file_bytes - self._placed_bytes - (self._expected_bytes - expected_bytes)
        if nbytes > left:
            return (
                f"the DISK file has places for {format_bytes(max(left, 0))} more, and these chunks take "
                f"{format_bytes(nbytes)}; raise disk_bytes"
            )
        if self._reserved_bytes == self._file_bytes:
            return None
        reserve = _reserves(self._budgets, self._file_bytes)
        return lacking_space(self._budgets, self._placed_bytes + nbytes, self._taken_bytes, reserve=reserve)

    @property
    def _taken_bytes(self) -> int:
        """The least disk space that the file takes now."""
        return max(self._reserved_bytes, sum(self._places[chunk][1] for chunk in self._taken))

    def prepare(self, nbytes: int, first_bytes: int, more_bytes: int) -> None:
        """Check that :meth:`expect` can follow. ``first_bytes``: the part of the chunks that is added at
        once.

        Raises:
            ConfigError: the file system cannot punch holes, and the budget is less than all places.
            IoError: the disk has too little space, or the file cannot be that long.
        """
        if self.file is None:
            return
        file_bytes = self._file_bytes + nbytes
        self.file.grow(file_bytes)
        budgets = replace(self._budgets, disk_bytes=self._budget_bytes + more_bytes)
        if not self.file.can_discard and file_bytes > budgets.disk_bytes:
            raise self._keeps_all(budgets.disk_dir or "", file_bytes)
        reserve = _reserves(budgets, file_bytes)
        lack = lacking_space(budgets, self._placed_bytes + first_bytes, self._taken_bytes, reserve=reserve)
        if lack is not None:
            raise IoError(errno.ENOSPC, lack, budgets.disk_dir or "")

    def expect(self, nbytes: int, more_bytes: int) -> None:
        """Add places for unforeseen chunks of ``nbytes`` in total, and ``more_bytes`` to the budget. Places
        take space when they are written."""
        self._expected_bytes += nbytes
        if self.file is None:
            return
        self._file_bytes += nbytes
        self._budgets = replace(self._budgets, disk_bytes=self._budget_bytes + more_bytes)
        if self._file_bytes > self._budget_bytes:
            self._unreserve(self.file)

    def _unreserve(self, file: AsyncFile) -> None:
        """Return reserved but unused space to the disk: there are now more places than the budget."""
        unplaced_bytes = self._reserved_bytes - self._placed_bytes
        if self._reserved_bytes:
            self._taken.update(range(len(self._places)))
        self._reserved_bytes = 0
        with suppress(IoError):  # a later give_back() tries again
            if unplaced_bytes > 0:
                file.discard(self._placed_bytes, unplaced_bytes)
            for chunk_id in [chunk for chunk in self._taken if not self._holds(chunk)]:
                self.drop(chunk_id)

    def _holds(self, chunk_id: int) -> bool:
        """Say whether the place of a chunk counts in the budget, or is about to."""
        return _C.Tier.DISK in self._table.held_tiers(chunk_id)

    def place(self, nbytes: int, *, expected: bool = False) -> int:
        """Return the offset of the next chunk, in the order of ids; ``expected``: the chunk was expected."""
        if expected:
            self._expected_bytes -= nbytes
        offset, fitted = self._placed_bytes, not self.gives_back
        self._places.append((offset, nbytes))
        self._placed_bytes += nbytes
        if fitted:
            with suppress(IoError):  # the chunk has its place; a later call tries again
                self.give_back()
        return offset

    def written(self, chunk_id: int) -> None:
        """Note that a chunk is about to take space."""
        self._taken.add(chunk_id)

    @property
    def gives_back(self) -> bool:
        """Whether the places exceed the budget, so that unused space must be given back."""
        return self.file is not None and self._placed_bytes > self._budget_bytes

    def give_back(self, chunk_ids: Set[int] | None = None) -> None:
        """If the places exceed the budget, return to the disk the space of those chunks (None: of all) that
        the table no longer holds on DISK. Raises IoError; a later call tries again."""
        if not self.gives_back:
            return
        for chunk_id in self._taken.copy() if chunk_ids is None else self._taken & chunk_ids:
            if not self._holds(chunk_id):
                self.drop(chunk_id)

    def drop(self, chunk_id: int) -> None:
        """Return the space of a chunk's place to the disk, because its content no longer counts. Raises
        IoError."""
        if self.file is not None and chunk_id in self._taken:
            self.file.discard(*self._places[chunk_id])
            self._taken.discard(chunk_id)

    def close(self) -> None:
        """Remove the file."""
        if self.file is not None:
            self.file.close()


def _reserves(budgets: TierBudgets, file_bytes: int) -> bool:
    return budgets.reserve_disk and not budgets.spare_disk_bytes and budgets.disk_bytes >= file_bytes


def lacking_space(
    budgets: TierBudgets, chunk_bytes: int, taken_bytes: int = 0, *, reserve: bool | None = None
) -> str | None:
    """Return an error text if the disk has less free space, besides ``taken_bytes``, than chunks of
    ``chunk_bytes`` in total will certainly need, so that training fails now and not later; None if it has
    enough, or does not report its size. ``reserve``: whether they take all of it at once; None: if the budget
    allows it."""
    if budgets.disk_dir is None or budgets.disk_bytes == 0:
        return None
    if reserve is None:
        reserve = _reserves(budgets, max(chunk_bytes, 1) + budgets.spare_disk_bytes)
    least_bytes = chunk_bytes - (0 if reserve else budgets.device_bytes + budgets.host_bytes)
    usage = shutil.disk_usage(budgets.disk_dir)
    if not usage.total or usage.free + taken_bytes >= least_bytes:  # a total of 0 means that it is unknown
        return None
    return (
        f"the DISK tier takes at least {format_bytes(least_bytes)} but {format_bytes(usage.free)} are free; "
        "free some space, name another disk_dir, or hold more on DEVICE and HOST and lower disk_bytes"
    )
