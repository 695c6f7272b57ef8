"""Under mixed precision buffers keep their type and what needs fp32 keeps it; what met 16 bits still runs."""

from __future__ import annotations

import copy
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_harness import KIB, Recipe, assert_trains_alike, random_batch, seeded, tight
from training_models import square_loss

import gemini
from gemini import ConfigError, GeminiAdamOptimizer, GeminiDDP

HALVES = pytest.mark.parametrize("precision", ["bf16", "fp16"])


class Rotary(nn.Module):
    """Turns its input by angles that are far positions times a frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 32) / 32), persistent=False)
        self.register_buffer("count", torch.tensor(300.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes of angles in fp32."""
        self.angles = 8191.0 * self.inv_freq
        return self.linear(x * self.angles.cos().to(x.dtype))


@HALVES
def test_buffers_keep_type_and_bits(precision: str) -> None:
    module = Rotary()
    want = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with GeminiDDP(module, mixed_precision=precision) as model:
        model(torch.ones(2, 32))
        for name, buffer in module.named_buffers():
            assert buffer.dtype == want[name].dtype
            assert torch.equal(buffer, want[name])


class Positions(nn.Module):
    """Adds a buffer in fp32 to what an embedding gives: everything behind it gets fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 32)
        self.register_buffer("positions", torch.randn(8, 32))
        self.register_buffer("weights", torch.ones(32, dtype=torch.float64))
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return four numbers for each token."""
        return self.last(self.layers(self.tokens(x) + self.positions) * self.weights)


class Derived(nn.Module):
    """Has buffers that operators take beside the parameter that they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(32, 16)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
            nn.BatchNorm1d(16),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return four numbers for each row."""
        return self.layers(x)


@HALVES
@pytest.mark.parametrize(
    ("build", "inputs"), [(Positions, torch.arange(16).view(2, 8)), (Derived, random_batch(0, 4, 32))]
)
def test_what_meets_a_buffer_in_fp32_runs_with_the_same_bits_under_any_budget(
    build: Any, inputs: Tensor, precision: str, tmp_path: Path
) -> None:
    losses = []
    for options in ({}, tight(tmp_path, 80 * KIB)):
        with GeminiDDP(seeded(build), mixed_precision=precision, **options) as model:
            optimizer = GeminiAdamOptimizer(model, lr=1e-2)
            for _ in range(3):
                loss = model(inputs).float().square().mean()
                optimizer.backward(loss)
                optimizer.step()
                losses.append(loss.item())
            with torch.no_grad():
                losses.append(float(model.eval()(inputs).sum()))
    assert losses[:4] == losses[4:]
    assert all(map(math.isfinite, losses))


def test_batch_norm_trains_as_with_fp32_parameters_and_statistics(tmp_path: Path) -> None:
    assert_trains_alike(
        lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)),
        square_loss,
        tight(tmp_path, 40 * KIB),
        Recipe(steps=5, precision="bf16", clip=("norm", 0.1)),
    )


class Router(nn.Module):
    """Casts its own parameters in forward, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(32, 4, bias=False)
        self.dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        """Return probabilities in the type of ``x``."""
        self.classifier = self.classifier.to(self.dtype)
        return self.classifier(x.to(self.dtype)).softmax(-1).to(x.dtype)


class Experts(nn.Module):
    """A router, a part that the model keeps in fp32, and layers that compute in 16 bits."""

    _keep_in_fp32_modules = ("wo", "scale")

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.wi, self.wo, self.worn = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(4, 32)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many numbers as there came."""
        return self.wo(self.wi(x) + self.worn(self.router(x))) * self.scale


@HALVES
def test_what_says_that_it_needs_fp32_keeps_it_in_chunks_of_its_own(precision: str, tmp_path: Path) -> None:
    losses = []
    for options in ({}, tight(tmp_path, 64 * KIB)):
        with GeminiDDP(seeded(Experts), mixed_precision=precision, **options) as model:
            kept = {name for name, param in model.module.named_parameters() if param.dtype == torch.float32}
            assert kept == {"router.classifier.weight", "wo.weight", "wo.bias", "scale"}
            optimizer = GeminiAdamOptimizer(model, lr=1e-2)
            for step in range(4):
                loss = (model(random_batch(step, 4, 32)).float() - 1).square().mean()
                optimizer.backward(loss)
                optimizer.clip_grad_by_norm(1.0)
                optimizer.step()
                losses.append(loss.item())
            assert "exp_avg" in optimizer.state_dict()["state"][0]
    assert losses[:4] == losses[4:]


def test_keep_fp32_names_whole_parts_of_names() -> None:
    module = nn.ModuleDict({"head": nn.Linear(4, 4), "head2": nn.Linear(4, 4), "body": nn.Linear(4, 4)})
    with GeminiDDP(module, mixed_precision="bf16", keep_fp32=["head", "body.bias"]):
        kept = {name for name, param in module.named_parameters() if param.dtype == torch.float32}
        assert kept == {"head.weight", "head.bias", "body.bias"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mixed_precision": "bf16", "keep_fp32": ["heads"]}, "'heads'"),
        ({"mixed_precision": "bf16", "keep_fp32": "head"}, "list of names"),
        ({"keep_fp32": ["0"]}, "mixed_precision"),
    ],
)
def test_keep_fp32_without_effect_is_refused(options: dict[str, Any], says: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=says):
        GeminiDDP(module, **options)
    assert type(module[0].weight) is nn.Parameter


class Masked(nn.Module):
    """Attention whose scores a buffer in fp32 promotes before they meet values in 16 bits."""

    def __init__(self, *, casts: bool) -> None:
        super().__init__()
        self.query, self.value, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)) + 0.1)
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        """Return what tokens see."""
        value = self.value(x)
        scores = self.query(x) @ value.transpose(-2, -1) * self.mask
        if self.casts:
            scores = scores.to(value.dtype)
        out: Tensor = x + self.out(scores @ value)
        return out


class Blocks(nn.Module):
    """Blocks that are computed again in backward, or not."""

    def __init__(self, *, casts: bool, recomputes: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked(casts=casts) for _ in range(2))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last block does."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


@HALVES
@pytest.mark.parametrize("recomputes", [False, True])
def test_activations_of_two_types_meet_in_that_of_16_bits(
    precision: str, recomputes: bool, tmp_path: Path
) -> None:
    found = []
    for casts in (False, True):
        module = seeded(lambda casts=casts: Blocks(casts=casts, recomputes=recomputes))
        with GeminiDDP(module, mixed_precision=precision, **tight(tmp_path, 40 * KIB)) as model:
            optimizer = GeminiAdamOptimizer(model, lr=1e-2)
            losses = []
            for step in range(3):
                loss = model(random_batch(step, (2, 4, 32))).square().mean()
                optimizer.backward(loss)
                optimizer.step()
                losses.append(loss.item())
                with torch.no_grad():
                    losses.append(model(random_batch(9, (2, 4, 32))).mean().item())
            assert type(module.blocks[0]).__name__ == "Masked"
            found.append((losses, [value.clone() for value in model.state_dict().values()]))
    (losses, weights), (wanted, other) = found
    assert losses == wanted
    assert all(map(torch.equal, weights, other))


def _losses(module: nn.Module) -> list[float]:
    """Manage a module in place, train it for two steps and release it; return its losses."""
    handle, optimizer = gemini.manage(module, mixed_precision="bf16"), None
    found = []
    for step in range(2):
        loss = module(random_batch(step, (2, 4, 32))).square().mean()
        if optimizer is None:
            optimizer = GeminiAdamOptimizer(module, lr=1e-2)
        optimizer.backward(loss)
        optimizer.step()
        found.append(loss.item())
    handle.release()
    return found


def test_the_outermost_module_may_be_such_a_module_and_is_released_as_what_it_was() -> None:
    module, casting = (seeded(lambda casts=casts: Masked(casts=casts)) for casts in (False, True))
    assert _losses(module) == _losses(casting)
    assert type(module) is Masked


def test_such_modules_are_copied_and_pickled(tmp_path: Path) -> None:
    module = seeded(lambda: Blocks(casts=False, recomputes=False))
    handle = gemini.manage(module, mixed_precision="bf16")
    with torch.no_grad():
        module(random_batch(0, (2, 4, 32)))
    handle.release()
    block = module.blocks[0]
    assert type(block) is not Masked
    assert isinstance(block, Masked)
    assert inspect.signature(block.forward) == inspect.signature(Masked(casts=False).forward)
    copied = copy.deepcopy(block).bfloat16()
    copied.mask = copied.mask.float()
    assert copied(random_batch(0, (2, 4, 32)).bfloat16()).dtype == torch.bfloat16
    torch.save(module, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    assert type(loaded.blocks[0]) is Masked
    assert torch.equal(loaded.blocks[0].out.weight, block.out.weight)


def test_types_that_torch_refuses_stay_refused_without_mixed_precision() -> None:
    with (
        GeminiDDP(nn.Linear(4, 4, dtype=torch.bfloat16)) as model,
        pytest.raises(RuntimeError, match="dtype"),
    ):
        model(torch.ones(2, 4))
