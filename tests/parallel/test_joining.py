"""`model.join()`: ranks with fewer batches serve the others; the numbers are those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pairs import pairs
from processes import RanksFailed, run_on_ranks
from sharded_harness import Recipe, assert_same, batch, mlp, tied, wrap
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer, StateError

# Ranks have one thread each: what they are compared with must add up alike.
pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = Recipe()
BUILDS = {"mlp": mlp, "tied": tied}


def own_batch(rank: int, index: int) -> Tensor:
    return batch(10 * rank + index)[:4]


def train(model: nn.Module, optimizer: GeminiOptimizer, inputs: Tensor) -> None:
    optimizer.backward(model(inputs).float().square().mean())
    optimizer.step()


def joined(build: str, counts: Sequence[int], all_count: bool, extra: dict[str, Any]) -> dict[str, Tensor]:
    """Train this rank's number of batches within join()."""
    rank = dist.get_rank()
    model, optimizer = wrap(BUILDS[build], RECIPE, **extra)
    with model:
        with model.join(divide_by_initial_world_size=all_count):
            for index in range(counts[rank]):
                train(model, optimizer, own_batch(rank, index))
                optimizer.zero_grad()
        model.manager.chunks.table.check_invariants()
        return {key: value.clone() for key, value in model.state_dict().items()}


def alone(build: str, counts: Sequence[int], all_count: bool) -> dict[str, Tensor]:
    """Train one plain model on the batches of all ranks, adding up in their order."""
    model = BUILDS[build]()
    optimizer = CPUAdam([p for p in model.parameters() if p.requires_grad], **RECIPE.adam)
    for index in range(max(counts)):
        present = [rank for rank, count in enumerate(counts) if index < count]
        for rank in present:
            model(own_batch(rank, index)).square().mean().backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(1 / (len(counts) if all_count else len(present)))
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


@pairs(build=["mlp", "tied"], counts=[(4, 2), (0, 3), (3, 3)], all_count=[True, False])
def test_uneven_batches_train_as_one_process(build: str, counts: Sequence[int], all_count: bool) -> None:
    want = alone(build, counts, all_count)
    for got in run_on_ranks(joined, 2, build, counts, all_count, {}):
        assert_same(got, want)


@pytest.mark.parametrize(
    "extra", [{"device_bytes": "768KiB", "host_bytes": "4MiB"}, {"strict_ddp_mode": True}]
)
def test_budgets_and_strict_ranks_change_no_bit(extra: dict[str, Any]) -> None:
    want = alone("mlp", (4, 2), True)
    for got in run_on_ranks(joined, 2, "mlp", (4, 2), True, extra):
        assert_same(got, want)


def test_three_ranks_leave_one_after_the_other() -> None:
    results = run_on_ranks(joined, 3, "mlp", (1, 4, 2), False, {})
    want = alone("mlp", (1, 4, 2), False)
    for got in results:
        assert_same(got, results[0])
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, atol=2e-5, rtol=0)


def joined_copies(all_count: bool) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2))
    return joined("mlp", (1, 2, 3, 0), all_count, {"process_group": mesh})


def test_ranks_of_several_copies_leave_in_any_order() -> None:
    want = alone("mlp", (1, 2, 3, 0), True)
    for got in run_on_ranks(joined_copies, 4, True):
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, atol=2e-5, rtol=0)
    with pytest.raises(RanksFailed, match="does not go with copies of the model"):
        run_on_ranks(joined_copies, 4, False)


def with_everything(precision: str | None, reduce_dtype: str | None, with_join: bool) -> dict[str, Any]:
    """Clip, change the learning rate, read gradients, evaluate, accumulate; rank 1 has no part in the last
    two steps, or one with a loss of zero."""
    rank = dist.get_rank()
    model, optimizer = wrap(mlp, RECIPE, mixed_precision=precision, reduce_dtype=reduce_dtype)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    bias = next(reversed(list(model.parameters())))
    with model:
        with model.join(enable=with_join):
            for index in range(4 if rank == 0 or not with_join else 2):
                optimizer.zero_grad()
                weight = 1.0 if rank == 0 or index < 2 else 0.0
                with model.no_sync():
                    optimizer.backward(model(own_batch(rank, index)).float().square().mean() * weight)
                optimizer.backward(model(own_batch(rank, index + 4)).float().square().mean() * weight)
                grad = optimizer.get_param_grad(bias)
                assert grad is not None
                with torch.no_grad():
                    model(own_batch(rank, 0))
                optimizer.clip_grad_by_norm(0.05)
                optimizer.step()
                scheduler.step()
        return {**model.state_dict(), "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


@pytest.mark.parametrize("reduce_dtype", [None, "bf16"])
@pytest.mark.parametrize("precision", [None, "fp16"])
def test_a_rank_without_batches_is_one_whose_losses_are_zero(
    precision: str | None, reduce_dtype: str | None
) -> None:
    got = run_on_ranks(with_everything, 2, precision, reduce_dtype, True)
    want = run_on_ranks(with_everything, 2, precision, reduce_dtype, False)
    for result in want:
        assert_same(
            {k: v for k, v in got[0].items() if k != "lr"}, {k: v for k, v in result.items() if k != "lr"}
        )
    assert_same(got[0], want[0])


def goes_on_after() -> dict[str, Tensor]:
    """Two passes over uneven data, then an even step without join()."""
    rank = dist.get_rank()
    model, optimizer = wrap(mlp, RECIPE)
    with model:
        for _ in range(2):
            with model.join():
                for index in range(2 + rank):
                    train(model, optimizer, own_batch(rank, index))
        train(model, optimizer, own_batch(rank, 9))
        return {key: value.clone() for key, value in model.state_dict().items()}


def test_training_goes_on_after_the_block() -> None:
    first, second = run_on_ranks(goes_on_after, 2)
    assert_same(first, second)


def joined_steps(model: GeminiDDP, optimizer: GeminiOptimizer, count: int, **options: bool) -> None:
    with model.join(**options):
        plain_steps(model, optimizer, count)


def plain_steps(model: GeminiDDP, optimizer: GeminiOptimizer, count: int) -> None:
    for index in range(count):
        train(model, optimizer, own_batch(dist.get_rank(), index))


def stops_early() -> str:
    model, optimizer = wrap(mlp, RECIPE)
    with model, pytest.raises(StateError) as caught:
        joined_steps(model, optimizer, 1 + dist.get_rank(), throw_on_early_termination=True)
    return str(caught.value)


def test_all_stop_with_the_first_where_they_are_to() -> None:
    for said in run_on_ranks(stops_early, 2):
        assert "ranks [0] have no batches left" in said


def without_join() -> str:
    """Rank 1 trains outside the block that rank 0 has left."""
    model, optimizer = wrap(mlp, RECIPE)
    steps = joined_steps if dist.get_rank() == 0 else plain_steps
    with model, pytest.raises(StateError) as caught:
        steps(model, optimizer, dist.get_rank())
    return str(caught.value)


def test_a_rank_outside_the_block_is_told() -> None:
    for said in run_on_ranks(without_join, 2):
        assert "that ranks [1] are not in" in said


def dies() -> str:
    """Rank 1 raises in the block, while rank 0 serves it."""
    model, optimizer = wrap(mlp, RECIPE)
    with model, pytest.raises((StateError, TypeError)) as caught:
        joined_steps(model, optimizer, "many" if dist.get_rank() == 1 else 0)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_rank_that_fails_within_the_block_is_named_to_those_that_serve_it() -> None:
    assert "rank 1 will not come: it closed the model" in run_on_ranks(dies, 2)[0]


def test_one_process_needs_no_others() -> None:
    with GeminiDDP(mlp()) as model, model.join():
        optimizer = GeminiOptimizer(CPUAdam(model.parameters()), model)
        train(model, optimizer, own_batch(0, 0))
