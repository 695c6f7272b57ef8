"""The cross entropy of a linear head by tiles of rows: logits exist for one tile at a time.

Each tile computes its logits, its part of the loss and, at once, the gradients of hidden states and weight.
So nothing is computed twice, and backward only scales. See docs/tiled-loss.md.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from gemini.errors import ConfigError, StateError

# An operator between logits and loss: ("mul", number), ("div", number), ("tanh", None) or ("to", dtype).
Step = tuple[str, Any]

_REDUCTIONS = ("mean", "sum")
_HALVES = (torch.float16, torch.bfloat16)
# With fewer rows per tile a matrix product takes longer per row; from these sizes on the time is constant.
_LEAST_ROWS = {"cpu": 128, "meta": 128}  # meta: rehearsals of steps on the CPU
_LEAST_ROWS_ELSEWHERE = 1024
_SMALL_TILE_BYTES = 16 * 2**20  # of fp32 logits: with a small vocabulary a tile has more rows
_LARGEST_SHARE = 7 / 8  # if a larger share of rows counts, no rows are left out
_BLOCK_BYTES = 64 * 2**20  # of a 16-bit gradient of the weight, computed before it is added to the sum


@dataclass(frozen=True)
class TileOptions:
    """How to compute a loss from the inputs of a head.

    ``steps``: the operators between logits and loss. ``tile_rows``: rows of a tile; None: chosen by device
    and vocabulary. ``compute_dtype``: of the head's product; None: that of the hidden states.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"
    steps: tuple[Step, ...] = ()
    tile_rows: int | None = None
    compute_dtype: torch.dtype | None = None


def tiled_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    tile_rows: int | str = "auto",
) -> torch.Tensor:
    """Return the cross entropy of ``hidden @ weight.T + bias`` and ``labels``, without all logits at once::

        loss = gemini.tiled_cross_entropy(hidden[:, :-1], model.lm_head.weight, ids[:, 1:])

    The loss and its gradients equal those of ``torch.nn.functional.cross_entropy`` on these logits, in fp32
    for 16-bit logits. Gradients are computed with the loss, so the gradient of ``weight`` takes memory from
    now until backward. Under autocast the product has autocast's dtype.

    Args:
        hidden: (..., features).
        weight: (entries, features). It may be a managed parameter, or shared with an embedding.
        labels: (...), the index of an entry for each row.
        bias: (entries,).
        ignore_index: a label that does not count.
        label_smoothing: the share of each label that is spread evenly over all entries.
        logit_scale: the factor of the logits.
        softcap: a bound of the scaled logits: ``softcap * tanh(logits / softcap)``.
        reduction: ``"mean"`` over the labels that count, or ``"sum"``.
        tile_rows: the number of rows per tile; ``"auto"``: few enough for memory and enough for speed.

    Raises:
        ConfigError: an argument is invalid.
    """
    steps: list[Step] = [("mul", logit_scale)] if logit_scale != 1 else []
    if softcap is not None:
        if not softcap > 0:
            raise ConfigError(f"softcap is {softcap}; give a number above 0, or None")
        steps += [("div", softcap), ("tanh", None), ("mul", softcap)]
    compute = dtype_of_autocast(hidden.device.type)
    if (compute or hidden.dtype) in _HALVES:
        steps.append(("to", torch.float32))
    if tile_rows != "auto" and (not isinstance(tile_rows, int) or tile_rows < 1):
        raise ConfigError(f"tile_rows is {tile_rows!r}; give a whole number above 0, or 'auto'")
    options = TileOptions(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
        steps=tuple(steps),
        tile_rows=tile_rows if isinstance(tile_rows, int) else None,
        compute_dtype=compute,
    )
    _check(hidden, weight, labels, bias, options)
    return loss_by_tiles(hidden.flatten(0, -2), weight, bias, labels.flatten(), options)


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    options: TileOptions,
) -> None:
    """Raise ConfigError if the arguments do not fit together."""
    if weight.dim() != 2 or hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ConfigError(
            f"hidden has the shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; they must be "
            "(..., features) and (entries, features)"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ConfigError(
            f"labels have the shape {tuple(labels.shape)} where hidden has {tuple(hidden.shape)}; give one "
            "label for each row of hidden"
        )
    if labels.is_floating_point():
        raise ConfigError(f"labels are {labels.dtype}; give the number of an entry for each row")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(
            f"bias has the shape {tuple(bias.shape)} and weight {tuple(weight.shape)}; a bias has a number "
            "for each entry"
        )
    if options.reduction not in _REDUCTIONS:
        raise ConfigError(
            f"reduction is {options.reduction!r}; it must be one of {', '.join(_REDUCTIONS)}: gradients are "
            "made with the loss, for all rows alike"
        )
    if not 0 <= options.label_smoothing <= 1:
        raise ConfigError(f"label_smoothing is {options.label_smoothing}; it must be from 0 to 1")


def loss_by_tiles(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: TileOptions,
) -> torch.Tensor:
    """Return the loss of hidden states (rows, features) and labels (rows,). For tensor subclasses of the
    weight it is one operator, like ``torch.nn.functional.linear``.
    """
    operands = (hidden, weight, bias, labels)
    if has_torch_function(operands):
        return handle_torch_function(loss_by_tiles, operands, hidden, weight, bias, labels, options)
    is_recorded = torch.is_grad_enabled()
    loss: torch.Tensor = TiledCrossEntropy.apply(hidden, weight, bias, labels, options, is_recorded)  # type: ignore[no-untyped-call]
    return loss


class TiledCrossEntropy(torch.autograd.Function):
    """The loss; its gradients are computed in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        options: TileOptions,
        is_recorded: bool,
    ) -> torch.Tensor:
        wanted = [is_recorded and needed for needed in ctx.needs_input_grad[:3]]
        with without_autocast(hidden.device.type):
            tiles = _Tiles(hidden, weight, bias, labels, options, wanted)
            loss = tiles.run()
        ctx.gradients, ctx.factor = tiles.gradients, tiles.factor
        ctx.dtypes = [hidden.dtype, weight.dtype, None if bias is None else bias.dtype]
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ConfigError(
                "a backward pass with create_graph=True goes through a tiled loss: its gradients were made "
                "with the loss and have no graph; take the loss of whole logits (without tiled_loss, or "
                "by torch.nn.functional.cross_entropy)"
            )
        if ctx.gradients is None:
            raise StateError(
                "a backward pass went through a tiled loss a second time: the first one has used up the "
                "gradients that were made with the loss; give the first one retain_graph=True"
            )
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        factor, found = grad * ctx.factor, []
        for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True):
            if gradient is not None:
                gradient = gradient * factor if keeps else gradient.mul_(factor)
                gradient = gradient.to(dtype)
            found.append(gradient)
        if not keeps:
            ctx.gradients = None
        return (*found, None, None, None)


class _Tiles:
    """One computation of a loss. ``gradients``: of hidden states, weight and bias, still to be multiplied by
    ``factor``.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        options: TileOptions,
        wanted: list[bool],
    ) -> None:
        compute = options.compute_dtype or hidden.dtype
        self._options = options
        self._all_rows = len(labels)
        self._kept = _rows_that_count(labels != options.ignore_index)
        if self._kept is not None:
            hidden, labels = hidden[self._kept], labels[self._kept]
        self._hidden, self._weight = hidden.to(compute), weight.to(compute)
        self._bias = None if bias is None else bias.to(compute)
        self._counts = labels != options.ignore_index
        self._labels = torch.where(self._counts, labels.long(), 0)
        self._work = next((value for name, value in reversed(options.steps) if name == "to"), compute)
        self._sums = torch.float32 if self._work in _HALVES else self._work
        self._inner, self._outer = _factors(options.steps)
        self._rows = min(options.tile_rows or _rows_of_tile(weight), max(1, len(labels)))
        device, entries = hidden.device, weight.shape[0]
        self._product = torch.empty(self._rows, entries, dtype=compute, device=device)
        self._logits = (
            self._product
            if self._sums is compute
            else torch.empty(self._rows, entries, dtype=self._sums, device=device)
        )
        self._parts = torch.empty(self._rows, entries, dtype=self._sums, device=device)
        shapes = (hidden.shape, weight.shape, weight.shape[:1])
        self.gradients: list[torch.Tensor | None] = [
            torch.zeros(shape, dtype=self._sums, device=device) if is_wanted else None
            for shape, is_wanted in zip(shapes, wanted, strict=True)
        ]
        self.factor = torch.ones((), dtype=self._sums, device=device)

    def run(self) -> torch.Tensor:
        """Compute the loss and the gradients; return the loss."""
        num_rows = len(self._labels)
        losses = torch.empty(num_rows, dtype=self._sums, device=self._hidden.device)
        for first in range(0, num_rows, self._rows):
            rows = slice(first, min(first + self._rows, num_rows))
            losses[rows] = self._losses(rows)
            if any(gradient is not None for gradient in self.gradients):
                self._add_gradients(rows)
        of_hidden = self.gradients[0]
        if self._kept is not None and of_hidden is not None:
            whole = of_hidden.new_zeros(self._all_rows, of_hidden.shape[1])
            self.gradients[0] = whole.index_copy_(0, self._kept, of_hidden)
        total = losses.sum()
        self.factor.mul_(self._inner * self._outer)
        if self._options.reduction == "mean":
            count = self._counts.sum()
            total = total / count  # NaN if no label counts, as in torch
            self.factor.div_(count.clamp(min=1))
        return total.to(self._work)

    def _losses(self, rows: slice) -> torch.Tensor:
        """Return the losses of some rows. Leaves their logits and log-probabilities in the buffers."""
        num_rows = rows.stop - rows.start
        logits, parts = self._logits[:num_rows], self._parts[:num_rows]
        product = self._product[:num_rows]
        if self._bias is None:
            torch.mm(self._hidden[rows], self._weight.t(), out=product)
        else:
            torch.addmm(self._bias, self._hidden[rows], self._weight.t(), out=product)
        values = product
        for name, value in self._options.steps:
            if name == "to":
                values = values.to(value) if values is not product else logits.copy_(values)
            elif name == "tanh":
                values.tanh_()
            else:
                getattr(values, f"{name}_")(value)
        if values is not logits:
            logits.copy_(values)
        torch._log_softmax(logits, 1, False, out=parts)
        smoothing = self._options.label_smoothing
        losses = parts.gather(1, self._labels[rows, None]).squeeze(1).neg_()
        if smoothing:
            losses.mul_(1 - smoothing).sub_(parts.sum(1), alpha=smoothing / parts.shape[1])
        return torch.where(self._counts[rows], losses, 0)

    def _add_gradients(self, rows: slice) -> None:
        """Add the gradients of some rows. Call it after :meth:`_losses` for the same rows."""
        num_rows = rows.stop - rows.start
        logits, slope = self._logits[:num_rows], self._parts[:num_rows].exp_()
        smoothing, counts = self._options.label_smoothing, self._counts[rows]
        labels = self._labels[rows, None]
        slope.scatter_(1, labels, slope.gather(1, labels).sub_(1 - smoothing))
        if smoothing:
            slope.sub_(smoothing / slope.shape[1])
        if any(name == "tanh" for name, _ in self._options.steps):
            # tanh' = 1 - tanh**2, and the logits are tanh times the outer factor.
            slope.addcmul_(slope, logits.square_(), value=-1 / self._outer**2)
        of_hidden, of_weight, of_bias = self.gradients
        if of_bias is not None:
            of_bias.add_(slope.t() @ counts.to(slope.dtype))
        narrow = slope if slope.dtype is self._product.dtype else self._product[:num_rows].copy_(slope)
        if of_hidden is not None:
            found = narrow @ self._weight
            of_hidden[rows] = torch.where(counts[:, None], found, 0)
        if of_weight is not None:
            hidden = torch.where(counts[:, None], self._hidden[rows], 0)
            _add_product(of_weight, slope, narrow, hidden)


def _rows_that_count(counts: torch.Tensor) -> torch.Tensor | None:
    """Return the indices of the rows with a label that counts; None to use all rows: if few would be left
    out, or if the device would have to be synchronized.
    """
    if counts.device.type != "cpu":
        return None
    kept = counts.nonzero().squeeze(1)
    return kept if len(kept) <= _LARGEST_SHARE * len(counts) else None


def _add_product(
    total: torch.Tensor, slope: torch.Tensor, narrow: torch.Tensor, hidden: torch.Tensor
) -> None:
    """Add ``slope.T @ hidden`` to ``total``. ``narrow``: the slope in the dtype of ``hidden``."""
    if hidden.dtype is total.dtype:
        total.addmm_(slope.t(), hidden)
    elif _adds_in_fp32(total.device):
        total.addmm_(slope.t(), hidden.to(total.dtype))
    else:
        step = max(1, _BLOCK_BYTES // (hidden.element_size() * hidden.shape[1]))
        for first in range(0, total.shape[0], step):
            total[first : first + step] += narrow[:, first : first + step].t() @ hidden


def _adds_in_fp32(device: torch.device) -> bool:
    """Return whether 16-bit products on ``device`` are slower than fp32 products, which do not round."""
    return device.type == "cpu"


def _rows_of_tile(weight: torch.Tensor) -> int:
    least = _LEAST_ROWS.get(weight.device.type, _LEAST_ROWS_ELSEWHERE)
    return max(least, _SMALL_TILE_BYTES // (4 * max(1, weight.shape[0])))


def _factors(steps: tuple[Step, ...]) -> tuple[float, float]:
    """Return the factors of the logits before and after their tanh; without tanh everything is before."""
    inner, outer = 1.0, 1.0
    is_after = False
    for name, value in steps:
        factor = 1.0 if name in ("to", "tanh") else value if name == "mul" else 1 / value
        is_after = is_after or name == "tanh"
        if is_after:
            outer *= factor
        else:
            inner *= factor
    return inner, outer


def dtype_of_autocast(device_type: str) -> torch.dtype | None:
    """Return autocast's dtype for a device type; None if autocast is off."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context manager that turns autocast off."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def whole_bytes(num_rows: int, num_entries: int) -> int:
    """Return the bytes of one fp32 array of all logits. A plain loss holds two or three of them at once."""
    return 4 * num_rows * num_entries
