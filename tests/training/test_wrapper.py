"""A wrapper hides nothing of its module: what programs read from a model, set and call, is the model's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import GeminiAdamOptimizer, GeminiDDP

# What the wrapper keeps for itself must not be found where the module has something of that name.
NAMES = ("config", "device", "dtype", "manager", "storage", "peers", "managed", "compiled", "optimizers")


class Named(nn.Module):
    """A model with attributes of every name that its wrapper might use."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.settings = SimpleNamespace(use_cache=True)
        for name in (*NAMES, "accumulates"):
            if name != "dtype":
                setattr(self, name, f"the model's {name}")

    @property
    def dtype(self) -> str:
        """Return what shows that it is the model's."""
        return "the model's dtype"

    def forward(self, x: Tensor) -> Tensor:
        """Return eight numbers for each row."""
        return self.head(x)

    def generate(self, x: Tensor) -> Tensor:
        """Use the model as its users do."""
        return self(x).argmax(-1)


@pytest.mark.parametrize("name", NAMES)
def test_an_attribute_is_the_models(name: str) -> None:
    with GeminiDDP(Named()) as model:
        assert getattr(model, name) == f"the model's {name}"


def test_a_model_with_any_names_trains_and_is_loaded() -> None:
    with GeminiDDP(Named(), mixed_precision="bf16") as model:
        optimizer = GeminiAdamOptimizer(model, lr=1e-2)
        with model.no_sync():
            optimizer.backward(model(torch.ones(2, 8)).sum())
        optimizer.backward(model(torch.ones(2, 8)).sum())
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        assert model.generate(torch.ones(2, 8, dtype=torch.bfloat16)).shape == (2,)


def test_what_the_model_has_is_set_and_deleted_on_the_model() -> None:
    module = Named()
    with GeminiDDP(module) as model:
        model.config = "another"
        model.settings.use_cache = False
        model.own = 1
        del model.settings
        assert module.config == "another"
        assert not hasattr(module, "settings")
        assert not hasattr(module, "own")
        assert model.head is module.head
        assert {"generate", "retry_step"} <= set(dir(model))


def test_without_its_own_a_model_has_the_device_of_its_parameters_and_no_config() -> None:
    with GeminiDDP(nn.Linear(4, 4)) as model:
        assert torch.ones(2, 4).to(model.device).device == model.module.weight.device
        for name in ("config", "dtype", "generate", "weights"):
            with pytest.raises(AttributeError, match=f"'Linear' object has no attribute '{name}'"):
                getattr(model, name)


class Whole(nn.Module):
    """Wraps another module, as a part of a larger model does."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part: Any = part

    def forward(self, x: Tensor) -> Tensor:
        """Run the part."""
        return self.part(x)


def test_a_wrapper_is_loaded_as_a_part() -> None:
    with GeminiDDP(Named()) as model:
        whole = Whole(model)
        state = {key: torch.full_like(value, 2.0) for key, value in whole.state_dict().items()}
        whole.load_state_dict(state)
        assert bool((model.state_dict()["head.weight"] == 2).all())
