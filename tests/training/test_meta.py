"""A model built on meta has the values of one built in memory, or waits for those that nobody gives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training_harness import KIB, assert_same_state, seeded, tight

from gemini import ConfigError, GeminiDDP, StateError, init_on


class Bare(nn.Module):
    """Has a parameter, and a buffer, of which only its constructor knows the values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.full((16,), 2.0))
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        """Return as many numbers as there came."""
        return self.linear(x) * self.scale + self.shift


class Tied(nn.Module):
    """Its last layer has the embedding's weight, and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 16)
        self.last = nn.Linear(16, 16)
        self.last.weight = self.tokens.weight


class Styled(nn.Module):
    """Initializes its parts as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(16, 16), Bare()])

    def _init_weights(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.constant_(part.weight, 3.0)
            nn.init.zeros_(part.bias)
        if isinstance(part, Bare):
            nn.init.constant_(part.scale, 2.0)
            part.shift.fill_(1.0)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Return what ``build`` returns, without memory."""
    with init_on("meta"):
        module = build()
    torch.manual_seed(0)
    return module


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.MultiheadAttention(16, 4),
        lambda: nn.Sequential(nn.MultiheadAttention(16, 4, kdim=8, add_bias_kv=True), nn.Linear(4, 4)),
        lambda: nn.TransformerDecoderLayer(16, 4, 32),
        Tied,
    ],
)
def test_bits_are_those_of_a_model_built_in_memory(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    want = seeded(build).state_dict()
    with GeminiDDP(on_meta(build), **tight(tmp_path, 160 * KIB)) as model:
        assert_same_state(model.state_dict(), dict(want))


def test_parts_are_initialized_by_the_model_around_them() -> None:
    with GeminiDDP(on_meta(Styled)) as model:
        state = model.state_dict()
        assert bool((state["parts.0.weight"] == 3).all())
        assert bool((state["parts.1.linear.weight"] == 3).all())
        assert bool((state["parts.1.scale"] == 2).all())


def test_what_nobody_initializes_is_awaited_and_a_load_brings_it() -> None:
    want = seeded(Bare).state_dict()
    x = torch.ones(2, 16)
    with GeminiDDP(on_meta(Bare)) as model:
        for use in (lambda: model(x), model.state_dict):
            with pytest.raises(StateError, match=r"2 weights.*'scale'.*load"):
                use()
        model.load_state_dict({"scale": want["scale"]}, strict=False)
        with pytest.raises(StateError):
            model(x)
        model.load_state_dict(want)
        model(x)
        assert_same_state(model.state_dict(), dict(want))


def test_writing_values_does_as_well_as_loading_them() -> None:
    with GeminiDDP(on_meta(Bare)) as model:
        with torch.no_grad():
            model.module.scale.fill_(2.0)
            model.module.shift.fill_(1.0)
        assert bool(model(torch.ones(2, 16)).isfinite().all())


def test_a_buffer_that_no_load_brings_is_refused_and_the_module_is_ordinary() -> None:
    def build() -> nn.Module:
        module = Bare()
        module.register_buffer("shift", torch.ones(16), persistent=False)
        return module

    module = on_meta(build)
    with pytest.raises(ConfigError, match=r"'shift' of Bare.*reset_parameters"):
        GeminiDDP(module)
    assert all(type(param) is nn.Parameter for param in module.parameters())


class Scaled(nn.Parameter):
    """A parameter with a class of its own."""


def test_a_parameter_of_a_class_of_its_own_is_refused_before_anything_changes() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = Scaled(torch.ones(4, 4))
    with pytest.raises(ConfigError, match=r"'1.weight' is a .*Scaled"):
        GeminiDDP(module)
    assert type(module[0].weight) is nn.Parameter
    with pytest.raises(ConfigError, match="lazy"):
        GeminiDDP(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)))
