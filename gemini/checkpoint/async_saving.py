"""Saving during training: values are copied to staging before they change, and a thread writes the copies.

docs/notes/checkpoint.md describes the work of the training thread and its timing.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.checkpoint.contents import Scheduler, checked_model, refuse_shared_directory
from gemini.checkpoint.saving import (
    SHARD_BYTES,
    Block,
    CheckpointFiles,
    CheckpointWriter,
    Extent,
    blocks_of_tensors,
    checked_shard_bytes,
    new_checkpoint,
    prepare,
)
from gemini.checkpoint.sealed_file import MEMORY_ALIGN
from gemini.checkpoint.tensor_file import settled
from gemini.chunk import Chunk
from gemini.chunk.chunk import TensorIds
from gemini.errors import CheckpointError, ConfigError
from gemini.model.handle import ManagedModel
from gemini.offload.async_file import direct_memory
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.runtime.gate.gradients import StatePiece
from gemini.runtime.storage.model_storage import ManagedSlot
from gemini.system import rng
from gemini.system.config import format_enough, parse_bytes
from gemini.system.threads import start_thread

logger = logging.getLogger(__name__)

_MEETING_SECONDS = 10.0  # how long a save that ends early waits for the other ranks' threads
BUFFER_BYTES = 4 * 2**20


@torch.no_grad()
def save_async(
    directory: str | os.PathLike[str],
    model: nn.Module | ManagedModel,
    optimizer: GeminiOptimizer,
    *,
    scheduler: Scheduler | None = None,
    extra: dict[str, Any] | None = None,
    keep: int = 2,
    shard_bytes: int | str = SHARD_BYTES,
    staging_bytes: int | str = "64MiB",
) -> SaveHandle:
    """Start a :func:`gemini.checkpoint.save` and return; training continues while it is written.

    The checkpoint has the values of this moment. Each piece is copied to staging right before the optimizer
    changes it; if staging is full, that update waits. A model that is wholly in host memory is written
    directly from there. The checkpoint is complete once ``wait()`` of the returned handle has returned; the
    next save and ``model.close()`` wait, too. In-place writes to weights first copy the values still to be
    saved, like updates. Buffers and unmanaged parameters are written before this function returns.
    Collective: every rank must call it, and ``wait()``.

    Args:
        directory, model, optimizer, scheduler, extra, keep, shard_bytes: as for
            :func:`gemini.checkpoint.save`.
        staging_bytes: the most memory that copies take, beside the budgets and the 16 MiB through which every
            save writes; in units of 4 MiB.

    Raises:
        ConfigError: ``staging_bytes`` is too small.
        IoError, CheckpointError: as in :func:`gemini.checkpoint.save`, also for an earlier asynchronous save
            that failed and that no ``wait()`` reported.
    """
    model, optimizer = checked_model(model, optimizer)
    refuse_shared_directory(model, directory)
    num_buffers = (parse_bytes(staging_bytes, name="staging_bytes") or 0) // BUFFER_BYTES
    if num_buffers < 1:
        raise ConfigError(
            f"staging_bytes is {staging_bytes!r}; it must be at least {format_enough(BUFFER_BYTES)}"
        )
    shard = checked_shard_bytes(shard_bytes)
    rank = model.rank_of_parts(aside=True)
    manifest = prepare(rank, model, optimizer, scheduler, extra)
    context = new_checkpoint(directory, model.manager.step, rank=rank, keep=keep)
    writer = context.__enter__()
    try:
        writer.describe(manifest, rng.capture())
        blocks = CheckpointFiles(writer, model, optimizer, shard).blocks()
        handle = SaveHandle(model, context, writer, blocks, num_buffers)
        model.manager.keep_for(handle)
        handle.start()
    except BaseException as error:
        model.manager.release_snapshot(model.manager.snapshot)
        context.__exit__(type(error), error, error.__traceback__)
        raise
    return handle


class _Ended(Exception):
    """The save has failed or was dropped: copy and write nothing more."""


class SaveHandle:
    """A running asynchronous save. Its methods are for the training thread; another thread writes.

    Implements :class:`gemini.runtime.gate.gate.Snapshot` for its model.
    """

    def __init__(
        self,
        model: ManagedModel,
        context: AbstractContextManager[CheckpointWriter],
        writer: CheckpointWriter,
        blocks: list[Block],
        num_buffers: int,
    ) -> None:
        self._manager = manager = model.manager
        self._context = context
        self._writer = writer
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="gemini-checkpoint", daemon=True)
        self._steps_ended = 0
        self._shown = False  # the error was raised from wait()
        self._changed = threading.Condition()
        self._num_buffers = num_buffers
        self._blocks_of = blocks_of_tensors(model, blocks)
        self._names = model.storage.parameter_names()
        # Guarded by _changed:
        self._left = {id(block.owner): block for block in blocks}  # neither copied nor written
        # Whether the writing thread may read chunks directly.
        chunks = manager.chunks
        self._in_place = manager.resident and chunks.file_backed is None and not chunks.device.has_own_memory
        self._reading: int | None = None  # the owner of the block that it is reading
        self._copying = False
        self._filling: CopyBuffer | None = None  # while _copying, only the training thread may use it
        self._copied: deque[CopyBuffer] = deque()
        self._free: list[CopyBuffer] = []
        self._unmade = num_buffers  # buffers not allocated yet
        self._error: BaseException | None = None
        self._over = False

    def start(self) -> None:
        """Start the writing thread. Raises ThreadError."""
        start_thread(self._thread, "saving a checkpoint")
        atexit.register(self._at_exit)

    # -- for users ---------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether the checkpoint is complete or has failed, so that :meth:`wait` returns at once."""
        return not self._thread.is_alive()

    @property
    def peak_staging_bytes(self) -> int:
        """The most memory that copies have taken, in bytes."""
        return (self._num_buffers - self._unmade) * BUFFER_BYTES

    def wait(self) -> Path:
        """Write the rest and return the checkpoint's directory. Call it between steps.

        Raises:
            IoError, CheckpointError: the checkpoint could not be written; earlier ones are unchanged.
        """
        self.before_write()
        self._thread.join()
        self._settle()
        if self._error is not None:
            self._shown = True
            raise self._error
        return self._writer.final

    def drop(self) -> None:
        """Cancel the save if it is not complete, and remove its files."""
        if os.getpid() != self._pid:
            return
        self._end(CheckpointError("the save was dropped before it was complete"))
        self._shown = True
        self._join_unless_others_hang()
        self._settle()

    # -- for the runtime ---------------------------------------------------------------------------

    def wants(self, piece: StatePiece) -> bool:
        """Whether values of ``piece`` are still to be saved."""
        # A piece that is being read in place does not count: without a GPU there are no updates on HOST.
        return id(piece) in self._left

    def before_update(self, piece: StatePiece) -> None:
        """Copy the unsaved values of ``piece``, which is pinned. Blocks while staging is full."""
        self._copy(piece)

    def before_write(self) -> None:
        """Copy or write everything that is still unsaved."""
        if self._in_place:
            with self._changed:
                self._changed.wait_for(lambda: not (self._left or self._reading) or self._over)
            return
        for block in list(self._left.values()):
            self._fetch_and_copy(block)

    def unsaved(self, tensors: TensorIds) -> frozenset[int]:
        """Return those of ``tensors`` that are not completely saved yet."""
        return frozenset(
            tensor for tensor in tensors if any(map(self._is_left, self._blocks_of.get(tensor, ())))
        )

    def before_change(self, tensors: TensorIds) -> None:
        """Copy the unsaved values of ``tensors``. Blocks while staging is full."""
        for tensor in tensors:
            for block in self._blocks_of.get(tensor, ()):
                if self._is_left(block):
                    self._fetch_and_copy(block)

    def spoil(self, tensors: Iterable[int]) -> None:
        """Cancel the save: unsaved values of ``tensors`` have already changed."""
        name = self._names[min(tensors)]
        self._end(
            CheckpointError(
                f"the save was given up: {name!r} was overwritten before it was saved, by an "
                "operator that the runtime could not foresee; call wait() first, or save() instead "
                "of save_async()"
            )
        )

    def residence(self, resident: bool) -> bool:
        """Stop reading chunks in place if they may leave DEVICE from now on; return ``resident``."""
        if self._in_place and not resident:
            with self._changed:
                self._in_place = False
                self._changed.wait_for(lambda: self._reading is None)
        return resident

    def step_ended(self) -> None:
        """Copy values that no update touches, if staging has room."""
        self._steps_ended += 1
        if self._steps_ended < 2 or self._in_place:
            return
        # After two steps all updates have run once, deferred ones included: the rest is not updated soon.
        room = self._num_buffers * BUFFER_BYTES
        while self._left and not self._copied and room > 0:
            block = next(iter(self._left.values()))
            self._fetch_and_copy(block)
            room -= block.nbytes

    def close(self, *, finish: bool) -> None:
        """Finish and raise an error that was not reported yet, or drop. Idempotent."""
        if finish and not self._shown:
            self.wait()
        else:
            self.drop()

    # -- inside, on the thread that trains ---------------------------------------------------------

    def _is_left(self, block: Block) -> bool:
        """Return whether the block is neither copied nor written. A block that is being read in place counts
        as left.
        """
        return id(block.owner) in self._left or self._reading == id(block.owner)

    def _fetch_and_copy(self, block: Block) -> None:
        with self._manager.updates.aside(block.tensors):
            self._copy(block.owner)

    def _copy(self, owner: StatePiece | ManagedSlot | Chunk) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._reading != id(owner))
                block = self._left.pop(id(owner), None)
                self._copying = block is not None
            if block is not None:
                for extent in block.extents:
                    self._stage(extent)
        except _Ended:
            pass
        except BaseException as error:  # the block is off the list, but perhaps only copied in part
            self._end(CheckpointError(f"the save was given up: {error!r}"))
            raise
        finally:
            with self._changed:
                self._copying = False
                if self._over:
                    self._filling = None
                self._changed.notify_all()

    @torch.no_grad()
    def _stage(self, extent: Extent) -> None:
        values, at = extent.read(), 0
        while at < values.numel():
            if self._filling is None:
                self._filling = self._take_buffer()
            at += (count := self._filling.add(extent, extent.first + at, values[at:]))
            if count == 0:
                with self._changed:
                    self._copied.append(self._filling)
                    self._filling = None
                    self._changed.notify_all()

    def _take_buffer(self) -> CopyBuffer:
        """Return an empty buffer; blocks until there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._unmade or self._over)
            if self._over:
                raise _Ended
            if self._free:
                return self._free.pop()
            self._unmade -= 1
        return CopyBuffer()

    def _settle(self) -> None:
        """Release everything that the save held, after the thread has ended."""
        atexit.unregister(self._at_exit)
        self._manager.release_snapshot(self)

    def _at_exit(self) -> None:
        """At interpreter exit: finish if the model is no longer needed, else drop the save."""
        if os.getpid() != self._pid:
            return
        if self._left and not self._in_place:
            logger.warning("%s is dropped: the program ended before it was complete", self._writer.path)
            self._end(CheckpointError("the program ended"))
        self._join_unless_others_hang()

    def _join_unless_others_hang(self) -> None:
        """Join the thread. With several ranks give up after a few seconds: the other ranks' threads may never
        come, because they may be waiting for this rank.
        """
        self._thread.join(None if self._writer.rank.is_alone else _MEETING_SECONDS)

    # -- inside, on the thread that writes ---------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while work := self._next():
                work()
        except BaseException as raised:
            error = raised
            self._end(
                error
            )  # before meeting the other ranks: the training thread may be waiting for a buffer
        try:
            # Finishes the checkpoint, or removes it.
            if error is None:
                self._context.__exit__(None, None, None)
            else:
                self._context.__exit__(type(error), error, error.__traceback__)
        except BaseException as raised:
            with self._changed:
                if self._error is error:  # the error of __exit__ says more
                    self._error = raised
            error = raised
        self._end(error)

    def _next(self) -> partial[None] | None:
        """Return the next action, or None if nothing is left. Blocks until the training thread has something
        to write.
        """
        with self._changed:
            while not self._over:
                if self._filling is not None and not self._copying:
                    self._copied.append(self._filling)
                    self._filling = None
                if self._copied:
                    return partial(self._write_copied, self._copied.popleft())
                if self._in_place and self._left:
                    self._reading = next(iter(self._left))
                    return partial(self._write_in_place, self._left.pop(self._reading))
                if not self._left and not self._copying:
                    return None
                self._changed.wait()
        raise self._error or _Ended

    def _write_copied(self, buffer: CopyBuffer) -> None:
        buffer.write()
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    @torch.no_grad()
    def _write_in_place(self, block: Block) -> None:
        try:
            block.write()
        finally:
            with self._changed:
                self._reading = None
                self._changed.notify_all()

    def _end(self, error: BaseException | None) -> None:
        """Stop both threads. The error of the first call is kept."""
        with self._changed:
            if not self._over:
                self._over, self._error = True, error
            self._left.clear()
            self._copied.clear()
            self._free.clear()
            if not self._copying:
                self._filling = None
            self._changed.notify_all()


class CopyBuffer:
    """Copied values on their way to files, placed so that they can be written without another copy."""

    def __init__(self) -> None:
        self._memory = direct_memory(BUFFER_BYTES)
        self._used = 0
        self._parts: list[tuple[Extent, int, torch.Tensor]] = []

    def add(self, extent: Extent, first: int, values: torch.Tensor) -> int:
        """Copy as many of ``values``, from element ``first`` of the extent's tensor on, as fit. Return the
        number.
        """
        begin = self._used + (extent.file.offset(extent.tensor, first) - self._used) % MEMORY_ALIGN
        size = values.dtype.itemsize
        count = min(values.numel(), (BUFFER_BYTES - begin) // size)
        if count > 0:
            copy = self._memory[begin : begin + count * size].view(values.dtype)
            copy.copy_(values[:count])
            self._parts.append((extent, first, copy))
            self._used = begin + count * size
        return max(count, 0)

    def write(self) -> None:
        """Write all values to their files and empty the buffer."""
        with settled(extent.file for extent, _first, _values in self._parts):
            for extent, first, values in self._parts:
                extent.file.lend(extent.tensor, first, values)
        self._parts.clear()
        self._used = 0
