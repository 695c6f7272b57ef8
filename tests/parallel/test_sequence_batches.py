"""Batches, orders and losses of sequences that several ranks have, without any other rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_on_ranks
from sequence_harness import BATCH, WIDTH
from tensor_harness import make_mesh
from torch import Tensor, nn
from torch.nn import functional

from gemini import ConfigError, StateError
from gemini.parallel import Layout, parallelize_sequence
from gemini.parallel.mesh import counted
from gemini.parallel.sequence import cut_batch
from gemini.parallel.sequence.batch import SequenceCut
from gemini.parallel.sequence.parallelize import SequenceParallel
from gemini.parallel.sequence.ring import attend_block, block_gradients, merge
from gemini.parallel.sequence.scores import Scoring, attend_by_scores
from gemini.parallel.sequence.ulysses import Heads, count


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_make_the_whole(size: int, zigzag: bool) -> None:
    order = SequenceCut(size, zigzag)
    whole = torch.arange(order.padded(13))
    parts = [order.part(whole, rank, 0) for rank in range(size)]
    assert torch.equal(order.whole(parts, 0), whole)
    for rank, part in enumerate(parts):
        assert torch.equal(order.positions(len(part), rank), part)


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("length", [1, 7, 12])
def test_every_token_keeps_its_label_and_its_position(length: int, zigzag: bool) -> None:
    order = SequenceCut(3, zigzag)
    ids = torch.arange(2 * length).view(2, length) + 1
    parts = [cut_batch(ids, ids, order=order, rank=rank) for rank in range(3)]
    found: dict[tuple[int, int], int] = {}
    for inputs, labels, positions in parts:
        assert labels is not None
        for row in range(2):
            for token, label, place in zip(inputs[row], labels[row], positions[0], strict=True):
                assert int(token) == (int(ids[row, place]) if place < length else 0)
                found[row, int(place)] = int(label)
    for row in range(2):
        for place in range(order.padded(length)):
            assert found[row, place] == (int(ids[row, place + 1]) if place + 1 < length else -100)


def test_labels_of_other_models_stay_where_they_are() -> None:
    ids = torch.arange(4).unsqueeze(0)
    part = cut_batch(ids, ids, order=SequenceCut(2), rank=1, shifts_labels=False)
    assert part.labels is not None
    assert part.labels.tolist() == part.inputs.tolist() == [[2, 3]]
    with pytest.raises(ConfigError, match="labels have 3 tokens, but inputs have 4"):
        cut_batch(ids, ids[:, :3], order=SequenceCut(2), rank=0)


def test_every_query_head_has_its_key_head() -> None:
    for size in range(1, 9):
        for keys in (1, 2, 3, 4):
            for group in (1, 2, 3):
                heads = Heads(keys * group, keys, size)
                assert sum(count(heads.of_queries(rank)) for rank in range(size)) == keys * group
                for rank in range(size):
                    mine = range(*heads.of_queries(rank).indices(keys * group))
                    own = torch.arange(keys)[heads.of_keys(rank)].view(1, -1, 1, 1)
                    matched = heads.matching(own, rank).flatten()
                    if len(mine):
                        each = matched.repeat_interleave(len(mine) // len(matched)).tolist()
                        assert each == [head // group for head in mine]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_of_keys_make_the_whole_attention(masked: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = 600  # more than are computed at once
    q, k, v = (
        torch.randn(1, 2, rows, 8, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)
    )
    mask = torch.rand(1, 1, rows, rows, generator=generator) < 0.5 if masked else None
    wanted = functional.scaled_dot_product_attention(q, k, v, mask)
    grad = torch.randn(wanted.shape, generator=generator, dtype=dtype)
    grads = torch.autograd.grad(wanted, (q, k, v), grad)
    halves = [slice(0, 100), slice(100, None)]
    with torch.no_grad():
        masks = [None if mask is None else mask[..., half] for half in halves]
        blocks = [
            attend_block(q, k[:, :, half], v[:, :, half], own, Scoring(8**-0.5), False)
            for half, own in zip(halves, masks, strict=True)
        ]
        out, lse = merge(*blocks[0], *blocks[1])
        parts = [
            block_gradients(grad, q, k[:, :, half], v[:, :, half], out, lse, own, Scoring(8**-0.5), False)
            for half, own in zip(halves, masks, strict=True)
        ]
    got = (parts[0][0] + parts[1][0], *(torch.cat(pair, 2) for pair in list(zip(*parts, strict=True))[1:]))
    torch.testing.assert_close(out, wanted.detach(), rtol=1e-5, atol=1e-5)
    for one, other in zip(got, grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def sent(method: str, key_heads: int) -> tuple[dict[str, int], dict[str, int]]:
    sequence = SequenceParallel(make_mesh(sp=3), method)
    q = torch.randn(BATCH, 6, 8, WIDTH, requires_grad=True)
    k, v = (torch.randn(BATCH, key_heads, 8, WIDTH, requires_grad=True) for _ in range(2))
    assert sequence.axis is not None
    with counted(sequence.axis) as (calls, nbytes), sequence.attending():
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.sum().backward()
    return dict(calls), dict(nbytes)


def test_a_row_that_sees_nothing_is_zeros_under_a_cap() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 5, 8, generator=generator).requires_grad_() for _ in range(3)]
    seen = torch.ones(5, 5, dtype=torch.bool).tril(-1)  # the first sees nothing
    out = attend_by_scores(*inputs, seen, Scoring(8**-0.5, softcap=1.0), causal=False)
    out.sum().backward()
    assert not out[:, :, 0].any()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in inputs)
    wide = attend_by_scores(*inputs, seen, Scoring(8**-0.5, softcap=1e4), causal=False)
    plain = functional.scaled_dot_product_attention(*inputs, seen)
    torch.testing.assert_close(wide, plain, rtol=1e-5, atol=1e-5)


def test_ulysses_sends_four_messages_and_the_ring_keys_alone() -> None:
    head = BATCH * 8 * WIDTH * 4  # bytes of one, of a rank's part
    for calls, nbytes in run_on_ranks(sent, 3, "ulysses", 3):
        assert calls == {"all_to_all": 4}
        assert nbytes == {"all_to_all": 2 * (6 + 6 + 3 + 3) * head * 2 // 3}
    for calls, nbytes in run_on_ranks(sent, 3, "ring", 3):
        assert calls == {"pass_on": 2 + 2 + 3}
        assert nbytes == {"pass_on": (2 + 2 + 3) * 2 * 3 * head}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_zigzag_gives_all_ranks_as_much_of_a_causal_mask(size: int) -> None:
    length = 24 * size
    whole = torch.ones(length, length).tril()

    def work(order: SequenceCut) -> list[float]:
        return [float(order.part(whole, rank, 0).sum()) for rank in range(size)]

    even, uneven = work(SequenceCut(size, zigzag=True)), work(SequenceCut(size))
    assert len(set(even)) == 1
    assert max(uneven) > even[0] * (2 - 1.1 / size)


class Attends(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, mask)


def refuse(method: str) -> list[str]:
    sequence = parallelize_sequence(model := Attends(), make_mesh(sp=2), method)
    said = []
    attempts: list[tuple[Any, ...]] = [
        (torch.ones(1, 2, 4, 8), torch.ones(4, 4)),
        (torch.ones(4, 8),),
        (torch.ones(1, 2, 4, 8), torch.zeros(1, 1, 4, 8, requires_grad=True)),
    ]
    for arguments in attempts:
        with pytest.raises(ConfigError) as caught:
            model(*arguments)
        said.append(str(caught.value))
    assert sequence.rank in (0, 1)
    attention = nn.MultiheadAttention(8, 2, kdim=4)
    with pytest.raises(ConfigError) as caught:
        parallelize_sequence(nn.ModuleList([attention]), make_mesh(sp=2), method)
    return [*said, str(caught.value)]


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_what_says_too_little_of_the_whole_is_refused(method: str) -> None:
    for mask, flat, learned, widths in run_on_ranks(refuse, 2, method):
        assert mask.startswith("a mask of 4 x 4 does not cover the sequence, in which each of 2 ranks has 4")
        assert flat.startswith("a query has shape (4, 8)")
        assert learned.startswith("a mask with a gradient")
        assert widths.startswith("0: attention with kdim")


def wait_for_a_rank_that_fails(method: str) -> str:
    mesh = make_mesh(sp=2)
    sequence = SequenceParallel(mesh, method)
    x = torch.ones(1, 2, 4, WIDTH, requires_grad=True)

    def attend() -> None:
        with mesh, sequence.attending():
            out = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            if sequence.rank == 1:
                raise ValueError("no batch")
            out.sum().backward()

    with pytest.raises((ValueError, StateError)) as caught:
        attend()
    return str(caught.value)


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_rank_that_fails_is_named_to_those_that_attend_to_it(method: str) -> None:
    waiting, failed = run_on_ranks(wait_for_a_rank_that_fails, 2, method, timeout=30.0)
    assert failed == "no batch"
    assert "rank 1" in waiting
    assert "ended with ValueError: no batch" in waiting


def losses() -> tuple[float, float, Tensor, bool]:
    """Return the mean of a loss of which one rank has no token that counts, its gradient, and whether no
    tokens at all are NaN without a gradient."""
    mesh = make_mesh(dp=2)
    sequence = SequenceParallel(mesh)
    rank = mesh["dp"].get_local_rank()
    logits = torch.tensor([[1.0, 2.0], [0.0, 4.0]], requires_grad=True)
    labels = torch.tensor([0, 1]) if rank == 0 else torch.tensor([-100, -100])
    loss = sequence.mean_loss(functional.cross_entropy(logits, labels), labels)
    loss.backward()
    assert logits.grad is not None
    others = torch.zeros(2, 2, requires_grad=True)
    nothing = torch.tensor([-100, -100])
    none = sequence.mean_loss(functional.cross_entropy(others, nothing), nothing)
    none.backward()
    assert others.grad is not None
    return loss.item(), rank, logits.grad, bool(none.isnan()) and not others.grad.any()


def test_rank_without_tokens_adds_nothing_to_the_mean() -> None:
    logits = torch.tensor([[1.0, 2.0], [0.0, 4.0]], requires_grad=True)
    wanted = functional.cross_entropy(logits, torch.tensor([0, 1]))
    wanted.backward()
    assert logits.grad is not None
    for loss, rank, grad, is_nan in run_on_ranks(losses, 2):
        assert loss == pytest.approx(wanted.item())
        assert torch.equal(grad, 2 * logits.grad if rank == 0 else torch.zeros(2, 2))
        assert is_nan


def test_methods_have_names() -> None:
    mesh: Any = None
    with pytest.raises(ConfigError, match="method is 'star'; choose ulysses or ring"):
        SequenceParallel(mesh, "star")
    with pytest.raises(ConfigError, match="zigzag=True balances the ring"):
        SequenceParallel(mesh, zigzag=True)
    assert Layout.from_config({"tensor": {"size": 4, "mode": "sequence"}}, 8).sp == 4
