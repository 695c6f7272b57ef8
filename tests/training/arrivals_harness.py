"""What the tests of parameters that come later share: a module, and changes of it while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gemini
from gemini import CPUAdam, GeminiOptimizer

WIDTH, DEPTH, STEPS = 48, 4, 10
KIB = 2**10


def block(seed: int, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=bias), nn.Tanh())


def stack() -> nn.Sequential:
    return nn.Sequential(*(block(seed) for seed in range(DEPTH)))


def tight(directory: Path, device: int = 160, **options: Any) -> dict[str, Any]:
    return {
        "placement_policy": "const",
        "device_bytes": device * KIB,
        "non_model_bytes": 0,
        "min_chunk_size_mb": 1 / 64,
        "search_range_mb": 1 / 64,
        "disk_dir": str(directory),
        **options,
    }


def inputs(step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss = model(inputs(step)).float().square().mean()
    if isinstance(optimizer, GeminiOptimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def put_new_head(net: nn.Sequential) -> Iterator[nn.Parameter]:
    net[-1] = block(71)
    return net[-1].parameters()


def add_a_layer(net: nn.Sequential) -> Iterator[nn.Parameter]:
    net.append(block(72, bias=False))
    return net[-1].parameters()


def add_a_large_one(net: nn.Sequential) -> Iterator[nn.Parameter]:
    torch.manual_seed(73)
    net.append(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)))
    return net[-1].parameters()


def wrap_a_layer(net: nn.Sequential) -> Iterator[nn.Parameter]:
    """Put an adapter around the first layer, whose parameters get other names by that."""
    net[0] = nn.Sequential(net[0], block(74))
    return net[0][1].parameters()


CHANGES: list[Callable[[nn.Sequential], Iterator[nn.Parameter]]] = [
    put_new_head,
    add_a_layer,
    wrap_a_layer,
    add_a_large_one,
]


def train(
    net: nn.Sequential, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS
) -> dict[str, Tensor]:
    """Train, and change the module after every second step."""
    for step in range(steps):
        if step % 2 == 0 and 0 < step // 2 <= len(CHANGES):
            new = CHANGES[step // 2 - 1](net)
            optimizer.add_param_group({"params": list(new), "lr": 3e-3})
        train_step(model, optimizer, step)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda params: CPUAdam(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "lion": lambda params: gemini.Lion(params, lr=1e-3),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}
