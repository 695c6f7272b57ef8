"""Optimizers other than Adam: the bits that they have on an unmanaged model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_harness import seeded
from training_models import TinyGPT, gpt_loss

from gemini import CheckpointError, ConfigError, GeminiDDP, GeminiOptimizer, Lion, checkpoint

WIDTH, STEPS = 32, 8

Make = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[[nn.Module, int], Tensor]


class Recurrent(nn.Module):
    """A bidirectional network over an embedding, part of which is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(nn.GRU(WIDTH, WIDTH // 2, bidirectional=True) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.tokens(x[:, :4].abs().mul(10).long().clamp(max=39))
        for layer in self.layers:
            out = layer(out)[0]
        return out


def mlp() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)))


def odd() -> nn.Module:
    """Sizes that no vector divides, a transposed weight, one parameter that nothing uses."""
    net = nn.Sequential(
        nn.Linear(WIDTH, 37), nn.Tanh(), nn.Linear(37, 53), *(nn.Linear(53, 53) for _ in range(5))
    )
    net[2].weight.data = net[2].weight.data.t().contiguous().t()
    net.unused = nn.Parameter(torch.ones(3))
    return net


def convolutions() -> nn.Module:
    body = [nn.Sequential(nn.Conv1d(24, 24, 3, padding=1), nn.GroupNorm(2, 24), nn.SiLU()) for _ in range(8)]
    return nn.Sequential(nn.Unflatten(1, (8, WIDTH // 8)), nn.Conv1d(8, 24, 1), *body)


def attention() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True), 3)


def square(model: nn.Module, index: int) -> Tensor:
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))
    return model(inputs).float().square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "mlp": (mlp, square),
    "odd": (odd, square),
    "gpt": (TinyGPT, gpt_loss),
    "convolutions": (convolutions, square),
    "attention": (attention, square),
    "recurrent": (Recurrent, square),
}

RULES: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "decay": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.05, maximize=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.3),
    "nesterov": lambda params: torch.optim.SGD(
        params, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01
    ),
    "lion": lambda params: Lion(params, lr=1e-3),
    "lion-decay": lambda params: Lion(params, lr=1e-3, betas=(0.95, 0.98), weight_decay=0.1),
}


def tight(directory: Path, model_bytes: int = 0, **options: Any) -> dict[str, Any]:
    """Budgets of 30 % of what fp32 data with one state takes."""
    return {
        "device_bytes": max(3 * model_bytes // 10, 2**14),
        "non_model_bytes": 0,
        "min_chunk_size_mb": 2**-8,
        "search_range_mb": 2**-8,
        "disk_dir": str(directory),
        **options,
    }


def num_bytes(net: nn.Module) -> int:
    return 12 * sum(param.numel() for param in net.parameters())


def train_plain(net: nn.Module, make: Make, loss: Loss, clip: float = 0.0) -> dict[str, Tensor]:
    optimizer = make(net.parameters())
    for step in range(STEPS):
        loss(net, step).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def train_managed(
    model: GeminiDDP, optimizer: GeminiOptimizer, loss: Loss, steps: range = range(STEPS)
) -> None:
    for step in steps:
        optimizer.backward(loss(model, step))
        optimizer.step()


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert [name for name in want if not torch.equal(got[name], want[name].to(got[name].dtype))] == []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("build", MODELS)
def test_a_third_of_the_memory_changes_no_bit(build: str, rule: str, tmp_path: Path) -> None:
    make_net, loss = MODELS[build]
    want = train_plain(seeded(make_net), RULES[rule], loss)
    net = seeded(make_net)
    with GeminiDDP(net, **tight(tmp_path, num_bytes(net))) as model:
        train_managed(model, GeminiOptimizer(RULES[rule](net.parameters()), model), loss)
        stats = model.stats()
        assert stats["device"]["peak_bytes"] <= stats["device"]["budget_bytes"] < stats["model_data_bytes"]
        assert_same(model.state_dict(), want)


@pytest.mark.parametrize("rule", ["nesterov", "lion-decay"])
@pytest.mark.parametrize(
    "options", [{"overlap": False}, {"overlap": "backward"}, {"overlap": True, "max_norm": 0.05}]
)
def test_neither_does_when_an_update_runs(rule: str, options: dict[str, Any], tmp_path: Path) -> None:
    want = train_plain(seeded(mlp), RULES[rule], square, options.get("max_norm", 0.0))
    net = seeded(mlp)
    with GeminiDDP(net, **tight(tmp_path, num_bytes(net))) as model:
        train_managed(model, GeminiOptimizer(RULES[rule](net.parameters()), model, **options), square)
        assert_same(model.state_dict(), want)


@pytest.mark.parametrize("rule", ["decay", "nesterov", "lion-decay"])
def test_a_model_in_16_bits_is_updated_in_16_bits(rule: str, tmp_path: Path) -> None:
    def loss(model: nn.Module, index: int) -> Tensor:
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))
        return model(inputs.bfloat16()).float().square().mean()

    want = train_plain(seeded(mlp).bfloat16(), RULES[rule], loss)
    net = seeded(mlp).bfloat16()
    with GeminiDDP(net, **tight(tmp_path, num_bytes(net) // 2)) as model:
        train_managed(model, GeminiOptimizer(RULES[rule](net.parameters()), model), loss)
        assert_same({name: value.bfloat16() for name, value in model.state_dict().items()}, want)


@pytest.mark.parametrize("rule", ["nesterov", "lion"])
def test_masters_make_the_same_of_any_budget(rule: str, tmp_path: Path) -> None:
    def run(device: int) -> dict[str, Tensor]:
        net = seeded(mlp)
        options = tight(tmp_path, 0, device_bytes=device, mixed_precision="bf16")
        with GeminiDDP(net, **options) as model:
            train_managed(model, GeminiOptimizer(RULES[rule](net.parameters()), model), square)
            return model.state_dict()

    assert_same(run(2**16), run(2**24))


@pytest.mark.parametrize("rule", ["sgd", "momentum", "lion"])
def test_states_are_exchanged_with_the_optimizer_itself(rule: str, tmp_path: Path) -> None:
    make = RULES[rule]
    want = train_plain(seeded(mlp), make, square)
    plain = seeded(mlp)
    optimizer = make(plain.parameters())
    for step in range(2):
        square(plain, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    with GeminiDDP(plain, **tight(tmp_path, num_bytes(plain))) as model:
        managed = GeminiOptimizer(optimizer, model)  # goes on from its state
        train_managed(model, managed, square, range(2, 4))
        state, weights = managed.state_dict(), model.state_dict()
        assert {name for entry in state["state"].values() for name in entry} == set(managed.state_names)
        assert set(managed.state[plain[0][0].weight]) == set(managed.state_names)
    plain = seeded(mlp)
    plain.load_state_dict(weights)
    optimizer = make(plain.parameters())
    optimizer.load_state_dict(state)
    for step in range(4, 6):
        square(plain, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()
    with GeminiDDP(plain, **tight(tmp_path, num_bytes(plain))) as model:
        managed = GeminiOptimizer(make(plain.parameters()), model)
        managed.load_state_dict(state)
        train_managed(model, managed, square, range(6, STEPS))
        assert_same(model.state_dict(), want)


@pytest.mark.parametrize("rule", ["sgd", "momentum", "lion"])
def test_a_checkpoint_is_of_its_rule(rule: str, tmp_path: Path) -> None:
    want = train_plain(seeded(mlp), RULES[rule], square)

    def wrap(make: Make) -> tuple[GeminiDDP, GeminiOptimizer]:
        net = seeded(mlp)
        model = GeminiDDP(net, **tight(tmp_path, num_bytes(net)))
        return model, GeminiOptimizer(make(net.parameters()), model)

    model, optimizer = wrap(RULES[rule])
    train_managed(model, optimizer, square, range(4))
    checkpoint.save(tmp_path / "saved", model, optimizer)
    model.close()
    model, optimizer = wrap(RULES[rule])
    checkpoint.load(tmp_path / "saved", model, optimizer)
    train_managed(model, optimizer, square, range(4, STEPS))
    assert_same(model.state_dict(), want)
    model.close()
    model, optimizer = wrap(RULES["lion" if rule != "lion" else "momentum"])
    with pytest.raises(CheckpointError, match="load it with an optimizer of the kind that saved it"):
        checkpoint.load(tmp_path / "saved", model, optimizer)
    model.close()


@pytest.mark.parametrize("second", ["momentum", "lion"])
@pytest.mark.parametrize("first", ["momentum", "lion"])
def test_an_optimizer_begins_with_states_of_its_own(first: str, second: str, tmp_path: Path) -> None:
    plain = seeded(mlp)
    train_plain(plain, RULES[first], square)
    want = train_plain(plain, RULES[second], square)
    net = seeded(mlp)
    with GeminiDDP(net, **tight(tmp_path, num_bytes(net))) as model:
        for rule in (first, second):
            train_managed(model, GeminiOptimizer(RULES[rule](net.parameters()), model), square)
        assert_same(model.state_dict(), want)


def test_what_needs_all_parameters_is_refused_and_a_step_of_its_own_is_run(tmp_path: Path) -> None:
    class MySgd(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                param.fill_(0.5)

    net = mlp()
    with GeminiDDP(net, **tight(tmp_path, 2 * num_bytes(net))) as model:
        with pytest.raises(ConfigError, match="LBFGS"):
            GeminiOptimizer(torch.optim.LBFGS(net.parameters()), model)
        assert {chunk.spec.label for chunk in model.manager.chunks.chunks} == {"param", "grad"}
        optimizer = GeminiOptimizer(MySgd(net.parameters(), lr=0.1), model)
        optimizer.backward(square(model, 0))
        optimizer.step()
        assert all(bool((value == 0.5).all()) for value in model.state_dict().values())


def test_one_state_takes_what_it_says(tmp_path: Path) -> None:
    numel = sum(param.numel() for param in mlp().parameters())
    sizes = {}
    for name, states in (("sgd", 0), ("lion", 1)):
        net = mlp()
        with GeminiDDP(net, **tight(tmp_path, device_bytes=2**22, min_chunk_size_mb=1)) as model:
            GeminiOptimizer(RULES[name](net.parameters()), model)
            sizes[name] = model.stats()["model_data_bytes"]
            assert sizes[name] >= (8 + 4 * states) * numel
    assert sizes["sgd"] < 10 * numel
    assert sizes["lion"] < 15 * numel
