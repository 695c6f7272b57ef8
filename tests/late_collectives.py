"""Late collectives: as NCCL's, in a stream of their own beside that of the operators.

A collective is started and the call returns. It begins when the operators' stream has come to where it was
started, and those who wait for it have the operators' stream wait: no thread of the runtime does. Carried out
over gloo by a thread.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_harness import LateDevice
from torch.utils._python_dispatch import _disable_current_modes

from gemini import _C
from gemini.comm.ranks import Messages, ProcessGroupPeers

_ASYNCHRONOUS = ("gather", "gather_to", "scatter_all", "swap_copies")
_OF_THE_CPU = ("broadcast", "sum", "largest")


class LateCollectives:
    """The collectives of one rank with a :class:`LateDevice`; one group, so one stream."""

    def __init__(self, gpu: LateDevice) -> None:
        self.num_late = 0
        self._gpu = gpu
        self._stream = _C.SimulatedStream(gpu._gpu)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after what was started."""
        self._jobs.put(None)
        self._thread.join()

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Have all process groups of models work like this."""
        make = ProcessGroupPeers.__init__

        def make_with_own_group(peers: ProcessGroupPeers, *args: Any) -> None:
            with _disable_current_modes():
                make(peers, *args)
                # Where gloo stands in for NCCL, what is in CPU memory has a group of its own.
                peers._on_host = dist.new_group(dist.get_process_group_ranks(peers.group))

        patch.setattr(ProcessGroupPeers, "__init__", make_with_own_group)
        for name in _ASYNCHRONOUS:
            patch.setattr(ProcessGroupPeers, name, self._late(getattr(ProcessGroupPeers, name)))
        for name in _OF_THE_CPU:
            patch.setattr(ProcessGroupPeers, name, self._behind(getattr(ProcessGroupPeers, name)))
        patch.setattr(Messages, "_exchange", at_once(Messages._exchange))

    def _behind(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Operators on the CPU's own tensors, which are not late beside a GPU, are here."""

        def run(*args: Any) -> Any:
            self._gpu.synchronize()
            return at_once(collective)(*args)

        return run

    def _late(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def start(peers: ProcessGroupPeers, *args: Any) -> _Started:
            reached, done = threading.Event(), threading.Event()
            tensors = [each for each in _flat(args) if isinstance(each, torch.Tensor)]
            turn = self._stream.turn([(each.data_ptr(), each.nbytes) for each in tensors])
            behind = self._stream.turn([])
            self._gpu.operators.launch([], reached.set)

            def run() -> None:
                turn.wait()
                reached.wait()
                time.sleep(random.random() * 4e-3)
                work = collective(peers, *args)
                if work is not None:
                    work.wait()
                turn.finish()
                behind.wait()  # only then the stream no longer counts as using the memory
                behind.finish()
                done.set()

            self.num_late += 1
            self._jobs.put(run)
            started = _Started(self._gpu, done)
            if collective.__name__ == "swap_copies":
                started.wait()
            return started

        return start

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class _Started:
    """A collective under way."""

    def __init__(self, gpu: LateDevice, done: threading.Event) -> None:
        self._gpu = gpu
        self._done = done

    def wait(self) -> None:
        """Have the operators' stream wait for it."""
        self._gpu.operators.launch([], self._done.wait)


def at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as one whose operators are not late."""

    def run(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **options)

    return run


def _flat(values: Any) -> list[Any]:
    if not isinstance(values, (list, tuple)):
        return [values]
    return [each for value in values for each in _flat(value)]
