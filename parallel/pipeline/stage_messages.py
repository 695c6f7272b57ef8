"""Send and receive tensors between the ranks of a pipeline."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent import futures
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch

from gemini.parallel.mesh import Axis
from gemini.system.threads import start_thread

_FIRST_TAG = 2**16  # lower tags belong to the runtime
_HEAD_NUMEL = 12  # dtype, whether a gradient comes back, number of dimensions, sizes
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


class ValueForm(NamedTuple):
    """The dtype and shape of a tensor sent between stages; ``returns``: whether a gradient comes back."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    returns: bool = False


class Incoming:
    """A tensor of ``form`` that another rank sends; :meth:`wait` returns it.

    ``in_order``: these tensors are waited for in the order in which they were created, and none depends on an
    action of this rank before the wait for an earlier one. Then a thread waits ahead, and a tensor that is in
    time causes no delay.
    """

    def __init__(
        self, messages: StageMessages, rank: int, tag: int, form: ValueForm, *, in_order: bool = False
    ) -> None:
        self._messages = messages
        self._room = torch.empty(form.shape, dtype=form.dtype, device="cpu")
        self._work = messages.receive(self._room, rank, tag)
        self._done = messages.watch(self._work) if in_order else None

    def wait(self, doing: str) -> torch.Tensor:
        """Return the tensor, in CPU memory, when it has arrived. Raises StateError as :meth:`Axis.settle`."""
        if self._done is None:
            self._messages.settle(self._work, doing)
        else:
            self._messages.settle_watched(self._done, doing)
        return self._room


class StageMessages:
    """Sends and receives over an axis, in CPU memory. For one thread.

    Messages are matched by tags, so ranks need not agree on their order. While a rank waits for a message it
    checks the other ranks' heartbeats, and notices one that has left, died or is stuck.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._sent: list[_Outgoing] = []
        self._waiter = _Waiter()
        self._in_order: _Waiter | None = None  # for receives begun ahead; started with the first

    def send(self, tensor: torch.Tensor, rank: int, tag: int, place: int = 0) -> None:
        """Begin to send ``tensor``, which the other rank takes in a ``place`` of its order. Nobody may write
        to it until :meth:`finish`, or :meth:`release` of that place."""
        tensor = tensor.detach().cpu().contiguous()
        self._axis.note_sent(tensor)
        content, group = _bytes_of(tensor), self._axis.host_group
        # The same as isend(), without its checks.
        work = self._axis.begin(lambda: group.send([content], rank, _FIRST_TAG + tag))
        self._sent.append(_Outgoing(work, tensor, rank, place))

    def receive(self, room: torch.Tensor, rank: int, tag: int) -> Any:
        """Begin to receive into ``room``; return the work for :meth:`settle`."""
        content, group = _bytes_of(room), self._axis.host_group
        return self._axis.begin(lambda: group.recv([content], rank, _FIRST_TAG + tag))

    def send_form(self, form: ValueForm, rank: int, tag: int, place: int) -> None:
        """Send what form a tensor has that is going to be sent."""
        said = [_DTYPES.index(form.dtype), int(form.returns), len(form.shape), *form.shape]
        self.send(
            torch.tensor(said + [0] * (_HEAD_NUMEL - len(said)), dtype=torch.int64, device="cpu"),
            rank,
            tag,
            place,
        )

    def receive_form(self, rank: int, tag: int, doing: str) -> ValueForm:
        """Receive the form that :meth:`send_form` sent on the other rank."""
        room = torch.empty(_HEAD_NUMEL, dtype=torch.int64, device="cpu")
        self.settle(self.receive(room, rank, tag), doing)
        dtype, returns, dims, *shape = room.tolist()
        return ValueForm(_DTYPES[dtype], tuple(shape[:dims]), bool(returns))

    def finish(self) -> None:
        """Wait until all sent tensors were received."""
        if self._sent:
            sent = _Several([each.work for each in self._sent])
            self.settle(sent, "sends what its stage has computed (forward, backward)")
            self._sent.clear()

    def release(self, rank: int, place: int) -> None:
        """Let go of what ``rank`` has taken: it has come to a ``place`` in its order, as a message tells."""
        self._sent = [
            each for each in self._sent if each.rank != rank or each.place > place or not each.is_over()
        ]

    def watch(self, work: Any) -> _Done:
        """Begin to wait for a message, after those that were watched before; return the argument for
        :meth:`settle_watched`. Raises ThreadError.
        """
        if self._in_order is None:
            self._in_order = _Waiter()
        return self._in_order.begin(work)

    def settle_watched(self, done: _Done, doing: str) -> None:
        """Wait for a watched message. Raises as :meth:`settle`."""
        if not done.is_well:
            self._axis.settle(done, doing)

    def settle(self, work: Any, doing: str) -> None:
        """Wait for a message. Raises StateError as :meth:`gemini.comm.heartbeats.Heartbeats.wait`."""
        self._axis.settle(self._waiter.begin(work), doing)

    def abandon(self) -> None:
        """Abandon pending messages: the process is about to end."""
        self._axis.break_off()
        self._sent.clear()


class _Waiter:
    """A thread that waits for messages, one after another. gloo closes its connections if a wait times out,
    so this one waits without a limit.
    """

    def __init__(self) -> None:
        self._waits: SimpleQueue[tuple[Any, futures.Future[None]] | None] = SimpleQueue()
        start_thread(Thread(target=_wait_for_each, args=(self._waits,), daemon=True), "waiting for a stage")
        weakref.finalize(self, self._waits.put, None)

    def begin(self, work: Any) -> _Done:
        """Wait for ``work`` after all earlier ones."""
        done: futures.Future[None] = futures.Future()
        self._waits.put((work, done))
        return _Done(done)


class _Outgoing(NamedTuple):
    """A ``tensor`` on its way to a ``rank``, which takes it in a ``place`` of its order."""

    work: Any
    tensor: torch.Tensor
    rank: int
    place: int

    def is_over(self) -> bool:
        """Wait for a message that is there; say whether all was well: :meth:`Passing.finish` tells if not."""
        try:
            self.work.wait()
        except RuntimeError:
            return False
        return True


class _Several:
    """Several messages with one wait."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of them. Raises RuntimeError if one has failed."""
        for work in self._works:
            work.wait()


class _Done:
    """A wait in another thread, with the interface of a collective that can be waited for in slices."""

    def __init__(self, done: futures.Future[None]) -> None:
        self._done = done

    @property
    def is_well(self) -> bool:
        """Whether it has ended without an error."""
        return self._done.done() and self._done.exception() is None

    def wait(self, limit: timedelta) -> None:
        """Wait at most ``limit``. Raises RuntimeError if it is not over or has failed."""
        try:
            self._done.result(limit.total_seconds())
        except futures.TimeoutError:
            raise RuntimeError("not yet") from None

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._done.done()


def _wait_for_each(waits: SimpleQueue[tuple[Any, futures.Future[None]] | None]) -> None:
    while (job := waits.get()) is not None:
        work, done = job
        try:
            work.wait()
        except RuntimeError as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        del job, work, done


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.view(-1)
