"""Tiled loss: make the logits of a language model's heads lazy while a loss may be computed from them.

A head is the layer that ``get_output_embeddings()`` of a module returns. It must be a linear layer, because
the loss uses only its weight and bias.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.losses.lazy_logits import HeadCall, LazyLogits
from gemini.losses.tiled_cross_entropy import whole_bytes
from gemini.system.config import format_bytes

logger = logging.getLogger(__name__)

# "auto": a plain loss holds about three arrays of logits at once. At this share they take a fifth of DEVICE.
SHARE_OF_DEVICE = 1 / 16
_LOSS_INPUTS = ("labels", "shift_labels")


class LazyHead:
    """Replaces the ``forward`` of a head."""

    def __init__(self, owner: TiledHeads, head: nn.Linear) -> None:
        self._owner = owner
        self._head = weakref.ref(head)  # weak: the head holds this object
        vars(head)["forward"] = self

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the head's logits, lazy if their loss may be tiled."""
        head = self._head()
        assert head is not None
        if self._owner.is_lazy(hidden, head):
            return self._owner.lazy(hidden, head)
        return type(head).forward(head, hidden)

    def remove(self) -> None:
        """Restore the head's own ``forward``."""
        head = self._head()
        if head is not None and vars(head).get("forward") is self:
            del vars(head)["forward"]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Copies and pickles of the head have the forward of its class.
        return getattr, (self._head(), "forward")


class TiledHeads:
    """The heads of one managed module. ``mode``: True, or ``"auto"`` to tile only logits that are large
    compared with ``device_bytes``. ``step``: returns a value that changes after each update of weights."""

    def __init__(
        self, module: nn.Module, mode: bool | str, device_bytes: int, step: Callable[[], object]
    ) -> None:
        self._mode = mode
        self._device_bytes = device_bytes
        self._step = step
        self._is_open = False
        self._has_warned = False
        self._heads: list[LazyHead] = []
        self.follow(module)

    def follow(self, module: nn.Module) -> None:
        """Replace the ``forward`` of the heads that ``module`` has now."""
        self.release()
        self._heads = [LazyHead(self, head) for head in fit_heads(module, self._mode)]

    def release(self) -> None:
        """Restore the ``forward`` of all heads."""
        for head in self._heads:
            head.remove()
        self._heads = []

    @contextmanager
    def during(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Context of a forward pass with ``inputs``. Its logits are lazy if a loss may be computed from them:
        if gradients are enabled or labels are given."""
        outer = self._is_open
        has_labels = any(inputs.get(name) is not None for name in _LOSS_INPUTS)
        self._is_open = outer or has_labels or torch.is_grad_enabled()
        try:
            yield
        finally:
            self._is_open = outer

    @contextmanager
    def expecting_loss(self) -> Iterator[None]:
        """Context of passes with a loss that the caller computes: their logits are lazy also without
        labels."""
        outer, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = outer

    def is_lazy(self, hidden: torch.Tensor, head: nn.Linear) -> bool:
        """Say whether the logits of ``hidden`` are lazy now."""
        if not self._is_open or type(hidden) is not torch.Tensor or torch.compiler.is_compiling():
            return False
        if hidden.dim() < 2 or hidden.shape[-1] != head.weight.shape[1]:
            return False
        num_rows = hidden.shape[:-1].numel()
        whole = whole_bytes(num_rows, head.weight.shape[0])
        return self._mode is True or whole > SHARE_OF_DEVICE * self._device_bytes

    def lazy(self, hidden: torch.Tensor, head: nn.Linear) -> LazyLogits:
        """Return the lazy logits of ``head(hidden)``."""
        weight, bias, step = head.weight, head.bias, self._step
        trains = [each for each in (weight, bias) if each is not None and each.requires_grad]

        def state() -> object:
            return (step(), *(each._version for each in trains)) if trains else None

        return LazyLogits(HeadCall.of((hidden, weight, bias), state, self._note))

    def _note(self, nbytes: int) -> None:
        """Warn once that logits are read as a whole."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "tiled_loss: the program reads logits besides the loss, so they are computed whole: "
                "%s; read fewer rows, or leave tiled_loss out",
                format_bytes(nbytes),
            )


def fit_heads(module: nn.Module, mode: bool | str) -> list[nn.Linear]:
    """Return the heads that allow a tiled loss. A pipeline stage may have none, because the head is in
    another stage.

    Raises:
        ConfigError: ``mode`` is True, and there is no head, or a head is not a linear layer.
    """
    if not mode:
        return []
    found: dict[int, nn.Linear] = {}
    is_elsewhere = False
    names = {id(part): name for name, part in module.named_modules()}
    for part in module.modules():
        if getattr(type(part), "get_output_embeddings", None) is None:
            continue
        head = _in_use(part.get_output_embeddings())  # type: ignore[operator]
        if head is None or id(head) not in names:
            continue
        if getattr(type(head), "is_stand_in", False):  # for a module of another stage (parallel/pipeline)
            is_elsewhere = True
            continue
        reason = _unfit(head)
        if reason is None:
            assert isinstance(head, nn.Linear)
            found[id(head)] = head
        elif mode is True:
            raise ConfigError(f"tiled_loss=True: the head {names[id(head)]!r} {reason}; leave tiled_loss out")
        else:
            logger.info("tiled_loss='auto' is off: the head %r %s", names[id(head)], reason)
    if not found and not is_elsewhere and mode is True:
        raise ConfigError(
            f"tiled_loss=True: {type(module).__name__} has no head that get_output_embeddings() returns, as "
            "language models of transformers have; leave tiled_loss out, and call "
            "gemini.tiled_cross_entropy() where the loss is made"
        )
    return list(found.values())


def _in_use(head: Any) -> Any:
    """Return the layer that runs: PEFT trains a copy of a head that is listed in ``modules_to_save``."""
    copies, active = getattr(head, "modules_to_save", None), getattr(head, "active_adapters", None)
    if not isinstance(head, nn.Module) or not isinstance(copies, nn.ModuleDict) or not active:
        return head
    return copies[active[0]] if len(active) == 1 and active[0] in copies else head


def _unfit(head: nn.Module) -> str | None:
    """Return why a head's loss cannot be tiled; None if it can."""
    kind = type(head)
    if any(each.__module__.startswith("gemini.parallel") for each in kind.__mro__):
        return f"is divided over ranks ({kind.__name__}): each rank has a part of the logits"
    if kind.__module__.startswith("peft."):
        return f"has adapters ({kind.__name__}): its logits are more than one product"
    if not isinstance(head, nn.Linear) or kind.forward is not nn.Linear.forward:
        return f"is a {kind.__name__}, not a linear layer"
    own = vars(head).get("forward")
    is_plain = own is None or isinstance(own, LazyHead) or getattr(own, "__func__", None) is kind.forward
    return None if is_plain else "overrides forward()"
