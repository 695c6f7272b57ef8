"""Which gradients ZeRO 1 and 2 take, when they are sent, and what they cost."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.checkpoint import checkpoint
from zero_models import adamw, assert_same, loss_of, odd_net, tokens_of, train_plain, weights

from gemini import ConfigError, StateError
from gemini.parallel.zero import LowLevelZeroOptimizer

FLOAT = 4


class Branches(nn.Module):
    """Layers of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5)
        self.branches = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor, branch: int | None) -> Tensor:
        x = torch.tanh(self.stem(x))
        return x if branch is None else self.branches[branch](x)


def branches() -> Branches:
    torch.manual_seed(3)
    return Branches()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


# -- which ---------------------------------------------------------------------------------------


def _diverge(overlap: bool, direct: bool) -> dict[str, Tensor]:
    """Train with branches that differ from rank to rank and from step to step."""
    model = branches()
    optimizer = LowLevelZeroOptimizer(
        adamw(model.parameters()), stage=2, reduce_bucket_size=20, overlap_communication=overlap
    )
    for step, by_rank in enumerate([(0, 1), (None, 1), (1, 0), (None, None)]):
        loss = model(batch(dist.get_rank(), step), by_rank[dist.get_rank()]).square().mean()
        if direct:
            loss.backward()
        else:
            optimizer.backward(loss)
        optimizer.step()
    return weights(model)


def test_ranks_that_use_other_parameters_finish_the_step_as_one_process_would() -> None:
    model = branches()
    plain = adamw(model.parameters())
    for step, by_rank in enumerate([(0, 1), (None, 1), (1, 0), (None, None)]):
        plain.zero_grad()
        losses = [model(batch(rank, step), by_rank[rank]).square().mean() for rank in (0, 1)]
        ((losses[0] + losses[1]) / 2).backward()
        plain.step()
    for overlap, direct in ((False, False), (True, False), (True, True)):
        for got in run_on_ranks(_diverge, 2, overlap, direct):
            for name, weight in weights(model).items():
                torch.testing.assert_close(got[name], weight, rtol=0, atol=1e-6)


def test_parameter_that_no_rank_uses_is_not_even_decayed() -> None:
    for got in run_on_ranks(_diverge, 2, True, False):
        for name, weight in weights(branches()).items():
            assert torch.equal(got[name], weight) == name.startswith("branches.2")


def _thaw() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    model = branches()
    model.branches[0].requires_grad_(False)
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), overlap_communication=True)
    seen = [weights(model)]
    for step in range(2):
        optimizer.backward(model(batch(dist.get_rank(), step), 0).square().mean())
        optimizer.step()
        seen.append(weights(model))
        model.branches[0].requires_grad_(True)
    return seen[0], seen[1], seen[2]


def test_frozen_parameter_stays_and_trains_once_thawed() -> None:
    for start, frozen, thawed in run_on_ranks(_thaw, 2):
        assert torch.equal(start["branches.0.weight"], frozen["branches.0.weight"])
        assert not torch.equal(start["stem.weight"], frozen["stem.weight"])
        assert not torch.equal(frozen["branches.0.weight"], thawed["branches.0.weight"])


class Reused(nn.Module):
    """A layer used four times under checkpoints: with reentrant ones its gradient arrives in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        for _ in range(4):
            x = checkpoint(self._apply_layer, x, use_reentrant=reentrant)
        return x

    def _apply_layer(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def _checkpointed(reentrant: bool, overlap: bool) -> dict[str, Tensor]:
    torch.manual_seed(5)
    model = Reused()
    optimizer = LowLevelZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), stage=2, overlap_communication=overlap
    )
    x = batch(dist.get_rank(), 0).requires_grad_()
    optimizer.backward(model(x, reentrant).square().mean())
    optimizer.step()
    return weights(model)


def test_gradient_that_arrives_in_parts_is_complete() -> None:
    want = run_on_ranks(_checkpointed, 2, False, False)[0]
    for reentrant, overlap in ((False, True), (True, False), (True, True)):
        for got in run_on_ranks(_checkpointed, 2, reentrant, overlap):
            for name, weight in want.items():
                torch.testing.assert_close(got[name], weight, rtol=0, atol=1e-6)


def test_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"'weight'.*sparse=False"):
        optimizer.backward(model(torch.tensor([1, 2])).sum())


def test_gradient_set_by_hand_counts() -> None:
    model = branches()
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model.stem.bias.grad = torch.ones(5)
    before = weights(model)
    optimizer.step()
    assert torch.equal(weights(model)["stem.bias"], before["stem.bias"] - 1)


def _in_stages() -> list[Tensor]:
    """Cut a model in two as a pipeline does: the second half sends a gradient back to the first."""
    first, second = branches().stem, branches().branches[0]
    optimizers = [
        LowLevelZeroOptimizer(torch.optim.SGD(half.parameters(), lr=1.0), precision="fp16", initial_scale=8.0)
        for half in (first, second)
    ]
    sent = first(batch(dist.get_rank(), 0).half())
    received = sent.detach().requires_grad_()
    optimizers[1].backward(second(received).square().float().mean())
    assert received.grad is not None
    optimizers[0].backward_by_grad(sent, received.grad)
    for optimizer in optimizers:
        optimizer.step()
    return [first.weight.detach(), second.weight.detach()]


def test_backward_from_a_gradient_takes_the_scale_out_once() -> None:
    model = branches()
    first, second = model.stem, model.branches[0]
    x = torch.cat([batch(0, 0), batch(1, 0)])
    second(first(x)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for got in run_on_ranks(_in_stages, 2):
        torch.testing.assert_close(got[0].float(), first.weight.detach(), rtol=0, atol=5e-3)
        torch.testing.assert_close(got[1].float(), second.weight.detach(), rtol=0, atol=5e-3)


# -- norms ---------------------------------------------------------------------------------------


def _norms(norm_types: list[float]) -> list[float]:
    model = odd_net()
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()))
    optimizer.backward(loss_of(model, own_part(tokens_of(0))))
    return [float(optimizer.clip_grad_by_norm(1e9, norm_type)) for norm_type in norm_types]


def test_norm_is_over_all_ranks_and_the_same_on_each() -> None:
    kinds = [1.0, 2.0, 3.0, math.inf]
    model = odd_net()
    loss_of(model, tokens_of(0)).backward()
    want = [float(nn.utils.clip_grad_norm_(model.parameters(), 1e9, kind)) for kind in kinds]
    every = run_on_ranks(_norms, 3, kinds)
    assert every[0] == every[1] == every[2]
    assert every[0] == pytest.approx(want, rel=1e-5)


def _zeros() -> list[int | None]:
    found = []
    for stage in (0, 1, 2):
        model, batch = sparse_net(), own_part(tokens_of(0))
        optimizer = LowLevelZeroOptimizer(
            adamw(model.parameters()), stage=stage, log_num_zeros_in_grad=True, clip_grad_norm=0.1
        )
        found.append(optimizer.get_num_zeros_in_grad())
        optimizer.backward(model(batch).square().mean())
        optimizer.step()
        found.append(optimizer.get_num_zeros_in_grad())
    return found


def sparse_net() -> nn.Module:
    """Return a network whose embedding has rows that no batch uses."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(31, 5), nn.Linear(5, 3))


@pytest.mark.parametrize("ranks", [1, 3])
def test_zeros_of_gradients_are_counted_over_all_ranks_where_asked_for(ranks: int) -> None:
    model = sparse_net()
    model(tokens_of(0)).square().mean().backward()
    zeros = sum(int((p.grad == 0).sum()) for p in model.parameters() if p.grad is not None)
    assert zeros >= 14 * 5  # tokens are below 17
    assert run_on_ranks(_zeros, ranks) == [[None, zeros] * 3] * ranks
    other = sparse_net()
    optimizer = LowLevelZeroOptimizer(adamw(other.parameters()))
    optimizer.backward(other(tokens_of(0)).square().mean())
    optimizer.step()
    assert optimizer.get_num_zeros_in_grad() is None


def test_gradients_that_arrive_after_clipping_are_refused_and_zero_grad_forgets_them() -> None:
    model = odd_net()
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()))
    optimizer.backward(loss_of(model, tokens_of(1)))
    optimizer.clip_grad_by_norm(1e-3)
    optimizer.backward(loss_of(model, tokens_of(2)))
    with pytest.raises(StateError, match="after they were clipped"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, tokens_of(0)))
    optimizer.step()
    assert_same(weights(model), weights(train_plain(num_steps=1)[0]))


# -- when ----------------------------------------------------------------------------------------


def _overlapped(overlap: bool) -> tuple[int, int]:
    """Return how many messages were sent when the gradient of the first layer was made, and in all."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    optimizer = LowLevelZeroOptimizer(
        adamw(model.parameters()), reduce_bucket_size=72, overlap_communication=overlap
    )
    sent: list[int] = []
    model[0].weight.register_hook(lambda grad: sent.append(optimizer.traffic.num_reduces))
    optimizer.backward(model(torch.randn(3, 8)).square().sum())
    return sent[0], optimizer.traffic.num_reduces


def test_overlap_sends_while_backward_goes_on() -> None:
    assert run_on_ranks(_overlapped, 2, True) == [(5, 6)] * 2
    assert run_on_ranks(_overlapped, 2, False) == [(0, 6)] * 2


# -- what it costs -------------------------------------------------------------------------------


def _gradient_memory(stage: int, accumulate: bool) -> list[tuple[int, int]]:
    """Return (local, mean) gradient bytes after backward, without and with an earlier micro-batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    optimizer = LowLevelZeroOptimizer(
        adamw(model.parameters()), stage=stage, reduce_bucket_size=64, overlap_communication=True
    )
    peaks = []

    def note(grad: Tensor) -> None:
        peaks.append(optimizer.gradient_bytes())

    model[0].weight.register_hook(note)
    if accumulate:
        with optimizer.no_sync():
            optimizer.backward(model(torch.randn(3, 8)).square().sum())
    optimizer.backward(model(torch.randn(3, 8)).square().sum())
    return [*peaks, optimizer.gradient_bytes()]


def test_stage_2_keeps_this_ranks_part_of_the_gradients_alone() -> None:
    whole = 6 * 64 * FLOAT
    for local, mean in (peaks[-1] for peaks in run_on_ranks(_gradient_memory, 2, 2, False)):
        assert (local, mean) == (0, whole // 2)
    for local, mean in (peaks[-1] for peaks in run_on_ranks(_gradient_memory, 2, 1, False)):
        assert (local, mean) == (whole, whole // 2)


def test_stage_2_holds_no_more_than_the_bucket_being_filled_and_two_under_way() -> None:
    bucket = 64 * FLOAT
    for peaks in run_on_ranks(_gradient_memory, 2, 2, False):
        # Five of six gradients have arrived; what is under way is no bucket's any more.
        local, mean = peaks[0]
        assert local == 0
        assert mean == 3 * bucket // 2


def test_optimizer_that_is_gone_leaves_ordinary_parameters_and_no_memory() -> None:
    model = odd_net()
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), stage=1)
    optimizer.backward(loss_of(model, tokens_of(0)))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    loss_of(model, tokens_of(0)).backward()
    assert model.bias.grad is not None


def test_closed_optimizer_gives_the_gradients_back_to_autograd() -> None:
    model = odd_net()
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()))
    optimizer.close()
    optimizer.close()
    loss_of(model, tokens_of(0)).backward()
    assert model.bias.grad is not None


# -- traffic -------------------------------------------------------------------------------------


class CountedBytes:
    """Counts what the ranks hand to torch.distributed, by what each collective must send."""

    def __init__(self) -> None:
        self.exchanged = self.gathered = 0

    def install(self, monkeypatch: pytest.MonkeyPatch, collectives: Any) -> None:
        size = dist.get_world_size()
        exchange, gather = dist.all_to_all_single, collectives.all_gather

        def counted_exchange(output: Tensor, source: Tensor, **options: Any) -> Any:
            self.exchanged += source.nbytes * (size - 1) // size
            return exchange(output, source, **options)

        def counted_gather(output: Tensor, source: Tensor, **options: Any) -> Any:
            self.gathered += source.nbytes * (size - 1)
            return gather(output, source, **options)

        monkeypatch.setattr(dist, "all_to_all_single", counted_exchange)
        monkeypatch.setattr(collectives, "all_gather", counted_gather)


def _count_a_step(precision: str, stage: int) -> tuple[int, int, int, int]:
    from gemini.parallel.zero import replica_collectives

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5))
    optimizer = LowLevelZeroOptimizer(
        adamw(model.parameters()), precision=precision, stage=stage, overlap_communication=True
    )
    counted = CountedBytes()
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted.install(monkeypatch, replica_collectives)
        x = torch.randn(4, 7).to(model[0].weight.dtype)
        optimizer.backward(model(x).float().square().mean())
        optimizer.step()
    traffic = optimizer.traffic
    return counted.exchanged, counted.gathered, traffic.reduce_bytes, traffic.gather_bytes


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_a_step_sends_each_gradient_and_each_weight_once(
    world_size: int, precision: str, itemsize: int
) -> None:
    """(N - 1) / N of all elements, each parameter rounded up to a multiple of N, there and back."""
    widths = [-(-numel // world_size) for numel in (7 * 9, 9, 9 * 5, 5)]
    want = (world_size - 1) * sum(widths) * itemsize
    for stage in (1, 2):
        assert run_on_ranks(_count_a_step, world_size, precision, stage) == [(want,) * 4] * world_size


# -- torch's own helpers -------------------------------------------------------------------------


def _scaler(unscales: bool) -> str:
    model = branches()
    before = weights(model)
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()))
    scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    scaler.scale(model(batch(0, 0), 0).square().mean()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(ConfigError) as caught:
        scaler.step(optimizer)
    assert_same(weights(model), before)
    return str(caught.value)


@pytest.mark.parametrize("unscales", [False, True])
def test_torchs_scaler_is_refused_with_the_way_out(unscales: bool) -> None:
    for said in (_scaler(unscales), *run_on_ranks(_scaler, 2, unscales)):
        assert "precision='fp16'" in said


def test_torchs_scaler_that_does_nothing_may_stay() -> None:
    model = branches()
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # type: ignore[attr-defined]
    scaler.scale(model(batch(0, 0), 0).square().mean()).backward()
    before = weights(model)
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(weights(model)["stem.weight"], before["stem.weight"])


@pytest.mark.parametrize("steps", [0, 1])
def test_torchs_helpers_for_state_dicts_are_refused_with_the_way_out(steps: int) -> None:
    model = branches()
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()))
    for step in range(steps):
        optimizer.backward(model(batch(0, step), 0).square().mean())
        optimizer.step()
    with pytest.raises(ConfigError, match=r"optimizer\.state_dict\(\)"):
        get_optimizer_state_dict(model, optimizer)
    with pytest.raises(ConfigError, match=r"state_shards\(\)"):
        set_optimizer_state_dict(model, optimizer, optimizer.state_dict())
    assert bool(optimizer.state) == bool(steps)
