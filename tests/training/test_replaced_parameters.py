"""Parameters that are set to other memory, named again or tied train as in torch, or are refused at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from training_harness import KIB, assert_same_state, moved_bytes, tight

from gemini import ConfigError, GeminiAdamOptimizer, GeminiDDP, HybridAdam, StateError, manage

WIDTH = 32


class LowRank(nn.Module):
    """Add a product of two small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((WIDTH, 2), 0.01))
        self.b = nn.Parameter(torch.full((2, WIDTH), 0.01))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight - self.a @ self.b


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def parametrized() -> nn.Sequential:
    net = network()
    parametrize.register_parametrization(net[0], "weight", LowRank())
    return net


@torch.no_grad()
def set_memory(net: Any) -> None:
    net[0].weight.set_(torch.eye(WIDTH))


def assign(net: Any) -> None:
    net[0].weight = torch.eye(WIDTH)


def merge(net: Any) -> None:
    parametrize.remove_parametrizations(net[0], "weight", leave_parametrized=True)


def name_again(net: Any) -> None:
    net[0].weight = nn.Parameter(net[0].weight)


def name_its_data(net: Any) -> None:
    net[0].weight = nn.Parameter(net[0].weight.data)


def freeze_its_data(net: Any) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach(), requires_grad=False)


def keep_a_view(net: Any) -> None:
    net[0].register_buffer("rows", net[0].weight.detach().t()[3:5])


def tie(net: Any) -> None:
    net[0].weight = net[5].weight


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("build", "change"),
    [
        (network, set_memory),
        (network, name_again),
        (network, tie),
        (parametrized, assign),
        (parametrized, merge),
    ],
)
def test_a_change_between_steps_is_trained_on(
    build: Callable[[], nn.Sequential], change: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    plain = build()
    by_hand = HybridAdam(plain.parameters(), lr=1e-2)
    net = build()
    with GeminiDDP(net, **tight(tmp_path, 24 * KIB)) as model:
        optimizer = GeminiAdamOptimizer(model, lr=1e-2)
        got, want = train(model, optimizer, 2), train(plain, by_hand, 2)
        change(net)
        if change is name_again:  # torch's optimizer holds the old name
            net[0].weight.requires_grad_()
        else:
            change(plain)
            assert_same_state(model.state_dict(), plain.state_dict())
        assert got + train(model, optimizer, 4) == want + train(plain, by_hand, 4)
        assert_same_state(model.state_dict(), plain.state_dict())
        assert moved_bytes(model.stats()) > 0


def test_a_norm_of_weights_is_taken_of_a_managed_layer(tmp_path: Path) -> None:
    net, plain = network(), network()
    parametrizations.weight_norm(plain[1])
    with GeminiDDP(net, **tight(tmp_path, 24 * KIB)) as model:
        parametrizations.weight_norm(net[1])
        x = torch.ones(2, WIDTH)
        assert torch.equal(model(x), plain(x))


def test_the_class_of_a_second_name_is_that_of_a_parameter(tmp_path: Path) -> None:
    net = network()
    with GeminiDDP(net, **tight(tmp_path, 24 * KIB)):
        again = nn.Parameter(net[0].weight, requires_grad=False)
        assert isinstance(again, nn.Parameter)
        assert not again.requires_grad
        assert net[0].weight.requires_grad
        assert torch.equal(again, net[0].weight)
        assert isinstance(nn.Parameter(net[0].weight.detach()), nn.Parameter)


def test_two_parameters_over_one_memory_are_refused(tmp_path: Path) -> None:
    net = network()
    net[1].weight.data = net[0].weight.data
    with pytest.raises(ConfigError, match=r"'0\.weight' and '1\.weight' share memory"):
        GeminiDDP(net, **tight(tmp_path, 24 * KIB))
    flat = torch.randn(2 * WIDTH)
    net = network()
    net[0].bias.data, net[1].bias.data = flat[:WIDTH], flat[WIDTH:]  # side by side
    net[1].weight.data = torch.randn(WIDTH, WIDTH)
    with GeminiDDP(net, **tight(tmp_path, 24 * KIB)) as model:
        with pytest.raises(ConfigError, match="tie"):
            net[1].weight.data = net[0].weight.data
        net[1].weight = nn.Parameter(net[0].weight)
        with pytest.raises(
            StateError, match=r"'0\.weight' and '1\.weight' are different tensors over the same memory"
        ):
            model(torch.ones(2, WIDTH))
        net[1].weight = net[0].weight
        assert model(torch.ones(2, WIDTH)).isfinite().all()


SECOND_NAMES = [name_again, name_its_data, freeze_its_data, keep_a_view, parametrizations.weight_norm]


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("change", SECOND_NAMES)
def test_what_names_a_weight_a_second_time_trains_and_outlives_management(
    change: Callable[[Any], object], precision: str | None, tmp_path: Path
) -> None:
    plain, net = network(), network()
    handle = manage(net, mixed_precision=precision, **tight(tmp_path, 24 * KIB))
    for each in (net, plain):
        change(each[0] if change is parametrizations.weight_norm else each)
    # torch's optimizers take parameters that came after wrapping.
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    by_hand = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    if precision is None:
        assert train(net, optimizer, 3) == train(plain, by_hand, 3)
    else:
        train(net, optimizer, 3)
        plain.load_state_dict(net.state_dict())
    handle.release()
    assert type(net) is nn.Sequential
    assert all(type(p) is nn.Parameter and p.is_leaf for p in net.parameters())
    if precision is None:
        assert_same_state(net.state_dict(), plain.state_dict())
        assert train(net, optimizer, 3) == train(plain, by_hand, 3)
        assert_same_state(net.state_dict(), plain.state_dict())
    else:
        got = {name: value.float() for name, value in net.state_dict().items()}
        assert all(map(torch.equal, got.values(), plain.state_dict().values()))
