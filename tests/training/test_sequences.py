"""Any sequence of uses gives what it gives on the unmanaged model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from torch import Tensor, nn
from training_harness import KIB, assert_same_state, assert_within_budgets, seeded, tight
from training_models import Around, square_loss

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer

Use = Callable[["Side", int], Any]


class Core(nn.Module):
    """Three layers, the middle one skipped on some inputs, and a place to raise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norm = nn.LayerNorm(32)
        self.skip = False
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers; the first weight is used again at the end."""
        x = torch.tanh(self.layers[0](x))
        x = x if self.skip else torch.tanh(self.layers[1](x))
        if self.fail:
            raise ValueError("as asked")
        return self.norm(self.layers[2](x)) @ self.layers[0].weight


class Side:
    """One of the two models of a comparison with its optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.module: Around = getattr(model, "module", model)
        self.optimizer = optimizer

    def param(self, index: int) -> nn.Parameter:
        """Return one of the parameters."""
        params = list(self.module.parameters())
        return params[index % len(params)]


def backward(side: Side, index: int) -> Any:
    loss = square_loss(side.model, index)
    loss.backward()
    return loss.item()


def train(side: Side, index: int) -> Any:
    side.module.core.skip = index % 3 == 0
    loss = backward(side, index)
    side.optimizer.step()
    side.optimizer.zero_grad()
    return loss


def evaluate(side: Side, index: int) -> Any:
    with torch.no_grad():
        return square_loss(side.model, index).item()


def forward_only(side: Side, index: int) -> Any:
    return square_loss(side.model, index).item()


def fail(side: Side, index: int) -> Any:
    side.module.core.fail = True
    with pytest.raises(ValueError, match="as asked"):
        square_loss(side.model, index)
    side.module.core.fail = False


def forget_gradients(side: Side, index: int) -> Any:
    side.optimizer.zero_grad()


def read(side: Side, index: int) -> Any:
    return side.param(index).norm().item(), side.param(index + 1).detach().sum().item()


def read_gradient(side: Side, index: int) -> Any:
    grad = side.param(index).grad
    return None if grad is None else grad.sum().item()


def write(side: Side, index: int) -> Any:
    with torch.no_grad():
        side.param(index).mul_(0.9)
        side.param(index + 2).data.add_(0.01)


def copy_between(side: Side, index: int) -> Any:
    with torch.no_grad():
        side.module.core.layers[index % 3].weight.copy_(side.module.core.layers[(index + 1) % 3].weight)


def scale_gradient(side: Side, index: int) -> Any:
    param = side.param(index)
    if param.grad is not None:
        param.grad.mul_(0.5)


def drop_one_gradient(side: Side, index: int) -> Any:
    side.param(index).grad = None


def freeze_or_thaw(side: Side, index: int) -> Any:
    side.param(index).requires_grad_(not side.param(index).requires_grad)


def reload(side: Side, index: int) -> Any:
    state = {key: value * 0.99 for key, value in side.model.state_dict().items()}
    side.model.load_state_dict(state)


def reload_optimizer(side: Side, index: int) -> Any:
    side.optimizer.load_state_dict(side.optimizer.state_dict())


def clip(side: Side, index: int) -> Any:
    return nn.utils.clip_grad_norm_(list(side.module.parameters()), 0.05).item()


USES: tuple[Use, ...] = (
    *(train,) * 6,
    backward,
    evaluate,
    forward_only,
    fail,
    forget_gradients,
    read,
    read_gradient,
    write,
    copy_between,
    scale_gradient,
    drop_one_gradient,
    freeze_or_thaw,
    reload,
    reload_optimizer,
    clip,
)


@settings(
    max_examples=num_examples(30),
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    uses=st.lists(st.tuples(st.sampled_from(USES), st.integers(0, 30)), min_size=4, max_size=14),
    device_kib=st.sampled_from([24, 40, 64, 96, 1024]),
    host_kib=st.sampled_from([0, 0, 24, 80]),
)
def test_any_sequence_of_uses_gives_the_same_results(
    tmp_path_factory: pytest.TempPathFactory,
    uses: list[tuple[Use, int]],
    device_kib: int,
    host_kib: int,
) -> None:
    plain = seeded(lambda: Around(Core()))
    want = Side(plain, CPUAdam(plain.parameters(), lr=1e-2))
    options = tight(tmp_path_factory.mktemp("disk"), device_kib * KIB, host_bytes=host_kib * KIB)
    with GeminiDDP(seeded(lambda: Around(Core())), **options) as model:
        got = Side(model, GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model))
        for use, index in uses:
            assert use(got, index) == use(want, index), use.__name__
        assert_same_state(model.state_dict(), plain.state_dict())
        assert_within_budgets(model.stats())
        model.manager.chunks.table.check_invariants()
