"""UpdateOperators: how the updates of an optimizer pin what they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gemini.chunk import TensorIds

if TYPE_CHECKING:
    from gemini.runtime.gemini_mgr import GeminiManager


class UpdateOperators:
    """Each pins ``tensors`` for a block; those in ``dirty`` count as written. ``on_host``: where they lie on
    HOST, for the CPU, else on DEVICE. Raises as :meth:`GeminiManager.pre_op`."""

    def __init__(self, manager: GeminiManager) -> None:
        self._manager = manager

    @contextmanager
    def inside(self, tensors: TensorIds, dirty: TensorIds, *, on_host: bool = False) -> Iterator[None]:
        """Of an update inside the step: a moment of it."""
        manager = self._manager
        manager.pre_op(tensors, on_host=on_host)
        try:
            yield
        finally:
            manager.post_ops(tensors, dirty)

    @contextmanager
    def late(self, tensors: TensorIds, dirty: TensorIds, *, on_host: bool = False) -> Iterator[None]:
        """Of a pending update: it waits for none, and counts to the step before."""
        manager = self._manager
        traced = manager.next_late_moment(tensors, on_host=on_host)
        try:
            manager.order.note_late(traced=traced)
            yield
        finally:
            manager.post_ops(tensors, dirty)

    @contextmanager
    def aside(self, tensors: TensorIds) -> Iterator[None]:
        """Pin ``tensors`` on DEVICE, to read them as they are: no moment of anything, and what is pending of
        their update stays pending."""
        manager = self._manager
        manager.backward_pins.settle()
        manager._settle_activations()
        manager.chunks.acquire(tensors, traced=False)
        try:
            yield
        finally:
            manager.chunks.release(tensors, dirty=False)

    def can_use_host(self, tensors: TensorIds) -> bool:
        """Say whether an operator of the CPU could use ``tensors`` on HOST: it has room, they are not on DISK
        alone, and nothing uses their chunks on DEVICE."""
        return self._manager.chunks.table.can_access_on_host(tensors)
