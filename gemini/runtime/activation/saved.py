"""What autograd holds in place of a tensor that it saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from gemini.chunk import Chunk
from gemini.runtime.activation.leases import Leases, Tenant


class Saved(Protocol):
    """Stands for a saved tensor until backward asks for it."""

    def restore(self) -> torch.Tensor:
        """Return the tensor; may be called again.

        Raises:
            RuntimeError: the tensor was written since it was saved.
        """
        ...


class Version:
    """The version of a tensor and what tells it later; keeps none of the tensor's memory, but for a nested or
    sparse one's."""

    __slots__ = ("_witness", "then")

    def __init__(self, tensor: torch.Tensor) -> None:
        # An alias shares the version counter, and goes on doing so when it is given other data.
        self._witness = tensor.detach()
        self.then = self._witness._version
        if tensor.layout is torch.strided and not tensor.is_nested:  # others take no other data
            self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @property
    def is_current(self) -> bool:
        """Whether the tensor was not written since."""
        return self._witness._version == self.then

    def require_current(self, shape: tuple[int, ...]) -> None:
        """Raise RuntimeError where the tensor was written since: autograd itself looks at no versions where
        hooks keep what it saved."""
        now = self._witness._version
        if now != self.then:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a {self._witness.dtype} tensor of shape {list(shape)} is at version {now}; "
                f"expected version {self.then} instead. Write to a clone of what an operator saved"
            )


class Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # with its graph it would keep itself alive
        self._version = Version(tensor)

    def restore(self) -> torch.Tensor:
        """Return the tensor. Raises RuntimeError where it was written since."""
        nested = self._tensor.is_nested  # of many shapes
        self._version.require_current(() if nested else tuple(self._tensor.shape))
        return self._tensor


class Stored:
    """A saved tensor whose bytes are in a chunk, from ``offset`` bytes behind the beginning of its window."""

    __slots__ = ("_dtype", "_leases", "_offset", "_shape", "_stride", "_tenant", "_version")

    def __init__(self, tensor: torch.Tensor, leases: Leases, tenant: Tenant, offset: int) -> None:
        self._dtype, self._shape, self._stride = tensor.dtype, tuple(tensor.shape), tensor.stride()
        self._version = Version(tensor)
        self._leases = leases
        self._tenant = tenant
        self._offset = offset // tensor.itemsize

    def restore(self) -> torch.Tensor:
        """Bring the bytes to DEVICE, where they stay for as long as the result is in use.

        Raises:
            RuntimeError: the tensor was written since.
            OutOfBudgetError, IoError, EvictedAccessError: as a PreOp.
        """
        self._version.require_current(self._shape)
        storage = self._leases.storage(self._tenant)
        tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
        tensor.set_(storage, self._offset, self._shape, self._stride)
        return tensor


@dataclass(frozen=True)
class Weight:
    """Memory of a managed tensor, as a tenant that its parameter keeps."""

    chunk: Chunk
    tensor: int
    fate: None = None
