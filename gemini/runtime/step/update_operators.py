"""UpdateOperators: how the updates of an optimizer pin what they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gemini.chunk import TensorIds
from gemini.runtime.gate.gate import Gate
from gemini.runtime.step.step_order import StepOrder


class UpdateOperators:
    """Each pins ``tensors`` for a block; those in ``dirty`` count as written. ``on_host``: where they lie on
    HOST, for the CPU, else on DEVICE. Raises as :meth:`Gate.pre_op`."""

    def __init__(self, gate: Gate, order: StepOrder) -> None:
        self._gate = gate
        self._order = order

    @contextmanager
    def inside(self, tensors: TensorIds, dirty: TensorIds, *, on_host: bool = False) -> Iterator[None]:
        """Of an update inside the step: a moment of it."""
        self._gate.pre_op(tensors, on_host=on_host)
        try:
            yield
        finally:
            self._gate.post_ops(tensors, dirty)

    @contextmanager
    def late(self, tensors: TensorIds, dirty: TensorIds, *, on_host: bool = False) -> Iterator[None]:
        """Of a pending update: it waits for none, and counts to the step before."""
        traced = self._gate.next_late_moment(self._order, tensors, on_host=on_host)
        try:
            self._order.note_late(traced=traced)
            yield
        finally:
            self._gate.post_ops(tensors, dirty)

    @contextmanager
    def aside(self, tensors: TensorIds) -> Iterator[None]:
        """Pin ``tensors`` on DEVICE, to read them as they are: no moment of anything, and what is pending of
        their update stays pending."""
        self._gate.settle()
        self._gate.chunks.acquire(tensors, traced=False)
        try:
            yield
        finally:
            self._gate.chunks.release(tensors, dirty=False)

    def can_use_host(self, tensors: TensorIds) -> bool:
        """Say whether an operator of the CPU could use ``tensors`` on HOST: it has room, they are not on DISK
        alone, and nothing uses their chunks on DEVICE."""
        return self._gate.chunks.table.can_access_on_host(tensors)
