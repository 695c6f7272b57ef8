"""``gemini.manage``: the module itself trains, as an unmanaged one does, and becomes ordinary again."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import CPUAdam, GeminiAdamOptimizer, GeminiOptimizer, checkpoint
from gemini.errors import ConfigError, OutOfBudgetError, StateError

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A model that calls itself, as ``generate`` does, and has a buffer and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 48)
        self.body = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 48))
        self.head = nn.Linear(48, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a score per token and class."""
        self.seen += tokens.numel()
        return self.head(self.body(self.embed(tokens)))

    def greedy(self, tokens: Tensor) -> Tensor:
        """Call the model as its users do."""
        return self(tokens).argmax(-1)


def build() -> Net:
    torch.manual_seed(3)
    return Net()


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train as a script does that knows of no manager."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = nn.functional.cross_entropy(model(tokens(step)).flatten(0, 1), tokens(step + 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def small(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return {"device_bytes": "132KiB", "disk_dir": str(tmp_path), "non_model_bytes": 0, **options}


def assert_same_weights(got: nn.Module, want: nn.Module) -> None:
    state = want.state_dict()
    assert got.state_dict().keys() == state.keys()
    for name, value in got.state_dict().items():
        assert torch.equal(value, state[name]), name


def trained_plain(steps: range) -> tuple[Net, list[float], torch.optim.Optimizer]:
    plain = build()
    optimizer = CPUAdam(plain.parameters(), lr=1e-2)
    return plain, train(plain, optimizer, steps), optimizer


def test_the_module_itself_trains_bit_for_bit_and_its_steps_are_planned(tmp_path: Path) -> None:
    plain, losses, _ = trained_plain(range(6))
    model = build()
    handle = gemini.manage(model, **small(tmp_path))
    optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model)
    assert train(model, optimizer, range(6)) == losses
    stats = handle.stats()
    assert stats["step"] == 6
    assert not stats["warmup"]
    assert stats["disk_read"]["bytes"] > 0
    for tier in ("device", "host", "disk"):
        assert stats[tier]["peak_bytes"] <= stats[tier]["budget_bytes"]
    assert torch.equal(model.eval().greedy(tokens(9)), plain.eval().greedy(tokens(9)))
    assert_same_weights(model, plain)
    handle.close()


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_release_gives_an_ordinary_module_back(tmp_path: Path, precision: str | None) -> None:
    model, untouched = build(), build()
    cls = type(model)
    handle = gemini.manage(model, **small(tmp_path), mixed_precision=precision)
    model(tokens(0))
    handle.release()
    assert type(model) is cls
    assert "_gemini" not in vars(model)
    assert not model._forward_pre_hooks
    assert all(type(param) is nn.Parameter and param.dtype is torch.float32 for param in model.parameters())
    assert model.head.weight is model.embed.weight
    untouched.seen.copy_(model.seen)
    assert_same_weights(model, untouched)
    again = torch.optim.SGD(model.parameters(), lr=0.1)
    assert len(train(model, again, range(2))) == 2
    handle.release()  # has nothing left to do


def test_a_released_module_is_managed_anew_and_goes_on(tmp_path: Path) -> None:
    plain, losses, plain_optimizer = trained_plain(range(3))
    model = build()
    handle = gemini.manage(model, **small(tmp_path))
    optimizer = GeminiAdamOptimizer(model, lr=1e-2)
    assert train(model, optimizer, range(3)) == losses
    states = optimizer.state_dict()
    handle.release()
    with pytest.raises(StateError, match="released"):
        optimizer.step()
    gemini.manage(model, **small(tmp_path))
    optimizer = GeminiAdamOptimizer(model, lr=1e-2)
    optimizer.load_state_dict(states)
    assert train(model, optimizer, range(3, 6)) == train(plain, plain_optimizer, range(3, 6))


def test_copies_and_pickles_are_ordinary(tmp_path: Path) -> None:
    model = build()
    handle = gemini.manage(model, **small(tmp_path))
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        assert type(other) is Net
        assert "_gemini" not in vars(other)
        assert_same_weights(other, model)
        other(tokens(0))
    assert handle.stats()["step"] == 0
    assert gemini.handle_of(model) is handle
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.copy(handle)


def test_weights_are_loaded_into_masters(tmp_path: Path) -> None:
    want, model = build(), build()
    with torch.no_grad():
        for param in want.parameters():
            param.add_(1e-5)  # less than bf16 tells apart
    handle = gemini.manage(model, **small(tmp_path), mixed_precision="bf16")
    model.load_state_dict(want.state_dict())
    with pytest.raises(RuntimeError, match="missing keys"):
        model.load_state_dict({})
    handle.release()
    assert_same_weights(model, want)


def test_checkpoints_take_the_module_or_its_handle(tmp_path: Path) -> None:
    model = build()
    handle = gemini.manage(model, **small(tmp_path))
    optimizer = GeminiAdamOptimizer(handle, lr=1e-2)
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path / "run", model, optimizer)
    losses = train(model, optimizer, range(2, 4))
    checkpoint.load(tmp_path / "run", handle, optimizer)
    assert train(model, optimizer, range(2, 4)) == losses


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_offloaded_and_their_hooks_end_with_release(tmp_path: Path, recompute: bool) -> None:
    _, losses, _ = trained_plain(range(5))
    model = build()
    options = {"activation_offload": "auto", "activation_recompute": recompute}
    handle = gemini.manage(model, device_bytes="400KiB", disk_dir=str(tmp_path), **options)
    assert train(model, GeminiAdamOptimizer(model, lr=1e-2), range(5)) == losses
    handle.release()
    assert not any("forward" in vars(part) for part in model.modules())


def test_zero_grad_gives_gradients_up_and_to_is_refused(tmp_path: Path) -> None:
    model = build()
    gemini.manage(model, **small(tmp_path))
    model(tokens(0)).sum().backward()
    assert model.embed.weight.grad is not None
    model.zero_grad()
    assert model.embed.weight.grad is None
    assert model.to("cpu") is model
    with pytest.raises(ConfigError, match=r"stays torch\.float32"):
        model.double()


def test_a_forward_pass_that_raises_leaves_the_model_usable(tmp_path: Path) -> None:
    plain, model = build(), build()
    gemini.manage(model, **small(tmp_path))
    optimizer = GeminiAdamOptimizer(model, lr=1e-2)
    with pytest.raises(IndexError):
        model(torch.full((1, 1), 99))
    model.seen.zero_()
    assert train(model, optimizer, range(3)) == train(plain, CPUAdam(plain.parameters(), lr=1e-2), range(3))


def test_what_is_where_is_shown(tmp_path: Path) -> None:
    model = build()
    handle = gemini.manage(model, **small(tmp_path))
    assert "managed: DEVICE" in repr(model)
    assert "132.0 KiB" in repr(handle)
    assert model._repr_html_() == handle._repr_html_()
    assert "<caption>Net, managed" in handle._repr_html_()
    handle.release()
    assert "managed" not in repr(model)


def test_what_cannot_be_managed_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    model = build()
    with pytest.raises(OutOfBudgetError):
        gemini.manage(model, device_bytes="8KiB")
    assert type(model) is Net
    assert type(model.embed.weight) is nn.Parameter
    with pytest.raises(TypeError, match="no argument 'device_byte'"):
        gemini.manage(model, device_byte="8KiB")
    with pytest.raises(ConfigError, match=r"takes an nn\.Module"):
        gemini.manage([model])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not a GeminiDDP, nor managed"):
        gemini.handle_of(model)
    gemini.manage(model, **small(tmp_path))
    with pytest.raises(ConfigError, match="managed already"):
        gemini.manage(model)
