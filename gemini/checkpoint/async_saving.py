"""Saving while training goes on: a thread writes what is copied to staging before it changes.

What the thread that trains does, and when, is in docs/notes/checkpoint.md.
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
from gemini.chunk import Chunk, TensorIds
from gemini.errors import CheckpointError, ConfigError
from gemini.model.handle import ManagedModel
from gemini.offload.async_file import direct_memory
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.runtime import ManagedSlot, StatePiece
from gemini.system import rng
from gemini.system.config import parse_bytes
from gemini.system.threads import start_thread

logger = logging.getLogger(__name__)

_MEETING_SECONDS = 10.0  # what a save that ends early waits for the other ranks to hear of it
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
    """Begin what :func:`gemini.checkpoint.save` does and return; training goes on while it is written.

    The checkpoint is what the model is now. Each piece of it is copied to staging right before the
    optimizer changes it; where staging is full, that update waits. A model that is wholly in host memory is
    written from where it is. The checkpoint is complete once ``wait()`` of what is returned has returned;
    the next save and ``model.close()`` wait, too. Writes to weights in place copy what is still to be saved
    of them first, as updates do. Buffers and parameters that are not managed are written before this returns.
    Over several ranks all of them call this, and ``wait()``.

    Args:
        staging_bytes: the most memory that copies take, on top of the budgets and of the 16 MiB that every
            save writes through; in units of 4 MiB.

    Raises:
        ConfigError: ``staging_bytes`` is too small.
        IoError, CheckpointError: as :func:`gemini.checkpoint.save`, also for an earlier asynchronous save
            that failed and that nobody waited for.
    """
    model, optimizer = checked_model(model, optimizer)
    refuse_shared_directory(model, directory)
    num_buffers = (parse_bytes(staging_bytes, name="staging_bytes") or 0) // BUFFER_BYTES
    if num_buffers < 1:
        raise ConfigError(f"staging_bytes is {staging_bytes!r}; it takes {BUFFER_BYTES} bytes or more")
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
        model.manager.let_go_of(model.manager.snapshot)
        context.__exit__(type(error), error, error.__traceback__)
        raise
    return handle


class _Ended(Exception):
    """The save has failed or was dropped: nothing more is copied or written."""


class SaveHandle:
    """A save under way. Its methods are for the thread that trains; another one writes.

    A :class:`gemini.runtime.Snapshot` of its model.
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
        # Whether the thread may read chunks where they are.
        chunks = manager.chunks
        self._in_place = manager.resident and chunks.stow is None and not chunks.device.has_own_memory
        self._reading: int | None = None  # what it reads there now
        self._copying = False
        self._filling: CopyBuffer | None = None  # while _copying, of the thread that trains alone
        self._copied: deque[CopyBuffer] = deque()
        self._free: list[CopyBuffer] = []
        self._unmade = num_buffers  # of them, those that nobody needed yet
        self._error: BaseException | None = None
        self._over = False

    def start(self) -> None:
        """Begin to write. Raises ThreadError."""
        start_thread(self._thread, "saving a checkpoint")
        atexit.register(self._at_exit)

    # -- for users ---------------------------------------------------------------------------------

    def done(self) -> bool:
        """Say whether the checkpoint is complete, or has failed: :meth:`wait` returns at once."""
        return not self._thread.is_alive()

    @property
    def peak_staging_bytes(self) -> int:
        """Return the most memory that copies have taken."""
        return (self._num_buffers - self._unmade) * BUFFER_BYTES

    def wait(self) -> Path:
        """Write what is left and return the checkpoint's directory. Call it between steps.

        Raises:
            IoError, CheckpointError: it could not be written; the earlier checkpoints are as they were.
        """
        self.before_write()
        self._thread.join()
        self._settle()
        if self._error is not None:
            self._shown = True
            raise self._error
        return self._writer.final

    def drop(self) -> None:
        """Give the save up, if it is not complete, and remove what was written of it."""
        if os.getpid() != self._pid:
            return
        self._end(CheckpointError("the save was dropped before it was complete"))
        self._shown = True
        self._join_unless_others_hang()
        self._settle()

    # -- for the runtime ---------------------------------------------------------------------------

    def wants(self, piece: StatePiece) -> bool:
        """Whether something of ``piece`` is still to be saved."""
        return id(piece) in self._left  # or it is being read where it is: then it is no GPU's

    def before_update(self, piece: StatePiece) -> None:
        """Copy what is still to be saved of ``piece``, which is pinned; wait for staging if it is full."""
        self._copy(piece)

    def before_write(self) -> None:
        """Copy or write everything that is still to be saved."""
        if self._in_place:
            with self._changed:
                self._changed.wait_for(lambda: not (self._left or self._reading) or self._over)
            return
        for block in list(self._left.values()):
            self._fetch_and_copy(block)

    def unsaved(self, tensors: TensorIds) -> frozenset[int]:
        """Return those that are not wholly saved yet."""
        return frozenset(
            tensor for tensor in tensors if any(map(self._is_left, self._blocks_of.get(tensor, ())))
        )

    def before_change(self, tensors: TensorIds) -> None:
        """Copy what is still to be saved of ``tensors``; wait for staging if it is full."""
        for tensor in tensors:
            for block in self._blocks_of.get(tensor, ()):
                if self._is_left(block):
                    self._fetch_and_copy(block)

    def spoil(self, tensors: Iterable[int]) -> None:
        """Give the save up: values of now are no longer those that it was to have."""
        name = self._names[min(tensors)]
        self._end(
            CheckpointError(
                f"the save was given up: {name!r} was written to before it was saved, by something that "
                "did not look as if it would; call wait() before that, or save() in place of save_async()"
            )
        )

    def residence(self, resident: bool) -> bool:
        """Leave chunks alone once they may leave DEVICE; return ``resident``."""
        if self._in_place and not resident:
            with self._changed:
                self._in_place = False
                self._changed.wait_for(lambda: self._reading is None)
        return resident

    def step_ended(self) -> None:
        """Copy something of what no update touches, as far as staging is free."""
        self._steps_ended += 1
        if self._steps_ended < 2 or self._in_place:
            return
        # After two steps every update that is to come soon has come, also those that were deferred.
        room = self._num_buffers * BUFFER_BYTES
        while self._left and not self._copied and room > 0:
            block = next(iter(self._left.values()))
            self._fetch_and_copy(block)
            room -= block.nbytes

    def close(self, *, finish: bool) -> None:
        """Finish, and raise an error that nobody saw; or drop. Idempotent."""
        if finish and not self._shown:
            self.wait()
        else:
            self.drop()

    # -- inside, on the thread that trains ---------------------------------------------------------

    def _is_left(self, block: Block) -> bool:
        """Whether the block is neither copied nor written. What is being read where it is counts."""
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
        except BaseException as error:  # of what was taken off the list, part may be missing
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
        """Return an empty buffer, once there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._unmade or self._over)
            if self._over:
                raise _Ended
            if self._free:
                return self._free.pop()
            self._unmade -= 1
        return CopyBuffer()

    def _settle(self) -> None:
        """Forget everything that the save held, after the thread has ended."""
        atexit.unregister(self._at_exit)
        self._manager.let_go_of(self)

    def _at_exit(self) -> None:
        """End with the interpreter: complete if nothing more of the model is needed, else dropped."""
        if os.getpid() != self._pid:
            return
        if self._left and not self._in_place:
            logger.warning("%s is dropped: the program ended before it was complete", self._writer.path)
            self._end(CheckpointError("the program ended"))
        self._join_unless_others_hang()

    def _join_unless_others_hang(self) -> None:
        """Wait for the thread; not for long where it has to meet those of other ranks, which may never come:
        what they wait for may be this one."""
        self._thread.join(None if self._writer.rank.is_alone else _MEETING_SECONDS)

    # -- inside, on the thread that writes ---------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while work := self._next():
                work()
        except BaseException as raised:
            error = raised
            self._end(error)  # before the other ranks are met: until then the thread that trains could wait
        try:
            # Finishes the checkpoint, or removes it.
            if error is None:
                self._context.__exit__(None, None, None)
            else:
                self._context.__exit__(type(error), error, error.__traceback__)
        except BaseException as raised:
            with self._changed:
                if self._error is error:  # what happened to it says more
                    self._error = raised
            error = raised
        self._end(error)

    def _next(self) -> partial[None] | None:
        """Return what to do next, None: nothing is left. Waits for the thread that trains."""
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
        """Stop both threads; the first call says why."""
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
    """Values on their way to files, one after the other, placed so that they need not be copied again."""

    def __init__(self) -> None:
        self._memory = direct_memory(BUFFER_BYTES)
        self._used = 0
        self._parts: list[tuple[Extent, int, torch.Tensor]] = []

    def add(self, extent: Extent, first: int, values: torch.Tensor) -> int:
        """Copy as many of ``values``, element ``first`` on, as fit; return how many."""
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
        """Write everything to its file, and be empty again."""
        with settled(extent.file for extent, _first, _values in self._parts):
            for extent, first, values in self._parts:
                extent.file.lend(extent.tensor, first, values)
        self._parts.clear()
        self._used = 0
