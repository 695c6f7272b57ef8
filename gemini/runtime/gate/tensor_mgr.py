"""StatefulTensorMgr: the three operations of the seeds over the chunk table."""

from __future__ import annotations

from gemini import _C
from gemini.chunk import ChunkManager, TensorIds
from gemini.errors import StateError

TensorState = _C.TensorState


class StatefulTensorMgr:
    """Query memory usage, transition tensor state, adjust tensor position."""

    def __init__(self, chunks: ChunkManager) -> None:
        self._chunks = chunks

    def query(self) -> dict[str, int]:
        """Return the bytes of model data on each tier."""
        device, host, disk = self._chunks.usages()
        return {"device": device, "host": host, "disk": disk}

    def state(self, tensor: int) -> TensorState:
        """Return a tensor's state."""
        return self._chunks.table.tensor_state(tensor)

    def transition(self, tensors: TensorIds, state: TensorState) -> None:
        """Bring tensors to ``state``: COMPUTE before an operator, HOLD after it, FREE when no longer used.

        COMPUTE also adjusts the position: the tensors are on DEVICE when it returns.

        Raises:
            StateError: for a transition that is not legal, such as COMPUTE to FREE.
            OutOfBudgetError, IoError: COMPUTE could not be reached; the state is as before.
        """
        if state == TensorState.COMPUTE:
            self.adjust(tensors)
        elif state == TensorState.FREE:
            self._chunks.free(tensors)
        else:
            not_in_use = [t for t in tensors if self.state(t) != TensorState.COMPUTE]
            if not_in_use:
                raise StateError(f"tensors {not_in_use} cannot become HOLD: they are not in state COMPUTE")
            self._chunks.release(tensors, dirty=True)

    def adjust(self, tensors: TensorIds) -> None:
        """Pin the tensors on DEVICE, evicting HOLD tensors where space is short."""
        self._chunks.acquire(tensors, traced=False)
