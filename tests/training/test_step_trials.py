"""Steps that depend on the shapes of parameters, and parameters without dimensions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from same_bits import assert_same
from test_rules import RULES, Make, mlp, square, tight
from test_stepped_rules import ELEMENT_WISE, train, train_plain
from torch import Tensor, nn
from training_harness import seeded

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer, Lamb, StateError
from gemini.optim.trials import Form

WIDTH = 32


class Scaled(nn.Module):
    """A parameter without dimensions before a layer, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale) + self.shift


class Scalars(nn.Module):
    """No parameter that has a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


ALL_RULES: dict[str, Make] = {
    **RULES,
    **ELEMENT_WISE,
    "cpu adam": CPUAdam,
    "lamb": lambda params: Lamb(params, lr=0.05),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
}
TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "device": lambda directory: {},
    "host": lambda directory: {"placement_policy": "cpu", "host_bytes": "1MiB", "non_model_bytes": 0},
    "disk": lambda directory: tight(directory, 200_000),
}


@pairs(rule=list(ALL_RULES), tier=list(TIERS), net=[Scaled, Scalars])
def test_parameters_without_dimensions_have_the_bits_of_plain_training(
    rule: str, tier: str, net: Callable[[], nn.Module], tmp_path: Path
) -> None:
    plain, managed = seeded(net), seeded(net)
    optimizer = ALL_RULES[rule](plain.parameters())
    train_plain(plain, [optimizer], square, range(4))
    with GeminiDDP(managed, **TIERS[tier](tmp_path)) as model:
        driven = GeminiOptimizer(ALL_RULES[rule](managed.parameters()), model)
        train(model, [driven], square, range(4))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
        assert_same(driven.state_dict()["state"], optimizer.state_dict()["state"])


class ByShape(torch.optim.Optimizer):
    """Element by element, but for what it does to tensors that ``chosen`` picks."""

    def __init__(
        self, params: Any, chosen: Callable[[Tensor], bool], act: Callable[[Tensor], Tensor]
    ) -> None:
        self.chosen, self.act = chosen, act
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    change = self.act(param) if self.chosen(param) else param.grad
                    param.sub_(change, alpha=group["lr"])


def longer(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad * 1.5


def decayed(param: Tensor) -> Tensor:
    """As is usual for matrices; beside a large gradient nothing of it is left."""
    assert param.grad is not None
    return param.grad + 0.1 * param


def centred(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad - param.grad.mean(0, keepdim=True)


OTHER_RULES: dict[str, tuple[Callable[[Tensor], bool], Callable[[Tensor], Tensor]]] = {
    "matrices": (lambda param: param.dim() > 1, decayed),
    "kernels": (lambda param: param.dim() == 3, longer),
    "no dimensions": (lambda param: param.dim() == 0, decayed),
    "vectors": (lambda param: param.dim() == 1, decayed),
    "large ones": (lambda param: param.numel() > 500, longer),
    "all but small ones": (lambda param: param.numel() > 100, longer),
    "wide ones": (lambda param: param.dim() > 1 and param.shape[-1] >= 32, decayed),
    "square ones": (lambda param: param.dim() == 2 and param.shape[0] == param.shape[1], decayed),
    "columns": (lambda param: param.dim() > 1, centred),
    "steep ones": (lambda param: bool(param.grad.norm() > 1e3), decayed),
    "flat ones": (lambda param: bool(param.grad.norm() < 1e-6), decayed),
    "order of memory": (lambda param: param.dim() == 2 and not param.is_contiguous(), decayed),
}


def shapes() -> nn.Module:
    net = nn.Sequential(
        nn.Unflatten(1, (8, 4)), nn.Conv1d(8, 24, 3), nn.Flatten(), nn.Linear(48, 48), Scaled()
    )
    net[4].layer = nn.Linear(48, 20)  # 960 elements, transposed
    net[4].layer.weight.data = net[4].layer.weight.data.t().contiguous().t()
    return net


@pytest.mark.parametrize("other", OTHER_RULES)
def test_a_step_that_depends_on_the_shape_is_not_taken_for_element_wise(other: str, tmp_path: Path) -> None:
    net = seeded(shapes)
    with GeminiDDP(net, **tight(tmp_path, 100_000)) as model:
        with pytest.raises(ConfigError, match="ByShape was said to be element-wise"):
            GeminiOptimizer(ByShape(net.parameters(), *OTHER_RULES[other]), model, elementwise=True)
        assert {chunk.spec.label for chunk in model.manager.chunks.chunks} == {"param", "grad"}


@pytest.mark.parametrize(
    ("chosen", "act"),
    [
        (lambda param: param.numel() > 2**16, longer),
        (lambda _: True, lambda param: param.grad / param.numel()),
    ],
)
def test_a_step_that_depends_on_sizes_beyond_those_that_are_tried_is_refused(
    chosen: Callable[[Tensor], bool], act: Callable[[Tensor], Tensor]
) -> None:
    net = nn.Linear(20, 2**12, bias=False)
    with (
        GeminiDDP(net) as model,
        pytest.raises(ConfigError, match="ByShape was said to be element-wise, and"),
    ):
        GeminiOptimizer(ByShape(net.parameters(), chosen, act), model, elementwise=True)


class Counting(torch.optim.Optimizer):
    """Counts in a list that it keeps, from some step on."""

    def __init__(self, params: Any, first: int) -> None:
        self.counts, self.first = [0], first
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            if state["step"] >= self.first:
                self.counts[0] += 1
            param.sub_(param.grad, alpha=self.param_groups[0]["lr"])


def test_a_list_that_pieces_would_share_is_seen_and_no_trial_writes_to_it(tmp_path: Path) -> None:
    net = seeded(mlp)
    with GeminiDDP(net, **tight(tmp_path, 200_000)) as model:
        inner = Counting(net.parameters(), first=2)
        with pytest.raises(ConfigError, match="its step writes to counts"):
            GeminiOptimizer(inner, model, elementwise=True)
        assert inner.counts == [0]
        inner = Counting(net.parameters(), first=20)
        managed = GeminiOptimizer(inner, model, elementwise=True, overlap=False)
        train(model, [managed], square, range(19))
        with pytest.raises(StateError, match=r"did not when it was tried .* its step changes counts"):
            train(model, [managed], square, range(19, 20))
        assert inner.counts == [0]


def test_an_element_wise_step_passes_with_every_shape(tmp_path: Path) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return ByShape(params, lambda param: True, decayed)

    plain, net = seeded(shapes), seeded(shapes)
    train_plain(plain, [make(plain.parameters())], square, range(4))
    with GeminiDDP(net, **tight(tmp_path, 100_000)) as model:
        train(model, [GeminiOptimizer(make(net.parameters()), model, elementwise=True)], square, range(4))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_learning_rates_that_print_alike_stay_those_of_their_groups(tmp_path: Path) -> None:
    def make(net: nn.Module) -> torch.optim.Optimizer:
        rates = torch.tensor(0.01), torch.tensor(0.010000002)
        assert repr(rates[0]) == repr(rates[1])
        groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(net, rates, strict=True)]
        return torch.optim.Adam(groups)

    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    plain, net = seeded(layers), seeded(layers)
    train_plain(plain, [make(plain)], square, range(6))
    with GeminiDDP(net) as model:
        train(model, [GeminiOptimizer(make(net), model)], square, range(6))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_form_is_made_smaller_in_its_own_order() -> None:
    assert Form((1000, 1000), (1, 1000)).bounded(2**16) == Form((250, 250), (1, 250))
    assert Form((50000, 64), (64, 1)).bounded(2**16) == Form((782, 64), (64, 1))
    assert Form((), ()).bounded(1) == Form((), ())
