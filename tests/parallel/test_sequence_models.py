"""Models on parts of a sequence compute and train as the whole one does in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import pairs
from processes import run_on_ranks
from tensor_harness import TOLERANCE, make_mesh, relative
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer
from gemini.parallel import parallelize, parallelize_sequence
from gemini.parallel.sequence.parallelize import SequenceParallel

WIDTH, HEADS, VOCABULARY, LENGTH = 32, 4, 29, 13  # which nothing divides
CHUNKS = {"min_chunk_size_mb": 0.004, "search_range_mb": 0.004, "non_model_bytes": 0}
TIGHT = {"device_bytes": "200KiB", "host_bytes": "8MiB"}


class Attention(nn.Module):
    """Grouped heads, and torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, WIDTH + WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.qkv(self.norm(x)).unflatten(-1, (2 * HEADS, -1)).transpose(1, 2)
        q, k, v = mixed.split([HEADS, HEADS // 2, HEADS // 2], 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Language(nn.Module):
    """A model of tokens and positions; of torch's blocks, or of others. "both ways" and "padding" look ahead
    too, the latter past tokens of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.recomputes = False
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(64, WIDTH)
        if kind != "functions":
            # Smooth: rounding, which differs between processors, may turn a ReLU on or off.
            options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True}
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, **options)
            self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).layers
        else:
            self.blocks = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(positions)
        for block in self.blocks:
            options: dict[str, Any] = {}
            if self.kind == "torch":
                options = {
                    "src_mask": nn.Transformer.generate_square_subsequent_mask(x.size(1)),
                    "is_causal": True,
                }
            elif self.kind == "padding":
                options = {"src_key_padding_mask": ids == 1}
            x = (
                checkpoint(block, x, use_reentrant=False, **options)
                if self.recomputes
                else block(x, **options)
            )
        out: Tensor = self.head(x)
        return out


def build(kind: str) -> Language:
    torch.manual_seed(17)
    model = Language(kind)
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(index)))
    return model


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return ids and labels of four sequences, of whose ends nothing counts."""
    ids = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[0, 4:] = labels[3, 9:] = -100
    return ids, labels


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of whole sequences."""
    ids, labels = batch
    logits = model(ids, torch.arange(LENGTH).unsqueeze(0))
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def loss_of_part(model: nn.Module, sequence: SequenceParallel, batch: tuple[Tensor, ...]) -> Tensor:
    inputs, labels, positions = sequence.cut_batch(*batch)
    assert labels is not None
    logits = model(inputs, positions)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return sequence.mean_loss(loss, labels)


def compare(kind: str, method: str, recomputes: bool) -> dict[str, float]:
    batch = batch_of(0)
    whole = build(kind)
    wanted = loss_of(whole, batch)
    wanted.backward()
    model = build(kind)
    model.recomputes = recomputes
    sequence = parallelize_sequence(model, make_mesh(sp=dist.get_world_size()), method)
    got = loss_of_part(model, sequence, batch)
    got.backward()
    errors = {"loss": relative(got.detach(), wanted.detach())}
    for (name, param), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert param.grad is not None
        assert other.grad is not None
        dist.all_reduce(param.grad)
        errors[name] = relative(param.grad / dist.get_world_size(), other.grad)
    return errors


@pairs(
    kind=["torch", "functions", "both ways", "padding"], recomputes=[False, True], method=["ulysses", "ring"]
)
def test_model_on_parts_computes_what_the_whole_one_does(kind: str, recomputes: bool, method: str) -> None:
    for errors in run_on_ranks(compare, 3, kind, method, recomputes):
        assert max(errors.values()) <= TOLERANCE, errors


def compare_cut(method: str, recomputes: bool, sequence_norms: bool) -> dict[str, float]:
    """Compare a model that is cut by its layers too, over 2 x 2 ranks."""
    batch = batch_of(0)
    whole, model = build("torch"), build("torch")
    wanted = loss_of(whole, batch)
    wanted.backward()
    model.recomputes = recomputes
    mesh = make_mesh(sp=2, tp=2)
    partition = parallelize(model, mesh, sequence_norms=sequence_norms)
    sequence = parallelize_sequence(model, mesh, method)
    padded: tuple[Tensor, ...] = batch
    if sequence_norms:  # each part is cut again
        padded = (functional.pad(batch[0], (0, 3)), functional.pad(batch[1], (0, 3), value=-100))
    got = loss_of_part(model, sequence, padded)
    got.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    for grad in grads.values():
        dist.all_reduce(grad, group=mesh.group("dp", "sp"))
    errors = {"loss": relative(got.detach(), wanted.detach())}
    for name, grad in partition.gather_state(grads).items():
        other = whole.get_parameter(name).grad
        assert other is not None
        errors[name] = relative(grad / 2, other)
    return errors


@pytest.mark.parametrize(
    ("method", "recomputes", "sequence_norms"),
    [("ulysses", False, False), ("ring", False, False), ("ulysses", True, True), ("ring", True, True)],
)
def test_parts_of_layers_and_of_sequences_go_together(
    method: str, recomputes: bool, sequence_norms: bool
) -> None:
    for errors in run_on_ranks(compare_cut, 4, method, recomputes, sequence_norms):
        assert max(errors.values()) <= TOLERANCE, errors


def train_whole() -> list[float]:
    model = build("functions")
    adam = CPUAdam(model.parameters(), lr=1e-2, eps=1e-6)
    losses = []
    for step in range(4):
        loss = loss_of(model, batch_of(step))
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def train(method: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], int]:
    """Train over 2 x 2 ranks, each with half of the sequences and of each its part."""
    mesh = make_mesh(dp=2, sp=2)
    module = build("functions")
    sequence = parallelize_sequence(module, mesh, method)
    with GeminiDDP(module, process_group=mesh.group("dp", "sp"), **CHUNKS, **options) as model:
        optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2, eps=1e-6), model)
        losses = []
        for step in range(4):
            ids, labels = batch_of(step)
            here = mesh["dp"].get_local_rank()
            loss = loss_of_part(model, sequence, (ids.chunk(2)[here], labels.chunk(2)[here]))
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        return losses, weights, model.stats()["d2h"]["bytes"]


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_any_budget_trains_as_one_process(method: str) -> None:
    wanted = train_whole()
    roomy = run_on_ranks(train, 4, method, {"device_bytes": "64MiB"})
    for options in (TIGHT, {**TIGHT, "activation_offload": True}):
        tight = run_on_ranks(train, 4, method, options)
        for (losses, weights, _), (same, same_weights, moved) in zip(roomy, tight, strict=True):
            assert losses == pytest.approx(wanted, rel=TOLERANCE)
            assert same == losses == roomy[0][0]
            assert moved > 0
            for key, value in weights.items():
                assert torch.equal(same_weights[key], value), key
