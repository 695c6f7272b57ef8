"""The end of a sharded model, and of the patience of its ranks."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from sharded_harness import Recipe, batch, mlp, wrap
from torch import distributed as dist

from gemini import CheckpointError
from gemini.comm.peers import Topic
from gemini.comm.ranks import make_peers


class _Counted:
    """A transfer that is in ``under_way`` until somebody has waited for it."""

    def __init__(self, work: Any, under_way: set[_Counted]) -> None:
        self._work = work
        self._under_way = under_way
        under_way.add(self)

    def wait(self) -> None:
        self._work.wait()
        self._under_way.discard(self)


def _under_way_at_the_end(*, is_closed: bool) -> tuple[int, int]:
    """Return how many transfers were under way before a model ended, and after."""
    under_way: set[_Counted] = set()
    model, optimizer = wrap(mlp, Recipe(), gather_bytes=1)
    assert model.peers is not None
    gather, scatter = model.peers.gather, model.peers.scatter_all
    model.peers.gather = lambda *args: _Counted(gather(*args), under_way)  # type: ignore[method-assign]
    model.peers.scatter_all = lambda *args: _Counted(scatter(*args), under_way)  # type: ignore[method-assign]
    for step in range(3):
        optimizer.backward(model(own_part(batch(step))).square().mean())
        if step < 2:
            optimizer.step()
    before = len(under_way)
    if is_closed:
        model.close()
    del model, optimizer
    gc.collect()
    return before, len(under_way)


def _end_both_ways() -> list[tuple[int, int]]:
    return [_under_way_at_the_end(is_closed=True), _under_way_at_the_end(is_closed=False)]


def test_model_that_ends_waits_for_what_is_written_to_its_memory() -> None:
    for ends in run_on_ranks(_end_both_ways, 2):
        for before, after in ends:
            assert before > 0
            assert after == 0


def _wait_for_a_rank_that_is_elsewhere() -> None:
    peers = make_peers(dist.new_group(timeout=timedelta(seconds=1)))
    assert peers is not None
    aside = peers.say_aside()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="imed out"):
            peers.exchange(Topic.SETTINGS, [1])
        with pytest.raises(RuntimeError, match="imed out"):
            aside("here")
    dist.barrier()


def test_ranks_wait_for_each_other_no_longer_than_their_process_group() -> None:
    run_on_ranks(_wait_for_a_rank_that_is_elsewhere, 2, timeout=30.0)


def _load_with_hooks() -> tuple[list[float], float, list[str]]:
    """Return the largest weight that a hook saw after loading, the difference of what is there from what it
    should be, and what a hook that raises on one rank leaves."""
    model, _ = wrap(mlp, Recipe(), gather_bytes=1, mixed_precision="bf16")
    seen: list[float] = []
    heard: list[str] = []
    with model:
        first = model.module[0]
        state = {key: torch.rand(value.shape) for key, value in model.state_dict().items()}
        for value in state.values():
            dist.broadcast(value, 0)
        first.register_load_state_dict_pre_hook(
            lambda _module, state, prefix, *_: state.update({prefix + "bias": state[prefix + "bias"] * 2})
        )
        first.register_load_state_dict_post_hook(lambda module, _keys: seen.append(module.bias.max().item()))
        model.load_state_dict(state)
        want = {**state, "0.bias": state["0.bias"] * 2}
        apart = max((model.state_dict()[key] - want[key]).abs().max().item() for key in want)
        if dist.get_rank() == 1:
            model.module[2].register_load_state_dict_pre_hook(lambda *_: 1 / 0)
        with pytest.raises((CheckpointError, ZeroDivisionError)) as raised:
            model.load_state_dict({key: value + 1 for key, value in state.items()})
        heard.append(raised.typename)
        apart += max((model.state_dict()[key] - want[key]).abs().max().item() for key in want)
    return seen, apart, heard


def test_hooks_of_loading_run_on_every_rank_and_one_that_raises_changes_nothing() -> None:
    results = run_on_ranks(_load_with_hooks, 2)
    assert [heard for _, _, heard in results] == [["CheckpointError"], ["ZeroDivisionError"]]
    for seen, apart, _ in results:
        assert len(seen) == 1
        assert seen[0] > 1
        assert apart == 0
