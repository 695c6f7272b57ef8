"""The losses of routers: their collection in a pass, and their way into the gradients.

Each model has its own :class:`RouterRecord`. Its layers report to it during the model's forward pass.
Recomputation runs in backward, outside of a pass, so nothing is reported twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.parallel.moe.router import Routing


class RoutedLayer(nn.Module):
    """A layer with a router that reports to the record of its model."""

    expert_bias: Tensor | None  # [experts]; added to scores only to choose experts
    data_ranks: Axis | None = None  # ranks of data parallelism, if known

    def __init__(self) -> None:
        super().__init__()
        # A bound method, not the record: a layer that is recomputed must hold nothing that changes.
        self.report: Callable[[RoutedLayer, Routing], None] | None = None

    def note_data_ranks(self, ranks: Axis | None) -> None:
        """Set the ranks of data parallelism, None for one process."""
        self.data_ranks = ranks


class RouterRecord:
    """The reports of a model's routers.

    Attributes:
        balance: the balance loss of each layer, from the last training pass.
        z: the z losses.
        counts: by layer, the number of choices of each expert since :meth:`take_counts`.
    """

    def __init__(self) -> None:
        self.balance: list[Tensor] = []
        self.z: list[Tensor] = []
        self.counts: dict[RoutedLayer, Tensor] = {}
        self._depth = 0  # nesting of running forward passes of the model

    @staticmethod
    def of(model: nn.Module) -> RouterRecord:
        """Return the record of ``model``; the first call makes it. A model and its wrapper share one record.

        Raises:
            ConfigError: the model has no layer with a router.
        """
        layers = [layer for layer in model.modules() if isinstance(layer, RoutedLayer)]
        if not layers:
            raise ConfigError(
                f"{type(model).__name__} has no MoeLayer, so routers have no losses to add; use the loss "
                "function without MoeLoss"
            )
        found = getattr(layers[0].report, "__self__", None)
        if isinstance(found, RouterRecord) and all(layer.report == found.add for layer in layers):
            return found
        record = RouterRecord()
        for layer in layers:
            layer.report = record.add
        model.register_forward_pre_hook(record._begin)
        model.register_forward_hook(record._end, always_call=True)
        return record

    def add(self, layer: RoutedLayer, routing: Routing) -> None:
        """Record the report of a layer in training; ignored outside of a forward pass of the model."""
        if not self._depth:
            return
        self.balance.append(routing.balance_loss)
        self.z.append(routing.z_loss)
        if layer.expert_bias is not None:
            before = self.counts.get(layer)
            self.counts[layer] = routing.counts if before is None else before + routing.counts

    def take_counts(self) -> dict[RoutedLayer, Tensor]:
        """Return the counts and reset them to 0."""
        counts, self.counts = self.counts, {}
        return counts

    def _begin(self, _model: nn.Module, _args: Any) -> None:
        if not self._depth:
            self.balance, self.z = [], []
        self._depth += 1

    def _end(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        self._depth -= 1


class MoeLoss(nn.Module):
    """A loss plus the losses of the model's routers in the preceding pass.

    ``initialize`` binds it to the model; other programs call :meth:`bind`. In evaluation it is only the loss.

    Args:
        aux_weight: the factor of the sum of the layers' balance losses.
        loss_fn: the class of the loss; further arguments are passed to it.
        z_weight: the factor of the sum of the layers' z losses.
    """

    def __init__(
        self,
        aux_weight: float,
        loss_fn: Callable[..., Callable[..., Tensor]],
        *args: Any,
        z_weight: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if not isinstance(loss_fn, type):
            raise ConfigError(
                f"MoeLoss: loss_fn is {loss_fn!r:.80}, but must be a class; write MoeLoss(0.01, "
                "nn.CrossEntropyLoss, label_smoothing=0.1)"
            )
        self.loss_fn = loss_fn(*args, **kwargs)
        self.aux_weight, self.z_weight = aux_weight, z_weight
        self.record: RouterRecord | None = None

    def bind(self, model: nn.Module) -> MoeLoss:
        """Use the losses of this model from now on; return self. Call it before the first pass.

        Raises:
            ConfigError: the model has no layer with a router.
        """
        self.record = RouterRecord.of(model)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the total loss. Raises ConfigError before :meth:`bind`."""
        if self.record is None:
            raise ConfigError(
                "MoeLoss does not know the model with the routers; call criterion.bind(model) before the "
                "first pass, or train with initialize(), which calls it"
            )
        loss = self.loss_fn(*args, **kwargs)
        for weight, parts in ((self.aux_weight, self.record.balance), (self.z_weight, self.record.z)):
            if weight and parts:
                total = torch.stack([part.to(loss.device) for part in parts]).sum()
                loss = loss + (weight * total).to(loss.dtype)
        return loss  # type: ignore[no-any-return]


Moeloss = MoeLoss


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: float | Callable[[], float]) -> Tensor:
        ctx.scale, ctx.dtype, ctx.shape, ctx.device = scale, loss.dtype, loss.shape, loss.device
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = ctx.scale() if callable(ctx.scale) else ctx.scale
        return grad, torch.full(ctx.shape, float(scale), dtype=ctx.dtype, device=ctx.device), None


def attach(y: Tensor, loss: Tensor, *, scale: float | Callable[[], float] = 1.0) -> Tensor:
    """Return ``y``; its backward also computes the gradient of ``loss``.

    This trains routers if no criterion gets their losses, for example in a stage of a pipeline. ``scale`` is
    the factor of the loss; a callable is called in backward, for example for the loss scale of fp16.
    """
    return _Attached.apply(y, loss, scale)  # type: ignore[no-untyped-call, no-any-return]


class BiasBalance:
    """Balances experts without a loss: adjusts the biases of layers after each optimizer step.

    A bias changes by ``rate * sign(mean count - count)``, with the choices of all passes since the previous
    step on all ranks of data parallelism. Layers made with ``MoeLayer(has_bias=True)`` have a bias.

    Raises:
        ConfigError: no layer has a bias, or there are several processes and a layer does not know its data
            ranks.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, rate: float = 1e-3) -> None:
        self.rate = rate
        self._record = RouterRecord.of(model)
        layers = [each for each in model.modules() if isinstance(each, RoutedLayer)]
        self._layers = [layer for layer in layers if layer.expert_bias is not None]
        if not self._layers:
            raise ConfigError(
                f"none of the {len(layers)} layers with routers has a bias to balance; make them with "
                "MoeLayer(..., has_bias=True)"
            )
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if world > 1 and any(layer.data_ranks is None for layer in self._layers):
            raise ConfigError(
                "BiasBalance sums the choices of all ranks of data parallelism, but the layers do not know "
                f"which of the {world} processes those are; call launch() before you build the model, or "
                "boost it with ep_size first"
            )
        optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def step(self) -> None:
        """Adjust the biases and reset the counts. The optimizer's step calls this."""
        counts = self._record.take_counts()
        for layer in self._layers:
            if layer.expert_bias is None:
                continue
            load = torch.zeros_like(layer.expert_bias, dtype=torch.int64)
            if layer in counts:
                load += counts[layer]
            if layer.data_ranks is not None:
                layer.data_ranks.all_reduce(load)
            load = load.double()
            layer.expert_bias += self.rate * torch.sign(load.mean() - load).float()

    def _after_step(self, *_step: Any) -> None:
        self.step()
