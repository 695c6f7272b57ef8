"""ChunkManager: owns the memory of chunks on every tier, and performs the actions that the chunk table
decides.

Also :func:`reconcile`, which makes memory match the table after an exception left an action half done.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import nn

from gemini import _C
from gemini.chunk.chunk import Chunk, ChunkKind, ChunkSpec, CutChunk, Expected, TensorIds
from gemini.chunk.cpu_memory import CPU
from gemini.chunk.disk_file import DiskFile
from gemini.chunk.file_backed import FileBackedChunks
from gemini.chunk.layout import ChunkLayout, search_chunk_size
from gemini.chunk.memory import AnyMemory, ComputeDevice, StoredChunk, TierBudgets, open_with_spare
from gemini.errors import DeviceFullError, IoError, StateError
from gemini.system.device import default_budget_bytes
from gemini.system.process import shown_as

_WAIT_SECONDS = 1.0  # wakes waiters so that Ctrl-C is seen


def reconcile(
    table: _C.ChunkTable,
    chunks: Sequence[Chunk],
    memory: AnyMemory,
    unmap: Callable[[Chunk, _C.Tier], None],
) -> set[int]:
    """Make memory match ``table`` after an exception, Ctrl-C included, at any point during its actions.
    ``unmap`` takes the memory of one copy.

    Transfers under way end first and count as aborted: their source is as before. May be interrupted and
    repeated. Returns the chunks that the table counts as on DEVICE although the device has no memory for
    them. Their first use was interrupted, so they have no content.
    """
    while memory.num_in_flight:
        memory.wait_any(_WAIT_SECONDS)
        memory.poll()
    memory.poll()
    for chunk in chunks:
        flight = table.flight_id(chunk.id)
        if flight:
            table.abort(flight)
    held = [table.held_tiers(chunk.id) for chunk in chunks]
    for chunk, tiers in zip(chunks, held, strict=True):
        for tier in (_C.Tier.DEVICE, _C.Tier.HOST):
            if tier not in tiers:
                unmap(chunk, tier)
    unfounded = set()
    for chunk, tiers in zip(chunks, held, strict=True):
        # Its first use was interrupted: it has no content yet.
        if _C.Tier.DEVICE in tiers and not chunk.window.mapped:
            try:
                memory.map(chunk.window, zero=chunk.spec.kind.starts_at_zero)
            except DeviceFullError:
                unfounded.add(chunk.id)
        if _C.Tier.HOST in tiers and not chunk.host.mapped:
            memory.map_host(chunk.host)
    return unfounded


def idle_tensors(table: _C.ChunkTable, chunks: set[int]) -> list[int]:
    """Return the tensors of ``chunks`` that count as having content and are not in use."""
    tensors = range(table.num_tensors()) if chunks else ()
    return [
        tensor
        for tensor in tensors
        if table.chunk_of(tensor) in chunks and table.tensor_state(tensor) == _C.TensorState.HOLD
    ]


class ChunkObserver(Protocol):
    """Is notified right after each event; times are seconds of ``time.perf_counter()``.

    Called on the thread that trains, for every operator: it must be quick, must not raise and must not call
    the manager.
    """

    def acquired(self, tensors: Sequence[int], asked_s: float, *, traced: bool) -> None:
        """``tensors``, requested at ``asked_s``, are pinned on DEVICE."""

    def released(self, tensors: Sequence[int]) -> None:
        """``tensors`` are about to be unpinned."""

    def prefetched(self, begin_s: float) -> None:
        """Prefetches in the recorded order have been started."""

    def waited(self, tensors: Sequence[int], begin_s: float, end_s: float) -> None:
        """Chunks of ``tensors`` were not ready at once: the time counts as a stall."""

    def submitted(self, action: _C.Action) -> None:
        """The transfer of ``action`` was submitted to its link."""

    def ended(self, action: _C.Action, result: _C.TransferResult) -> None:
        """The transfer of ``action`` has ended, and the table was updated."""


_TRANSFERS = frozenset((_C.ActionKind.EVICT, _C.ActionKind.SPILL, _C.ActionKind.FETCH, _C.ActionKind.LOAD))

Parts = Sequence[tuple[int, int, int, int]]  # as of a StoredChunk
_SEEN_BY_AUTOGRAD = frozenset((ChunkKind.PARAM, ChunkKind.GRAD))


class ChunkManager:
    """Chunks of one model on three tiers.

    Pin chunks with :meth:`acquire`, unpin them with :meth:`release`. Not thread-safe: call it from the thread
    that trains. Transfers run on the engine's own threads and are polled.
    """

    def __init__(
        self,
        specs: Sequence[ChunkSpec],
        budgets: TierBudgets,
        device: ComputeDevice = CPU,
        *,
        expected: Sequence[ChunkSpec] = (),
    ) -> None:
        """Reserve addresses for every chunk, for those ``expected`` to be added later and for as much again,
        and the DISK file; no chunk has content yet.

        Raises:
            IoError: the DISK directory is missing, read-only or too small.
        """
        self.budgets = budgets
        self.device = device
        self.table = _C.ChunkTable(budgets.device_bytes, budgets.host_bytes, budgets.disk_bytes)
        sizes, later = ([spec.nbytes for spec in each] for each in (specs, expected))
        self._disk = DiskFile(budgets, sum(sizes), self.table, sum(later))
        self._memory, spare_bytes = open_with_spare(device, sizes + later, budgets, self._disk.file)
        self._expected = Expected(expected, spare_bytes)
        self._runs_behind = device.has_own_memory  # operators run on after their calls returned
        self._by_window: list[int] = []  # chunk id of each reserved window
        self.chunks: list[Chunk] = []
        for spec in specs:
            self._append(spec)
        self._in_flight: dict[int, _C.Action] = {}  # ticket -> action
        self._waited_s = 0.0
        self.observer: ChunkObserver | None = None
        self.file_backed: FileBackedChunks | None = None  # chunks that are in memory only while pinned
        self.has_choices = False  # whether uses take some of several chunks
        self._stored: dict[int, StoredChunk] = {}  # by chunk id, until the chunk is written
        self._files: list[_C.SourceFiles] = []
        self._park_limit_bytes = budgets.device_bytes
        self._parks_always = False  # not only while memory is short
        self._parks_for_now = False  # more is parked than the limit of later periods
        self._under_pressure = False
        self._needs_reconcile = False  # an exception may have left an action half done
        self._unfounded: set[int] = set()  # chunks on DEVICE without memory, because it ran out
        self._closed = False

    def _append(self, spec: ChunkSpec, *, reserved: bool = True, expected: bool = False) -> Chunk:
        chunk_id = self.table.add_chunk(spec.nbytes)
        window, place = self._memory.windows(
            spec.nbytes, later=not reserved, floats=spec.floats, follows=spec.follows
        )
        view = partial(self._memory.tensor, window, spec.dtype, spec.numel)
        offset = self._disk.place(spec.nbytes, expected=expected)
        chunk = Chunk(chunk_id, spec, window, place, offset, view)
        self.chunks.append(chunk)
        if reserved:
            self._by_window.append(chunk_id)
        return chunk

    # -- called by the runtime -------------------------------------------------------------------

    def park(self, limit_bytes: int, *, always: bool) -> None:
        """Park DEVICE memory that chunks return, for the next chunks, up to ``limit_bytes`` or, if more, up
        to the limit of the current period. Unless ``always``, only while memory is short."""
        self._park_limit_bytes, self._parks_always = limit_bytes, always
        self._parks_for_now = self.arena_bytes() > limit_bytes  # from earlier periods

    def open_file_backed(self) -> FileBackedChunks:
        """Return the file-backed chunks, which are in memory only while pinned; created at the first call."""
        if self.file_backed is None:
            self.file_backed = FileBackedChunks(self)
        return self.file_backed

    def usages(self) -> tuple[int, int, int]:
        """Return the bytes on DEVICE, HOST and DISK; DISK includes the file of file-backed chunks."""
        device, host, disk = self.table.usages()
        return device, host, disk if self.file_backed is None else disk + self.file_backed.bytes

    def has_place(self, nbytes: int) -> bool:
        """Say whether unforeseen chunks of ``nbytes`` in total have a place in the DISK file, if there is
        one."""
        return self._disk.has_place(nbytes)

    def lacking_place(self, specs: Sequence[ChunkSpec]) -> str | None:
        """Return an error text if chunks of ``specs``, added now, have no place in the DISK file or the disk
        has too little space; None if they fit."""
        nbytes = sum(spec.nbytes for spec in specs)
        return self._disk.lacking_place(nbytes, self._expected.bytes_of(specs))

    def prepare(self, specs: Sequence[ChunkSpec], first_bytes: int, more_disk_bytes: int) -> None:
        """Check that :meth:`expect` can follow. ``first_bytes``: the part of the chunks that is added at
        once.

        Raises:
            ConfigError: there are no addresses for them, or as :meth:`DiskFile.prepare`.
            IoError: as :meth:`DiskFile.prepare`.
        """
        nbytes = sum(spec.nbytes for spec in specs)
        self._expected.refuse(nbytes)
        self._disk.prepare(nbytes, first_bytes, more_disk_bytes)

    def expect(self, specs: Sequence[ChunkSpec], more_disk_bytes: int) -> None:
        """Reserve addresses and places in the DISK file for additional chunks, and raise the DISK budget by
        ``more_disk_bytes``."""
        self._disk.expect(sum(spec.nbytes for spec in specs), more_disk_bytes)
        if more_disk_bytes:
            self.table.raise_disk_budget(more_disk_bytes)
            disk_bytes = self.budgets.disk_bytes + more_disk_bytes
            self.budgets = replace(self.budgets, disk_bytes=disk_bytes)
        self._expected.add(specs)

    def add_chunk(self, spec: ChunkSpec) -> Chunk:
        """Add a chunk without content; the caller has checked that there is a place for it. If it was
        expected, its window is among the reserved ones."""
        expected = self._expected.take(spec)
        return self._append(spec, reserved=expected, expected=expected)

    def add_choice(self, members: Sequence[Sequence[int]], *, certain: bool = False) -> None:
        """Register a choice: a use takes some of the ``members`` (each a list of chunk ids that are used
        together) and leaves the others. The recorded order counts them as one chunk. ``certain``: a use takes
        what the last one took."""
        self.table.add_choice(members, certain=certain)
        self.has_choices = True

    def widen_choice(self, chunk: int, members: Sequence[Sequence[int]]) -> None:
        """Add members to the choice that contains ``chunk``."""
        self.table.widen_choice(chunk, members)

    def join(self, parts: Sequence[Chunk]) -> CutChunk:
        """Return chunks with consecutive addresses as one CutChunk."""
        first = parts[0]
        numel = sum(part.spec.numel for part in parts)
        return CutChunk(parts, self._memory.joined(first.window, first.spec.dtype, numel))

    def is_on_device(self, tensor: int) -> bool:
        """Say whether the chunk of a tensor is valid on DEVICE."""
        return _C.Tier.DEVICE in self.table.valid_tiers(self.table.chunk_of(tensor))

    def add_tensor(self, chunk: Chunk) -> int:
        """Register a tensor of ``chunk`` and return its id; it starts in state FREE."""
        tensor: int = self.table.add_tensor(chunk.id)
        return tensor

    def has_content(self, tensor: int) -> bool:
        """Say whether a tensor was written since it was created or freed, even if a file has its content."""
        held = self.table.tensor_state(tensor) != _C.TensorState.FREE
        return held or (self.file_backed is not None and self.file_backed.holds(tensor))

    def lend(self, chunk: Chunk, count: int = 1) -> tuple[torch.UntypedStorage, object]:
        """Return a storage over the window of ``chunk`` and the following ones, ``count`` in all, and an
        object that lives as long as the storage. The storage does not pin the chunks."""
        return self._memory.lend(chunk.window, count * chunk.spec.nbytes)

    def acquire(self, tensors: TensorIds, *, traced: bool, on_host: bool = False) -> None:
        """Fetch the tensors' chunks to DEVICE, or with ``on_host`` to HOST for the CPU (:func:`host_tensor`),
        and pin them (HOLD or FREE -> COMPUTE); block until they are there.

        Raises:
            OutOfBudgetError: they do not fit there at once, or one for HOST is only on DISK. Nothing has
                changed, except that chunks may have moved if only the end of transfers showed that they do
                not fit.
            IoError: a transfer failed; the tensors are not pinned, their content is where it was.
            StateError: one for HOST is pinned on DEVICE, or the other way round.
        """
        asked_s = time.perf_counter() if self.observer is not None else 0.0
        if self._runs_behind:
            self._memory.follow()
        if self._needs_reconcile:
            self._reconcile()
        try:
            actions = self.table.access(tensors, traced, on_host)
            if actions != ():
                self._settle(tensors, actions or ())
            if self._parks_for_now:
                self._trim_parked()
        except BaseException:
            self._needs_reconcile = True
            raise
        if self.observer is not None:
            self.observer.acquired(tensors, asked_s, traced=traced)

    def release(self, tensors: TensorIds, *, dirty: bool) -> None:
        """Unpin tensors (COMPUTE -> HOLD); ``dirty``: the tier where they were pinned has the only valid
        copy."""
        if self.observer is not None:
            self.observer.released(tensors)
        if self._needs_reconcile:
            self._reconcile()
        try:
            actions = self.table.release(tensors, dirty)
            if actions:
                self._execute(actions)
            if self.file_backed is not None:
                self.file_backed.released(tensors, dirty=dirty)
        except BaseException:
            self._needs_reconcile = True
            raise

    def leave(self, tensors: TensorIds) -> None:
        """Start to evict the chunks of ``tensors``, which are not used soon, if DEVICE is nearly full."""
        if self._needs_reconcile:
            self._reconcile()
        try:
            actions = self.table.leave(tensors)
            if actions:
                self._execute(actions)
        except BaseException:
            self._needs_reconcile = True
            raise

    def free(self, tensors: TensorIds) -> None:
        """Discard the tensors' content (HOLD -> FREE); a chunk without content holds no memory on any
        tier."""
        if self._needs_reconcile:
            self._reconcile()
        try:
            actions = self.table.free(tensors)
            if actions:
                self._execute(actions)
            if self._disk.gives_back:
                self._disk.give_back({self.table.chunk_of(tensor) for tensor in tensors})
        except BaseException:
            self._needs_reconcile = True
            raise

    @property
    def can_read_files(self) -> bool:
        """Whether chunks may stay in files of the user; see :meth:`find_on_disk`."""
        return self.budgets.reads_files and not self.device.has_own_memory

    @property
    def reads_directly(self) -> bool:
        """Whether files of the user are read with O_DIRECT, past the page cache."""
        return all(files.direct for files in self._files)

    def find_on_disk(self, tensors: TensorIds, files: _C.SourceFiles, chunks: Mapping[int, Parts]) -> None:
        """Register ``chunks``, by id, as lying in ``files``; the manager owns ``files`` from now on. All
        ``tensors`` of these chunks then have content. A chunk that is written to goes to the DISK tier's own
        file.

        Raises:
            OutOfBudgetError: DISK cannot hold them.
            StateError: one has content already.
        """
        self.table.found_on_disk(tensors)
        self._stored |= {chunk: StoredChunk(files, tuple(parts)) for chunk, parts in chunks.items()}
        self._files.append(files)

    def prefetch(self) -> None:
        """Start the next transfers in the recorded order; return without waiting."""
        begin_s = time.perf_counter() if self.observer is not None else 0.0
        try:
            if self._in_flight:
                self._reap()
            actions = self.table.prefetch()
            if actions:
                self._execute(actions)
        except BaseException:
            self._needs_reconcile = True
            raise
        finally:
            self._memory.settle()
        if self.observer is not None:
            self.observer.prefetched(begin_s)

    def make_room(self) -> None:
        """Evict down to the limit, and return all parked memory. Raises as :meth:`acquire`."""
        self.acquire((), traced=False)
        self.drain()
        self._memory.trim(0)

    def make_way(self, nbytes: int, limit_bytes: int) -> None:
        """Start to evict until ``nbytes`` of ``limit_bytes``, the limit in force, are free on DEVICE; do not
        wait.

        Raises:
            IoError: a transfer that ended meanwhile had failed; its chunk is where it was.
        """
        self._memory.follow()
        table = self.table
        try:
            if self._in_flight:
                self._reap()
            table.set_limit(max(0, limit_bytes - nbytes))
            try:
                actions = table.access((), traced=False)
            finally:
                table.set_limit(limit_bytes)
            self._execute(actions or ())
        except BaseException:
            self._needs_reconcile = True
            raise

    def drain(self) -> None:
        """Wait for every transfer under way.

        Raises:
            IoError: the first that failed, after all have ended.
        """
        error: IoError | None = None
        if self._needs_reconcile:
            self._reconcile()
        try:
            while self._in_flight:
                try:
                    self._await_completion()
                except IoError as failed:
                    error = error or failed
            if error is not None:
                raise error
        except BaseException:  # reconcile retries to give back disk space
            self._needs_reconcile = True
            raise
        finally:
            self._memory.settle()

    def recover(self) -> None:
        """Unpin everything after an operator raised halfway."""
        if self._needs_reconcile:
            self._reconcile()
        try:
            actions = self.table.release_all(dirty=True)
            if actions:
                self._execute(actions)
            if self._unfounded:
                self._forget_unfounded()
            if self.file_backed is not None:
                self.file_backed.all_released()
        except BaseException:
            self._needs_reconcile = True
            raise

    def end_step(self) -> None:
        """Forget the memory pressure of the step that ended."""
        self._under_pressure = False

    @property
    def stall_seconds(self) -> float:
        """How long operators have waited for their chunks, in seconds."""
        return self._waited_s + self._memory.stall_seconds()

    def link_stats(self) -> dict[str, dict[str, float]]:
        """Return per link, since construction: bytes moved, seconds busy, for disk links the seconds in which
        the other direction was busy as well, and the number of transfers."""
        return self._memory.link_stats()

    def arena_bytes(self) -> int:
        """Return the DEVICE bytes that are mapped under windows or parked for reuse."""
        return self._memory.mapped_bytes + self._memory.parked_bytes

    def address_range(self) -> tuple[int, int]:
        """Return the first address of the windows and the first one after them."""
        return self._memory.address_range()

    def all_on_device(self) -> bool:
        """Say whether every chunk with content has it on DEVICE and no transfer is under way."""
        if self._in_flight:
            return False
        copies = (self.table.valid_tiers(chunk.id) for chunk in self.chunks)
        return all(_C.Tier.DEVICE in tiers or not tiers for tiers in copies)

    def wait_host(self, chunk: Chunk, *, aside: bool = False) -> None:
        """Wait until the CPU may use a chunk that is pinned on HOST. Counts as a stall, unless ``aside``:
        called on another thread than the one that trains."""
        start = time.perf_counter()
        self._memory.wait_host(chunk.host)
        if not aside:
            self._waited_s += time.perf_counter() - start

    def chunk_at(self, address: int) -> int:
        """Return the id of the chunk with ``address`` in its window, or -1."""
        window = self._memory.find(address)
        return self._by_window[window] if window >= 0 else -1

    def heal(self) -> int:
        """Remove the poison pages that stray accesses left in evicted windows; return how many windows had
        some."""
        return self._memory.heal()

    def close(self) -> None:
        """Finish transfers and return all memory and the DISK file; idempotent. Windows stay reserved."""
        if self._closed:
            return
        self._closed = True
        try:
            self.drain()
        finally:
            try:
                exposed = [chunk.window for chunk in self.chunks if chunk.spec.kind in _SEEN_BY_AUTOGRAD]
                self._memory.close([(chunk.window, chunk.host_place) for chunk in self.chunks], exposed)
            finally:
                self._disk.close()
                for files in self._files:
                    files.close()
                if self.file_backed is not None:
                    self.file_backed.close()

    # -- performing actions ------------------------------------------------------------------------

    @shown_as("fetch")
    def _settle(self, tensors: TensorIds, actions: Sequence[_C.Action]) -> None:
        start = time.perf_counter()
        table = self.table
        try:
            self._execute(actions)
            while not table.ready(tensors):
                self._await_completion()
                self._execute(table.ensure(tensors))
        except BaseException:
            self._reconcile()
            self.release(tensors, dirty=False)
            self._forget_unfounded()
            raise
        finally:
            end = time.perf_counter()
            self._waited_s += end - start
            if self.observer is not None:
                self.observer.waited(tensors, start, end)

    def _await_completion(self) -> None:
        if not self._in_flight:
            raise StateError("the chunk table waits for a transfer but none is in flight")
        while not self._reap():
            self._memory.wait_any(_WAIT_SECONDS)

    def _execute(self, actions: Sequence[_C.Action]) -> None:
        try:
            self._perform(actions)
        finally:
            self._memory.settle()

    def _perform(self, actions: Sequence[_C.Action]) -> None:
        for action in actions:
            chunk = self.chunks[action.chunk]
            kind = action.kind
            if kind == _C.ActionKind.ALLOCATE and action.to_tier == _C.Tier.HOST:
                self._memory.map_host(chunk.host)
                self._fill(chunk, action.to_tier)
            elif kind == _C.ActionKind.ALLOCATE:
                self._memory.map(chunk.window, zero=chunk.spec.kind.starts_at_zero)
                self._fill(chunk, action.to_tier)
            elif kind == _C.ActionKind.DROP and action.from_tier == _C.Tier.DISK:
                self._disk.drop(chunk.id)
            elif kind == _C.ActionKind.DROP:
                self._unmap(chunk, action.from_tier)
            else:
                self._in_flight[self._submit(action, chunk)] = action
                if self.observer is not None:
                    self.observer.submitted(action)
            if kind in _TRANSFERS:
                self._under_pressure = True
        if actions:
            self._trim_parked()

    def _fill(self, chunk: Chunk, tier: _C.Tier) -> None:
        if self.file_backed is not None:
            self._under_pressure = True  # park its memory for the next file-backed chunk
            self.file_backed.fill(chunk, tier)

    def _parks_within(self) -> int:
        """Return how many bytes may be mapped and parked in the current period."""
        if not self._parks_always:
            return self._park_limit_bytes
        return max(self._park_limit_bytes, self.table.limit())

    def _trim_parked(self) -> None:
        """Trim parked memory to the limit of the current period: if parked blocks cannot be combined, fresh
        pages are added to them."""
        memory = self._memory
        if memory.parked_bytes:
            memory.trim(max(0, self._parks_within() - memory.mapped_bytes))
        self._parks_for_now = bool(memory.parked_bytes) and self.arena_bytes() > self._park_limit_bytes

    def _submit(self, action: _C.Action, chunk: Chunk) -> int:
        """Map the destination and hand the transfer to the engine; return its ticket."""
        nbytes, window, memory = action.nbytes, chunk.window, self._memory
        if action.kind == _C.ActionKind.FETCH:
            return memory.fetch(window, chunk.host, nbytes)
        if action.kind == _C.ActionKind.LOAD and chunk.id in self._stored:
            return memory.load_stored(window, self._stored[chunk.id])
        if action.kind == _C.ActionKind.LOAD:
            return memory.load(window, nbytes, chunk.disk_offset)
        if action.kind == _C.ActionKind.EVICT:
            return memory.evict(chunk.host, window, nbytes)
        if self._disk.file is None:
            raise IoError(
                errno.EROFS,
                "weights that were changed, cast or merged differ from the checkpoint's files, which are "
                "read-only, so they cannot be evicted from DEVICE; give disk_dir",
            )
        self._disk.written(chunk.id)
        self._stored.pop(chunk.id, None)
        source = window if action.from_tier == _C.Tier.DEVICE else chunk.host
        return memory.spill(source, nbytes, chunk.disk_offset)

    def _reap(self) -> bool:
        """Report finished transfers to the table; say whether there were any.

        Raises:
            IoError: a transfer failed; its action was aborted, the source is as before.
        """
        failed: IoError | None = None
        completions = self._memory.poll()
        for completion in completions:
            action = self._in_flight.pop(completion.ticket)
            if completion.ok:
                outcome = self.table.complete(action.id)
            else:
                outcome = self.table.abort(action.id)
                failed = IoError(completion.errno, completion.message, completion.path, completion.offset)
            try:
                self._free_unused(action, outcome)
            except IoError as error:  # the other transfers have ended too, and are not reported again
                failed = failed or error
            if self.observer is not None:
                self.observer.ended(action, completion)
        if failed is not None:
            raise failed
        return bool(completions)

    def _free_unused(self, action: _C.Action, outcome: _C.Completion) -> None:
        chunk = self.chunks[action.chunk]
        if outcome.source_freed:
            self._unmap(chunk, action.from_tier)
        if outcome.destination_freed:
            self._unmap(chunk, action.to_tier)
        # A chunk that was freed during a read or write has kept its place until now.
        if outcome.destination_freed and _C.Tier.DISK in (action.from_tier, action.to_tier):
            self._disk.give_back({chunk.id})

    def _reconcile(self) -> None:
        """Make memory match the table after an exception. May be interrupted and repeated."""
        self._unfounded |= reconcile(self.table, self.chunks, self._memory, self._unmap)
        self._memory.settle()
        self._in_flight.clear()
        with suppress(IoError):  # an error of punching holes must not keep the user from saving
            self._disk.give_back()
        self._needs_reconcile = False

    def _forget_unfounded(self) -> None:
        """Free chunks that have no content because the device had no memory at their first use."""
        tensors = idle_tensors(self.table, self._unfounded)
        self._unfounded.clear()
        self._execute(self.table.free(tensors))

    def _unmap(self, chunk: Chunk, tier: _C.Tier) -> None:
        """Take the memory of one copy; DEVICE memory is parked for the next chunk if parking is on."""
        if tier == _C.Tier.DEVICE and chunk.window.mapped:
            park = self._parks_always or self._under_pressure
            park = park and self.arena_bytes() <= self._parks_within()
            self._memory.unmap(chunk.window, park=park)
            self._parks_for_now |= park and self.arena_bytes() > self._park_limit_bytes
        elif tier == _C.Tier.HOST and chunk.host_place is not None and chunk.host_place.mapped:
            self._memory.unmap_host(chunk.host_place)


def init_chunk_manager(
    model: nn.Module,
    *,
    hidden_dim: int | None = None,
    search_range_mb: float = 32,
    min_chunk_size_mb: float = 32,
    budgets: TierBudgets | None = None,
    verbose: bool = True,
) -> tuple[ChunkManager, ChunkLayout]:
    """Search the chunk size for ``model``, lay out its parameters and reserve their chunks; nothing is
    copied.

    The parameters must have one dtype. ``budgets`` defaults to DEVICE only, with the free memory. ``verbose``
    prints the result of the search, which is logged in any case. The caller closes the manager.

    Raises:
        ConfigError: a size allows no chunk; see :func:`search_chunk_size`.
    """
    named = list(model.named_parameters())
    dtype = named[0][1].dtype
    found = search_chunk_size(
        [param for _, param in named],
        search_range_mb=search_range_mb,
        min_chunk_size_mb=min_chunk_size_mb,
        hidden_dim=hidden_dim,
        itemsize=dtype.itemsize,
    )
    found.report(printed=verbose)
    layout = ChunkLayout.build(named, found.chunk_numel, itemsize=dtype.itemsize)
    specs = [ChunkSpec(ChunkKind.PARAM, numel, dtype) for numel in layout.chunk_numels]
    return ChunkManager(specs, budgets or TierBudgets(default_budget_bytes())), layout
