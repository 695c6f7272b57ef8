"""Layers of experts: MoeLayer combines a gate, a router and experts; Widenet is a model of such layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.moe.experts import Experts, VanillaFFN, moe_env, moe_mlp_args, new_parameter
from gemini.parallel.moe.losses import RoutedLayer, attach
from gemini.parallel.moe.router import NormalNoiseGenerator, Routing, Top2Router, balance_loss, no_autocast


class MoeLayer(RoutedLayer):
    """Sends each token to a few experts and sums their weighted results.

    The layer owns the gate, which computes logits in fp32. Router and experts may be shared with other
    layers. A dropped choice adds zero.

    Args:
        router: a :class:`TopKRouter`, or a module with its interface.
        experts: :class:`Experts`, as many as ``num_experts``.
        aux_weight: 0 reports the router's losses to the record of the model, for ``MoeLoss``. Otherwise
            backward adds the gradient of ``aux_weight`` times the balance loss, and no loss is reported.
        balance_over: the choices that the balance loss counts: those of this "rank", or those of the "group"
            of ranks of data parallelism. "group" gives the loss of one process; then all ranks must run the
            layer.
        has_bias: whether choices have a bias, which ``BiasBalance`` adjusts.

    Raises:
        ConfigError: the number of experts is not ``num_experts``, or ``balance_over`` is unknown.
    """

    def __init__(
        self,
        dim_model: int,
        num_experts: int,
        router: nn.Module,
        experts: Experts,
        *,
        aux_weight: float = 0.0,
        has_bias: bool = False,
        balance_over: Literal["group", "rank"] = "rank",
    ) -> None:
        super().__init__()
        if balance_over not in ("group", "rank"):
            raise ConfigError(f"MoeLayer: balance_over is {balance_over!r}; give 'group' or 'rank'")
        if experts.num_experts != num_experts:
            raise ConfigError(
                f"MoeLayer: num_experts is {num_experts}, but experts has {experts.num_experts}; make "
                f"Experts(..., num_experts={num_experts})"
            )
        self.num_experts, self.aux_weight, self.balance_over = num_experts, aux_weight, balance_over
        self.data_ranks = moe_env.data_ranks
        self.router, self.experts = router, experts
        self.gate = new_parameter(num_experts, dim_model)
        where = torch.get_default_device()
        bias = torch.zeros(num_experts, dtype=torch.float32, device=where) if has_bias else None
        self.register_buffer("expert_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small weights for the gate, so that all experts begin with about the same number of tokens."""
        std = math.sqrt(0.1 / self.gate.shape[1])
        nn.init.trunc_normal_(self.gate, std=std, a=-2 * std, b=2 * std)
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Return one like ``x``, [..., dim_model]. ``token_mask``: [...], 0 for padding, which becomes 0."""
        tokens = x.reshape(-1, x.shape[-1])
        with no_autocast(x):
            logits = functional.linear(tokens.float(), self.gate.float())
        routing: Routing = self.router(logits, bias=self.expert_bias, token_mask=token_mask)
        y = self._combined(tokens, routing)
        if self.training and self.balance_over == "group" and self.data_ranks is not None:
            counts = routing.counts.clone()
            self.data_ranks.all_reduce(counts)
            routing = replace(routing, balance_loss=balance_loss(counts, routing.mean_scores))
        if self.training and self.aux_weight:
            y = attach(y, self.aux_weight * routing.balance_loss)
        elif self.training and self.report is not None:
            self.report(self, routing)
        return y.to(x.dtype).view(x.shape)

    def _combined(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return, for each token, the weighted sum over its choices, in their order."""
        num_tokens, num_choices = routing.experts.shape
        chosen = routing.experts.reshape(-1)
        order = chosen.argsort(stable=True)
        if routing.kept is None or order.is_meta:
            counts = routing.counts
        else:
            kept = routing.kept.reshape(-1)
            order = order[kept[order]]
            counts = torch.zeros_like(routing.counts).scatter_add(0, chosen, kept.long())
        made = self.experts(tokens[order // num_choices], counts)
        results = made.new_zeros(num_tokens * num_choices, made.shape[-1]).index_copy(0, order, made)
        weighted = results.unflatten(0, (num_tokens, num_choices)) * routing.weights.to(made.dtype)[..., None]
        return weighted.sum(1)  # type: ignore[no-any-return]


class Widenet(nn.Module):
    """A vision transformer that is wide instead of deep: its blocks share one attention and one set of
    experts, and differ in their norms and gates.

    Args:
        capacity_factor: the factor of a :class:`Top2Router` in training.
        img_size, patch_size, in_chans: sizes of square images, [batch, in_chans, img_size, img_size].
        size: further sizes, see :class:`WidenetBody`.
    """

    def __init__(
        self,
        num_experts: int,
        capacity_factor: float,
        *,
        num_classes: int = 1000,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        **size: Any,
    ) -> None:
        super().__init__()
        self.body = WidenetBody(num_experts, capacity_factor, **size)
        d_model, num_patches = self.body.d_model, (img_size // patch_size) ** 2
        self.patches = nn.Conv2d(in_chans, d_model, patch_size, stride=patch_size)
        self.position = new_parameter(num_patches, d_model)
        self.head = nn.Linear(d_model, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the position embeddings."""
        nn.init.normal_(self.position, std=0.02)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return logits, [batch, num_classes]."""
        x = self.patches(pictures).flatten(2).transpose(1, 2) + self.position
        return self.head(self.body(x).mean(1))  # type: ignore[no-any-return]


class WidenetBody(nn.Module):
    """The blocks of :class:`Widenet`, from tokens to tokens, [batch, tokens, d_model]."""

    def __init__(
        self,
        num_experts: int,
        capacity_factor: float,
        *,
        d_model: int = 768,
        d_ff: int = 4096,
        depth: int = 12,
        num_heads: int = 12,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.attention = nn.MultiheadAttention(d_model, num_heads, drop_rate, batch_first=True)
        router = Top2Router(capacity_factor, noisy_func=NormalNoiseGenerator(num_experts))
        experts = Experts(VanillaFFN, num_experts, **moe_mlp_args(d_model, d_ff, drop_rate))
        self.attention_norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(depth))
        self.expert_norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(depth))
        self.layers = nn.ModuleList(MoeLayer(d_model, num_experts, router, experts) for _ in range(depth))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Run all blocks."""
        for attention_norm, expert_norm, layer in zip(
            self.attention_norms, self.expert_norms, self.layers, strict=True
        ):
            normed = attention_norm(x)
            x = x + self.attention(normed, normed, normed, need_weights=False)[0]
            x = x + layer(expert_norm(x))
        return self.norm(x)  # type: ignore[no-any-return]
