"""What stands in for a PreOp, or for a gate, where managed memory cannot be used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NoReturn

from gemini.chunk import TensorIds
from gemini.errors import StateError
from gemini.runtime.gate.snapshot import NO_SNAPSHOT


def closed(tensors: TensorIds, *, on_host: bool = False) -> None:
    """Raise StateError: the model was closed."""
    raise StateError("the managed model was closed; its parameters hold no memory any more")


def in_child(_tensors: TensorIds = (), *, on_host: bool = False) -> None:
    """Raise StateError: the memory is the parent's."""
    raise StateError(
        "managed parameters cannot be used in a forked process: their memory stays with the parent; "
        "pass copies, for example param.detach().clone(), or start the process with 'spawn'"
    )


class RefusingGate(ABC):
    """Stands in for the gate of tensors whose values nobody may use: what an operator asks of it raises."""

    resident = False
    mixes_types = False
    snapshot = NO_SNAPSHOT

    @abstractmethod
    def pre_op(self, *_tensors: Any) -> NoReturn:
        """Raise."""

    @property
    def raw_uses(self) -> NoReturn:
        self.pre_op()

    @property
    def windows(self) -> NoReturn:
        self.pre_op()
