"""Models of layers over a grid train as one process does, also under GeminiDDP, whatever the budgets."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from grid_harness import MODES, built_whole, grid_mesh
from processes import run_on_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer, StateError, init_on
from gemini.parallel.tensor import nn as tnn

STEPS, WIDTH, HEADS, VOCABULARY = 3, 16, 4, 37
ADAM = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.01}
CHUNKS = {"min_chunk_size_mb": 0.004, "search_range_mb": 0.004}
CLIP = 0.05  # of the first step's gradients most is cut off


class Block(nn.Module):
    """Attention, whose heads have query, key and value side by side, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = tnn.LayerNorm(WIDTH), tnn.LayerNorm(WIDTH)
        self.qkv = tnn.Linear(WIDTH, 3 * WIDTH)
        self.out = tnn.Linear(WIDTH, WIDTH)
        self.up = tnn.Linear(WIDTH, 4 * WIDTH)
        self.down = tnn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size = 3 * WIDTH // HEADS
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (-1, size)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(*heads.chunk(3, -1), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        return out


class Transformer(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(self, num_blocks: int = 2, *, recomputes: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = tnn.Embedding(VOCABULARY, WIDTH), tnn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = tnn.LayerNorm(WIDTH)
        self.head = tnn.Classifier(WIDTH, VOCABULARY, self.tokens.weight, bias=False)
        self.criterion = tnn.CrossEntropyLoss()
        self.recomputes = recomputes

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        out: Tensor = self.criterion(self.head(self.norm(x)), labels)
        return out


def batch(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (8, 7), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def train_whole(num_blocks: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = built_whole(partial(Transformer, num_blocks))
    optimizer = CPUAdam(model.parameters(), **ADAM)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(*batch(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {key: value.clone() for key, value in model.state_dict().items()}


@dataclass(frozen=True)
class Trained:
    """How a model is built."""

    num_blocks: int = 2
    recomputes: bool = False
    on_meta: bool = False
    gathers_again: bool = False


def train(
    mode: str, trained: Trained, options: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, Tensor], int]:
    """Train on all ranks; return losses, norms, weights and the bytes that left DEVICE."""
    mesh = grid_mesh(mode)
    torch.manual_seed(11)
    with (
        tnn.over(mesh, gathers_again=trained.gathers_again) as grid,
        init_on("meta") if trained.on_meta else nullcontext(),
    ):
        model = Transformer(trained.num_blocks, recomputes=trained.recomputes)
    parts = tnn.partition_of(model)
    managed = GeminiDDP(
        model,
        process_group=mesh["dp"],
        model_ranks=parts.model_ranks,
        **{**CHUNKS, **options},
    )
    optimizer = GeminiOptimizer(CPUAdam(managed.parameters(), **ADAM), managed, initial_scale=16)
    losses, norms = [], []
    with managed:
        for step in range(STEPS):
            ids, labels = (part.chunk(mesh.layout.dp)[mesh["dp"].get_local_rank()] for part in batch(step))
            loss = managed(grid.own_batch(ids), model.criterion.own_labels(labels))
            optimizer.backward(loss)
            norms.append(float(optimizer.clip_grad_by_norm(CLIP)))
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            losses.append(mean.item() / mesh.layout.dp)
        moved = sum(managed.stats()[link]["bytes"] for link in ("d2h", "disk_write"))
        managed.manager.chunks.table.check_invariants()
        state = parts.gather_state(managed.state_dict())
        return losses, norms, {key: value.clone() for key, value in state.items()}, moved


ROOMY = {"device_bytes": "64MiB"}
TIGHT = {"device_bytes": "30KiB", "host_bytes": "4MiB", "non_model_bytes": 0}


def assert_trains_as_one_process(ranks: int, mode: str, trained: Trained, tight: dict[str, Any]) -> None:
    wanted_losses, wanted_norms, wanted = train_whole(trained.num_blocks)
    roomy = run_on_ranks(train, ranks, mode, trained, ROOMY)
    again = replace(trained, gathers_again=True)  # in mode 3d: the same numbers, put together twice
    moving = run_on_ranks(train, ranks, mode, again, tight)
    for (losses, norms, weights, moved), (same_losses, same_norms, same, moved_tight) in zip(
        roomy, moving, strict=True
    ):
        assert losses == pytest.approx(wanted_losses, rel=1e-5)
        assert norms == pytest.approx(wanted_norms, rel=1e-6)
        assert (same_losses, same_norms) == (losses, norms)
        assert moved == 0 < moved_tight
        for key, value in wanted.items():
            assert float((weights[key] - value).abs().max()) <= 2e-5, key
            assert torch.equal(same[key], weights[key]), key


@pytest.mark.dear("up to eight ranks train")
@pytest.mark.parametrize("mode", MODES)
def test_training_is_that_of_one_process_and_budgets_change_no_bit(mode: str) -> None:
    trained = Trained(recomputes=mode == "2d", on_meta=mode == "2.5d")
    assert_trains_as_one_process(MODES[mode][0], mode, trained, TIGHT)


def test_data_parallelism_recomputing_and_a_model_from_meta_go_together() -> None:
    trained = Trained(num_blocks=6, recomputes=True, on_meta=True)
    assert_trains_as_one_process(4, "1d", trained, TIGHT | {"device_bytes": "116KiB"})


def test_budgets_change_no_bit_in_16_bits() -> None:
    trained, options = Trained(num_blocks=4), {"mixed_precision": "bf16"}
    roomy = run_on_ranks(train, 4, "2d", trained, ROOMY | options)
    tight = run_on_ranks(train, 4, "2d", trained, TIGHT | options | {"device_bytes": "36KiB"})
    wanted_losses, _, _ = train_whole(4)
    for (losses, norms, weights, _), (same_losses, same_norms, same, moved) in zip(roomy, tight, strict=True):
        assert losses == pytest.approx(wanted_losses, rel=0.05)
        assert (same_losses, same_norms) == (losses, norms)
        assert moved > 0
        assert all(torch.equal(same[key], value) for key, value in weights.items())


def masks(mode: str) -> tuple[Tensor, Tensor, bool, Tensor]:
    torch.manual_seed(1)
    with tnn.over(grid_mesh(mode)):
        outside, inside = tnn.Dropout(0.5), tnn.Dropout(0.5, inside=True)
    x = torch.ones(16, 64, requires_grad=True)
    first, second = outside(x) != 0, inside(x) != 0
    out = checkpoint(inside, x, use_reentrant=False)
    out.sum().backward()
    again = torch.equal(out != 0, x.grad != 0)
    assert torch.equal(inside.eval()(x), x)
    return first, second, again, torch.get_rng_state()


@pytest.mark.parametrize("mode", ["1d", "2d"])
def test_masks_differ_between_ranks_that_have_parts(mode: str) -> None:
    found = run_on_ranks(masks, MODES[mode][0], mode)
    (outside, inside, _, state), (other_outside, other_inside, _, _) = found[:2]
    assert torch.equal(outside, other_outside) == (mode == "1d")
    assert not torch.equal(inside, other_inside)
    assert 0.4 < inside.float().mean() < 0.6
    for _, _, again, other_state in found:
        assert again
        assert torch.equal(state, other_state)


def fail(*_: object) -> None:
    raise ValueError("a batch is missing")


def fail_on_one_rank(where: str) -> str:
    try:
        with grid_mesh("2d") as mesh:
            with tnn.over(mesh) as grid:
                model = Transformer()
            if dist.get_rank() == 3 and where == "forward":
                model.blocks[1].up.register_forward_pre_hook(fail)
            if dist.get_rank() == 3 and where == "backward":
                model.blocks[1].up.weight.register_hook(fail)
            ids, labels = batch(0)
            model(grid.own_batch(ids), model.criterion.own_labels(labels)).backward()
    except (ValueError, StateError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_rank_that_fails_tells_all_of_its_groups_why(where: str) -> None:
    *waiting, failed = run_on_ranks(fail_on_one_rank, 4, where)
    assert failed == "ValueError: a batch is missing"
    for said in waiting:  # those in its row and column from itself, the other from one of them
        assert said.startswith("StateError: rank")
        assert "a batch is missing" in said


def refusals() -> list[str]:
    said = []

    def note(make: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            make(*args, **options)
        said.append(str(caught.value))

    note(tnn.Linear, 4, 4)
    with tnn.over(grid_mesh("2d")) as grid:
        note(tnn.Linear3D, 4, 4)
        note(tnn.Linear, 5, 4)
        note(tnn.Linear, 4, 6 + 1)
        note(tnn.LayerNorm, (3, 4))
        note(tnn.LayerNorm, 7)
        note(tnn.Classifier, 4, 10, nn.Parameter(torch.ones(10, 4)))
        note(tnn.Linear(4, 4), torch.ones(2, 4))
        note(tnn.CrossEntropyLoss(), torch.ones(2, 4), torch.ones(3))
        note(tnn.CrossEntropyLoss, "median")
        note(grid.own_part, torch.ones(3, 4))
        note(grid.axis, "dep")
        note(tnn.partition_of, nn.Sequential(tnn.Linear(4, 4), nn.LayerNorm(2)))
        note(tnn.partition_of, nn.Linear(4, 4))
    return said


def test_what_does_not_go_is_refused_with_what_would() -> None:
    wanted = [
        "this layer does not know its ranks; build the model within `with over(mesh):`",
        "this layer is for mode '3d', but the mesh is for '2d'",
        "in_features 5 is not divisible by 2 ranks (along row); use 4 or 6",
        "out_features 7 is not divisible by 2 ranks (along row); use 6 or 8",
        "LayerNorm over (3, 4): over ranks it can normalize only the last dimension",
        "normalized_shape 7 is not divisible by 2 ranks",
        "Classifier(4, 10, mode='2d', inside=False) is tied to the weight of an Embedding(10, 4), so it",
        "Linear(4, 4, mode='2d', inside=False) takes 2 of 4 features on each rank, but its input has 4",
        "scores of (2, 4) do not fit labels of (3,); cut labels with criterion.own_labels(labels)",
        "reduction is 'median'; choose mean, sum or none",
        "dimension 0 of (3, 4) is not divisible by the 2 ranks along col; use a multiple",
        "mode '2d' has no groups 'dep'; it has col, row",
        "'1.weight' and 1 more parameters belong to ordinary layers",
        "Linear has layers of 0 grids",
    ]
    for said in run_on_ranks(refusals, 4):
        for message, begins in zip(said, wanted, strict=True):
            assert message.startswith(begins), message
