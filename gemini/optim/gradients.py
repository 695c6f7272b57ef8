"""Global operations on gradients in chunks: finite check, loss scale, clipping and norms.

The 2-norm and the maximum have the same bits for every way to divide a vector among chunks and ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import pairwise
from typing import Protocol

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

from gemini import _C
from gemini.chunk.chunk import CutChunk
from gemini.comm.peers import Peers, Topic
from gemini.errors import ConfigError, StateError
from gemini.model.handle import ManagedModel
from gemini.optim.kernels import GradScale, sum_of_squares
from gemini.runtime import GeminiManager
from gemini.runtime.storage.cut_gradient import CutGradient
from gemini.runtime.storage.model_storage import ManagedSlot, ModelStorage

logger = logging.getLogger(__name__)


_EXPONENTS = 256  # of fp32; the row of the last one counts infinities and NaNs
_INFINITE, _NO_NUMBER = 0, 1  # their limbs in that row
_LIMBS = 3
_LIMB_BITS = 40
_LIMB_MASK = 2**_LIMB_BITS - 1
_BLOCK = 2**22  # this many lower limbs may be added before a carry must be propagated
_LANES = 64
_BIAS = 150  # exponent bias if the significand is read as an integer


def empty_squares() -> torch.Tensor:
    """Return the exact sum of no squares: int64, shape (exponents, limbs). Sums of this form can be added."""
    return torch.zeros(_EXPONENTS, _LIMBS, dtype=torch.int64, device="cpu")


def exact_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the exact sum of squares of a flat dense fp32 tensor, in CPU memory."""
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        raise ValueError(
            f"exact_squares takes a flat fp32 tensor, not {values.dtype} of {tuple(values.shape)}"
        )
    if values.device.type != "cpu":
        return squares_by_operators(values).cpu()
    limbs = _C.exact_squares(values.data_ptr(), values.numel())
    return torch.tensor(limbs, dtype=torch.int64, device="cpu").view(_EXPONENTS, _LIMBS)


def squares_by_operators(values: torch.Tensor) -> torch.Tensor:
    """Compute :func:`exact_squares` with torch operators on the device of ``values``; the sum stays there.

    The sums are integer sums, so the order of additions, which a GPU does not fix, has no effect.
    """
    # Large inputs use several sums per exponent, so that fewer threads contend for each.
    num_lanes = min(_LANES, 1 + values.numel() // _EXPONENTS)
    sums = torch.zeros(_LIMBS, num_lanes * _EXPONENTS, dtype=torch.int64, device=values.device)
    lanes = torch.arange(min(_BLOCK, values.numel()), device=values.device) % num_lanes * _EXPONENTS
    for block in values.view(torch.int32).split(_BLOCK):
        exponents = (block >> 23) & 255
        significands = (block & (2**23 - 1)).long() + (exponents > 0).long() * 2**23
        counted = torch.where(significands > 2**23, 2**_LIMB_BITS, 1)
        squares = torch.where(exponents == _EXPONENTS - 1, counted, significands * significands)
        places = lanes[: block.numel()] + exponents
        sums[0].scatter_add_(0, places, squares & _LIMB_MASK)
        sums[1].scatter_add_(0, places, squares >> _LIMB_BITS)
        for lower, upper in pairwise(sums):
            upper.add_(lower >> _LIMB_BITS)
            lower.bitwise_and_(_LIMB_MASK)
    return sums.view(_LIMBS, num_lanes, _EXPONENTS).sum(1).t().contiguous()


def norm_of(squares: torch.Tensor) -> torch.Tensor:
    """Return the square root of a sum of squares as an fp32 scalar: the exact sum rounded to double, then to
    fp32.

    As in torch, NaN if an element was NaN, else infinite if one was infinite.
    """
    *sums, special = squares.tolist()
    if special[_NO_NUMBER]:
        return torch.tensor(math.nan, dtype=torch.float32, device="cpu")
    if special[_INFINITE]:
        return torch.tensor(math.inf, dtype=torch.float32, device="cpu")
    total = Fraction(0)
    for exponent, limbs in enumerate(sums):
        significands = sum(limb << _LIMB_BITS * place for place, limb in enumerate(limbs))
        if significands:
            total += significands * Fraction(2) ** (2 * (max(exponent, 1) - _BIAS))
    return torch.tensor(float(total), dtype=torch.float64, device="cpu").sqrt().float()


class Summing(Protocol):
    """A group of ranks with all-reduce; see :class:`gemini.comm.peers.Peers`."""

    def sum(self, values: torch.Tensor) -> None: ...

    def largest(self, values: torch.Tensor) -> None: ...


def sum_over_ranks(number: int, groups: Iterable[Summing]) -> int:
    """Return the sum of ``number`` over all ranks, reduced over this rank's groups one after the other.
    Collective.
    """
    total = torch.tensor([number], dtype=torch.float64, device="cpu")  # exact up to 2**53
    for ranks in groups:
        ranks.sum(total)
    return int(total)


class NormOverRanks:
    """Accumulates this rank's parts, then reduces the norm over all ranks: the same bits on each rank.

    The bits of the 2-norm and the maximum norm do not depend on how the vector is divided; other norms differ
    in the last digits. Raises ConfigError unless ``norm_type`` is positive.
    """

    def __init__(self, norm_type: float) -> None:
        if not norm_type > 0:
            raise ConfigError(
                f"norm_type is {norm_type}; over several ranks give a positive number or infinity"
            )
        self._norm_type = norm_type
        self._squares, self._found = empty_squares(), torch.zeros(1, dtype=torch.float64, device="cpu")

    def add(self, values: torch.Tensor) -> None:
        """Add a part, fp32."""
        if values.numel() == 0:
            return
        if self._norm_type == 2.0:
            self._squares.add_(exact_squares(values.reshape(-1)))
        elif self._norm_type == math.inf:
            torch.maximum(self._found, values.abs().max().double().cpu(), out=self._found)
        else:
            norm = torch.linalg.vector_norm(values, self._norm_type, dtype=torch.float64)
            self._found.add_(float(norm) ** self._norm_type)

    def over(self, groups: Iterable[Summing]) -> torch.Tensor:
        """Return the norm over the parts of all ranks, an fp32 CPU scalar, reduced over ``groups`` one after
        the other. Collective; call it once.
        """
        if self._norm_type == 2.0:
            for ranks in groups:
                ranks.sum(self._squares)
            return norm_of(self._squares)
        found = self._found
        if self._norm_type == math.inf:
            # The maximum over ranks may lose a NaN, so NaNs are reduced separately.
            said = torch.cat([found.nan_to_num(nan=0.0, posinf=math.inf), found.isnan().double()])
            for ranks in groups:
                ranks.largest(said)
            return torch.tensor(math.nan if said[1] else said[0].item(), dtype=torch.float32, device="cpu")
        for ranks in groups:
            ranks.sum(found)
        return (found[0] ** (1.0 / self._norm_type)).float()


# The largest power of two in fp16. The scale is the gradient of an fp16 loss: 2**16 would be infinite.
INITIAL_SCALE = 2.0**15


@dataclass(frozen=True)
class LossScaleConfig:
    """Settings of a dynamic loss scale. ``growth_interval``: clean steps before the scale grows.
    ``hysteresis``: the scale backs off from this overflow on, counted since the last growth; 2 tolerates one.
    """

    initial_scale: float = INITIAL_SCALE
    min_scale: float = 1
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2**32

    def __post_init__(self) -> None:
        if not 0 < self.min_scale <= self.initial_scale <= self.max_scale:
            raise ConfigError(
                f"loss scale: need 0 < min_scale ({self.min_scale}) <= initial_scale ({self.initial_scale}) "
                f"<= max_scale ({self.max_scale})"
            )
        if (
            self.growth_factor <= 1
            or not 0 < self.backoff_factor < 1
            or self.growth_interval < 1
            or self.hysteresis < 1
        ):
            raise ConfigError(
                "loss scale: growth_factor must exceed 1, backoff_factor lie in (0, 1), growth_interval and "
                "hysteresis be at least 1"
            )


def loss_scale_for(config: LossScaleConfig, defaults: LossScaleConfig, *, fp16: bool) -> LossScale | None:
    """Return the loss scale under ``fp16``. Otherwise return None, and warn about settings that have no
    effect.
    """
    if fp16:
        return LossScale(config)
    given = [
        field.name for field in fields(config) if getattr(config, field.name) != getattr(defaults, field.name)
    ]
    if given:
        logger.warning(
            "%s of the loss scale %s no effect: losses are scaled only with fp16",
            ", ".join(given),
            "has" if len(given) == 1 else "have",
        )
    return None


class LossScale:
    """The current loss scale. Call :meth:`update` once per step.

    A run of skipped steps is logged once, by the step that ends it, with their number; if the scale cannot
    back off any further, it is logged at once.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self._config = config
        self.scale = float(config.initial_scale)
        self._clean_steps = 0
        self._forgiven = config.hysteresis
        self._skipped = 0  # steps skipped in a row
        self._scale_before = self.scale  # the scale before that row
        self._level = logging.WARNING  # of the next message; INFO after the first
        self._told_least = False

    def update(self, overflowed: bool) -> None:
        """Back off after ``hysteresis`` overflows, grow after ``growth_interval`` clean steps."""
        config = self._config
        if overflowed:
            self._note_skipped()
            self._clean_steps = 0
            self._forgiven -= 1
            if self._forgiven <= 0:
                self.scale = max(config.min_scale, self.scale * config.backoff_factor)
            return
        self._tell_skipped()
        self._clean_steps += 1
        if self._clean_steps == config.growth_interval:
            self._clean_steps = 0
            self._forgiven = config.hysteresis
            self.scale = min(config.max_scale, self.scale * config.growth_factor)

    def _note_skipped(self) -> None:
        if not self._skipped:
            self._scale_before = self.scale
        self._skipped += 1
        if self.scale <= self._config.min_scale and self._skipped > 1 and not self._told_least:
            self._told_least = True
            logger.warning(
                "%d steps in a row were skipped: gradients overflow even at the smallest loss scale, "
                "%g; they may not be finite even without a scale: check the loss, lower the learning "
                "rate, or lower min_scale",
                self._skipped,
                self.scale,
            )

    def _tell_skipped(self) -> None:
        """Log the number of steps skipped before this one; the first time as a warning."""
        if self._skipped:
            logger.log(
                self._level,
                "%d %s skipped, in which gradients overflowed fp16: the loss scale went from %g to %g",
                self._skipped,
                "step was" if self._skipped == 1 else "steps were",
                self._scale_before,
                self.scale,
            )
            self._level = logging.INFO
        self._skipped = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "clean_steps": self._clean_steps, "forgiven": self._forgiven}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self._clean_steps = int(state["clean_steps"])
        self._forgiven = int(state["forgiven"])


def scaled(grad: torch.Tensor, scale: GradScale) -> torch.Tensor:
    """Return the gradient in fp32 or float64 as the optimizer kernel will see it; the input itself if nothing
    changes.
    """
    grad = grad.to(wide_type(grad.dtype))
    if scale.pre_scale != 1.0:
        grad = grad * scale.pre_scale
    if scale.clip_value != math.inf:
        grad = grad.clamp(-scale.clip_value, scale.clip_value)
    return grad * scale.post_scale if scale.post_scale != 1.0 else grad


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of ``dtype`` are computed: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def then_multiply(scale: GradScale, factor: float) -> GradScale:
    """Return ``scale`` followed by a multiplication."""
    return GradScale(scale.pre_scale, scale.clip_value, scale.post_scale * factor)


def then_clamp(scale: GradScale, value: float) -> GradScale | None:
    """Return ``scale`` followed by a clamp, or None if a GradScale cannot express it."""
    if scale.clip_value != math.inf or (scale.post_scale != 1.0 and scale.pre_scale != 1.0):
        return None
    return GradScale(scale.pre_scale * scale.post_scale, value, 1.0)


def visit_gradients(
    storage: ModelStorage,
    manager: GeminiManager,
    visit: Callable[[ManagedSlot, torch.Tensor], object],
    *,
    writes: bool = False,
    by_part: bool = False,
) -> None:
    """Call ``visit(slot, gradient)`` for every existing gradient, chunk by chunk, with its chunk pinned.

    A gradient in several chunks is passed as a copy or, with ``writes`` or ``by_part``, as its existing
    parts, one call for each.
    """
    for group in storage.trainable_groups():
        slots = [slot for slot in group.slots if slot.has_grad]
        if isinstance(group.grad, CutChunk):
            for slot in slots:
                _visit_cut(slot, manager, visit, writes, whole=not (writes or by_part))
            continue
        tensors = [tensor for slot in slots for tensor in slot.trainable_grad.tensors]
        with manager.operator(tensors, tensors if writes else ()), torch.no_grad():
            for slot in slots:
                visit(slot, slot.trainable_grad.value)


def _visit_cut(
    slot: ManagedSlot,
    manager: GeminiManager,
    visit: Callable[[ManagedSlot, torch.Tensor], object],
    writes: bool,
    *,
    whole: bool,
) -> None:
    grad = slot.trainable_grad
    if whole and isinstance(grad, CutGradient):
        visit(slot, grad.gathered())
        return
    for tensors, values in grad.held():
        with manager.operator(tensors, tensors if writes else ()), torch.no_grad():
            visit(slot, values)


def whole_gradient(slot: ManagedSlot, manager: GeminiManager, scale: GradScale) -> torch.Tensor | None:
    """Return a scaled copy of a gradient in CPU memory, in the parameter's memory layout; None if there is
    none.

    Over ranks the copy is whole. Collective: all ranks call it, after the exchange of gradients.
    """
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
    if isinstance(grad, CutGradient):
        into.copy_(scaled(grad.gathered(), scale))
        return full
    with manager.operator(grad.tensors), torch.no_grad():
        into.copy_(scaled(grad.value, scale))
    if manager.sharding is not None and shard is not None:
        manager.sharding.assemble(flat, slot.group)
    return full


def all_finite(storage: ModelStorage, manager: GeminiManager) -> bool:
    """Return whether all gradients are finite: here, on other ranks, and in other models that the same losses
    reached. Each gradient is read once.
    """
    scale = manager.gradient_scale
    finite = not any(losses.overflowed for losses in scale.losses)
    on_gpu: list[torch.Tensor] = []  # one value per gradient; reading them synchronizes with the GPU

    def look(_slot: object, grad: torch.Tensor) -> None:
        nonlocal finite
        if grad.dtype == torch.float64:
            finite = finite and bool(grad.isfinite().all())
        elif grad.device.type == "cpu":
            finite = finite and math.isfinite(sum_of_squares(grad))
        elif grad.numel():
            # The maximum norm is NaN if an element is; it needs no copy in a wider dtype.
            on_gpu.append(torch.linalg.vector_norm(grad, math.inf).float())

    visit_gradients(storage, manager, look, by_part=True)
    for other in scale.linked():
        for slot in other.slots:
            for tensors, values in slot.trainable_grad.held() if slot.has_grad else ():
                with other.operator(tensors), torch.no_grad():
                    look(slot, values)
    if on_gpu:
        finite = finite and bool(torch.stack(on_gpu).isfinite().all())
    for peers in _other_ranks(manager):
        # Over all copies of the model: the gradients of linked models may differ between copies.
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
    """Return the norm of all scaled gradients as one vector, with the bits of
    ``torch.nn.utils.get_total_norm``.

    ``order``: the order in which the norms of the parameters are combined. Extra memory: one parameter in
    fp32 if its gradient is 16-bit or scaled. Over ranks it is the norm over all shards and parts.
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
    if len({measured.dtype for measured in each}) > 1:  # torch combines the norms dtype by dtype
        grouped = _group_tensors_by_device_and_dtype([each])  # type: ignore[list-item]
        each = [measured for (group,), _ in grouped.values() for measured in group if measured is not None]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(each), norm_type)
    return norm


def _norm_as_torch_takes_it(values: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm of one gradient by the kernel that ``get_total_norm`` uses on its device: the foreach
    kernel adds in another order than the kernel for one tensor.
    """
    if _has_foreach_support([values], values.device):
        return torch._foreach_norm([values], norm_type)[0]
    norm: torch.Tensor = torch.linalg.vector_norm(values, norm_type)
    return norm


def _norm_over_ranks(
    storage: ModelStorage, manager: GeminiManager, norm_type: float, scale: GradScale
) -> torch.Tensor:
    """Return the norm over the gradients of all ranks."""
    uncounted = manager.part.uncounted if manager.part is not None else frozenset()
    norm = NormOverRanks(norm_type)

    def measure(slot: ManagedSlot, grad: torch.Tensor) -> None:
        if slot.name not in uncounted:
            norm.add(scaled(grad, scale).float())

    visit_gradients(storage, manager, measure)
    return norm.over(_other_ranks(manager))


def count_zeros(storage: ModelStorage, manager: GeminiManager) -> int:
    """Return how many elements of all gradients are 0; over ranks, of all shards and parts."""
    part = manager.part
    found = 0

    def count(slot: ManagedSlot, grad: torch.Tensor) -> None:
        nonlocal found
        if part is not None and slot.name in part.uncounted:
            return
        found += grad.numel() - int(torch.count_nonzero(grad))
        shard = slot.group.shard
        if part is not None and (shard is None or shard.start <= slot.start < shard.stop):
            found -= part.filling[
                slot.name
            ]  # padding zeros, subtracted once: by the rank with the first element

    visit_gradients(storage, manager, count)
    return sum_over_ranks(found, _other_ranks(manager))


class Clipping:
    """The loss scale and the clipping still to be applied to the current gradients of a model."""

    measured: float | None  # the gradients' norm before clipping by norm

    def __init__(self, model: ManagedModel, loss_scale: LossScale | None) -> None:
        self._model, self._loss_scale = model, loss_scale
        self._seen = model.gradient_state()
        self.forget()

    @property
    def scale(self) -> GradScale:
        """The pending transform; it first divides by the loss scale."""
        in_gradients = self._model.manager.gradient_scale.value
        if in_gradients is None and self._loss_scale is not None:  # the user assigned the gradients
            in_gradients = self._loss_scale.scale
        return self._scale if self.done or in_gradients is None else GradScale(pre_scale=1.0 / in_gradients)

    def note(self, scale: GradScale) -> None:
        """Set the transform for the current gradients; it also removes the loss scale."""
        self._scale, self.done, self._seen = scale, True, self._model.gradient_state()

    def note_norm(self, norm: float) -> None:
        """Record the norm of the gradients before clipping."""
        self.measured = norm

    def note_overflow(self, overflowed: bool) -> None:
        """Record whether the gradients overflowed, before a clamp hides it."""
        self.overflowed |= overflowed

    def check(self) -> None:
        """Forget the clipping of gradients that were freed. Raises StateError if newer gradients were added
        to clipped ones.
        """
        if not self.done or self._seen == self._model.gradient_state():
            return
        (discarded, _), (discarded_then, _) = self._model.gradient_state(), self._seen
        if discarded == discarded_then:
            raise StateError("gradients arrived after they were clipped; clip once, right before step()")
        self.forget()

    def forget(self) -> None:
        """Reset for new gradients."""
        self._scale = GradScale()
        self.measured = None
        self.done = False
        self.overflowed = False  # detected before a clamp hid it
