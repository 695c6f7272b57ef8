"""What torch.compile took is one operator: the same bits as where nobody manages the compiled model."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_harness import (
    KIB,
    Outcome,
    Recipe,
    assert_identical,
    assert_trains_alike,
    managed_optimizer,
    managed_step,
    random_batch,
    seeded,
    tight,
    train_plain,
)
from training_models import TinyGPT, gpt_loss

from gemini import ConfigError, GeminiDDP, OutOfBudgetError, StateError

pytestmark = pytest.mark.usefixtures("fresh_compiler")

TRACED = {"backend": "aot_eager"}  # all of the compiler but the making of machine code


class Block(nn.Module):
    """Two layers and a norm, ``[n, 32]`` to ``[n, 32]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's sum."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class DecoratedBlock(Block):
    """A block whose class compiles its forward."""

    forward = torch.compile(Block.forward, **TRACED)


class UncompiledBlock(Block):
    """A block that the compiler is to leave alone."""

    forward = torch.compiler.disable(Block.forward)


class Stack(nn.Module):
    """Blocks between layers."""

    def __init__(self, kind: type[nn.Module] = Block, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(kind() for _ in range(depth))
        self.last = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes of the blocks."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def stack_loss(model: nn.Module, index: int) -> Tensor:
    """Return the loss of a batch."""
    x = random_batch(index, 8, 32)
    x = x.to(next(model.parameters()).dtype)
    return model(x).float().square().mean()


def compiled_gpt() -> nn.Module:
    """Return a GPT whose blocks are compiled."""
    model = TinyGPT()
    for block in model.blocks:
        block.compile(**TRACED)
    return model


def compiled_stack(kind: type[nn.Module] = Block) -> nn.Module:
    """Return a stack of compiled blocks."""
    model = Stack(kind)
    for block in model.blocks:
        block.compile(**TRACED)
    return model


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("device_bytes", [200 * KIB, 320 * KIB, "16MiB"])
def test_compiled_blocks_train_to_the_same_bits(
    device_bytes: int | str, precision: str | None, tmp_path: Path
) -> None:
    recipe = Recipe(steps=5, accumulate=2, clip=("norm", 0.5), precision=precision)
    assert_trains_alike(compiled_gpt, gpt_loss, tight(tmp_path, device_bytes), recipe)


def replaced() -> nn.Module:
    """Return a stack with what torch.compile returns for each block."""
    model = Stack()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **TRACED)
    return model


def whole() -> nn.Module:
    """Return a compiled stack."""
    return torch.compile(Stack(), **TRACED)


def nested() -> nn.Module:
    """Return a stack of compiled blocks with a compiled layer in each."""
    model = Stack()
    for block in model.blocks:
        block.up.compile(**TRACED)
        block.compile(**TRACED)
    return model


@pytest.mark.parametrize(
    ("build", "device_bytes"),
    [
        (replaced, 160 * KIB),
        (whole, 320 * KIB),
        (lambda: Stack(DecoratedBlock), 160 * KIB),
        (nested, 160 * KIB),
    ],
)
def test_every_way_of_compiling(build: Any, device_bytes: int, tmp_path: Path) -> None:
    assert_trains_alike(build, stack_loss, tight(tmp_path, device_bytes))


@pytest.mark.parametrize("when", ["before the first step", "after some steps"])
def test_model_compile(when: str, tmp_path: Path) -> None:
    recipe = Recipe(steps=6)
    plain = seeded(Stack)
    if when == "before the first step":
        for block in plain.blocks:
            block.compile(**TRACED)
    want = train_plain(plain, stack_loss, recipe)  # traced operators have the bits of others
    model = GeminiDDP(seeded(Stack), **tight(tmp_path, 160 * KIB))
    with model:
        optimizer = managed_optimizer(model, recipe)
        losses = []
        for step in range(recipe.steps):
            if step == (0 if when == "before the first step" else 3):
                model.compile(**TRACED)
            losses += managed_step(model, optimizer, stack_loss, recipe, step)
        got = Outcome(losses, {key: value.clone() for key, value in model.state_dict().items()})
        assert all(block._compiled_call_impl is not None for block in model.module.blocks)
    assert_identical(got, want)


@pytest.mark.dear("it compiles to machine code")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of torch.compile needs a C++ compiler")
def test_machine_code_of_the_compiler(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = Stack(depth=2)
        for block in model.blocks:
            block.compile()
        return model

    assert_trains_alike(build, stack_loss, tight(tmp_path, 160 * KIB), Recipe(steps=3))


class Odd(nn.Module):
    """A block with what blocks may have: frozen and unused weights, a weight that it is given, one that it
    returns, a recurrent layer, an auxiliary loss behind a break of the graph, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.unused = nn.Linear(32, 32)
        self.recurrent = nn.LSTM(32, 32)
        self.router = nn.Linear(32, 4)
        self.drop = nn.Dropout(0.25)
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result and a view of a weight."""
        x = self.frozen(torch.tanh(self.linear(x))) + F.linear(x, given)
        x = x + self.recurrent(x[None])[0][0]
        torch._dynamo.graph_break()
        self.auxiliary = self.router(x.detach()).softmax(-1).square().sum()
        return self.drop(x), self.linear.weight[:4]


class OddStack(nn.Module):
    """Two odd blocks that share a weight with what is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Odd() for _ in range(2))
        for block in self.blocks:
            block.compile(**TRACED)

    def forward(self, x: Tensor) -> Tensor:
        """Return a sum."""
        x = self.first(x)
        total = x.sum()
        for block in self.blocks:
            x, view = block(x, self.first.weight)
            total = total + block.auxiliary + view.square().sum()
        return total + x.square().mean()


def test_odd_blocks(tmp_path: Path) -> None:
    def loss(model: nn.Module, index: int) -> Tensor:
        torch.manual_seed(index)
        return model(random_batch(index, 8, 32))

    assert_trains_alike(OddStack, loss, tight(tmp_path, 256 * KIB), Recipe(steps=5))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_compiled_blocks(reentrant: bool, tmp_path: Path) -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.last(x)

    def build() -> nn.Module:
        model = Checkpointed()
        for block in model.blocks:
            block.compile(**TRACED)
        return model

    assert_trains_alike(build, stack_loss, tight(tmp_path, 160 * KIB))


@pytest.mark.parametrize("offload", [True, "auto"])
def test_with_offloaded_activations(offload: bool | str, tmp_path: Path) -> None:
    options = {
        **tight(tmp_path, "4MiB", activation_offload=offload, activation_recompute=offload == "auto"),
        "non_model_bytes": None,
    }

    def loss(model: nn.Module, index: int) -> Tensor:
        return model(random_batch(index, 1024, 32)).square().mean()

    assert_trains_alike(compiled_stack, loss, options, Recipe(steps=6))


def test_evaluations_of_compiled_blocks(tmp_path: Path) -> None:
    want = seeded(compiled_stack)
    with GeminiDDP(seeded(compiled_stack), **tight(tmp_path, 160 * KIB)) as model:
        for mode in (torch.no_grad, torch.inference_mode):
            for index in range(3):
                x = random_batch(index, 8, 32)
                with mode():
                    assert torch.equal(model(x), want(x))


def test_a_block_is_one_moment_and_steps_that_compile_are_not_recorded(tmp_path: Path) -> None:
    with GeminiDDP(seeded(compiled_stack), **tight(tmp_path, 160 * KIB)) as model:
        optimizer = managed_optimizer(model)
        managed_step(model, optimizer, stack_loss, Recipe(), 0)
        assert model.memstats() is None
        managed_step(model, optimizer, stack_loss, Recipe(), 1)
        trace = model.memstats()
        assert trace is not None
        assert sum(phase == "forward" for phase in trace.phases) == 2 + 4
    with GeminiDDP(seeded(lambda: Stack(UncompiledBlock)), **tight(tmp_path, 160 * KIB)) as model:
        managed_step(model, managed_optimizer(model), stack_loss, Recipe(), 0)
        trace = model.memstats()
        assert trace is not None
        assert sum(phase == "forward" for phase in trace.phases) == 2 + 4 * 3


def test_compiling_a_managed_model_from_outside_leaves_it_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = Recipe(steps=3)
    want = train_plain(seeded(Stack), stack_loss, recipe)
    with GeminiDDP(seeded(Stack), **tight(tmp_path, 160 * KIB)) as model:
        outside = torch.compile(model, **TRACED)
        optimizer = managed_optimizer(model, recipe)
        losses = []
        with caplog.at_level(logging.WARNING):
            for step in range(recipe.steps):
                loss = stack_loss(outside, step)
                optimizer.backward(loss)
                losses.append(loss.item())
                optimizer.step()
        assert losses == want.losses
        assert caplog.text.count("model.compile(), which compiles each block") == 1


def test_a_compiled_function_runs_operators_of_managed_parameters_as_they_are(tmp_path: Path) -> None:
    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.squared(super().forward(x))

        @torch.compile(**TRACED)
        def squared(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(x * 2), self.first.weight) + 1

    assert_trains_alike(Model, stack_loss, tight(tmp_path, 160 * KIB))


def test_a_block_that_does_not_fit_is_refused_up_front(tmp_path: Path) -> None:
    budgets = tight(tmp_path, 160 * KIB)
    with pytest.raises(OutOfBudgetError, match=r"submodule 'blocks.0' needs [\d.]+ KiB"):
        GeminiDDP(seeded(lambda: compiled_stack(Wide)), **budgets)
    with GeminiDDP(seeded(lambda: Stack(Wide)), **budgets) as model:
        model.compile(**TRACED)
        with pytest.raises(OutOfBudgetError, match=r"this operator needs [\d.]+ [KM]iB on DEVICE"):
            stack_loss(model, 0)


class Wide(nn.Module):
    """Many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(60)])

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes of them."""
        return self.layers(x)


def test_a_block_that_uses_another_models_parameters_is_refused(tmp_path: Path) -> None:
    class Given(nn.Linear):
        def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
            return F.linear(x, self.weight if weight is None else weight)

    first, second = (GeminiDDP(Given(32, 32), **tight(tmp_path, 64 * KIB)) for _ in range(2))
    with first, second:
        first.compile(**TRACED)
        with pytest.raises(ConfigError, match="another managed model"):
            first(torch.ones(2, 32), second.module.weight)


def test_a_failing_block_leaves_its_parameters_managed(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise ValueError("three")
            return self.linear(x)

    with GeminiDDP(Fails(), **tight(tmp_path, 64 * KIB)) as model:
        model.compile(**TRACED)
        weight = model.module.linear.weight
        with pytest.raises(ValueError, match="three"):
            model(torch.ones(3, 32))
        assert model.module.linear.weight is weight
        model(torch.ones(2, 32)).sum().backward()
        assert weight.grad is not None
    with pytest.raises(StateError):
        model.module(torch.ones(2, 32))
