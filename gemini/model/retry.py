"""Undo a step that ran out of memory and repeat it once, with less model data on DEVICE.

See docs/notes/out-of-memory.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from gemini.errors import ConfigError, OutOfBudgetError, StateError
from gemini.model.handle import ManagedModel
from gemini.runtime import ManagedParameter
from gemini.runtime.gate.gate import Gate, others
from gemini.runtime.intercept.tensors import ManagedTensor
from gemini.runtime.manager import drop_locals
from gemini.system import rng
from gemini.system.config import format_bytes
from gemini.system.device import ran_out_of_memory

T = TypeVar("T")


def retry_step(model: ManagedModel, step: Callable[[], T]) -> T:
    """Call ``step`` and return its result. If the computing device runs out of memory in it, lower the DEVICE
    share of model data, undo the step and call it once more::

        def step():
            loss = loss_of(model(inputs), targets)
            optimizer.backward(loss)
            optimizer.step()
            return loss.item()

        loss = model.retry_step(step)

    Gradients, buffers and the global random number generators are restored before the second call, so it
    computes the same numbers as the first would have. ``step`` must undo its other effects itself: it must
    not take its batch from an iterator, for example. Updates that an earlier step left pending run exactly
    once. Buffers are copied before the first call, on their device.

    Raises:
        OutOfBudgetError: memory ran out in the second call as well; its cause is the second error. The step
            was undone, and model data takes less from then on: it may be tried again, better with a smaller
            batch.
        StateError: the step cannot be undone: it had begun to update weights, or wrote to them itself, it
            trained another managed model too, or there were gradients before it.
        ConfigError: an optimizer updates in backward (``overlap="backward"``), or there are several ranks.
    """
    _refuse(model)
    manager = model.manager
    start: _Start | None = None

    def attempt() -> T:
        nonlocal start
        with manager.shortage.watched():
            start = start or _Start(model)
            return step()

    try:
        return attempt()
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        first_share = _undo_step(model, start, error)
    manager.shortage.make_room()
    try:
        return attempt()
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        _undo_step(model, start, error)
        raise OutOfBudgetError(_message(model, error, first_share)) from error


def _refuse(model: ManagedModel) -> None:
    if model.peers is not None:
        raise ConfigError(
            "retry_step() works in one process only, because a rank cannot repeat a step alone; use "
            "a smaller batch or torch.utils.checkpoint"
        )
    if any(optimizer.overlap == "backward" for optimizer in model.optimizers):
        raise ConfigError(
            "with overlap='backward' a step cannot be repeated, because its backward pass updates "
            "weights; choose overlap=True"
        )


def _undo_step(model: ManagedModel, start: _Start | None, error: BaseException) -> int:
    """Undo the part of a step that ran before ``error``; return the DEVICE bytes that model data may take
    from now on."""
    drop_locals(error)  # frees activations; first, because the rest may need memory
    model.manager.chunks.device.release_cache()
    if start is not None:
        start.restore(error)
    return model.manager.shortage.share_bytes


class _Start:
    """The state before a step, as far as it can be restored."""

    def __init__(self, model: ManagedModel) -> None:
        self._model = model
        self._final = self._find_final()
        self._others = [(other, _progress(other)) for other in others(model.manager)]
        self._had_gradients = any(slot.has_grad for slot in model.storage.slots.values())
        self._generators = rng.capture()
        self._gradients = [(param, param.grad, _copy(param.grad)) for param in _unmanaged(model)]
        self._buffers = [
            (owner, dict(owner._buffers), {name: _copy(buffer) for name, buffer in owner._buffers.items()})
            for owner in model.module.modules()
            if owner._buffers
        ]

    @torch.no_grad()
    def restore(self, error: BaseException) -> None:
        """Restore gradients, generators and buffers. Raises StateError if the step cannot be undone."""
        self._model.manager.recover()
        lost = self._find_lost()
        if lost:
            raise StateError(f"memory ran out and the step cannot be repeated: {lost}") from error
        self._model.zero_grad()
        rng.restore(rng.parse(self._generators))
        for param, grad, values in self._gradients:
            param.grad = grad
            if grad is not None and values is not None:
                grad.copy_(values)
        for owner, buffers, copies in self._buffers:
            owner._buffers.clear()
            owner._buffers.update(buffers)
            for name, copied in copies.items():
                buffer = buffers[name]
                if buffer is not None and copied is not None:
                    buffer.copy_(copied)

    def _find_lost(self) -> str:
        """Describe what the step did that cannot be undone; empty if it can be undone."""
        optimizers = self._model.optimizers
        broken = [optimizer.incomplete for optimizer in optimizers if optimizer.incomplete]
        if broken:
            return f"{broken[0]}; load a checkpoint before you continue"
        for before, now, what in zip(self._final, self._find_final(), _WHAT, strict=True):
            if before != now:
                return what
        if any(_progress(other) != before for other, before in self._others):
            return _OTHERS
        return _HAD_GRADIENTS if self._had_gradients else ""

    def _find_final(self) -> tuple[object, ...]:
        """Return values that change with each irreversible action, in the order of ``_WHAT``."""
        model, manager = self._model, self._model.manager
        optimizers = model.optimizers
        updates = sorted((id(optimizer), sum(optimizer.steps.values())) for optimizer in optimizers)
        managed = [tensor for slot in model.storage.slots.values() for tensor in slot.param_ref.tensors]
        unmanaged = [(id(param), param._version) for param in _unmanaged(model)]
        return (manager.step, updates), (manager.written.times(managed), unmanaged)


_WHAT = (
    "its update had started; continue with the next step",
    "it wrote to parameters; load a checkpoint, or weights, before you continue",
)
_OTHERS = "it also trained another managed model; give each model its own step, or use a smaller batch"
_HAD_GRADIENTS = (
    "there were gradients before it, which it may have changed; call zero_grad() before you "
    "continue, and start a step without gradients: with the first forward pass after step() or "
    "zero_grad()"
)


def _progress(manager: Gate) -> tuple[int, ...]:
    """Return values that change if the model is trained or written to."""
    return manager.step, manager.num_gradients, manager.written.times()


def _unmanaged(model: ManagedModel) -> list[torch.nn.Parameter]:
    """Return the parameters that were added after wrapping."""
    return [param for param in model.module.parameters() if not isinstance(param, ManagedParameter)]


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy of ``tensor``; None for a view of managed memory, which has no state of its own."""
    if tensor is None or isinstance(tensor, ManagedTensor):
        return None
    return tensor.detach().clone()


def _message(model: ManagedModel, error: BaseException, first_share: int) -> str:
    capacity = model.manager.context.capacity
    below = "" if capacity.host_bytes or capacity.disk_bytes else ", give model data host_bytes or a disk_dir"
    reason = str(error).partition("\n")[0]
    return (
        f"a step ran out of memory twice, the second time with at most {format_bytes(first_share)} of model "
        "data on DEVICE besides the operators' memory (device_bytes is "
        f"{format_bytes(capacity.device_bytes)}): {reason}; use a smaller batch or torch.utils.checkpoint, "
        f"lower device_bytes if other programs use this memory{below}. The step was undone; from now on "
        f"model data takes at most {format_bytes(model.manager.shortage.share_bytes)}"
    )
