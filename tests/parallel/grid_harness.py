"""What the tests of layers over grids share: meshes of each mode, and a comparison with one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensor_harness import relative
from torch import Tensor, nn
from torch import distributed as dist

from gemini.parallel import Layout, Mesh
from gemini.parallel.tensor.nn import over, partition_of

# By mode: its ranks and the rest of its layout.
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "1d": (2, {"tp": 2, "mode": "1d"}),
    "2d": (4, {"tp": 4, "mode": "2d"}),
    "2.5d": (8, {"tp": 8, "mode": "2.5d", "depth": 2}),
    "3d": (8, {"tp": 8, "mode": "3d"}),
}


def grid_mesh(mode: str) -> Mesh:
    """Return the mesh of a mode over its ranks, and over more as data parallelism."""
    layout = MODES[mode][1]
    return Mesh(Layout(**layout, dp=dist.get_world_size() // layout["tp"]))


def built_whole(build: Callable[[], nn.Module], seed: int = 11) -> nn.Module:
    """Return a model as one process has it."""
    torch.manual_seed(seed)
    with over(None):
        return build()


def compare(mesh: Mesh, build: Callable[[], nn.Module], x: Tensor, **where: bool) -> dict[str, float]:
    """Return the relative errors of a layer's output and gradients, by name; ``out_inside`` and ``in_inside``
    say where output and input lie."""
    whole = built_whole(build)
    torch.manual_seed(11 + dist.get_rank())  # the first rank's generator is taken
    with over(mesh, gathers_again=where.get("again", False)) as grid:
        model = build()
    wanted_x = x.clone().requires_grad_(x.is_floating_point())
    wanted = whole(wanted_x)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(6))
    (wanted * weights).sum().backward()

    out_inside, in_inside = where.get("out_inside", False), where.get("in_inside", False)
    is_features = x.is_floating_point() and x.dim() < 4
    own_x = grid.own_part(x, inside=in_inside) if is_features else grid.own_batch(x)
    own_x.requires_grad_(x.is_floating_point())
    out = model(own_x)
    (out * grid.own_part(weights, inside=out_inside)).sum().backward()

    errors = {"output": relative(grid.whole(out, inside=out_inside), wanted.detach())}
    if is_features:
        assert own_x.grad is not None
        errors["input"] = relative(grid.whole(own_x.grad, inside=in_inside), wanted_x.grad)
    partition = partition_of(model)
    first = partition.gather_state(model.state_dict())
    grads = partition.gather_state({name: param.grad for name, param in model.named_parameters()})
    for name, param in whole.named_parameters():
        assert torch.equal(first[name], param), name
        errors[name] = relative(grads[name], param.grad)
    return errors
