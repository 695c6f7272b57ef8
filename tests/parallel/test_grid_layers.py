"""Layers over a grid of ranks compute what one process does: outputs and gradients, shapes, bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from grid_harness import MODES, built_whole, compare, grid_mesh
from processes import run_on_ranks
from tensor_harness import relative
from torch import Tensor, nn

from gemini.parallel.launch import launch_from_torch, shutdown
from gemini.parallel.mesh import counted
from gemini.parallel.tensor import nn as tnn

TOLERANCE = 1e-5


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


class Mlp(nn.Module):
    """The one of the shape oracles, unless it is given other layers."""

    def __init__(
        self,
        dim: int = 256,
        *,
        bias: bool = False,
        layers: tuple[type[tnn.Linear], type[tnn.Linear]] = (tnn.Linear, tnn.Linear),
    ) -> None:
        super().__init__()
        self.dense_1 = layers[0](dim, 4 * dim, bias)
        self.dense_2 = layers[1](4 * dim, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dense_2(torch.nn.functional.gelu(self.dense_1(x)))
        return out


# T6: weights, input and outputs of each layer.
SHAPES = {
    "1d": ([(512, 256), (256, 512)], [(16, 256), (16, 512), (16, 256)]),
    "2d": ([(128, 512), (512, 128)], [(8, 128), (8, 512), (8, 128)]),
    "2.5d": ([(128, 512), (512, 128)], [(4, 128), (4, 512), (4, 128)]),
    "3d": ([(128, 256), (512, 64)], [(4, 128), (4, 512), (4, 128)]),
}


OF_ONE_MODE = {
    "1d": (tnn.Linear1D_Col, tnn.Linear1D_Row),
    "2d": (tnn.Linear2D, tnn.Linear2D),
    "2.5d": (tnn.Linear2p5D, tnn.Linear2p5D),
    "3d": (tnn.Linear3D, tnn.Linear3D),
}


def shapes(mode: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    with tnn.over(grid_mesh(mode)) as grid:
        model, explicit = Mlp(), Mlp(layers=OF_ONE_MODE[mode])
    for ours, theirs in zip(model.parameters(), explicit.parameters(), strict=True):
        assert ours.shape == theirs.shape
    x = grid.own_part(draw(16, 256))
    between = model.dense_1(x)
    out = model.dense_2(between)
    weights = [tuple(layer.weight.shape) for layer in (model.dense_1, model.dense_2)]
    return weights, [tuple(value.shape) for value in (x, between, out)]


@pytest.mark.parametrize("mode", MODES)
def test_shapes_are_those_of_the_oracles(mode: str) -> None:
    for got in run_on_ranks(shapes, MODES[mode][0], mode):
        assert got == SHAPES[mode]


class Tied(nn.Module):
    """An embedding and the head that has its weight, of a vocabulary that nothing divides."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = tnn.Embedding(37, 8, padding_idx=3)
        self.head = tnn.Classifier(8, 37, self.embedding.weight if tied else None)

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.head(self.embedding(ids))
        return scores if self.head.grid.every is None else scores.masked_fill(scores.isinf(), 0.0)


def ids(*shape: int) -> Tensor:
    return torch.randint(37, shape, generator=torch.Generator().manual_seed(4))


Case = tuple[Callable[[], nn.Module], Tensor, dict[str, bool]]
CASES: dict[str, Case] = {
    "linear": (partial(tnn.Linear, 8, 16), draw(8, 8), {"out_inside": True}),
    "linear, second of a pair": (
        partial(tnn.Linear, 16, 8, inside=True),
        draw(8, 3, 16),
        {"in_inside": True},
    ),
    "pair": (partial(Mlp, 8, bias=True), draw(8, 3, 8), {}),
    "norm": (partial(tnn.LayerNorm, 16), draw(8, 3, 16) + 5, {}),
    "norm inside": (
        partial(tnn.LayerNorm, 16, inside=True),
        draw(8, 16) + 5,
        {"in_inside": True, "out_inside": True},
    ),
    "embedding": (partial(tnn.Embedding, 37, 8, padding_idx=3), ids(8, 5), {}),
    "patches": (partial(tnn.PatchEmbedding, 8, 4, 3, 16), draw(8, 3, 8, 8), {}),
}
GATHERED = {"pair, put together again": (partial(Mlp, 8, bias=True), draw(8, 3, 8), {"again": True})}


def compare_cases(mode: str) -> dict[str, dict[str, float]]:
    cases = CASES | (GATHERED if mode == "3d" else {})
    mesh = grid_mesh(mode)
    return {name: compare(mesh, build, x, **where) for name, (build, x, where) in cases.items()}


@pytest.mark.parametrize("mode", MODES)
def test_layers_compute_what_one_process_does(mode: str) -> None:
    for by_case in run_on_ranks(compare_cases, MODES[mode][0], mode):
        for case, errors in by_case.items():
            assert max(errors.values()) <= TOLERANCE, (case, errors)


def take_losses(mode: str) -> dict[str, Any]:
    found, mesh = {}, grid_mesh(mode)
    labels = ids(8, 5)
    labels[0, :2] = -100
    for tied in (True, False):
        whole = built_whole(partial(Tied, tied=tied))
        smoothing = 0.1 if tied else 0.0
        flat = whole(ids(8, 5)).flatten(0, 1)
        wanted = nn.functional.cross_entropy(flat, labels.flatten(), label_smoothing=smoothing)
        wanted.backward()
        torch.manual_seed(11)
        with tnn.over(mesh) as grid:
            model, criterion = Tied(tied=tied), tnn.CrossEntropyLoss(label_smoothing=smoothing)
        own = grid.own_batch(ids(8, 5))
        scores = model.head(model.embedding(own))
        loss = criterion(scores, criterion.own_labels(labels))
        loss.backward()
        parts = tnn.partition_of(model)
        grads = parts.gather_state({name: param.grad for name, param in model.named_parameters()})
        errors = {name: relative(grads[name], param.grad) for name, param in whole.named_parameters()}
        every = model.head.whole_scores(scores)
        errors |= {"loss": abs(loss.item() - wanted.item()), "scores": relative(every, whole(ids(8, 5)))}
        found[f"tied: {tied}"] = errors
    return found


@pytest.mark.parametrize("mode", MODES)
def test_loss_of_parts_is_that_of_the_whole_batch(mode: str) -> None:
    for by_case in run_on_ranks(take_losses, MODES[mode][0], mode):
        for case, errors in by_case.items():
            assert max(errors.values()) <= TOLERANCE, (case, errors)


def places_of_models() -> list[list[bool]]:
    """Return where the layers of models take their inputs, of three in one run, the last after a launch."""
    found = []
    for again in range(3):
        if again != 1:
            launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}})
        layers = [tnn.Linear(8, 16), tnn.Linear(16, 8), tnn.Classifier(8, 4)]
        losses = [tnn.CrossEntropyLoss(), tnn.CrossEntropyLoss()]
        found.append([layer.inside for layer in (*layers, *losses)])
        if again == 1:
            tnn.Linear(8, 16)
    shutdown()
    return found


def test_models_of_one_run_begin_alike() -> None:
    for found in run_on_ranks(places_of_models, 2):
        assert found == [[False, True, False, True, True]] * 3


def test_layers_of_one_process_begin_and_compute_as_torchs() -> None:
    for ours, theirs, x in (
        (partial(tnn.Linear, 6, 4), partial(nn.Linear, 6, 4), draw(3, 6)),
        (partial(tnn.Classifier, 6, 5), partial(nn.Linear, 6, 5), draw(3, 6)),
        (partial(tnn.Embedding, 37, 4, 1), partial(nn.Embedding, 37, 4, 1), ids(3, 2)),
        (partial(tnn.LayerNorm, 6), partial(nn.LayerNorm, 6), draw(3, 6)),
        (partial(tnn.Dropout, 0.5), partial(nn.Dropout, 0.5), draw(3, 6)),
    ):
        found = []
        for make in (ours, theirs):
            torch.manual_seed(5)
            layer = make()
            found.append([*layer.state_dict().values(), copy.deepcopy(layer)(x)])
        assert all(torch.equal(got, wanted) for got, wanted in zip(*found, strict=True)), theirs


def count(mode: str, again: bool) -> tuple[dict[str, int], int]:
    with tnn.over(grid_mesh(mode), gathers_again=again) as grid:
        layer = tnn.Linear(256, 1024, bias=False)
    x = grid.own_part(draw(16, 256)).requires_grad_()
    assert grid.every is not None
    with counted(grid.every) as (calls, sent):
        layer(x).sum().backward()
    return dict(calls), sum(sent.values())


X, W, Y = 4 * 16 * 256, 4 * 256 * 1024, 4 * 16 * 1024  # bytes
TRAFFIC: dict[tuple[str, bool], tuple[int, int]] = {  # calls and bytes of a rank, q = 2 and d = 2
    ("1d", False): (1, X),
    ("2d", False): (12, 3 * (X + W) // 4),
    ("2.5d", False): (13, 3 * (X // 2 + W) // 4 + W // 4),
    ("3d", False): (6, 2 * (X + W + Y) // 8),
    ("3d", True): (8, (3 * X + 3 * W + 2 * Y) // 8),
}


@pytest.mark.parametrize(("mode", "again"), TRAFFIC)
def test_layer_sends_what_the_table_says(mode: str, again: bool) -> None:
    for calls, sent in run_on_ranks(count, MODES[mode][0], mode, again):
        assert (sum(calls.values()), sent) == TRAFFIC[mode, again], calls
