"""Global operations on gradients that live in chunks: finite check, norm, clipping, and what clipping leaves
to be done to them on their way into the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

from gemini.comm.peers import Peers, Topic
from gemini.errors import StateError
from gemini.model.handle import ManagedModel
from gemini.optim.kernels import GradScale, sum_of_squares
from gemini.optim.loss_scale import LossScale
from gemini.optim.norm_over_ranks import NormOverRanks, sum_over_ranks
from gemini.runtime import GeminiManager, ManagedSlot, ModelStorage


def scaled(grad: torch.Tensor, scale: GradScale) -> torch.Tensor:
    """Return the gradient, in fp32 or float64, as the optimizer kernel will see it; the input itself when
    nothing changes."""
    grad = grad.to(wide_type(grad.dtype))
    if scale.pre_scale != 1.0:
        grad = grad * scale.pre_scale
    if scale.clip_value != math.inf:
        grad = grad.clamp(-scale.clip_value, scale.clip_value)
    return grad * scale.post_scale if scale.post_scale != 1.0 else grad


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that gradients of ``dtype`` are computed with: fp32, but float64 stays."""
    return torch.promote_types(dtype, torch.float32)


def then_multiply(scale: GradScale, factor: float) -> GradScale:
    """Return ``scale`` followed by a multiplication."""
    return GradScale(scale.pre_scale, scale.clip_value, scale.post_scale * factor)


def then_clamp(scale: GradScale, value: float) -> GradScale | None:
    """Return ``scale`` followed by a clamp, or None when its three numbers cannot say it."""
    if scale.clip_value != math.inf or (scale.post_scale != 1.0 and scale.pre_scale != 1.0):
        return None
    return GradScale(scale.pre_scale * scale.post_scale, value, 1.0)


def visit_gradients(
    storage: ModelStorage,
    manager: GeminiManager,
    visit: Callable[[ManagedSlot, torch.Tensor], object],
    *,
    writes: bool = False,
) -> None:
    """Call ``visit(slot, gradient)`` for every gradient there is, chunk by chunk, each pinned meanwhile."""
    for group in storage.trainable_groups():
        slots = [slot for slot in group.slots if slot.has_grad]
        tensors = [tensor for slot in slots for tensor in slot.trainable_grad.tensors]
        with manager.operator(tensors, tensors if writes else ()), torch.no_grad():
            for slot in slots:
                visit(slot, slot.trainable_grad.value)


def whole_gradient(slot: ManagedSlot, manager: GeminiManager, scale: GradScale) -> torch.Tensor | None:
    """Return a copy of a gradient, scaled, whole, in CPU memory, in the parameter's memory layout; None where
    there is none. Over several ranks all of them call it, after the exchange."""
    if not slot.has_grad:
        return None
    grad, view = slot.trainable_grad, slot.param_view
    dtype = wide_type(grad.view.dtype)
    full = torch.empty_strided(view.shape, view.stride(), dtype=dtype, device="cpu")
    shard = slot.group.shard
    into = full
    if shard is not None:
        start, stop = shard.clip(slot.start, slot.stop)
        flat = torch.as_strided(full, (full.numel(),), (1,)).zero_()
        into = flat[start - slot.start : stop - slot.start]
    with manager.operator(grad.tensors), torch.no_grad():
        into.copy_(scaled(grad.value, scale))
    if manager.sharding is not None and shard is not None:
        manager.sharding.assemble(flat)
    return full


def all_finite(storage: ModelStorage, manager: GeminiManager) -> bool:
    """Say whether every element of every gradient is finite, here, on other ranks, and in other models that
    the same losses have reached; each is read once."""
    scale = manager.gradient_scale
    finite = not any(losses.overflowed for losses in scale.losses)
    on_gpu: list[torch.Tensor] = []  # one element of each gradient there: to look at them waits for the GPU

    def look(_slot: object, grad: torch.Tensor) -> None:
        nonlocal finite
        if grad.dtype == torch.float64:
            finite = finite and bool(grad.isfinite().all())
        elif grad.device.type == "cpu":
            finite = finite and math.isfinite(sum_of_squares(grad))
        elif grad.numel():
            # The largest element, which is NaN where one is: read as it is, with no copy in a wider type.
            on_gpu.append(torch.linalg.vector_norm(grad, math.inf).float())

    visit_gradients(storage, manager, look)
    for other in scale.linked():
        for slot in other.slots:
            for tensors, values in slot.trainable_grad.held() if slot.has_grad else ():
                with other.operator(tensors), torch.no_grad():
                    look(slot, values)
    if on_gpu:
        finite = finite and bool(torch.stack(on_gpu).isfinite().all())
    for peers in _other_ranks(manager):
        # Of all copies of the model: what other models have may differ between them.
        finite = all(said == [1] for said in peers.exchange(Topic.GRADIENTS, [int(finite)]))
    return finite


def _other_ranks(manager: GeminiManager) -> list[Peers]:
    """Return the groups of ranks that have other gradients of this model: other shards, then other parts."""
    every = [] if manager.sharding is None else [manager.sharding.peers]
    return every if manager.part is None else [*every, manager.part.peers]


def total_norm(
    storage: ModelStorage,
    manager: GeminiManager,
    order: Sequence[ManagedSlot],
    norm_type: float,
    scale: GradScale,
) -> torch.Tensor:
    """Return the norm of all gradients, scaled, as one vector, with the bits of
    ``torch.nn.utils.get_total_norm``.

    ``order`` is the order in which the per-parameter norms are combined. Extra memory: one parameter in fp32
    where the gradient is 16-bit or scaled. Over several ranks it is the norm of all shards and parts.
    """
    if _other_ranks(manager):
        return _norm_over_ranks(storage, manager, norm_type, scale)
    norms: dict[ManagedSlot, torch.Tensor] = {}

    def measure(slot: ManagedSlot, grad: torch.Tensor) -> None:
        norms[slot] = _norm_as_torch_takes_it(scaled(grad, scale), norm_type)

    visit_gradients(storage, manager, measure)
    if not norms:
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")
    each = [norms[slot] for slot in order if slot in norms]
    if len({measured.dtype for measured in each}) > 1:  # torch takes those of one type after another
        grouped = _group_tensors_by_device_and_dtype([each])  # type: ignore[list-item]
        each = [measured for (group,), _ in grouped.values() for measured in group if measured is not None]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(each), norm_type)
    return norm


def _norm_as_torch_takes_it(values: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm of one gradient by the kernel that ``get_total_norm`` runs on its device: one for lists
    of tensors adds up in another order than that for one."""
    if _has_foreach_support([values], values.device):
        return torch._foreach_norm([values], norm_type)[0]
    norm: torch.Tensor = torch.linalg.vector_norm(values, norm_type)
    return norm


def _norm_over_ranks(
    storage: ModelStorage, manager: GeminiManager, norm_type: float, scale: GradScale
) -> torch.Tensor:
    """Return the norm of what all ranks hold."""
    uncounted = manager.part.uncounted if manager.part is not None else frozenset()
    norm = NormOverRanks(norm_type)

    def measure(slot: ManagedSlot, grad: torch.Tensor) -> None:
        if slot.name not in uncounted:
            norm.add(scaled(grad, scale).float())

    visit_gradients(storage, manager, measure)
    return norm.over(_other_ranks(manager))


def count_zeros(storage: ModelStorage, manager: GeminiManager) -> int:
    """Return how many elements of all gradients are 0; over several ranks, of all shards and parts."""
    part = manager.part
    found = 0

    def count(slot: ManagedSlot, grad: torch.Tensor) -> None:
        nonlocal found
        if part is not None and slot.name in part.uncounted:
            return
        found += grad.numel() - int(torch.count_nonzero(grad))
        shard = slot.group.shard
        if part is not None and (shard is None or shard.start <= slot.start < shard.stop):
            found -= part.filling[slot.name]  # once: where the gradient begins

    visit_gradients(storage, manager, count)
    return sum_over_ranks(found, _other_ranks(manager))


class Clipping:
    """The loss scale to take out of a model's gradients, and how they were clipped; of these ones alone."""

    measured: float | None  # their norm, before they were clipped by it

    def __init__(self, model: ManagedModel, loss_scale: LossScale | None) -> None:
        self._model, self._loss_scale = model, loss_scale
        self._seen = model.gradient_state()
        self.forget()

    @property
    def scale(self) -> GradScale:
        """The pending transform, with the loss scale taken out first."""
        in_gradients = self._model.manager.gradient_scale.value
        if in_gradients is None and self._loss_scale is not None:  # they were assigned
            in_gradients = self._loss_scale.scale
        return self._scale if self.done or in_gradients is None else GradScale(pre_scale=1.0 / in_gradients)

    def note(self, scale: GradScale) -> None:
        """Apply ``scale``, in which no loss scale is left, to the gradients that are there now."""
        self._scale, self.done, self._seen = scale, True, self._model.gradient_state()

    def note_norm(self, norm: float) -> None:
        """``norm`` is that of the gradients before they are clipped by it."""
        self.measured = norm

    def note_overflow(self, overflowed: bool) -> None:
        """The gradients have ``overflowed``, or not, before a clamp that hides it."""
        self.overflowed |= overflowed

    def check(self) -> None:
        """Forget the clipping of gradients that were given up; refuse to mix clipped and newer ones."""
        if not self.done or self._seen == self._model.gradient_state():
            return
        (given_up, _), (given_up_then, _) = self._model.gradient_state(), self._seen
        if given_up == given_up_then:
            raise StateError("gradients arrived after they were clipped; clip once, right before step()")
        self.forget()

    def forget(self) -> None:
        """Begin anew, with gradients to come."""
        self._scale = GradScale()
        self.measured = None
        self.done = False
        self.overflowed = False  # seen before a clamp hid it
