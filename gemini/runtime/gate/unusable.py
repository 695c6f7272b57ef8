"""What a PreOp is replaced by where managed memory is gone: after close(), and in a forked process."""

from __future__ import annotations

from gemini.chunk import TensorIds
from gemini.errors import StateError


def closed(tensors: TensorIds, *, on_host: bool = False) -> None:
    """Raise StateError: the model was closed."""
    raise StateError("the managed model was closed; its parameters hold no memory any more")


def in_child(_tensors: TensorIds = (), *, on_host: bool = False) -> None:
    """Raise StateError: the memory is the parent's."""
    raise StateError(
        "managed parameters cannot be used in a forked process: their memory stays with the parent; "
        "pass copies, for example param.detach().clone(), or start the process with 'spawn'"
    )
