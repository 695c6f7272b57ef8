"""Records: what a rank computes, keeps and sends is told apart by block, and equal blocks run once."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import pytest
import torch
from planner_models import Net, net, run_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini import ConfigError
from gemini.planner import records
from gemini.planner.records import CutModel, Message, Part, Record


def recorded(model: nn.Module, samples: int = 2, part: Part | None = None) -> Record:
    return CutModel(model, part or Part()).record(run_of(samples))


def flops(record: Record) -> list[tuple[int, int]]:
    return [
        tuple(
            sum(each.flops * count for each, count in way.operations.items())
            for way in (s.forward, s.backward)
        )  # type: ignore[misc]
        for s in record.segments
    ]


def test_each_block_has_its_arithmetic_and_its_parameters() -> None:
    found = recorded(net(4, 64, 4))
    tokens = 2 * 8
    products = [2 * tokens * 16 * 2 * inner for inner in (4, 64, 4)]
    assert flops(found) == [
        (0, 0),
        *((each, 2 * each) for each in products),
        (2 * tokens * 16 * 32, 4 * tokens * 16 * 32),
    ]
    assert found.blocks == ("blocks.0", "blocks.1", "blocks.2")
    counts = [sum(p.numel for p in s.parameters) for s in found.segments]
    assert counts == [32 * 16, *(2 * 16 * inner + inner + 16 for inner in (4, 64, 4)), 16 * 32 + 32]


def test_a_block_keeps_its_input_and_what_is_inside() -> None:
    found = recorded(net(4, 64))
    tokens = 2 * 8
    for segment, inner in zip(found.segments[1:-1], (4, 64), strict=True):
        # relu keeps its output, which the second product has for an input; the sum is the next block's input.
        assert segment.kept_bytes == 4 * tokens * (inner + 16)
        assert segment.input_bytes == 4 * tokens * 16
        assert segment.forward.peak_bytes >= segment.kept_bytes


def test_equal_blocks_that_stand_still_have_the_figures_of_those_that_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net(8, 8, 8, 24, 8, 24, 24, 8)
    found = recorded(model)
    monkeypatch.setattr(records, "_RUNS_PER_KIND", 100)
    whole = recorded(model)
    assert found.segments == whole.segments


def test_what_tells_equal_blocks_apart_is_seen() -> None:
    model = net(8, 8, 8, 8)
    model.blocks[3].up.weight.requires_grad_(False)
    found = flops(recorded(model))
    assert found[3][1] - found[4][1] == 2 * 16 * 16 * 8  # of the frozen weight there is no gradient


def test_parts_of_layers_compute_less_and_tell_what_they_send() -> None:
    class Cut(Net):
        _tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    with torch.device("meta"):
        model = Cut((8, 8, 8))
    found = recorded(model, part=Part(tp=2))
    whole = recorded(model)
    nbytes = 2 * 8 * 16 * 4
    once = {Message("tp", "all_reduce", nbytes, nbytes): 1}  # a half there, a half back
    for mine, all_of_it in zip(found.segments[1:-1], whole.segments[1:-1], strict=True):
        assert mine.forward.messages == once
        assert mine.backward.messages == once
        assert 2 * sum(p.numel for p in mine.parameters) == sum(p.numel for p in all_of_it.parameters) + 16
    assert 2 * flops(found)[1][0] == flops(whole)[1][0]


def test_a_model_without_blocks_has_one_segment_and_the_reason() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.embed(ids))
            return out

    with torch.device("meta"):
        model = Flat()
    found = CutModel(model, Part()).record(run_of(2))
    assert len(found.segments) == 1
    assert found.blocks == ()
    assert found.why_one is not None
    assert found.segments[0].forward.operations


def test_of_blocks_that_run_twice_there_is_one_segment_and_the_reason() -> None:
    class Twice(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            out: torch.Tensor = self.head(x)
            return out

    with torch.device("meta"):
        model = Twice((8, 8))
    found = recorded(model)
    assert found.blocks == ()
    assert "ran after block" in str(found.why_one)
    ((forward, backward),) = flops(found)
    assert backward == 2 * forward == 2 * (2 * flops(recorded(net(8, 8)))[1][0] * 2 + 2 * 2 * 8 * 16 * 32)


def test_blocks_that_do_not_run_are_no_stages() -> None:
    class Unused(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.embed(ids))
            return out

    with torch.device("meta"):
        model = Unused((8, 8))
    assert recorded(model).why_one == "0 of 2 blocks ran; stages run each once"


def test_a_value_that_is_not_there_is_named() -> None:
    class Asks(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out = super().forward(ids)
            return out * float(out.detach().sum())

    with torch.device("meta"):
        model = Asks((8, 8))
    with pytest.raises(ConfigError, match="without values"):
        recorded(model)


class Scaled(nn.Module):
    """Takes a table that was made in front, and hands on how large its input is, which needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor, table: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.up(x) * table + size, x.detach().abs()


class ScaledNet(Net):
    def __init__(self) -> None:
        super().__init__((16, 16))
        self.blocks = nn.ModuleList((Scaled(), Scaled()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        table, size = torch.ones(8, 16, device=x.device, dtype=x.dtype).cos(), x.detach().abs()
        for block in self.blocks:
            x, size = block(x, table, size)
        out: Tensor = self.head(x)
        return out


def test_what_a_stage_begins_with_is_told_apart_from_what_it_makes_itself() -> None:
    with torch.device("meta"):
        record = recorded(ScaledNet().train())
    inputs = 4 * 2 * 8 * 16
    assert record.segments[2].front_bytes == 4 * 8 * 16  # the table
    assert record.segments[2].received_bytes == 2 * inputs  # the sizes need no gradient


def test_the_input_half_of_backward_keeps_the_graph() -> None:
    for block in recorded(net(16, 16)).segments[1:3]:
        assert block.half_bytes >= 2 * block.input_bytes  # gradients of the sum and of what is added to it
        assert block.carried_bytes >= block.input_bytes


def test_blocks_that_recompute_by_themselves_are_seen() -> None:
    model = net(16, 16)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    record = recorded(model)
    assert [each.recomputes for each in record.segments] == [False, True, True, False]
    assert not any(each.recomputes for each in recorded(net(16, 16)).segments)
