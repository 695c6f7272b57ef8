"""Experts that do not train move by the expert: whichever fit, the numbers are those of the resident
model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import (
    EXPERTS,
    PRODUCTS,
    ROW_BYTES,
    TOP,
    WIDTH,
    Arrays,
    Expert,
    managed,
    model,
    tokens,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_harness import managed_optimizer

import gemini
from gemini import _C, GeminiDDP, GeminiOptimizer
from gemini.checkpoint import load, save
from gemini.chunk import ChunkManager
from gemini.model.handle import ManagedModel


def parts(ddp: GeminiDDP) -> tuple[ManagedModel, ChunkManager]:
    handle = gemini.handle_of(ddp)
    return handle, handle.storage.chunks


def read_bytes(ddp: GeminiDDP) -> int:
    return int(parts(ddp)[1].link_stats()["disk_read"]["bytes"])


@pytest.mark.parametrize("rows", [5.5, 12, 40])
@pytest.mark.parametrize("product", PRODUCTS)
def test_outputs_have_the_bits_of_the_resident_model_at_any_budget(
    product: str, rows: float, tmp_path: Path
) -> None:
    plain = model(product)
    ddp = managed(copy.deepcopy(plain), rows, tmp_path)
    chunks, strays = parts(ddp)[1], _C.stray_count()
    for seed, count in enumerate((1, 9, 1, 30, 2, 2, 1)):
        x = tokens(count, seed)
        assert torch.equal(ddp(x), plain(x))
    assert chunks.table.peak(_C.Tier.DEVICE) <= int(rows * ROW_BYTES)
    assert chunks.has_choices
    assert _C.stray_count() == strays


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_pass_reads_the_experts_that_it_uses_and_no_others(product: str, tmp_path: Path) -> None:
    plain = model(product)
    ddp = managed(copy.deepcopy(plain), 10, tmp_path)
    for seed in range(4):
        ddp(tokens(1, seed))
    before = read_bytes(ddp)
    passes = 8
    for seed in range(10, 10 + passes):
        ddp(tokens(1, seed))
    used = passes * 3 * TOP * 2 * ROW_BYTES
    spare = 4096 * passes * 3 * (2 * TOP + 4)  # biases and routers, a page each
    assert 0 < read_bytes(ddp) - before <= used + spare


@pytest.mark.parametrize("product", PRODUCTS)
def test_routing_is_no_divergence(product: str, tmp_path: Path) -> None:
    ddp = managed(model(product), 12, tmp_path)
    table = parts(ddp)[1].table
    diverged = []
    for seed in range(8):
        ddp(tokens(1, seed))
        diverged.append(table.diverged())
    assert not any(diverged[1:])


def test_more_experts_than_fit_are_used_in_turns(tmp_path: Path) -> None:
    plain = model("grouped", layers=1)
    ddp = managed(copy.deepcopy(plain), 3.5, tmp_path)
    x = tokens(64)  # every expert is used
    assert torch.equal(ddp(x), plain(x))
    before = read_bytes(ddp)
    ddp(x)
    assert read_bytes(ddp) - before <= 2 * EXPERTS * ROW_BYTES + 16 * 4096  # each expert once


def test_gradients_go_through_experts_that_do_not_train(tmp_path: Path) -> None:
    plain = model("grouped")
    ddp = managed(copy.deepcopy(plain), 14, tmp_path)
    given = [tokens(12).requires_grad_() for _ in range(2)]
    plain(given[0]).square().sum().backward()
    gemini.handle_of(ddp).backward(ddp(given[1]).square().sum())
    assert torch.equal(given[0].grad, given[1].grad)  # type: ignore[arg-type]


def test_a_view_of_rows_refers_to_their_chunks_alone(tmp_path: Path) -> None:
    ddp = managed(model("grouped", layers=1), 6, tmp_path)
    up: Any = ddp.module[0].experts.up  # type: ignore[index, union-attr]
    assert len(up._ref.tensors) == EXPERTS
    whole = up._ref.tensors
    assert up[3]._ref.tensors == whole[3:4]
    assert up[2:5]._ref.tensors == whole[2:5]
    assert up[2:5][1]._ref.tensors == whole[3:4]
    assert up.transpose(1, 2)[5]._ref.tensors == whole[5:6]
    assert up.transpose(1, 2).detach()._ref.tensors == whole
    assert [row._ref.tensors for row in up.unbind()] == [(tensor,) for tensor in whole]
    before = read_bytes(ddp)
    up[7].sum()
    assert read_bytes(ddp) - before <= ROW_BYTES


def test_weights_are_written_and_read_by_the_expert(tmp_path: Path) -> None:
    plain = model("grouped")
    ddp = managed(copy.deepcopy(plain), 3.5, tmp_path)  # no array fits as a whole
    expected = plain.state_dict()
    found = ddp.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    changed = {name: value * 2 for name, value in expected.items()}
    ddp.load_state_dict(changed)
    assert all(torch.equal(value, changed[name]) for name, value in ddp.state_dict().items())
    up: Any = ddp.module[0].experts.up  # type: ignore[index, union-attr]
    with torch.no_grad():
        up[4] += 1
    expert = changed["0.experts.up"]
    expert[4] += 1
    assert torch.equal(ddp.state_dict()["0.experts.up"], expert)


def test_a_checkpoint_is_saved_and_loaded_by_the_expert(tmp_path: Path) -> None:
    def trained(module: nn.Module) -> tuple[GeminiDDP, GeminiOptimizer]:
        module[-1].requires_grad_(True)  # type: ignore[operator, index]
        ddp = managed(module, 5, tmp_path)  # no array fits as a whole
        return ddp, managed_optimizer(ddp)

    ddp, optimizer = trained(model("grouped"))
    expected = ddp.state_dict()
    save(tmp_path / "saved", ddp, optimizer)
    other, its = trained(model("grouped").apply(_zero))
    load(tmp_path / "saved", other, its)
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


@torch.no_grad()
def _zero(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        param.zero_()


def test_experts_that_are_unfrozen_train_with_the_numbers_of_torch(tmp_path: Path) -> None:
    plain = model("grouped", layers=1)
    ddp = managed(copy.deepcopy(plain), 200, tmp_path)
    for module in (plain, ddp.module):
        module[0].experts.up.requires_grad_(True)  # type: ignore[index, union-attr]
    x = tokens(6)
    plain(x).square().sum().backward()
    gemini.handle_of(ddp).backward(ddp(x).square().sum())
    expected = plain[0].experts.up.grad  # type: ignore[index, union-attr]
    assert torch.equal(ddp.module[0].experts.up.grad.clone(), expected)  # type: ignore[index, union-attr, arg-type]


def test_rows_that_are_no_whole_pages_share_chunks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    experts = Arrays("grouped")
    experts.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24))  # rows of 6 KiB: two make three pages
    ddp = managed(nn.Sequential(experts).requires_grad_(False), 100, tmp_path)
    up: Any = ddp.module[0].up  # type: ignore[index]
    assert len(up._ref.tensors) == EXPERTS // 2
    assert up[0]._ref.tensors == up[1]._ref.tensors


class Scaled(torch.autograd.Function):
    """Saves a weight itself, as a kernel of one's own does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, row: int) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.row = row
        return x @ weight[row]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grad @ weight[ctx.row].T, None, None


class Custom(nn.Module):
    """Two experts in turn, by a function that saves all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.first = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 8, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of a product with rows 2 and 6."""
        x = self.first(x)
        for row in (2, 6):
            x = Scaled.apply(x, self.up, row)  # type: ignore[no-untyped-call]
        return x.sum()


def test_a_function_that_saves_all_experts_gets_them_back_in_backward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Custom()
    model = copy.deepcopy(plain)
    handle = gemini.manage(
        model, device_bytes=20 * ROW_BYTES, host_bytes=0, disk_dir=tmp_path, activation_offload=True
    )
    assert handle.storage.chunks.has_choices
    x = tokens(8)
    plain(x).backward()
    handle.backward(model(x))
    expected = plain.first.weight.grad
    assert torch.equal(model.first.weight.grad.clone(), expected)  # type: ignore[union-attr, arg-type]


def array(ddp: GeminiDDP) -> Any:
    return ddp.module[0].experts.up  # type: ignore[index, union-attr]


def test_rows_may_be_set_from_other_rows_of_the_same_array(tmp_path: Path) -> None:
    plain = model("grouped", layers=1)
    ddp = managed(copy.deepcopy(plain), 5, tmp_path)
    up, strays = plain[0].experts.up, _C.stray_count()  # type: ignore[index, union-attr]
    for target in (up, array(ddp)):
        target[0:2] = target[4:6]
    assert torch.equal(ddp.state_dict()["0.experts.up"], up)
    assert _C.stray_count() == strays


INDICES: list[Any] = [
    torch.tensor([], dtype=torch.int64),
    torch.tensor([7, -8, 3]),
    torch.tensor([[0, 1], [5, 0]]),
    torch.arange(EXPERTS) % 2 == 0,
    [6, 1],
    (torch.tensor([2, 5]), 3),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_gives_the_rows_that_it_names_whatever_its_form(index: Any, tmp_path: Path) -> None:
    plain = model("grouped", layers=1)
    ddp = managed(copy.deepcopy(plain), 4.5, tmp_path)
    assert torch.equal(array(ddp)[index], plain[0].experts.up[index])  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    "index",
    [torch.tensor([8]), torch.tensor([1], dtype=torch.int16), torch.ones(3, dtype=torch.bool)],
    ids=str,
)
def test_an_index_that_torch_refuses_is_refused_alike(index: Tensor, tmp_path: Path) -> None:
    ddp = managed(model("grouped", layers=1), 3.5, tmp_path)
    with pytest.raises(IndexError):
        array(ddp)[index]


def test_no_token_uses_no_expert(tmp_path: Path) -> None:
    for product in PRODUCTS:
        plain = model(product)
        ddp = managed(copy.deepcopy(plain), 5.5, tmp_path)
        assert torch.equal(ddp(tokens(0)), plain(tokens(0)))


@pytest.mark.parametrize("rows", [3.5, 5.5, 9])
@pytest.mark.parametrize("count", [4, 8, 40])
def test_a_pass_that_is_run_again_takes_the_same_turns(rows: float, count: int, tmp_path: Path) -> None:
    plain = model("grouped")
    ddp = managed(copy.deepcopy(plain), rows, tmp_path)
    given = [tokens(count).requires_grad_() for _ in range(2)]
    checkpoint(plain, given[0], use_reentrant=False).square().sum().backward()
    loss = checkpoint(ddp, given[1], use_reentrant=False).square().sum()
    gemini.handle_of(ddp).backward(loss)
    assert torch.equal(given[0].grad, given[1].grad)  # type: ignore[arg-type]


def test_arrays_that_layers_share_are_used_by_all_of_them(tmp_path: Path) -> None:
    for product in ("grouped", "list"):
        plain = model(product)
        plain[1].experts = plain[0].experts  # type: ignore[index, union-attr]
        if product == "grouped":
            plain[2].experts.up = plain[0].experts.up  # type: ignore[index, union-attr, assignment]
        ddp = managed(copy.deepcopy(plain), 8, tmp_path)
        for seed in range(3):
            assert torch.equal(ddp(tokens(5, seed)), plain(tokens(5, seed)))


def test_lists_of_experts_may_share_some_and_nest(tmp_path: Path) -> None:
    plain = model("list", layers=1)
    shared = plain[0].experts  # type: ignore[index, union-attr]
    shared[3].up = shared[2].up  # type: ignore[index, union-attr]
    shared[4].experts = nn.ModuleList([Expert(), Expert()]).requires_grad_(False)  # type: ignore[index]
    ddp = managed(copy.deepcopy(plain), 12, tmp_path)
    assert torch.equal(ddp(tokens(9)), plain(tokens(9)))
