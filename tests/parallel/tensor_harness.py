"""What the tests of tensor parallelism share: models, and a comparison with the whole one in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gemini.parallel import Layout, Mesh, parallelize
from gemini.parallel.partition import Partition

TOLERANCE = 1e-5
WIDTH, HEADS = 32, 4


class Mlp(nn.Module):
    """Two projections and a norm that nobody cuts; ``odd`` outputs of the last one."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=bias)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))))
        return out


class Language(nn.Module):
    """A model of tokens whose head may be tied to its embedding, in a vocabulary that no size divides."""

    VOCABULARY = 37

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        self.head = nn.Linear(WIDTH, self.VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


LANGUAGE_PLAN = {
    "embedding": "embedding_rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


@dataclass
class Measured:
    """What a model computed: output, loss and the gradients of inputs and weights, by name."""

    output: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)


def measure(model: nn.Module, inputs: tuple[Tensor, ...]) -> Measured:
    """Run the model forward and backward."""
    inputs = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in inputs)
    output = model(*inputs)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    (output * weights).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    grads |= {f"input {index}": x.grad for index, x in enumerate(inputs) if x.grad is not None}
    return Measured(output.detach(), grads)


def relative(got: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))


def make_mesh(**sizes: int) -> Mesh:
    """Return the mesh of all ranks with these sizes."""
    return Mesh(Layout(**sizes))


def compare_to_whole(
    build: Callable[[], nn.Module], plan: Any, inputs: tuple[Tensor, ...]
) -> dict[str, float]:
    """Return the relative errors of a cut model's output and gradients, by name."""
    torch.manual_seed(11)
    wanted = measure(build(), inputs)
    torch.manual_seed(11)
    model = build()
    partition = parallelize(model, make_mesh(tp=dist.get_world_size()), plan)
    got = measure(model, inputs)
    grads = partition.gather_state(got.grads)
    assert grads.keys() == wanted.grads.keys()
    errors = {name: relative(grads[name], wanted.grads[name]) for name in grads}
    return errors | {"output": relative(got.output, wanted.output)}


def gathered(model: nn.Module, partition: Partition) -> dict[str, Tensor]:
    """Return the weights of a cut model as those of the whole one, in memory of their own."""
    return {key: value.detach().clone() for key, value in partition.gather_state(model.state_dict()).items()}
