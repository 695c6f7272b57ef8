"""TorchFSDPPlugin: what one process trains, and files that every other plugin reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from booster_models import boosted, mlp, tied
from processes import run_on_ranks
from torch import Tensor, nn
from torch import distributed as dist

from gemini import ConfigError, HybridAdam
from gemini.parallel import Booster, GeminiPlugin, TorchDDPPlugin, TorchFSDPPlugin
from gemini.parallel.booster import Plugin

BATCHES = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))


class Blocks(nn.Module):
    """Blocks that are gathered one by one, in widths that two do not divide."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 7), nn.Linear(7, 16)) for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def make(
    plugin: Plugin, model: nn.Module, precision: str | None = None
) -> tuple[Booster, nn.Module, torch.optim.Optimizer]:
    booster = Booster(precision, plugin)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-6)
    wrapped, optim, *_ = booster.boost(model, optimizer)
    return booster, wrapped, optim


def step(booster: Booster, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """Train on a batch in two halves, the first without synchronization; return the norm."""
    first, second = batch.chunk(2)
    with booster.no_sync(model):
        booster.backward(model(first).square().mean() / 2, optimizer)
    booster.backward(model(second).square().mean() / 2, optimizer)
    norm = float(optimizer.clip_grad_by_norm(0.1))  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()
    return norm


def train(precision: str | None = None) -> tuple[dict[str, Tensor], list[float]]:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    booster, model, optimizer = make(TorchFSDPPlugin(), Blocks(rank), precision)
    norms = [step(booster, model, optimizer, batch) for batch in BATCHES.chunk(size, dim=1)[rank]]
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, norms


def test_ranks_train_as_one_process_does_on_the_whole_batch() -> None:
    wanted, wanted_norms = train()
    for weights, norms in run_on_ranks(train, 2):
        assert norms == pytest.approx(wanted_norms, rel=1e-5)
        assert weights.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def test_mixed_precision_keeps_weights_in_fp32() -> None:
    wanted, _ = train()
    for weights, _ in run_on_ranks(train, 2, "bf16"):
        for name, value in wanted.items():
            assert weights[name].dtype == torch.float32
            torch.testing.assert_close(weights[name], value, rtol=0.05, atol=0.05)


def save(directory: str, shard: bool) -> dict[str, Tensor]:
    """Save and load into another model; return the weights after one more step, which both agree on."""
    path = Path(directory, str(shard))
    kept = make(TorchFSDPPlugin(), Blocks())
    step(*kept, BATCHES[0])
    kept[0].save_model(kept[1], path / "model", shard=shard)
    kept[0].save_optimizer(kept[2], path / "optimizer", shard=shard)
    again = make(TorchFSDPPlugin(), Blocks(7))
    again[0].load_model(again[1], path / "model")
    again[0].load_optimizer(again[2], path / "optimizer")
    weights = []
    for each in (kept, again):
        step(*each, BATCHES[1])
        weights.append({name: value.clone() for name, value in each[1].state_dict().items()})
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name
    return weights[0]


@pytest.mark.parametrize("shard", [False, True])
def test_training_goes_on_from_files_on_any_number_of_ranks(tmp_path: Path, shard: bool) -> None:
    (tmp_path / str(shard)).mkdir()
    wanted, _ = run_on_ranks(save, 2, str(tmp_path), shard)
    booster, model, optimizer = make(TorchFSDPPlugin(), Blocks(3))  # one process
    booster.load_model(model, tmp_path / str(shard) / "model")
    booster.load_optimizer(optimizer, tmp_path / str(shard) / "optimizer")
    step(booster, model, optimizer, BATCHES[1])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)
    for plugin in (TorchDDPPlugin(), GeminiPlugin()):
        other = Booster(plugin=plugin)
        managed, _, *_ = other.boost(Blocks(5))
        other.load_model(managed, tmp_path / str(shard) / "model")


def save_tied(directory: str) -> bool:
    model = tied(dist.get_rank())
    booster, wrapped, _ = make(TorchFSDPPlugin(), model)
    booster.save_model(wrapped, Path(directory, "model"))
    _, other, _ = make(TorchFSDPPlugin(), tied(5))
    booster.load_model(other, Path(directory, "model"))
    first, second = wrapped.state_dict(), other.state_dict()
    return all(torch.equal(first[name], second[name]) for name in first if isinstance(first[name], Tensor))


def test_tied_weights_and_buffers_are_the_first_ranks(tmp_path: Path) -> None:
    assert all(run_on_ranks(save_tied, 2, str(tmp_path)))


def train_on(adagrad: bool, steps_before: int) -> list[float]:
    """Return the losses of an optimizer that has states when it is boosted."""
    model = Blocks()
    make_optimizer = torch.optim.Adagrad if adagrad else torch.optim.Adam
    optimizer = make_optimizer(model.parameters(), lr=0.1)
    for batch in BATCHES[:steps_before]:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    booster = Booster(plugin=TorchFSDPPlugin())
    wrapped, optim, *_ = booster.boost(model, optimizer)
    losses = []
    for batch in BATCHES[steps_before:]:
        loss = wrapped(batch).square().mean()
        booster.backward(loss, optim)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("adagrad", "steps_before"), [(True, 0), (False, 2)])
def test_states_that_an_optimizer_has_before_are_sharded_with_the_parameters(
    adagrad: bool, steps_before: int
) -> None:
    wanted = train_on(adagrad, steps_before)
    for losses in run_on_ranks(train_on, 2, adagrad, steps_before):
        assert losses == pytest.approx(wanted, rel=1e-5)


class Around(nn.Module):
    """Generates by the model within, as PEFT's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Blocks()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out

    def generate(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


def generate() -> Tensor:
    _, model, _ = make(TorchFSDPPlugin(), Around())
    with torch.no_grad():
        return model.generate(BATCHES[0])


def test_a_model_around_a_model_generates() -> None:
    for made in run_on_ranks(generate, 2):
        torch.testing.assert_close(made, Blocks()(BATCHES[0]).detach(), rtol=1e-5, atol=1e-6)


def refusals() -> list[str]:
    said = []
    attempts: list[Callable[[], object]] = [
        lambda: boosted(TorchFSDPPlugin(), mlp()),
        lambda: make(TorchFSDPPlugin(), mlp(), "fp16"),
        lambda: make(TorchFSDPPlugin(), nn.Linear(2, 2, device="meta")),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigError) as caught:
            attempt()
        said.append(str(caught.value))
    scalar = mlp()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError) as caught:
        make(TorchFSDPPlugin(), scalar)
    return [*said, str(caught.value)]


def test_what_cannot_be_sharded_is_refused() -> None:
    for adam, half, meta, scalar in (*run_on_ranks(refusals, 2), refusals()):
        assert adam.startswith(f"{HybridAdam.__name__} updates plain tensors")
        assert half.startswith("TorchFSDPPlugin has no loss scale")
        assert meta.startswith("the model is on 'meta'")
        assert scalar.startswith("fully_shard cannot cut 'scale', a parameter without dimensions")
