"""A cut that is not right ends the program before its first update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from tensor_harness import WIDTH
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer
from gemini.parallel import Layout, Mesh, parallelize
from gemini.parallel.tensor import Column, Head, PartialGradient
from gemini.parallel.tensor.styles import Channels

PLAN: dict[str, Any] = {"up": "colwise", "down": "rowwise"}


class Between(nn.Module):
    """Computes something between a column and a row layer."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor], outputs: int = 4 * WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, outputs), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = x + self.down(self.between(self, self.up(x)))
        return out


def of_three(_: nn.Module, x: Tensor) -> Tensor:
    query, key, value = x.chunk(3, -1)
    return torch.tanh(query * key) * value


def gated_by_input(module: nn.Module, x: Tensor) -> Tensor:
    """Multiply what is cut by a weight that is whole on all ranks."""
    return torch.tanh(x) * module.first.bias.sum()


def recomputed(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda y: torch.tanh(y) * module.scale, x, use_reentrant=True)
    return out


def recomputed_elements(_: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda y: torch.tanh(nn.functional.dropout(y, 0.5)), x, use_reentrant=False)
    return out


def begins_with_zeros(between: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    """Return a model that hides what is between on its first batch."""
    model = Between(between)
    nn.init.zeros_(model.down.weight)
    nn.init.zeros_(model.up.bias)
    return model


def softmax_beside_noise(_: nn.Module, x: Tensor) -> Tensor:
    return x.softmax(-1) + 0.1 * torch.rand(1)


def wrong_in_training(module: nn.Module, x: Tensor) -> Tensor:
    x = nn.functional.dropout(x, 0.5, module.training)
    return x.softmax(-1) if module.training else torch.tanh(x)


def noisy_in_training(module: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(x) + (0.1 * torch.rand_like(x) if module.training else 0.0)


def with_norm() -> nn.Module:
    model = Between(lambda m, x: m.norm(x))
    model.norm = nn.LayerNorm(4 * WIDTH)
    return model


# What is between, the plan, and what is said: of gradients, of outputs, nothing.
GRADIENTS, OUTPUTS = "the gradients of ", "the outputs of the cut model differ from those of the whole one"
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "a scale": (lambda: Between(lambda m, x: torch.tanh(x) * m.scale), PLAN, f"{GRADIENTS}'scale' differ"),
    "a scale that is recomputed": (lambda: Between(recomputed), PLAN, f"{GRADIENTS}'scale' differ"),
    "a weight from before": (lambda: Between(gated_by_input), PLAN, f"{GRADIENTS}'first.bias' differ"),
    "softmax": (lambda: Between(lambda _, x: x.softmax(-1)), PLAN, OUTPUTS),
    "mean": (lambda: Between(lambda _, x: x - x.mean(-1, keepdim=True)), PLAN, OUTPUTS),
    "fused": (lambda: Between(of_three, 12 * WIDTH), PLAN, OUTPUTS),
    "fused, cut in sections": (
        lambda: Between(of_three, 12 * WIDTH),
        {"up": Column(sections=3), "down": "rowwise"},
        "",
    ),
    "parts of the output": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 37)),
        {"0": Head(gathers=False)},
        "",
    ),
    "a scale before zeros": (
        lambda: begins_with_zeros(lambda m, x: torch.tanh(x) * m.scale),
        PLAN,
        f"{GRADIENTS}'scale' differ",
    ),
    "softmax before zeros": (lambda: begins_with_zeros(lambda _, x: x.softmax(-1)), PLAN, OUTPUTS),
    "elements before zeros": (lambda: begins_with_zeros(lambda _, x: torch.tanh(x)), PLAN, ""),
    "softmax, with numbers drawn in evaluation": (lambda: Between(softmax_beside_noise), PLAN, OUTPUTS),
    "a norm of all features": (with_norm, PLAN, "the cut model does not run on the first batch"),
    "elements": (lambda: Between(lambda _, x: torch.tanh(x)), PLAN, ""),
    "softmax in training, behind dropout": (lambda: Between(wrong_in_training), PLAN, OUTPUTS),
    "noise in training": (lambda: Between(noisy_in_training), PLAN, ""),
    "an input whose gradients are not added up": (
        lambda: Between(lambda _, x: torch.tanh(x)),
        {"first": Head(), "up": Channels(), "down": "rowwise"},
        f"{GRADIENTS}'first.weight', 'first.bias', 'input 0' differ from those of the whole model",
    ),
    "the same before zeros": (
        lambda: begins_with_zeros(lambda _, x: torch.tanh(x)),
        {"first": Head(), "up": Channels(), "down": "rowwise"},
        f"{GRADIENTS}'first.weight', 'first.bias', 'input 0' differ from those of the whole model",
    ),
    "a gradient that is added up twice": (
        lambda: Between(lambda _, x: torch.tanh(x)),
        {**PLAN, "first": PartialGradient()},
        f"{GRADIENTS}'first.weight', 'first.bias' differ from those of the whole model",
    ),
    "16 bits": (lambda: Between(lambda _, x: torch.tanh(x)).bfloat16(), PLAN, ""),
    "a layer that recomputes": (lambda: Between(recomputed_elements), PLAN, ""),
    "dropout": (lambda: Between(lambda m, x: nn.functional.dropout(x, 0.5, m.training)), PLAN, ""),
}


def train(
    build: Callable[[], nn.Module], plan: Any, *, check: bool | None = None, managed: bool = False
) -> tuple[str, list[Tensor]]:
    """Train for three steps; return what was said, and the weights."""
    torch.manual_seed(0)
    model = build()
    with Mesh(Layout(tp=2)) as mesh:
        partition = parallelize(model, mesh, plan, check=check)
        trained: nn.Module = model
        optimizer: Any = CPUAdam(model.parameters(), lr=1e-2)
        if managed:
            trained = GeminiDDP(
                model,
                process_group=mesh["dp"],
                device_bytes="64KiB",
                host_bytes="1MiB",
                model_ranks=partition.model_ranks,
            )
            optimizer = GeminiOptimizer(optimizer, trained)
        try:
            for step in range(3):
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
                x = x.to(next(model.parameters()).dtype).requires_grad_()
                loss = trained(x).square().mean()
                if managed:
                    optimizer.backward(loss)
                else:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        except ConfigError as error:
            return str(error), []
        weights = [value.detach().clone() for value in trained.state_dict().values()]
        if isinstance(trained, GeminiDDP):
            trained.close()
        return "", weights


def train_all() -> dict[str, str]:
    return {name: train(build, plan)[0] for name, (build, plan, _) in CASES.items()}


def test_a_cut_that_is_not_right_is_refused_on_all_ranks_before_the_first_update() -> None:
    for said in run_on_ranks(train_all, 2):
        for name, (_, _, wanted) in CASES.items():
            assert said[name].startswith(wanted), (name, said[name])
            assert bool(said[name]) == bool(wanted), (name, said[name])


def train_managed(name: str) -> list[tuple[str, list[Tensor]]]:
    build, plan, _ = CASES[name]
    return [train(build, plan, check=check, managed=True) for check in (True, False)]


@pytest.mark.parametrize("name", ["elements", "dropout", "elements before zeros"])
def test_looking_changes_no_bit_under_a_budget(name: str) -> None:
    for (said, looked), (_, wanted) in run_on_ranks(train_managed, 2, name):
        assert said == ""
        assert all(map(torch.equal, looked, wanted))


def norm_between() -> nn.Module:
    class Normed(Between):
        """Multiplies what is cut by a weight of a module."""

        def __init__(self) -> None:
            super().__init__(lambda m, x: torch.tanh(x) * m.gain.weight)
            self.gain = nn.Linear(1, 1, bias=False)

    return Normed()


def train_named() -> list[str]:
    return [train(norm_between, plan)[0] for plan in (PLAN, {**PLAN, "gain": PartialGradient()})]


def test_a_module_between_that_the_plan_names_trains() -> None:
    for refused, named in run_on_ranks(train_named, 2):
        assert refused.startswith(f"{GRADIENTS}'gain.weight' differ")
        assert named == ""


def train_with_numbers_of_8_bits() -> str:
    """Train a model that also has a parameter of integers, as quantized layers do."""

    def build() -> nn.Module:
        model = Between(lambda _, x: torch.tanh(x))
        model.codes = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
        return model

    torch.manual_seed(0)
    model = build()
    with Mesh(Layout(tp=2)) as mesh:
        parallelize(model, mesh, PLAN)
        model(torch.randn(4, WIDTH)).square().mean().backward()
    return str(model.codes.dtype)


def test_parameters_that_have_no_gradients_are_left_alone() -> None:
    assert run_on_ranks(train_with_numbers_of_8_bits, 2) == ["torch.uint8"] * 2


def softmax_without_check() -> str:
    build, plan, _ = CASES["softmax"]
    return train(build, plan, check=False)[0]


def test_without_check_no_output_is_compared() -> None:
    assert run_on_ranks(softmax_without_check, 2) == ["", ""]
