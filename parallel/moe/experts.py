"""Experts: the feed-forward networks of a layer, their weights, and the seeds of these.

Feed-forward experts are parameters with one row per expert, which are multiplied in groups and which the
runtime recognizes. Experts of other classes are modules in a list. If ranks divide the experts, each has only
its own, with the initial weights that they would have in one process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.expert_ranks import ExpertRanks
from gemini.parallel.launch import global_context
from gemini.parallel.mesh import Axis
from gemini.parallel.moe.exchange import through_experts
from gemini.parallel.moe.router import no_autocast

Activation = Callable[[Tensor], Tensor]

_grouped_mm: Callable[..., Tensor] | None = getattr(functional, "grouped_mm", None)
_GROUPED = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}


class MoeEnv:
    """The ranks that have experts, set by the launch, and the seed of :func:`moe_set_seed`; read-only."""

    def __init__(self) -> None:
        self._seed: int | None = None
        self._num_layers = 0  # layers made since moe_set_seed()

    @property
    def model_parallel_size(self) -> int:
        """Return the number of processes that divide the experts of a layer."""
        return int(global_context.layout.ep)

    @property
    def data_parallel_size(self) -> int:
        """Return the number of processes that have the same experts."""
        return int(global_context.data_parallel_size) // self.model_parallel_size

    @property
    def data_ranks(self) -> Axis | None:
        """Return the ranks of data parallelism; None for one process, or before the launch."""
        return global_context.mesh.axis("dp") if global_context.is_launched else None

    def ranks_of(self, num_experts: int) -> ExpertRanks | None:
        """Return the ranks that divide a layer of ``num_experts``; None if each has all. Collective. Raises
        ConfigError if they cannot divide it.
        """
        if self.model_parallel_size == 1:
            return None
        return ExpertRanks.of(self.data_ranks, self.model_parallel_size, [num_experts])

    @property
    def seed(self) -> int | None:
        """Return the seed of :func:`moe_set_seed`; None before."""
        return self._seed

    def next_layer(self) -> tuple[int, int]:
        """Return the seed and the index of the next layer's experts."""
        if self._seed is None:
            return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu")), 0
        self._num_layers += 1
        return self._seed, self._num_layers - 1


# Global: a program's layers read their seed here without being passed it.
moe_env = MoeEnv()


def moe_set_seed(seed: int) -> None:
    """Make the weights of experts created from now on depend only on ``seed``, their layer and their index.

    Layers are counted from this call. Without a seed, each layer draws one from torch's generator. Dropout in
    experts that ranks divide also depends on the rank.
    """
    moe_env._seed, moe_env._num_layers = seed, 0


def expert_seed(seed: int, layer: int, expert: int) -> int:
    """Return the seed of one expert's weights."""
    digest = hashlib.sha256(f"{seed}/{layer}/{expert}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def stream_of(ranks: ExpertRanks | None, device: torch.device) -> Iterator[None]:
    """Use a random stream of this rank inside the block, for example for dropout of its experts; without
    ``ranks`` use torch's. The stream depends on torch's generator, so a recomputed block draws the same
    numbers.
    """
    if ranks is None:
        yield
        return
    drawn = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(expert_seed(drawn, moe_env.seed or 0, ranks.data.rank))
        yield


class VanillaFFN(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(
        self, d_model: int, d_ff: int, drop_rate: float = 0.0, activation: Activation = functional.gelu
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.activation, self.dropout = activation, nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers to tokens."""
        hidden = self.dropout(self.activation(self.up(x)))
        return self.dropout(self.down(hidden))  # type: ignore[no-any-return]


def moe_mlp_args(
    d_model: int, d_ff: int, drop_rate: float = 0.0, activation: Activation = functional.gelu
) -> dict[str, Any]:
    """Return the arguments of :class:`VanillaFFN`."""
    return {"d_model": d_model, "d_ff": d_ff, "drop_rate": drop_rate, "activation": activation}


def new_parameter(*shape: int) -> nn.Parameter:
    """Return an uninitialized parameter of torch's default device and dtype."""
    where, kind = torch.get_default_device(), torch.get_default_dtype()
    return nn.Parameter(torch.empty(shape, device=where, dtype=kind))


class ExpertArray(nn.Module):
    """``num_experts`` networks like :class:`VanillaFFN`, in parameters with one row per network. ``first`` is
    the index of the first one in its layer.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_ff: int,
        drop_rate: float = 0.0,
        activation: Activation = functional.gelu,
        *,
        seed: int,
        layer: int,
        first: int = 0,
    ) -> None:
        """The initial weights depend on ``seed`` and ``layer``."""
        super().__init__()
        self.num_experts, self.first = num_experts, first
        self.up = new_parameter(num_experts, d_ff, d_model)
        self.up_bias = new_parameter(num_experts, d_ff)
        self.down = new_parameter(num_experts, d_model, d_ff)
        self.down_bias = new_parameter(num_experts, d_model)
        self.activation, self.dropout = activation, nn.Dropout(drop_rate)
        self.seed, self.layer = seed, layer
        self.reset_parameters()

    def note_own(self, own: range) -> None:
        """Set which experts of the layer the parameters hold from now on."""
        self.num_experts, self.first = len(own), own.start

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each expert's weights from its own generator, uniformly as ``nn.Linear`` does."""
        if self.up.is_meta:
            return
        for expert in range(self.num_experts):
            generator = torch.Generator().manual_seed(expert_seed(self.seed, self.layer, self.first + expert))
            for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
                bound = 1 / math.sqrt(weight.shape[-1])
                for array in (weight, bias):
                    row = torch.empty(array.shape[1:], dtype=torch.float32, device="cpu")
                    array[expert].copy_(row.uniform_(-bound, bound, generator=generator))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' results for tokens sorted by expert; ``counts``: the number for each."""
        arrays = (tokens, self.up, self.up_bias, self.down, self.down_bias)
        kind = _autocast_type(tokens)
        with no_autocast(tokens):
            tokens, up, up_bias, down, down_bias = (
                arrays if kind is None else tuple(array.to(kind) for array in arrays)
            )
            product = _grouped if _can_group(tokens, up) else _one_by_one
            hidden = self.dropout(self.activation(product(tokens, up, up_bias, counts)))
            return self.dropout(product(hidden, down, down_bias, counts))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return f"{self.num_experts}, d_model={self.up.shape[2]}, d_ff={self.up.shape[1]}, first={self.first}"


class Experts(nn.Module):
    """The experts of a layer, all of class ``expert``, made with ``**expert_args``.

    :class:`VanillaFFN` becomes an :class:`ExpertArray`. Other classes become a list; a list built on ``meta``
    gets its weights later, from torch's generator. Layers may share one object. ``expert_cls`` is another
    name of ``expert``. ``layer_number=None`` takes the number of ``Experts`` made since :func:`moe_set_seed`.

    With ``parallel=dict(moe=dict(size=2))`` in the launch, ranks divide the experts: ``ranks`` are these
    ranks, and this rank makes only its own experts. A list then becomes a dict by expert index.

    Raises:
        ConfigError: no class or no number of experts is given, or ranks cannot divide so many.
    """

    def __init__(
        self,
        expert: Callable[..., nn.Module] | None = None,
        num_experts: int = 0,
        *,
        expert_cls: Callable[..., nn.Module] | None = None,
        layer_number: int | None = None,
        **expert_args: Any,
    ) -> None:
        super().__init__()
        made_by = expert or expert_cls
        if made_by is None or (expert is not None and expert_cls is not None):
            raise ConfigError(
                "Experts: the class of the experts is missing or given twice; pass it once, as "
                "expert=VanillaFFN"
            )
        if num_experts < 1:
            raise ConfigError(f"Experts: num_experts is {num_experts}; give 1 or more")
        self.num_experts = num_experts
        seed, counted = moe_env.next_layer()
        layer = counted if layer_number is None else layer_number
        self.array: ExpertArray | None = None
        self.experts: nn.ModuleList | nn.ModuleDict | None = None
        self.ranks = moe_env.ranks_of(num_experts)
        own = range(num_experts) if self.ranks is None else self.ranks.own(num_experts)
        if made_by is VanillaFFN:
            self.array = ExpertArray(len(own), **expert_args, seed=seed, layer=layer, first=own.start)
            return
        made = []
        for number in own:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(expert_seed(seed, layer, number))
                made.append(made_by(**expert_args))
        named = zip(map(str, own), made, strict=True)
        self.experts = nn.ModuleList(made) if self.ranks is None else nn.ModuleDict(dict(named))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' results for tokens sorted by expert; ``counts``: the number for each."""
        if self.ranks is None:
            return self._computed(tokens, counts)
        return through_experts(self.ranks.sharing, tokens, counts, self._computed_alike)

    def note_ranks(self, ranks: ExpertRanks) -> None:
        """Take part in the exchange from now on: parameters have only this rank's experts."""
        if self.array is not None:
            self.array.note_own(ranks.own(self.num_experts))
        self.ranks = ranks

    def _computed_alike(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Compute with the same operators as other ranks, however few tokens there are. Without any, compute
        with a row to discard, which gives gradients of zeros.
        """
        if len(tokens):
            return self._computed(tokens, counts)
        rows, counts = tokens.new_zeros(1, tokens.shape[1]), counts.clone()
        counts[0] = 1
        return self._computed(torch.cat([tokens, rows]), counts)[:0]

    def _computed(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return the results of this rank's experts for tokens that are sorted by expert."""
        draws = self.training and (self.array is None or self.array.dropout.p > 0)
        with stream_of(self.ranks if draws else None, tokens.device):
            if self.array is not None:
                return self.array(tokens, counts)  # type: ignore[no-any-return]
            assert self.experts is not None
            experts = self.experts.values() if isinstance(self.experts, nn.ModuleDict) else self.experts
            # With gradients, experts without tokens run too: their gradients must be zeros, not None.
            pairs = zip(experts, tokens.split(_sizes(counts, len(tokens))), strict=True)
            runs = torch.is_grad_enabled() or not len(tokens)
            return torch.cat([expert(part) for expert, part in pairs if runs or len(part)])


def _autocast_type(tokens: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast; None outside autocast."""
    kind = tokens.device.type
    if tokens.is_meta:
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _can_group(tokens: Tensor, weight: Tensor) -> bool:
    """Return whether torch can multiply these in groups: the dtype is supported, and rows are multiples of 16
    bytes in both layouts.
    """
    if _grouped_mm is None or tokens.dtype != weight.dtype or not len(tokens):
        return False
    is_aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    return is_aligned and tokens.dtype in _GROUPED.get(tokens.device.type, ())


def _grouped(tokens: Tensor, weight: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """Multiply each token by the matrix of its expert, in one call."""
    assert _grouped_mm is not None
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = torch.arange(len(counts), dtype=torch.int64, device=counts.device)
    owner = rows.repeat_interleave(counts, output_size=len(tokens))
    return _grouped_mm(tokens, weight.transpose(-2, -1), offs=ends) + bias[owner]


def _one_by_one(tokens: Tensor, weight: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """Multiply the tokens of each expert by its matrix, expert by expert."""
    # unbind: the backward of weight[e] would allocate a tensor of the whole parameter for each expert.
    parts = zip(tokens.split(_sizes(counts, len(tokens))), weight.unbind(), bias.unbind(), strict=True)
    return torch.cat([functional.linear(part, matrix, added) for part, matrix, added in parts])


def _sizes(counts: Tensor, num_tokens: int) -> list[int]:
    """Return the number of tokens for each expert; on meta, equal numbers."""
    if not counts.is_meta:
        return [int(size) for size in counts.tolist()]
    share, rest = divmod(num_tokens, len(counts))
    return [share + (number < rest) for number in range(len(counts))]
