"""What blocks leave beside their output, and what a criterion reads of the model, in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ConfigError, GeminiDDP
from gemini.parallel.pipeline.containers import tensor_paths
from gemini.parallel.pipeline.remote_modules import RemoteModule, meta_copy_of
from gemini.parallel.pipeline.split import StagedModel, choose_ranges, split
from gemini.parallel.pipeline.stage_pass import StageInputs, StagePass
from gemini.parallel.pipeline.units import find_units

WIDTH = 6
NOTED: list[Tensor] = []


def note(loss: Tensor) -> None:
    NOTED.append(loss)


class Block(nn.Module):
    in_class: list[Tensor] = []  # noqa: RUF012  # that blocks share it is tried
    depth = 0

    def __init__(self, leaves: str) -> None:
        super().__init__()
        self.linear, self.leaves, self.loss = nn.Linear(WIDTH, WIDTH), leaves, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.leaves.startswith("routed"):
            rows = (y.sum(-1) > 0).nonzero().squeeze(-1)
            y = y.index_add(0, rows, y[rows])
        if self.leaves == "routed, in an attribute":
            self.loss = y.square().mean()
        if self.leaves in ("class", "routed, in a list"):
            self.in_class.append(y.square().mean())
        if self.leaves == "global":
            note(y.square().mean())
        if self.leaves == "counter":
            Block.depth += 1
            y = y / Block.depth
        return x + y


class Model(nn.Module):
    def __init__(self, leaves: str) -> None:
        super().__init__()
        self.hooked: list[Tensor] = []
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(leaves) for _ in range(4))
        for block in self.blocks if leaves == "hook" else ():
            block.register_forward_hook(lambda _module, _args, out: self.hooked.append(out.square().mean()))

    def forward(self, x: Tensor) -> Tensor:
        Block.depth = 0
        for losses in (NOTED, Block.in_class, self.hooked):
            losses.clear()
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x) * (1 + sum([*NOTED, *Block.in_class, *self.hooked]))
        return out


def staged(own: int, build: Callable[[], nn.Module]) -> StagedModel:
    torch.manual_seed(0)
    model = build()
    units = find_units(model)
    return split(model, units, choose_ranges(model, units, 2, "layers"), (own,))


def run_stages(leaves: str, x: Tensor) -> Any:
    stages = [staged(own, lambda: Model(leaves)).stages[0] for own in range(2)]
    takes = stages[1].takes((x,), {})
    for _ in range(2):  # the second pass finds what the first has learned
        given = stages[0].run((), StageInputs(), takes, (x,), {})
        out = stages[1].run(given, takes, StageInputs(), (x,), {})
    return out


@pytest.mark.parametrize("leaves", ["nothing", "class", "global", "hook", "counter"])
def test_what_blocks_leave_anywhere_is_that_of_one_process(leaves: str) -> None:
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    whole = Model(leaves)(x)
    assert torch.equal(run_stages(leaves, x), whole)


@pytest.mark.parametrize("leaves", ["routed, in a list", "routed, in an attribute"])
def test_what_a_block_leaves_that_decides_on_values_is_refused(leaves: str) -> None:
    with pytest.raises(ConfigError, match=r"'blocks\.0' leaves something in .* does not run on 'meta'"):
        run_stages(leaves, torch.ones(5, WIDTH))


class Paired(nn.Module):
    """Returns its output and a loss; "routed" also decides on values."""

    wide: Tensor

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH, dtype=dtype), kind
        self.register_buffer("wide", torch.eye(WIDTH, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "routed":
            rows = (x.sum(-1) > 0).nonzero().squeeze(-1)
            x = x.index_add(0, rows, x[rows])
        y = torch.bmm(self.linear(x)[None], self.wide[None])[0]
        return x + y, y.square().mean()


class Pairs(nn.Module):
    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Paired(kind, dtype) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _loss = block(x)
        return x


def takes_of_pairs(kind: str, dtype: torch.dtype) -> StageInputs:
    stage = staged(1, lambda: Pairs(kind, dtype)).stages[0]
    return stage.takes((torch.ones(5, WIDTH, dtype=dtype),), {})


def test_the_output_of_a_block_that_decides_on_values_is_assumed_to_be_like_its_input() -> None:
    with pytest.raises(ConfigError, match=r"'blocks\.0' of another stage does not run on 'meta'.*ValueError"):
        takes_of_pairs("routed", torch.float32)


def test_a_block_in_which_a_buffer_promotes_values_runs_on_meta_in_16_bits() -> None:
    assert takes_of_pairs("plain", torch.bfloat16) == takes_of_pairs("plain", torch.float32)


def test_a_block_that_decides_on_values_and_leaves_nothing_trains() -> None:
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    whole = Model("routed")(x)
    assert torch.equal(run_stages("routed", x), whole)


@pytest.mark.parametrize(
    "weights",
    [
        lambda model: model.parameters(),
        lambda model: model.state_dict(keep_vars=True).values(),
        lambda model: [module.weight for module in model.modules() if isinstance(module, nn.Linear)],
    ],
)
def test_a_criterion_that_adds_up_all_weights_is_refused(weights: Callable[[nn.Module], Any]) -> None:
    part = staged(1, lambda: Model("nothing"))
    own = {name for name, _ in part.module.named_parameters()}
    with pytest.raises(ConfigError, match="the loss depends on a value that only another stage has"):
        part.stages[0].judge(lambda: sum(weight.square().sum() for weight in weights(part.module)))
    assert {name for name, _ in part.module.named_parameters()} == own


def test_a_block_that_holds_the_model_around_it_is_refused() -> None:
    def build() -> nn.Module:
        model = Model("nothing")
        model.blocks[1].owner = [model]  # type: ignore[assignment]
        return model

    with pytest.raises(ConfigError, match=r"'blocks\.1' holds the model, .* attribute 'owner'"):
        staged(0, build)


def test_a_module_within_an_absent_one_is_absent_too_and_the_same_each_time() -> None:
    absent = RemoteModule("block", meta_copy_of(nn.TransformerEncoderLayer(4, 2)), StagePass())
    inner = absent.self_attn.out_proj
    assert type(inner) is RemoteModule
    assert inner is absent.self_attn.out_proj
    assert list(absent.stand_ins()) == [absent, absent.self_attn, inner]


def test_what_the_runtime_keeps_with_a_model_is_not_looked_through_in_each_pass() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    module.losses = [torch.zeros(())]
    module.kept = torch.zeros(3)
    model = GeminiDDP(module)
    found = [path for path, _ in tensor_paths(module.__dict__, ("",), set())]
    assert found == [("", "losses", (0, 1)), ("", "kept")]
    model.close()
