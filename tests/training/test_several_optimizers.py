"""Several optimizers of one model, managed or plain, update what they hold and nothing of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_harness import KIB, assert_same_state, assert_within_budgets, random_batch, seeded, tight

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer

Optimizers = tuple[Any, Any]


class ActorCritic(nn.Module):
    """Two heads on one trunk, 85 KiB of model data in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.actor = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.critic = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        """Return both heads, one after the other."""
        x = self.trunk(x)
        return torch.cat([self.actor(x), self.critic(x)])

    def adams(self) -> Optimizers:
        """Return an Adam for all but the critic, and one for the critic."""
        first = [*self.trunk.parameters(), *self.actor.parameters()]
        return CPUAdam(first, lr=1e-2), CPUAdam(self.critic.parameters(), lr=3e-3, weight_decay=0.1)


def both_after_one_backward(model: nn.Module, optimizers: Optimizers, index: int) -> float:
    loss = model(random_batch(index, 4, 32)).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def one_every_other_step(model: nn.Module, optimizers: Optimizers, index: int) -> float:
    loss = model(random_batch(index, 4, 32)).square().mean()
    loss.backward()
    for optimizer in optimizers[: 1 + index % 2]:
        optimizer.zero_grad(set_to_none=False) if index == 3 else optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def in_turn(model: nn.Module, optimizers: Optimizers, index: int) -> float:
    module = getattr(model, "module", model)
    actor, critic = optimizers
    action = module.actor(module.trunk(random_batch(index, 4, 32)))
    critic.zero_grad()
    module.critic(action.detach()).square().mean().backward()
    critic.step()
    actor.zero_grad()
    loss = module.critic(action).mean()
    loss.backward()
    actor.step()
    return float(loss.item())


@pytest.mark.parametrize("device_kib", [24, 40, 1024])
@pytest.mark.parametrize("step", [both_after_one_backward, one_every_other_step, in_turn])
def test_two_optimizers_of_one_model_train_alike(
    step: Callable[[nn.Module, Optimizers, int], float], device_kib: int, tmp_path: Path
) -> None:
    plain = seeded(ActorCritic)
    of_plain = plain.adams()  # type: ignore[operator]
    want = [step(plain, of_plain, index) for index in range(6)]
    with GeminiDDP(seeded(ActorCritic), **tight(tmp_path, device_kib * KIB)) as model:
        first, second = model.module.adams()  # type: ignore[operator]
        optimizers = GeminiOptimizer(first, model), GeminiOptimizer(second, model)
        assert [step(model, optimizers, index) for index in range(6)] == want
        assert_same_state(model.state_dict(), plain.state_dict())
        assert_within_budgets(model.stats())


def test_clipping_outlasts_the_step_of_another_optimizer(tmp_path: Path) -> None:
    plain = seeded(ActorCritic)
    with GeminiDDP(seeded(ActorCritic), **tight(tmp_path, 40 * KIB)) as model:
        managed = [GeminiOptimizer(adam, model) for adam in model.module.adams()]  # type: ignore[operator]
        for index in range(3):
            for each in (plain, model):
                each(random_batch(index, 4, 32)).square().mean().backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
            for each in managed:
                each.clip_grad_by_norm(1e-3)
            if index == 0:
                of_plain = plain.adams()  # type: ignore[operator]
            for optimizer in (*of_plain, *managed):
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(model.state_dict(), plain.state_dict())


def test_a_parameter_that_came_after_wrapping_keeps_its_gradient_for_its_own_optimizer(
    tmp_path: Path,
) -> None:
    with GeminiDDP(seeded(ActorCritic), **tight(tmp_path, 40 * KIB)) as model:
        optimizer = GeminiOptimizer(CPUAdam(model.parameters()), model)
        model.module.extra = nn.Parameter(torch.ones(32))
        (model(random_batch(0, 4, 32)) * model.module.extra).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert model.module.extra.grad is not None
        model.zero_grad()
        assert model.module.extra.grad is None


def test_fp16_refuses_a_second_optimizer_of_other_parameters(tmp_path: Path) -> None:
    with GeminiDDP(seeded(ActorCritic), mixed_precision="fp16", **tight(tmp_path, 40 * KIB)) as model:
        first, second = model.module.adams()  # type: ignore[operator]
        optimizer = GeminiOptimizer(first, model)
        with pytest.raises(ConfigError, match="one optimizer"):
            GeminiOptimizer(second, model)
        assert set(model.optimizers) == {optimizer}
        GeminiOptimizer(first, model)  # in place of the one there was
