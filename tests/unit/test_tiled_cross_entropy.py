"""``gemini.tiled_cross_entropy`` is torch's cross entropy of a linear layer, with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from torch import Tensor
from torch.nn import functional

import gemini
from gemini.errors import ConfigError, StateError
from gemini.losses import tiled_cross_entropy as tiles

ENTRIES = 13


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    tile_rows: Any = None,
    **options: Any,
) -> Tensor:
    logits = functional.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), **options)


def operands(
    rows: int, *, dtype: torch.dtype = torch.float32, bias: bool = True, ignored: float = 0.3, seed: int = 0
) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(ENTRIES, (rows,), generator=draw)
    labels[torch.rand(rows, generator=draw) < ignored] = -100
    tensors = [torch.randn(shape, generator=draw) for shape in ((rows, 8), (ENTRIES, 8), (ENTRIES,))]
    hidden, weight, offset = [each.to(dtype).requires_grad_() for each in tensors]
    return [hidden, weight, labels, offset if bias else None]


def gradients(loss: Tensor, given: list[Any], factor: float = 1.0) -> list[Tensor]:
    wanted = [each for each in given if isinstance(each, Tensor) and each.requires_grad]
    return list(torch.autograd.grad(loss * factor, wanted))


def error(got: Tensor, want: Tensor) -> float:
    """Return the difference beside the larger of one and what is wanted."""
    return ((got - want).norm() / want.norm().clamp(min=1)).item()


@settings(max_examples=num_examples(150))
@given(
    rows=st.integers(0, 40),
    tile_rows=st.one_of(st.just("auto"), st.integers(1, 50)),
    bias=st.booleans(),
    ignored=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    scale=st.sampled_from([1.0, 0.25, -3.0]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    reduction=st.sampled_from(["mean", "sum"]),
    factor=st.sampled_from([1.0, 1 / 3, 1024.0]),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradients_are_torchs(
    rows: int,
    tile_rows: Any,
    bias: bool,
    ignored: float,
    smoothing: float,
    scale: float,
    softcap: float | None,
    reduction: str,
    factor: float,
    seed: int,
) -> None:
    given = operands(rows, dtype=torch.float64, bias=bias, ignored=ignored, seed=seed)
    options = {"label_smoothing": smoothing, "logit_scale": scale, "softcap": softcap, "reduction": reduction}

    def of_torch(hidden: Tensor, weight: Tensor, labels: Tensor, offset: Tensor | None) -> Tensor:
        logits = functional.linear(hidden, weight, offset) * scale
        logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
        return functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction=reduction)

    want = of_torch(*given)
    got = gemini.tiled_cross_entropy(*given, tile_rows=tile_rows, **options)
    assert got.dtype is want.dtype
    assert torch.allclose(got, want, rtol=1e-12, equal_nan=True)
    for one, other in zip(gradients(got, given, factor), gradients(want, given, factor), strict=True):
        assert error(one, other) < 1e-12


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_in_fp32_are_within_a_millionth(softcap: float | None) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(300, 64, generator=draw), torch.randn(5000, 64, generator=draw) / 8
    labels = torch.randint(5000, (300,), generator=draw)
    given: list[Any] = [hidden.requires_grad_(), weight.requires_grad_(), labels]
    want = gradients(plain(*given, softcap=softcap), given)
    got = gradients(gemini.tiled_cross_entropy(*given, softcap=softcap, tile_rows=32), given)
    for one, other in zip(got, want, strict=True):
        assert ((one - other).norm() / other.norm()).item() < 1e-6


def test_a_soft_cap_has_the_slope_that_its_value_has() -> None:
    given = [each.double().requires_grad_() for each in operands(6)[:2]]
    labels = torch.arange(6)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return gemini.tiled_cross_entropy(hidden, weight, labels, softcap=1.5, logit_scale=0.7, tile_rows=4)

    assert torch.autograd.gradcheck(loss, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_blocks", [False, True], ids=["at once", "in blocks"])
def test_sixteen_bits_are_as_near_as_torchs(
    dtype: torch.dtype, in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = operands(200)
    given: list[Any] = [
        each.detach().to(dtype).requires_grad_() if each.is_floating_point() else each for each in exact
    ]
    exact = [each.detach().float().requires_grad_() if each.is_floating_point() else each for each in given]
    if in_blocks:  # as on a GPU
        monkeypatch.setattr(tiles, "_BLOCK_BYTES", 5 * 8 * 2)
        monkeypatch.setattr(tiles, "_adds_in_fp32", lambda _: False)
    loss = gemini.tiled_cross_entropy(*given, tile_rows=16)
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(plain(*given).item(), rel=1e-6)
    true, torchs = gradients(plain(*exact), exact), gradients(plain(*given), given)
    for got, near, want in zip(gradients(loss, given), torchs, true, strict=True):
        assert got.dtype is dtype
        worst = max((near.float() - want).norm().item(), torch.finfo(dtype).eps * want.norm().item())
        assert (got.float() - want).norm().item() <= 1.5 * worst


def test_autocast_multiplies_in_its_type_and_gives_gradients_in_that_of_the_operands() -> None:
    given = operands(40)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = plain(*given), gemini.tiled_cross_entropy(*given)
    assert got.item() == pytest.approx(want.item(), rel=1e-6)
    for one, other in zip(gradients(got, given), gradients(want, given), strict=True):
        assert one.dtype is torch.float32
        assert ((one - other).norm() / other.norm()).item() < 0.01


@pytest.mark.parametrize("frozen", [0, 1, 3], ids=["hidden", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    given = operands(20)
    given[frozen] = given[frozen].detach()
    want = gradients(plain(*given), given)
    for one, other in zip(gradients(gemini.tiled_cross_entropy(*given), given), want, strict=True):
        assert error(one, other) < 1e-6


def test_without_gradients_there_is_only_a_loss() -> None:
    given = operands(20)
    with torch.no_grad():
        loss = gemini.tiled_cross_entropy(*given)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(plain(*given).item(), rel=1e-6)


def test_gradients_serve_as_often_as_the_graph_is_kept() -> None:
    given = operands(20)
    loss = gemini.tiled_cross_entropy(*given)
    want = gradients(plain(*given), given, 3.0)
    for factor in (3.0, 1.0):
        got = torch.autograd.grad(loss * factor, [given[0], given[1], given[3]], retain_graph=True)
    got = torch.autograd.grad(loss * 3, [given[0], given[1], given[3]])
    assert all(error(one, other) < 1e-6 for one, other in zip(got, want, strict=True))
    with pytest.raises(StateError, match="retain_graph=True"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    given = operands(6)
    loss = gemini.tiled_cross_entropy(*given)
    with pytest.raises(ConfigError, match="create_graph=True"):
        torch.autograd.grad(loss, given[:2], create_graph=True)


@pytest.mark.parametrize(
    ("ignored", "tile_rows", "most"), [(0, 16, 16), (384, 512, 128)], ids=["in tiles", "of rows that count"]
)
def test_of_all_logits_there_are_only_those(ignored: int, tile_rows: int, most: int) -> None:
    rows, entries, largest = 512, 4096, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, (tuple, list)) else [out]:
                largest = max(largest, each.numel() if isinstance(each, Tensor) else 0)
            return out

    hidden = torch.randn(rows, 4, requires_grad=True)
    weight = torch.randn(entries, 4, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.long)
    labels[:ignored] = -100
    with Watch():
        gemini.tiled_cross_entropy(hidden, weight, labels, tile_rows=tile_rows).backward()
    assert largest == most * entries


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.update(labels=given["labels"][:-1]), "one label for each row"),
        (lambda given: given.update(labels=given["labels"].float()), "the number of an entry"),
        (lambda given: given.update(weight=given["weight"][:, :-1]), "entries, features"),
        (lambda given: given.update(bias=given["bias"][:-1]), "a number for each entry"),
        (lambda given: given.update(reduction="none"), "mean, sum"),
        (lambda given: given.update(label_smoothing=1.5), "from 0 to 1"),
        (lambda given: given.update(softcap=0), "above 0"),
        (lambda given: given.update(tile_rows=0), "above 0"),
    ],
)
def test_what_cannot_be_is_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    given = dict(zip(("hidden", "weight", "labels", "bias"), operands(6), strict=True))
    change(given)
    with pytest.raises(ConfigError, match=message):
        gemini.tiled_cross_entropy(**given)
