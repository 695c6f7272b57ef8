"""torch's own optimizers under management, run by their own steps over pieces, or over whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from same_bits import assert_same
from test_rules import MODELS, STEPS, Loss, Make, mlp, num_bytes, square, tight
from torch import Tensor, nn
from torch import optim as torch_optim
from training_harness import seeded

from gemini import (
    ConfigError,
    GeminiDDP,
    GeminiOptimizer,
    HybridAdam,
    Lamb,
    Muon,
    OutOfBudgetError,
    checkpoint,
)

Optimizers = list[torch.optim.Optimizer]

ELEMENT_WISE: dict[str, Make] = {
    "asgd": lambda params: torch_optim.ASGD(params, lr=0.1, t0=2),
    "adadelta": torch_optim.Adadelta,
    "adagrad": lambda params: torch_optim.Adagrad(params, initial_accumulator_value=0.3, lr_decay=0.1),
    "adam": lambda params: torch_optim.Adam(params, lr=torch.tensor(1e-2)),
    "adamw": lambda params: torch_optim.AdamW(params, amsgrad=True, maximize=True),
    "adamax": torch_optim.Adamax,
    "nadam": torch_optim.NAdam,
    "radam": torch_optim.RAdam,
    "rmsprop": lambda params: torch_optim.RMSprop(params, momentum=0.9, centered=True, weight_decay=0.1),
    "rprop": torch_optim.Rprop,
}


def matrices(params: Iterator[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    each = list(params)
    return [p for p in each if p.dim() == 2 and p.requires_grad], [p for p in each if p.dim() != 2]


def muon(params: Iterator[nn.Parameter]) -> Optimizers:
    """As it is meant to be used: Muon for matrices, another one for the rest."""
    two, others = matrices(params)
    found: Optimizers = [torch_optim.Muon(two, lr=0.02)] if two else []
    return [*found, torch_optim.AdamW(others, lr=1e-2)] if others else found


TARGETS: dict[str, Callable[[Any], Optimizers]] = {
    "muon": muon,
    "adafactor": lambda params: [torch_optim.Adafactor(params, lr=0.05, weight_decay=0.1)],
    "muon and adam": lambda params: [
        Muon([(str(number), param) for number, param in enumerate(params)], lr=0.02, weight_decay=0.1)
    ],
    "lamb": lambda params: [Lamb(params, lr=0.05, weight_decay=0.1, bias_correction=True)],
    "adam-int8": lambda params: [HybridAdam(params, lr=1e-2, state_dtype="int8")],
}


def train_plain(net: nn.Module, optimizers: Optimizers, loss: Loss, steps: range) -> None:
    for step in steps:
        loss(net, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        net.zero_grad()


def train(net: nn.Module, optimizers: list[GeminiOptimizer], loss: Loss, steps: range) -> None:
    for step in steps:
        optimizers[0].backward(loss(net, step))
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("rule", ELEMENT_WISE)
def test_an_element_wise_step_has_its_bits_in_pieces(rule: str, tmp_path: Path) -> None:
    build, loss = MODELS["odd"]
    plain = seeded(build)
    optimizer = ELEMENT_WISE[rule](plain.parameters())
    train_plain(plain, [optimizer], loss, range(6))
    net = seeded(build)
    with GeminiDDP(net, **tight(tmp_path, num_bytes(net) * 2)) as model:
        managed = GeminiOptimizer(ELEMENT_WISE[rule](net.parameters()), model)
        train(model, [managed], loss, range(6))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
        assert_same(managed.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("rule", TARGETS)
@pytest.mark.parametrize("build", MODELS)
def test_a_third_of_the_memory_changes_no_bit_of_these_either(build: str, rule: str, tmp_path: Path) -> None:
    make_net, loss = MODELS[build]
    plain = seeded(make_net)
    optimizers = TARGETS[rule](plain.parameters())
    train_plain(plain, optimizers, loss, range(STEPS))
    net = seeded(make_net)
    with GeminiDDP(net, **tight(tmp_path, num_bytes(net))) as model:
        managed = [GeminiOptimizer(each, model) for each in TARGETS[rule](net.parameters())]
        train(model, managed, loss, range(STEPS))
        stats = model.stats()
        assert stats["device"]["peak_bytes"] <= stats["device"]["budget_bytes"] < stats["model_data_bytes"]
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("rule", ["muon", "adafactor"])
def test_a_matrix_in_many_chunks_is_gathered(rule: str, precision: str | None, tmp_path: Path) -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 300, bias=False), nn.Linear(300, 32, bias=False))

    def run(device_bytes: int) -> dict[str, Tensor]:
        net = seeded(wide)
        options = tight(tmp_path, device_bytes=device_bytes, mixed_precision=precision)
        with GeminiDDP(net, **options) as model:
            managed = [GeminiOptimizer(each, model) for each in TARGETS[rule](net.parameters())]
            train(model, managed, square, range(6))
            pieces = [len(group.pieces) for group in model._gemini.storage.groups]
            assert max(pieces) > 1 or device_bytes > 2**20
            return dict(model.state_dict())

    assert_same(run(2**18), run(2**24))


@pytest.mark.parametrize("rule", ["nadam", "adafactor", "muon and adam"])
def test_checkpoints_and_state_dicts_have_all_of_a_state(rule: str, tmp_path: Path) -> None:
    make = ELEMENT_WISE.get(rule) or (lambda params: TARGETS[rule](params)[0])
    plain = seeded(mlp)
    optimizer = make(plain.parameters())
    train_plain(plain, [optimizer], square, range(8))

    def wrap() -> tuple[GeminiDDP, GeminiOptimizer]:
        net = seeded(mlp)
        model = GeminiDDP(net, **tight(tmp_path, num_bytes(net) * 2))
        return model, GeminiOptimizer(make(net.parameters()), model)

    model, managed = wrap()
    train(model, [managed], square, range(3))
    checkpoint.save(tmp_path / "saved", model, managed)
    model.close()
    model, managed = wrap()
    checkpoint.load(tmp_path / "saved", model, managed)
    train(model, [managed], square, range(3, 6))
    weights, state = dict(model.state_dict()), managed.state_dict()
    model.close()
    net = seeded(mlp)
    net.load_state_dict(weights)
    unmanaged = make(net.parameters())
    unmanaged.load_state_dict(state)
    train_plain(net, [unmanaged], square, range(6, 7))
    with GeminiDDP(net, **tight(tmp_path, num_bytes(net) * 2)) as model:
        managed = GeminiOptimizer(unmanaged, model)  # goes on from its state
        train(model, [managed], square, range(7, 8))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
        assert_same(managed.state_dict()["state"], optimizer.state_dict()["state"])


class Clipped(torch.optim.Optimizer):
    """A class that nobody knows, and that is element-wise as long as it clips elements, not norms."""

    def __init__(self, params: Any, by_norm: bool = False, counts: bool = False) -> None:
        super().__init__(params, {"lr": 0.1, "by_norm": by_norm, "counts": counts, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += group["counts"]
            for param in group["params"]:
                state = self.state[param]
                mean = state.setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad, 0.3)
                clipped = mean / (1 + mean.norm()) if group["by_norm"] else mean.clamp(-0.01, 0.01)
                param.sub_(clipped, alpha=group["lr"])


def test_an_unknown_class_is_cut_where_its_user_says_so_and_a_trial_agrees(tmp_path: Path) -> None:
    plain = seeded(mlp)
    train_plain(plain, [Clipped(plain.parameters())], square, range(5))
    net = seeded(mlp)
    with GeminiDDP(net, **tight(tmp_path, num_bytes(net) * 2)) as model:
        with pytest.raises(ConfigError, match=r"Clipped was said to be element-wise"):
            GeminiOptimizer(Clipped(net.parameters(), by_norm=True), model, elementwise=True)
        with pytest.raises(ConfigError, match=r"writes to param_groups, which all parameters share"):
            GeminiOptimizer(Clipped(net.parameters(), counts=True), model, elementwise=True)
        assert {chunk.spec.label for chunk in model.manager.chunks.chunks} == {"param", "grad"}
        managed = GeminiOptimizer(Clipped(net.parameters()), model, elementwise=True)
        train(model, [managed], square, range(5))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_what_cannot_be_cut_is_refused_by_name(tmp_path: Path) -> None:
    net = mlp()
    with GeminiDDP(net, **tight(tmp_path, num_bytes(net))) as model:
        for make, reason in (
            (torch_optim.LBFGS, "as one vector"),
            (torch_optim.SparseAdam, "sparse"),
            (lambda params: torch_optim.AdamW(params, fused=True), "without fused; leave it out"),
            (lambda params: torch_optim.SGD(params, fused=True), "without fused; leave it out"),
        ):
            with pytest.raises(ConfigError, match=reason):
                GeminiOptimizer(make(net.parameters()), model)
        assert {chunk.spec.label for chunk in model.manager.chunks.chunks} == {"param", "grad"}


def test_a_matrix_whose_update_needs_more_than_device_holds_is_refused_beforehand(tmp_path: Path) -> None:
    options = tight(tmp_path, device_bytes=450_000, disk_bytes="8MiB")
    net = nn.Linear(32, 1500, bias=False)  # 192,000 bytes; with gradient and momentum 576,000
    with GeminiDDP(net, **options) as model:
        GeminiOptimizer(torch_optim.NAdam(net.parameters()), model)  # a piece at a time
    net = nn.Linear(32, 1500, bias=False)
    with GeminiDDP(net, **options) as model:
        with pytest.raises(OutOfBudgetError, match=r"raise device_bytes to at least 5.*KiB") as refused:
            GeminiOptimizer(torch_optim.Muon(net.parameters()), model)
        assert "updating one chunk" in str(refused.value)


def test_a_learning_rate_that_changes_is_that_of_its_step(tmp_path: Path) -> None:
    def run(optimizer: torch.optim.Optimizer, step: Callable[[int], None]) -> None:
        schedule = torch_optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for index in range(5):
            step(index)
            schedule.step()

    plain = seeded(mlp)
    optimizer = torch_optim.RMSprop(plain.parameters())
    run(optimizer, lambda index: train_plain(plain, [optimizer], square, range(index, index + 1)))
    net = seeded(mlp)
    with GeminiDDP(net, **tight(tmp_path, num_bytes(net) * 2)) as model:
        managed = GeminiOptimizer(torch_optim.RMSprop(net.parameters()), model)
        run(managed, lambda index: train(model, [managed], square, range(index, index + 1)))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
