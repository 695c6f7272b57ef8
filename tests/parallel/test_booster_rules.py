"""GeminiPlugin with any optimizer: the bits of the unmanaged model, and refusals that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ConfigError, HybridAdam, Lion, OutOfBudgetError
from gemini.parallel import Booster, GeminiPlugin
from gemini.runtime import ManagedParameter

STEPS = 5


class Unknown(torch.optim.Optimizer):
    """Counts in its group; keeps a list of factors of matrices, and of vectors an array instead."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                state, grad = self.state[param], param.grad
                if param.dim() == 1:
                    change = state.setdefault("mean", torch.zeros_like(param)).lerp_(grad, 0.3)
                else:
                    rows, columns = state.setdefault("factors", [grad.new_zeros(64, 1), grad.new_zeros(64)])
                    rows.lerp_(grad.square().mean(1, keepdim=True), 0.1)
                    columns.lerp_(grad.square().mean(0), 0.1)
                    change = grad / (rows.sqrt() + columns.sqrt() + 1e-3)
                param.sub_(change, alpha=group["lr"] / group["count"])


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "lion": Lion,
    "nadam": torch.optim.NAdam,
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "unknown": Unknown,
    "int8": lambda params: HybridAdam(params, state_dtype="int8"),
}


def _net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))


def _loss(model: nn.Module, index: int) -> Tensor:
    return model(torch.randn(4, 64, generator=torch.Generator().manual_seed(index))).square().mean()


def _plugin(directory: Path, **options: Any) -> GeminiPlugin:
    sizes = {"min_chunk_size_mb": 2**-6, "search_range_mb": 2**-6, "non_model_bytes": 0}
    return GeminiPlugin(**{"device_bytes": "160KiB", "disk_dir": str(directory), **sizes, **options})


def _train(model: nn.Module, optimizer: Any, steps: range, backward: Callable[[Tensor, Any], None]) -> None:
    for step in steps:
        backward(_loss(model, step), optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("rule", MAKE)
def test_boosting_changes_no_bit_and_files_have_all_of_a_state(rule: str, tmp_path: Path) -> None:
    plain = _net()
    unmanaged = MAKE[rule](plain.parameters())
    _train(plain, unmanaged, range(STEPS), lambda loss, _: loss.backward())
    saved: dict[str, str] = {name: str(tmp_path / name) for name in ("model", "optimizer")}
    for steps in (range(3), range(3, STEPS)):
        module = _net(seed=steps.start)
        booster = Booster(plugin=_plugin(tmp_path))
        model, optimizer, *_ = booster.boost(module, MAKE[rule](module.parameters()))
        if steps.start:
            booster.load_model(model, saved["model"])
            booster.load_optimizer(optimizer, saved["optimizer"])
        _train(model, optimizer, steps, booster.backward)
        if not steps.start:
            booster.save_model(model, saved["model"])
            booster.save_optimizer(optimizer, saved["optimizer"])
        weights = model.state_dict()
        model.close()
    for name, value in plain.state_dict().items():
        assert torch.equal(weights[name], value), name


def test_what_is_refused_leaves_an_ordinary_model(tmp_path: Path) -> None:
    module = _net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    booster = Booster(plugin=_plugin(tmp_path, device_bytes="40KiB", disk_dir=None))
    with pytest.raises(ConfigError, match="LBFGS"):
        booster.boost(module, torch.optim.LBFGS(module.parameters()))
    with pytest.raises(OutOfBudgetError):
        booster.boost(module, torch.optim.NAdam(module.parameters()))
    booster = Booster(plugin=_plugin(tmp_path, device_bytes="200KiB", disk_dir=None))
    with pytest.raises(OutOfBudgetError):  # by the optimizer's states, when all is managed
        booster.boost(module, torch.optim.NAdam(module.parameters()))
    assert not any(isinstance(param, ManagedParameter) for param in module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_trainable_model_is_evaluated_where_a_frozen_one_is(tmp_path: Path) -> None:
    data = torch.randn(4, 64)
    for trains in (False, True):
        module = _net().requires_grad_(trains)
        with torch.no_grad():
            want = module(data)
        model, *_ = Booster(plugin=_plugin(tmp_path, device_bytes="80KiB")).boost(module)
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(data), want)
            assert torch.equal(model(data), want)
        model.close()
