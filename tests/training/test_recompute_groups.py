"""Groups of blocks that run again in backward: the same bits, one input kept for all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gemini import ConfigError, StateError
from gemini.runtime.activation.block_groups import names_in, text_of_names
from gemini.runtime.activation.recomputed_blocks import GroupedBlock, recompute_blocks

WIDTH, ROWS = 32, 64
NESTED: tuple[Any, ...] = ((("0", ("1", "2"), "3"), "4", "5"),)
GROUPS: dict[str, tuple[Any, ...]] = {
    "all": (("0", "1", "2", "3", "4", "5"),),
    "pairs": (("0", "1"), ("2", "3"), ("4", "5")),
    "mixed": ("0", ("1", "2", "3")),
    "nested": NESTED,
    "deep": ((((("0",), "1"), "2"), "3"),),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        out: torch.Tensor = x + self.drop(self.down(torch.relu(self.up(self.norm(x * scale))))) + shift
        return out


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.full((1,), 0.5, dtype=x.dtype)
        for number, block in enumerate(self.blocks):
            x = block(x, scale, shift=number / 8)
        return x


def built() -> Stack:
    torch.manual_seed(0)
    return Stack()


def trained(model: Stack, steps: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        first, second = (model(torch.randn(ROWS, WIDTH)) for _ in range(2))  # two micro-batches under way
        (first.square().mean()).backward()
        (second.square().mean()).backward()
        losses.append(first.detach())
        optimizer.step()
    return [*losses, *(each.detach().clone() for each in model.state_dict().values()), torch.rand(3)]


def grouped(groups: tuple[Any, ...]) -> Stack:
    def named(part: Any) -> Any:
        return f"blocks.{part}" if isinstance(part, str) else tuple(map(named, part))

    model = built()
    recompute_blocks(model, named(groups))
    return model


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_groups_change_no_bit(groups: tuple[Any, ...]) -> None:
    # Not batch norm's statistics either, and not the generator.
    wanted, found = trained(built()), trained(grouped(groups))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


SEEN: list[int] = []


class Runs(nn.Module):
    """Notes when it runs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(WIDTH, WIDTH), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(self.number)
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize(
    ("groups", "runs"),
    [
        ((("0", "1", "2", "3"),), [2, 2, 2, 2]),
        (("0", ("2", "3")), [2, 1, 2, 2]),
        (((("0", "1"), "2", "3"),), [3, 3, 2, 2]),
        ((((("0",), "1"), "2"),), [4, 3, 2, 1]),
    ],
)
def test_blocks_run_as_often_as_their_groups_say(groups: tuple[Any, ...], runs: list[int]) -> None:
    SEEN.clear()
    model = nn.Sequential(*(Runs(number) for number in range(4)))
    recompute_blocks(model, groups)
    out = model(torch.randn(ROWS, WIDTH, requires_grad=True))
    out.sum().backward()
    assert [SEEN.count(number) for number in range(4)] == runs


def test_a_group_keeps_one_input_between_forward_and_backward() -> None:
    def kept(groups: tuple[Any, ...]) -> int:
        held: list[int] = []
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
        if groups:
            recompute_blocks(model, groups)
        refs = []
        for each in model:
            each.register_forward_hook(
                lambda _module, _args, out: refs.append(torch._C._WeakTensorRef(out))  # type: ignore[attr-defined]
            )
        out = model(torch.randn(ROWS, WIDTH))
        held.append(sum(not each.expired() for each in refs))
        out.sum().backward()
        return held[0]

    assert kept(()) == 6
    assert kept(("0", "1", "2", "3", "4", "5")) == 6
    assert kept((("0", "1", "2", "3", "4", "5"),)) == 1  # its own output
    assert kept((("0", "1", "2"), ("3", "4", "5"))) == 2


def test_what_is_written_between_blocks_is_kept() -> None:
    class Writes(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = torch.full((1,), 0.5, dtype=x.dtype)
            for block in self.blocks:
                x = block(x, scale)
                x += 1
            return x

    def run(groups: tuple[Any, ...]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Writes()
        recompute_blocks(model, groups)
        return trained(model)

    names = tuple(f"blocks.{number}" for number in range(6))
    assert all(torch.equal(a, b) for a, b in zip(run(()), run((names,)), strict=True))


def test_a_graph_that_is_kept_may_be_gone_through_twice() -> None:
    model, inputs = grouped(NESTED), torch.randn(ROWS, WIDTH, requires_grad=True)
    out = model(inputs).sum()
    first = torch.autograd.grad(out, inputs, retain_graph=True)[0]
    second = torch.autograd.grad(out, inputs)[0]
    assert torch.equal(first, second)


def test_part_of_a_group_may_run_alone_and_copies_run_as_their_class_does() -> None:
    model = grouped(GROUPS["all"])
    inputs = torch.randn(ROWS, WIDTH, requires_grad=True)
    model.blocks[3](inputs, torch.ones(1)).sum().backward()
    assert inputs.grad is not None
    assert not isinstance(copy.deepcopy(model).blocks[0].forward, GroupedBlock)


def test_a_block_that_saves_something_else_each_time_is_refused() -> None:
    class Changes(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            return x.tanh() if type(self).calls % 2 else x.tanh().exp()

    model = nn.Sequential(Changes(), Changes())
    recompute_blocks(model, (("0", "1"),))
    out = model(torch.randn(4, requires_grad=True)).sum()
    Changes.calls += 1
    with pytest.raises(StateError, match="differs from run to run"):
        out.backward()


def test_text_of_groups_is_read_as_it_was_written() -> None:
    for names in ((), ("0",), ("a.0", ("a.1", "a.2")), (("0", ("1", "2")), "3", (("4",), "5"))):
        assert names_in(text_of_names(names)) == names
    assert names_in(" a , (b, c) ,") == ("a", ("b", "c"))
    for text, why in (("(a,b", "does not close"), ("a)", "does not open")):
        with pytest.raises(ConfigError, match=why):
            names_in(text)


def test_a_group_that_names_no_block_or_one_twice_is_refused() -> None:
    for groups, why in (((("0", "9"),), "no such block"), ((("0", ("1", "0")),), "twice")):
        with pytest.raises(ConfigError, match=why):
            recompute_blocks(nn.Sequential(nn.Tanh(), nn.Tanh()), groups)
