"""What a program does to gradients between backward and step, over ranks as on one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from sharded_harness import (
    WIDTH,
    Recipe,
    assert_near,
    assert_same,
    batch,
    mlp,
    tied,
    train_plain,
    train_step,
    wrap,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini import ConfigError, CPUAdam

ONE_CHUNK = {"min_chunk_size_mb": 1}
TIGHT = {"device_bytes": "600KiB", "non_model_bytes": 0}  # with a DISK tier: updates stay pending

Side = tuple[nn.Module, Callable[[Tensor], Tensor], Any]  # the module, what to call, the optimizer


class Recomputed(nn.Module):
    """A norm that every block uses again, under reentrant checkpointing: several gradients in one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers:
            x = checkpoint(lambda y, f=layer: torch.tanh(self.norm(f(y))), x, use_reentrant=True)
        return x


def recomputed() -> nn.Module:
    """See :class:`Recomputed`."""
    torch.manual_seed(4)
    return Recomputed()


def _loss(side: Side, index: int) -> Tensor:
    return side[1](own_part(batch(index))).square().mean()


def _one_pass(side: Side, step: int) -> None:
    _loss(side, step).backward()


def _two_losses_of_one_pass(side: Side, step: int) -> None:
    out = side[1](own_part(batch(step)))
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def _one_is_replaced(side: Side, step: int) -> None:
    _loss(side, step).backward()
    second = list(side[0].parameters())[1]
    second.grad = torch.full(second.shape, 0.1)
    if step % 2:
        _loss(side, step + 9).backward()


def _all_are_assigned(side: Side, step: int) -> None:
    # Before anything else uses the parameters, whose updates may be pending.
    for param in side[0].parameters():
        param.grad = torch.full(param.shape, 0.25 - 0.1 * step)


def _autograd_grad_is_assigned(side: Side, step: int) -> None:
    params = list(side[0].parameters())
    for param, grad in zip(params, torch.autograd.grad(_loss(side, step), params), strict=True):
        param.grad = grad


def _one_is_given_up(side: Side, step: int) -> None:
    _loss(side, step).backward()
    next(side[0].parameters()).grad = None
    if step % 2:
        _loss(side, step + 9).backward()


def _all_are_zeroed_and_one_is_made_again(side: Side, step: int) -> None:
    _loss(side, step).backward()
    side[2].zero_grad(set_to_none=False)
    list(side[0].parameters())[2].square().mean().backward()


WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[[Side, int], None]]] = {
    "recomputed": (recomputed, _one_pass),
    "two losses": (mlp, _two_losses_of_one_pass),
    "one replaced": (mlp, _one_is_replaced),
    "all assigned": (mlp, _all_are_assigned),
    "autograd.grad assigned": (mlp, _autograd_grad_is_assigned),
    "one given up": (mlp, _one_is_given_up),
    "zeroed": (mlp, _all_are_zeroed_and_one_is_made_again),
}


def _train(name: str, **options: Any) -> dict[str, Tensor]:
    build, make_gradients = WAYS[name]
    model, optimizer = wrap(build, Recipe(), **options)
    with model:
        for step in range(3):
            make_gradients((model.module, model, optimizer), step)
            optimizer.step()
        model.manager.chunks.table.check_invariants()
        return {key: value.clone() for key, value in model.state_dict().items()}


def _train_every_way(directory: str) -> dict[str, list[dict[str, Tensor]]]:
    places: list[dict[str, Any]] = [ONE_CHUNK, {"gather_bytes": 1}, {**TIGHT, "disk_dir": directory}]
    return {name: [_train(name, **place) for place in places] for name in WAYS}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Tensor]]]]:
    return run_on_ranks(_train_every_way, 2, str(tmp_path_factory.mktemp("disk")), timeout=120.0)


@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_those_of_plain_pytorch(name: str, trained: Any) -> None:
    build, make_gradients = WAYS[name]
    model = build()
    optimizer = CPUAdam(model.parameters(), **Recipe().adam)
    for step in range(3):
        make_gradients((model, model, optimizer), step)
        optimizer.step()
        optimizer.zero_grad()
    for one_chunk, few_whole, tight in (rank[name] for rank in trained):
        assert_near(one_chunk, model.state_dict())
        assert_near(few_whole, model.state_dict())
        assert_same(tight, few_whole)


TORCHS_OWN: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "norm": lambda params: nn.utils.clip_grad_norm_(params, 0.05),
    "norm, foreach": lambda params: nn.utils.clip_grad_norm_(params, 0.05, foreach=True),
    "value": lambda params: nn.utils.clip_grad_value_(params, 0.05),
    "loop": lambda params: [p.grad.mul_(0.5) for p in params if p.grad is not None],
    "added to": lambda params: [p.grad.add_(0.5) for p in params if p.grad is not None],
}


def _clip_with_torch(build: Callable[[], nn.Module], options: dict[str, Any]) -> dict[str, Tensor]:
    """Train two steps, each clipped with the optimizer after what torch offers was refused."""
    recipe = Recipe(clip=0.05)
    model, optimizer = wrap(build, recipe, **options)
    with model:
        for step in range(2):
            optimizer.backward(_loss((model.module, model, optimizer), step))
            for clip in TORCHS_OWN.values():
                with pytest.raises(ConfigError, match=r"optimizer\.clip_grad_by_norm"):
                    clip(list(model.parameters()))
            assert {p.grad.shape == p.shape for p in model.parameters() if p.grad is not None} == {True}
            model.to("cpu").float()  # changes nothing
            optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
            train_step(model, optimizer, recipe, step)
            assert all(p.grad is None for p in model.parameters())
        model.manager.chunks.table.check_invariants()
        return {key: value.clone() for key, value in model.state_dict().items()}


# "tied" has a parameter that nothing uses: the gradients beside it in its chunk wait for step().
@pytest.mark.parametrize("build", [mlp, tied])
@pytest.mark.parametrize("options", [ONE_CHUNK, {}, {"gather_bytes": 1}])
def test_clipping_that_would_miss_gradients_is_refused(
    build: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    _, want = train_plain(build, Recipe(steps=2, clip=0.05))
    for got in run_on_ranks(_clip_with_torch, 2, build, options):
        assert_near(got, want)


def _look_under_no_sync() -> tuple[list[Tensor], list[Tensor]]:
    """Return what a rank finds in ``param.grad`` before gradients are exchanged, and what it should."""
    model, optimizer = wrap(mlp, Recipe(), **ONE_CHUNK)
    plain, seen = mlp(), list[Tensor]()
    with model:
        with model.no_sync():
            optimizer.backward(_loss((model.module, model, optimizer), 0))
        _loss((plain, plain, None), 0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        seen += [p.grad.clone() for p in model.parameters()]
        model.module[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        model.module[0].bias.square().sum().backward()
        plain[0].bias.square().sum().backward()
        return seen, [p.grad for p in plain.parameters()]


def test_what_a_rank_has_made_can_be_seen_until_it_is_exchanged() -> None:
    for (*seen, hooked), want in run_on_ranks(_look_under_no_sync, 2):
        clipped = [w for w in want if w is not want[1]]
        assert all(torch.equal(got, w) for got, w in zip([seen[0], *seen[2:]], clipped, strict=True))
        assert torch.equal(hooked, want[1])


def _norms_of(places: list[tuple[int, float]], norm_types: list[float]) -> list[float]:
    """Return the norms of gradients that are 0.5 but for some elements."""
    found = []
    model, optimizer = wrap(mlp, Recipe(), **ONE_CHUNK)
    with model:
        for norm_type in norm_types:
            for param in model.parameters():
                param.grad = torch.full(param.shape, 0.5)
            for place, value in places:
                grad = list(model.parameters())[place].grad
                assert grad is not None
                grad.view(-1)[0] = value
            found.append(float(optimizer.clip_grad_by_norm(1.0, norm_type)))
            optimizer.zero_grad()
    return found


NOT_FINITE = [
    [(0, math.nan)],
    [(-1, math.nan)],
    [(0, math.nan), (-1, math.inf)],
    [(0, math.inf)],
    [(-1, -math.inf)],
]


@pytest.mark.parametrize("places", NOT_FINITE)
def test_norms_that_are_not_finite_are_those_of_one_process(places: list[tuple[int, float]]) -> None:
    norm_types = [math.inf, 2.0]
    wanted = _norms_of(places, norm_types)
    for found in run_on_ranks(_norms_of, 2, places, norm_types):
        for got, want in zip(found, wanted, strict=True):
            assert got == want or (math.isnan(got) and math.isnan(want))


def _norm_types_refused() -> list[str]:
    messages = []
    for norm_type in (-1.0, -math.inf, math.nan):
        with pytest.raises(ConfigError, match="norm_type") as refused:
            _norms_of([], [norm_type])
        messages.append(str(refused.value))
    return messages


def test_norms_that_are_none_are_refused_over_ranks() -> None:
    first, second = run_on_ranks(_norm_types_refused, 2)
    assert first == second
