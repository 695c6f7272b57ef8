"""Norms on parts of the sequence: what the whole model computes, with what goes over the network counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_on_ranks
from tensor_harness import TOLERANCE, WIDTH, make_mesh, measure, relative
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini import ConfigError
from gemini.parallel import parallelize
from gemini.parallel.mesh import counted

HEADS, LENGTH = 4, 6


class Encoder(nn.Module):
    """Torch's encoder, some of its blocks computed again in backward."""

    def __init__(self, *, layers: int = 2, batch_first: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=dropout, batch_first=batch_first, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(WIDTH), enable_nested_tensor=False
        ).layers
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


def build(options: dict[str, Any]) -> Encoder:
    torch.manual_seed(17)
    model = Encoder(**options)
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(index)))
    return model


def inputs(length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(3))


def compare(options: dict[str, Any], recomputes: bool) -> float:
    x = inputs() if options.get("batch_first", True) else inputs().transpose(0, 1).contiguous()
    wanted = measure(build(options), (x,))
    model = build(options)
    model.recomputes = recomputes
    partition = parallelize(model, make_mesh(tp=2), sequence_norms=True)
    got = measure(model, (x,))
    grads = partition.gather_state(got.grads)
    assert grads.keys() == wanted.grads.keys()
    # Softmax does not see the biases of keys: a third of this gradient is noise, beside the others.
    errors = [relative(grads[name], value) for name, value in wanted.grads.items()]
    return max([*errors, relative(got.output, wanted.output)])


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_norms_on_parts_compute_what_whole_ones_do(batch_first: bool, recomputes: bool) -> None:
    assert max(run_on_ranks(compare, 2, {"batch_first": batch_first}, recomputes)) <= TOLERANCE


def gradients_under_dropout(recomputes: bool) -> tuple[dict[str, Tensor], Tensor]:
    model = build({"dropout": 0.4})
    model.recomputes = recomputes
    partition = parallelize(model, make_mesh(tp=2), sequence_norms=True)
    torch.manual_seed(1)
    for _ in range(2):  # a pass after one that was recomputed
        got = measure(model, (inputs(),))
    return partition.gather_state(got.grads), torch.get_rng_state()


def test_recomputed_blocks_draw_the_masks_of_forward() -> None:
    kept = run_on_ranks(gradients_under_dropout, 2, False)
    again = run_on_ranks(gradients_under_dropout, 2, True)
    assert torch.equal(kept[0][1], kept[1][1])  # outside, generators stay together
    for (grads, _), (wanted, _) in zip(again, kept, strict=True):
        for name, value in wanted.items():
            assert torch.equal(grads[name], value), name


def count(layers: int) -> tuple[dict[str, int], dict[str, int]]:
    mesh = make_mesh(tp=2)
    model = build({"layers": layers})
    parallelize(model, mesh, sequence_norms=True)
    axis = mesh.axis("tp")
    assert axis is not None
    measure(model, (inputs(),))  # the first pass also compares what must be equal
    with counted(axis) as (calls, sent):
        measure(model, (inputs(),))
    return dict(calls), dict(sent)


def test_layer_sends_the_bytes_of_four_all_reduces() -> None:
    (one, one_sent), _ = run_on_ranks(count, 2, 1)
    (three, sent), _ = run_on_ranks(count, 2, 3)
    layer = {kind: (calls - one[kind]) // 2 for kind, calls in three.items()}
    # Of two norms and two rows the weights and biases that are used for parts.
    assert layer == {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 6}
    activation = 2 * LENGTH * WIDTH * 4
    for kind in ("all_gather", "reduce_scatter"):
        assert sent[kind] - one_sent[kind] == 2 * 4 * activation // 2


def refuse() -> tuple[str, str]:
    mesh = make_mesh(tp=2)
    with pytest.raises(ConfigError) as unknown:
        parallelize(nn.MultiheadAttention(WIDTH, HEADS), mesh, sequence_norms=True)
    model = build({})
    parallelize(model, mesh, sequence_norms=True)
    with pytest.raises(ConfigError) as odd:
        model(inputs(5))
    return str(unknown.value), str(odd.value)


def test_what_has_no_such_norms_is_refused() -> None:
    for unknown, odd in run_on_ranks(refuse, 2):
        assert unknown.startswith(
            "sequence_norms=True needs a model with one list of blocks of LlamaDecoderLayer"
        )
        assert odd.startswith("a sequence of 5 tokens is not divisible by 2 ranks")
