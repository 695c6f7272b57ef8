"""The gradient of one parameter: in a chunk, or where autograd made it while nothing can be evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gemini.errors import ConfigError
from gemini.runtime.param import TensorRef, as_managed

if TYPE_CHECKING:
    from gemini.runtime.gemini_mgr import GeminiManager


class SlotGradient:
    """Holds the gradient between backward and update.

    ``view`` is its place in the gradient chunk. While the whole model stays on DEVICE for good
    (``GeminiManager.resident``) gradients are kept as autograd made them instead, which saves the copy;
    budgets count the chunk's bytes either way.
    """

    __slots__ = ("_in_chunk", "_loose", "_manager", "_name", "ref", "view")

    def __init__(self, name: str, manager: GeminiManager, tensor: int, view: torch.Tensor) -> None:
        self.ref = TensorRef(manager, tensor)
        self.view = view
        self._name = name
        self._manager = manager
        self._in_chunk = False
        self._loose: torch.Tensor | None = None

    @property
    def exists(self) -> bool:
        """Whether there is a gradient."""
        return self._in_chunk or self._loose is not None

    @property
    def tensors(self) -> tuple[int, ...]:
        """The ids to pin before reading or writing :attr:`value`; none when it is not in a chunk."""
        return self.ref.tensors if self._in_chunk else ()

    @property
    def value(self) -> torch.Tensor:
        """The gradient, in the parameter's shape; valid while pinned, and only if it exists."""
        return self.view if self._loose is None else self._loose

    @property
    def loose_bytes(self) -> int:
        """Bytes held outside the chunk."""
        return 0 if self._loose is None else self._loose.numel() * self._loose.element_size()

    def flat(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` in the memory order of the parameter."""
        value = self.value
        if value.stride() != self.view.stride():
            value = torch.empty_strided(self.view.shape, self.view.stride(), dtype=value.dtype).copy_(value)
        return torch.as_strided(value, (stop - start,), (1,), value.storage_offset() + start)

    def collect(self, grad: torch.Tensor) -> None:
        """Take over a gradient that autograd made, adding to what is there.

        Raises:
            ConfigError: it is sparse.
        """
        if grad.layout is not torch.strided:
            raise ConfigError(
                f"parameter {self._name!r} has a sparse gradient; build its module with sparse=False"
            )
        if self._manager.expects_scaled_loss:
            raise ConfigError(
                "under mixed_precision='fp16' the gradients of an unscaled loss underflow; "
                "call optimizer.backward(loss) instead of loss.backward()"
            )
        if self._loose is not None:
            self._loose.add_(grad)
        elif self._manager.resident and not self._in_chunk:
            self._loose = grad
        else:
            self._write(grad)

    def alias(self) -> torch.Tensor | None:
        """Return what ``param.grad`` is: None, or a tensor whose use fetches the chunk."""
        if self._loose is not None:
            return self._loose
        return as_managed(self.view.view_as(self.view), self.ref) if self._in_chunk else None

    def assign(self, grad: torch.Tensor | None) -> None:
        """Do what ``param.grad = grad`` says."""
        if grad is None:
            self.free()
            return
        if grad.shape != self.view.shape:
            raise ConfigError(
                f"parameter {self._name!r} has shape {tuple(self.view.shape)} and cannot take a gradient of "
                f"shape {tuple(grad.shape)}"
            )
        held = self.alias()
        if held is not None and held.data_ptr() == grad.data_ptr():
            return
        source = grad.detach().clone()
        self.free()
        with torch.no_grad():
            self.collect(source)

    def fill_zero(self) -> None:
        """Set the gradient to zeros, if there is one."""
        if self.exists:
            with self._manager.operator(self.tensors, self.tensors):
                self.value.zero_()

    def free(self) -> None:
        """Give up the gradient's memory."""
        self._loose = None
        if self._in_chunk:
            self._in_chunk = False
            self._manager.chunks.free(self.ref.tensors)

    def _write(self, grad: torch.Tensor) -> None:
        manager = self._manager
        manager.pre_op(self.ref.tensors)
        try:
            if self._in_chunk:
                self.view.add_(grad)
            else:
                self.view.copy_(grad)
            self._in_chunk = True
        finally:
            manager.post_op(self.ref.tensors, True)
