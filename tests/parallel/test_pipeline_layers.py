"""Stages built by hand: rows of layers, and weights that stages share."""

from __future__ import annotations

import pytest
import torch
from processes import run_on_ranks
from torch import Tensor, nn

from gemini import ConfigError
from gemini.parallel import Layout, Mesh
from gemini.parallel.pipeline import PipelinableContext, SharedParameters


class Net(nn.Module):
    """Registered in another order than it runs, with a function in between."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.conv = nn.Conv2d(1, 2, 2)
        self.blocks = nn.Sequential(nn.ReLU(), nn.Conv2d(2, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.flatten(self.blocks(self.conv(x)), 1))
        return out


STEPS = ["conv", "blocks.0", "blocks.1", (lambda x: torch.flatten(x, 1), "behind"), "head"]


@pytest.mark.parametrize("policy", ["uniform", "balanced"])
@pytest.mark.parametrize(("chunks", "ranks"), [(1, 1), (1, 2), (1, 5), (2, 2)])
def test_the_stages_of_all_ranks_are_the_model(policy: str, chunks: int, ranks: int) -> None:
    pipelinable = PipelinableContext(policy)
    with pipelinable:
        model = Net()
    assert pipelinable.model is model
    pipelinable.to_layer_list(STEPS)
    every = [pipelinable.partition(chunks, ranks, rank) for rank in range(ranks)]
    x = images = torch.rand(4, 1, 4, 4)
    for chunk in range(chunks):
        for stage in every:
            x = (stage[chunk] if isinstance(stage, nn.ModuleList) else stage)(x)
    assert torch.equal(x, model(images))
    own = [id(param) for stage in every for param in stage.parameters()]
    assert sorted(own) == sorted(id(param) for param in model.parameters())


def test_the_model_built_within_is_kept_and_none_outside() -> None:
    pipelinable = PipelinableContext()
    with pytest.raises(RuntimeError, match="not built"), pipelinable:
        raise RuntimeError("not built")
    Net()
    assert pipelinable.model is None
    with pipelinable:
        model = nn.Sequential(Net(), nn.ReLU())
    Net()
    assert pipelinable.model is model


def test_what_cannot_be_is_refused() -> None:
    pipelinable = PipelinableContext()
    with pytest.raises(ConfigError, match="no model was built"):
        pipelinable.partition(1, 2, 0)
    with pipelinable:
        Net()
    for steps, message in (
        (["nose"], "no module 'nose'"),
        ([(3, "behind")], "is neither"),
        ([torch.relu], "is neither"),
    ):
        with pytest.raises(ConfigError, match=message):
            pipelinable.to_layer_list(steps)
    pipelinable.to_layer_list(STEPS)
    with pytest.raises(ConfigError, match="5 layers"):
        pipelinable.partition(1, 6, 0)
    with pytest.raises(ConfigError, match="0 to 1"):
        pipelinable.partition(1, 2, 2)
    with pytest.raises(ConfigError, match="policy"):
        PipelinableContext("random")
    with pytest.raises(ConfigError, match="ranks 0 to 0"):
        SharedParameters(None, [0, 1])
    SharedParameters(None, [0]).add_up()


def _share() -> list[list[float]]:
    """The first and the last stage share a weight, and one of them makes no gradient of a second."""
    with Mesh(Layout(pp=2)) as mesh:
        axis = mesh.axis("pp")
        assert axis is not None
        shared, module = SharedParameters(axis, [0, axis.size - 1]), nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            module.weight.fill_(axis.rank + 1.0)
        shared.register_module(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        optimizer.register_step_pre_hook(shared.add_up)
        seen = [module.weight.flatten().tolist()]
        for step in range(3):
            if step == 0 or (step == 1 and axis.rank == 0):
                (module.weight * (axis.rank + 1.0)).sum().backward()
            optimizer.step()
            assert (module.weight.grad is None) == (step == 2)
            optimizer.zero_grad()
            seen.append(module.weight.flatten().tolist())
        return seen


def test_shared_parameters_begin_alike_and_stay_so() -> None:
    first, last = run_on_ranks(_share, 2)
    assert first == last == [[1.0, 1.0], [-2.0, -2.0], [-3.0, -3.0], [-3.0, -3.0]]
