"""Divide the experts of a whole model among ranks: those of :class:`Experts`, and modules of transformers
with one row of parameters per expert, called with tokens, choices and weights. Model code does not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gemini.errors import ConfigError
from gemini.parallel.expert_ranks import DividedExperts, ExpertRanks
from gemini.parallel.mesh import Axis
from gemini.parallel.moe.exchange import through_experts
from gemini.parallel.moe.experts import Experts
from gemini.parallel.moe.layer import MoeLayer
from gemini.runtime.storage.experts import expert_sets
from gemini.system.subclassing import mix_in


class CalledByChoice(nn.Module):
    """Experts called as ``experts(tokens, chosen, weights)``, with some of them on this rank.

    The module computes with its own forward pass, in the implementation that its model chooses. A token that
    arrives is passed to it as a token with a single choice, of weight 1.
    """

    ranks: ExpertRanks
    num_experts: int  # on this rank

    def note_ranks(self, ranks: ExpertRanks) -> None:
        """Take part in the exchange from now on: parameters have only this rank's experts."""
        self.num_experts = len(ranks.own(self.num_experts))
        self.ranks = ranks

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return, for each token, the weighted sum over its choices, in their order."""
        width, num_choices = hidden_states.shape[-1], top_k_index.shape[-1]
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)
        num_experts = self.ranks.size * self.num_experts
        counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        rows = hidden_states.reshape(-1, width).index_select(0, order // num_choices)
        made = through_experts(self.ranks.sharing, rows, counts, self._computed)
        results = torch.empty_like(made).index_copy(0, order, made)
        weighted = results.view(-1, num_choices, width) * top_k_weights.reshape(-1, num_choices, 1)
        return weighted.sum(1).to(hidden_states.dtype).view(hidden_states.shape)

    def _computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        num_rows = len(rows)
        numbers = torch.arange(len(counts), dtype=torch.int64, device=rows.device)
        chosen = numbers.repeat_interleave(counts, output_size=num_rows)
        idle = numbers[counts == 0]
        if len(idle):  # discarded rows: all ranks run the same operators; zero gradients
            rows, chosen = (
                torch.cat([rows, rows.new_zeros(len(idle), rows.shape[1])]),
                torch.cat([chosen, idle]),
            )
        made: Tensor = super().forward(rows, chosen[:, None], rows.new_ones(len(rows), 1))
        return made[:num_rows]


def divided_experts(model: nn.Module) -> DividedExperts | None:
    """Return the parameters of ``model`` that hold only this rank's experts; None if each rank has all
    experts.

    Raises:
        ConfigError: layers are divided among different numbers of ranks.
    """
    params: dict[int, nn.Parameter] = {}
    drawn: dict[int, nn.Parameter] = {}
    by_size: dict[int, ExpertRanks] = {}
    for module in model.modules():
        if isinstance(module, (Experts, CalledByChoice)) and module.ranks is not None:
            own = {id(param): param for param in module.parameters()}
            params |= own
            drawn |= own if isinstance(module, Experts) else {}
            by_size[module.ranks.size] = module.ranks
    if len(by_size) > 1:
        sizes = " and among ".join(map(str, sorted(by_size)))
        raise ConfigError(
            f"layers divide their experts among {sizes} ranks; choose a size that divides every layer's "
            "number of experts"
        )
    each = list(params.values()), list(drawn.values())
    return next((DividedExperts(ranks, *each) for ranks in by_size.values()), None)


def expert_ranks_of(model: nn.Module, data: Axis | None, size: int, *, apart: int = 1) -> ExpertRanks | None:
    """Return the ranks to divide the experts of the whole ``model``; None if each rank will have all. Changes
    nothing.

    Args:
        data: the ranks of data parallelism, None for one process. Collective over them.
        size: the number of neighbouring ranks that divide the experts. If a layer has fewer experts, that
            many ranks divide those of all layers.
        apart: the number of consecutive ranks of ``data`` with parts of the same sequences.

    Raises:
        ConfigError: the model has no experts, some that cannot be divided, or not among so many ranks (the
            message says among how many).
    """
    if (found := divided_experts(model)) is not None:
        _refuse_lists([module for module in model.modules() if isinstance(module, Experts)])
        return found.ranks
    counts = [module.num_experts for module in _divisible(model)]
    if not counts:
        raise ConfigError(f"{type(model).__name__} has no experts to divide among ranks; leave out ep_size")
    return ExpertRanks.of(data, size, counts, apart=apart)


def divide_experts(model: nn.Module, ranks: ExpertRanks) -> DividedExperts | None:
    """Keep only this rank's experts in ``model``, or in a part of one, in place. Return their parameters,
    None if the part has no experts. Parameters keep their identity; values come from the first rank.
    Collective over the ranks of data parallelism; see :func:`expert_ranks_of`.
    """
    for layer in model.modules():
        if isinstance(layer, MoeLayer):
            layer.note_data_ranks(ranks.data)
    if divided_experts(model) is None:
        for module in _divisible(model):
            _divide(module, ranks)
    return divided_experts(model)


def _divisible(model: nn.Module) -> list[Any]:
    """Return the modules with experts. Raises ConfigError for experts that cannot be divided."""
    ours = [module for module in model.modules() if isinstance(module, Experts)]
    _refuse_lists(ours)
    within = {id(part) for module in ours for part in module.modules()}
    sets = [(each, model.get_submodule(each.name)) for each in expert_sets(model)]
    others = [(each, module) for each, module in sets if id(module) not in within]
    for each, module in others:
        params = list(module.parameters())
        if any(param.dim() < 2 or len(param) != each.count for param in params):
            raise ConfigError(
                f"the experts {each.name!r} do not have parameters with one row for each of {each.count} "
                "experts, so they cannot be divided; leave out ep_size"
            )
        if len(inspect.signature(module.forward).parameters) != 3:
            raise ConfigError(
                f"the experts {each.name!r} have forward{inspect.signature(module.forward)}, but divided "
                "experts take tokens, choices and weights; leave out ep_size"
            )
    return [*ours, *(module for _, module in others)]


def _refuse_lists(modules: Sequence[Experts]) -> None:
    if any(module.array is None for module in modules):
        raise ConfigError(
            "Experts of your own class are a list of modules, but checkpoint files store experts as rows of "
            "parameters; use VanillaFFN, or write your own training loop with MoeGradientHandler"
        )


@torch.no_grad()
def _divide(module: Any, ranks: ExpertRanks) -> None:
    own = ranks.own(module.num_experts)
    for param in module.parameters():
        if param.grad is not None:
            raise ConfigError("experts already have gradients; divide the model before training")
        whole = param.detach().contiguous()
        if not whole.is_meta:
            ranks.data.broadcast(whole)
        param.data = whole[own.start : own.stop].clone()
    if not isinstance(module, Experts):
        mix_in(module, CalledByChoice)
    module.note_ranks(ranks)
