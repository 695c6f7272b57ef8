"""Routers: choose the experts for each token, the tokens to drop, and the weights of the results.

A router has no weights and no state. A layer passes it the logits of its gate, so several layers may share
one router. All computation is in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gemini.errors import ConfigError

Noise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Routing:
    """The routing of the tokens of one pass.

    Attributes:
        experts: [tokens, k]; the first choice of each token comes first.
        weights: [tokens, k], fp32; 0 for a dropped choice.
        kept: [tokens, k]; None if nothing is dropped or padding.
        counts: [experts]; the number of choices of each expert, including dropped ones but not padding.
        mean_scores: [experts]; the mean probability of each expert over the tokens.
        balance_loss: num_experts * sum(share of choices * mean probability); 1 when balanced.
        z_loss: mean of logsumexp(logits)**2.
    """

    experts: Tensor
    weights: Tensor
    kept: Tensor | None
    counts: Tensor
    mean_scores: Tensor
    balance_loss: Tensor
    z_loss: Tensor


@dataclass(frozen=True)
class Capacity:
    """The number of choices that an expert accepts: k * factor * tokens / experts, at least ``minimum``.

    ``rounding``: "up", or "even", which rounds down and then up to an even number. ``eval_factor``: the
    factor outside of training; None: the same.
    """

    factor: float
    eval_factor: float | None = None
    minimum: int = 0
    rounding: Literal["up", "even"] = "up"

    def __post_init__(self) -> None:
        factors = (self.factor, self.factor if self.eval_factor is None else self.eval_factor)
        if not all(math.isfinite(each) and each > 0 for each in factors) or self.minimum < 0:
            raise ConfigError(
                f"{self} gives no capacity; give factors above 0 and a minimum of 0 or more, or pass "
                "capacity=None to drop no tokens"
            )

    def of(self, num_tokens: int, num_choices: int, num_experts: int, *, training: bool) -> int:
        """Return the number of choices that each expert accepts."""
        factor = self.factor if training or self.eval_factor is None else self.eval_factor
        wanted = num_choices * factor * num_tokens / num_experts
        if self.rounding == "up":
            return max(math.ceil(wanted), self.minimum)
        rounded = math.floor(wanted)
        return max(rounded + rounded % 2, self.minimum)


class NormalNoiseGenerator:
    """Adds normal noise with the standard deviation ``std`` to logits; None means 1 / num_experts."""

    def __init__(self, num_experts: int, *, std: float | None = None) -> None:
        self.std = 1 / num_experts if std is None else std

    def __call__(self, logits: Tensor) -> Tensor:
        """Return noisy logits, from torch's generator."""
        return logits + torch.randn_like(logits) * self.std


class UniformNoiseGenerator:
    """Multiplies logits by factors uniform in [1 - eps, 1 + eps]."""

    def __init__(self, eps: float = 1e-2) -> None:
        self.eps = eps

    def __call__(self, logits: Tensor) -> Tensor:
        """Return noisy logits, from torch's generator."""
        return logits * (1 + (2 * torch.rand_like(logits) - 1) * self.eps)


class TopKRouter(nn.Module):
    """Sends each token to the ``num_choices`` experts with the largest scores; among equal scores, to the
    lower index.

    Args:
        score: the function from logits to probabilities, "softmax" or "sigmoid".
        weights: the divisor of a token's weights: "none", 1; "chosen", the sum over its choices; "kept", the
            sum over its choices that are not dropped. None: "chosen", but "none" for one choice: a single
            weight divided by itself is 1, and the gate would get no gradient.
        capacity: None drops no choice.
        drop: which choices an expert with too many keeps. "position": all first choices before all second
            ones, then earlier tokens before later ones. "random": random ones in training, else as
            "position". "probability": those with the largest probabilities.
        noisy_func: changes the logits in training.
        weights_from: whether weights are probabilities of the "clean" or of the "noisy" logits.
    """

    def __init__(
        self,
        num_choices: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        weights: Literal["none", "chosen", "kept"] | None = None,
        capacity: Capacity | None = None,
        drop: Literal["position", "random", "probability"] = "position",
        noisy_func: Noise | None = None,
        weights_from: Literal["clean", "noisy"] = "clean",
    ) -> None:
        super().__init__()
        if num_choices < 1:
            raise ConfigError(f"a router makes {num_choices} choices for each token; give 1 or more")
        weights = weights or ("chosen" if num_choices > 1 else "none")
        for name, value, known in (
            ("score", score, ("softmax", "sigmoid")),
            ("weights", weights, ("none", "chosen", "kept")),
            ("drop", drop, ("position", "random", "probability")),
            ("weights_from", weights_from, ("clean", "noisy")),
        ):
            if value not in known:
                raise ConfigError(f"router: {name} is {value!r}; give one of {', '.join(known)}")
        if num_choices == 1 and weights != "none":
            raise ConfigError(
                f"router: weights={weights!r} makes the weight of a single choice 1, so the gate gets no "
                "gradient; write weights='none'"
            )
        self.num_choices, self.score, self.weights = num_choices, score, weights
        self.capacity, self.drop = capacity, drop
        self.noisy_func, self.weights_from = noisy_func, weights_from

    def forward(
        self, logits: Tensor, *, bias: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Routing:
        """Route tokens.

        Args:
            logits: [tokens, experts].
            bias: [experts], added to scores only to choose experts; weights do not contain it.
            token_mask: [tokens]; False for padding, which no expert computes and which uses no capacity.

        Raises:
            ConfigError: there are fewer experts than choices, or the mask has another shape.
        """
        num_tokens, num_experts = logits.shape
        if num_experts < self.num_choices:
            raise ConfigError(
                f"the router chooses {self.num_choices} of {num_experts} experts for each token; add experts "
                "or lower the number of choices"
            )
        mask = _checked_mask(token_mask, num_tokens)
        with no_autocast(logits):
            clean = logits.float()
            noisy = self.noisy_func(clean) if self.training and self.noisy_func is not None else clean
            scores = self._scores(noisy)
            biased = scores.detach() if bias is None else scores.detach() + bias.float()
            experts = biased.sort(dim=-1, descending=True, stable=True).indices[:, : self.num_choices]
            if noisy is not clean and self.weights_from == "clean":
                scores = self._scores(clean)
            kept = self._kept(experts, scores.detach().gather(1, experts), num_experts, mask)
            counts = _counts(experts, num_experts, mask)
            means = _mean(scores if self.score == "softmax" else scores / scores.sum(-1, keepdim=True), mask)
            return Routing(
                experts,
                self._weights(scores.gather(1, experts), kept),
                kept,
                counts,
                means,
                balance_loss(counts, means),
                _mean(clean.logsumexp(-1).square(), mask),
            )

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()

    def _weights(self, chosen: Tensor, kept: Tensor | None) -> Tensor:
        given = chosen if kept is None else torch.where(kept, chosen, 0.0)
        if self.weights == "none":
            return given
        total = (chosen if self.weights == "chosen" else given).sum(-1, keepdim=True)
        return given / total.clamp_min(torch.finfo(total.dtype).tiny)

    def _kept(
        self, experts: Tensor, probabilities: Tensor, num_experts: int, mask: Tensor | None
    ) -> Tensor | None:
        """Return which choices are computed; None if all are."""
        everyone = None if mask is None else mask[:, None].expand_as(experts)
        if self.capacity is None:
            return everyone
        num_tokens = len(experts) if mask is None or mask.is_meta else int(mask.sum())
        limit = self.capacity.of(num_tokens, self.num_choices, num_experts, training=self.training)
        if limit >= num_tokens:  # all fit: the choices of a token are different experts
            return everyone
        chosen = experts if everyone is None else torch.where(everyone, experts, num_experts)
        flat = chosen.T.reshape(-1)  # all first choices, then all second ones
        order = self._order(flat, probabilities)
        order = order[flat[order].argsort(stable=True)]  # sorted by expert, and by priority for each expert
        sizes = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
        starts = sizes.scatter_add(0, flat, torch.ones_like(flat)).cumsum(0).roll(1)
        starts[0] = 0
        place = torch.arange(len(flat), dtype=torch.int64, device=flat.device)
        rank = torch.empty_like(flat).scatter(0, order, place - starts[flat[order]])
        kept = (rank < limit) & (flat < num_experts)
        return kept.view(self.num_choices, -1).T

    def _order(self, flat: Tensor, probabilities: Tensor) -> Tensor:
        if self.drop == "probability":
            return probabilities.T.reshape(-1).argsort(descending=True, stable=True)
        if self.drop == "random" and self.training:
            return torch.rand(flat.shape, dtype=torch.float64, device=flat.device).argsort(stable=True)
        return torch.arange(len(flat), dtype=torch.int64, device=flat.device)

    def extra_repr(self) -> str:
        """Return the options for ``repr``."""
        return f"{self.num_choices}, score={self.score}, weights={self.weights}, capacity={self.capacity}"


class Top1Router(TopKRouter):
    """The router of the documents with one choice. Its weight is the probability, in training that of the
    noisy logits.

    An expert accepts floor(factor * tokens / experts) choices, rounded up to an even number, and at least
    ``min_capacity``. ``select_policy="first"`` drops later tokens, "random" drops random ones.
    ``drop_tks=False`` drops none.
    """

    def __init__(
        self,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        select_policy: Literal["first", "random"] = "first",
        noisy_func: Noise | None = None,
        drop_tks: bool = True,
    ) -> None:
        if select_policy not in ("first", "random"):
            raise ConfigError(f"Top1Router: select_policy is {select_policy!r}; give 'first' or 'random'")
        limits = Capacity(capacity_factor_train, capacity_factor_eval, min_capacity, "even")
        super().__init__(
            1,
            weights="none",
            capacity=limits if drop_tks else None,
            drop="position" if select_policy == "first" else "random",
            noisy_func=noisy_func,
            weights_from="noisy",
        )


class Top2Router(TopKRouter):
    """The router of the documents with two choices. Their weights are the probabilities, in training those of
    the noisy logits. If one choice is dropped, the weight of the other does not change.

    An expert accepts floor(2 * factor * tokens / experts) choices, rounded up to an even number, and at least
    ``min_capacity``. Second choices come after all first ones. ``drop_tks=False`` drops none.
    """

    def __init__(
        self,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        min_capacity: int = 4,
        noisy_func: Noise | None = None,
        drop_tks: bool = True,
    ) -> None:
        limits = Capacity(capacity_factor_train, capacity_factor_eval, min_capacity, "even")
        super().__init__(
            2,
            weights="none",
            capacity=limits if drop_tks else None,
            noisy_func=noisy_func,
            weights_from="noisy",
        )


def balance_loss(counts: Tensor, mean_scores: Tensor) -> Tensor:
    """Return num_experts * sum(share of choices * mean probability)."""
    return len(counts) * (counts / counts.sum().clamp_min(1) * mean_scores).sum()


def no_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which operators on ``tensor`` compute in the dtypes of their operands."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


def _checked_mask(token_mask: Tensor | None, num_tokens: int) -> Tensor | None:
    if token_mask is None:
        return None
    if token_mask.numel() != num_tokens:
        raise ConfigError(
            f"token_mask has the shape {tuple(token_mask.shape)} for {num_tokens} tokens; give one value for "
            "each token, 0 for padding"
        )
    return token_mask.reshape(-1).bool()


def _counts(experts: Tensor, num_experts: int, mask: Tensor | None) -> Tensor:
    ones = torch.ones_like(experts) if mask is None else mask[:, None].expand_as(experts).long()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add(0, experts.flatten(), ones.flatten())


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over tokens, without padding."""
    if mask is None:
        return values.sum(0) / max(len(values), 1)
    rows = mask if values.dim() == 1 else mask[:, None]
    return torch.where(rows, values, 0.0).sum(0) / mask.sum().clamp_min(1)
