"""Ranks that do not make together the calls that they must: all of them are told, and can go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from processes import own_part, run_on_ranks
from sharded_harness import Recipe, assert_near, assert_same, batch, mlp, train_plain, train_step, wrap
from torch import Tensor
from torch import distributed as dist

from gemini import CheckpointError, ConfigError, GeminiDDP, GeminiOptimizer, IoError, StateError
from gemini.checkpoint import load, save
from gemini.comm.peers import Topic
from gemini.comm.ranks import ProcessGroupPeers, make_peers

RECIPE = Recipe(steps=2)


def _backward(model: GeminiDDP, optimizer: GeminiOptimizer) -> None:
    optimizer.backward(model(own_part(batch(9))).square().mean())


def _one_more_zero_grad(model: GeminiDDP, optimizer: GeminiOptimizer) -> None:
    if dist.get_rank() == 0:
        model.zero_grad()
    _backward(model, optimizer)
    optimizer.step()


def _zero_grad_for_step(model: GeminiDDP, optimizer: GeminiOptimizer) -> None:
    _backward(model, optimizer)
    (optimizer.step if dist.get_rank() else optimizer.zero_grad)()


def _clip_alone(model: GeminiDDP, optimizer: GeminiOptimizer) -> None:
    _backward(model, optimizer)
    if dist.get_rank() == 0:
        optimizer.clip_grad_by_value(1.0)
    optimizer.step()


def _save_alone(model: GeminiDDP, optimizer: GeminiOptimizer) -> None:
    if dist.get_rank() == 0:
        save("unused", model, optimizer)
    else:
        _backward(model, optimizer)


WAYS: dict[str, tuple[Callable[[GeminiDDP, GeminiOptimizer], None], str]] = {
    "one more zero_grad": (_one_more_zero_grad, r"ranks \[0\] give gradients up .* ranks \[1\] are about to"),
    "zero_grad for step": (_zero_grad_for_step, r"ranks \[0\] give gradients up .* ranks \[1\] are about to"),
    "clip alone": (
        _clip_alone,
        r"rank 0: clip_grad_by_value\(clip_value=1.0\).*; rank 1: step with group 0: .*lr=0.01",
    ),
    "save alone": (_save_alone, "rank 0 saves or loads, rank 1 runs operators"),
}


def _go_apart(way: str, directory: str) -> None:
    act, refusal = WAYS[way]
    model, optimizer = wrap(mlp, RECIPE)
    with model:
        for step in range(RECIPE.steps):
            save(directory, model, optimizer)
            with pytest.raises(StateError, match=refusal):
                act(model, optimizer)
            model.zero_grad()
            train_step(model, optimizer, RECIPE, step)
        model.manager.chunks.table.check_invariants()
        _, want = train_plain(mlp, RECIPE)
        assert_near(model.state_dict(), want)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_apart_are_all_told_and_go_on(way: str, tmp_path: Path) -> None:
    run_on_ranks(_go_apart, 2, way, str(tmp_path), timeout=30.0)


def _give_up_fails_on_one(directory: str) -> None:
    model, optimizer = wrap(mlp, RECIPE)
    with model:
        train_step(model, optimizer, RECIPE, 0)
        save(directory, model, optimizer)
        want = {key: value.clone() for key, value in model.state_dict().items()}
        _backward(model, optimizer)
        alone, recover = dist.get_rank() == 1, model.manager.recover

        def fail() -> None:
            model.manager.recover = recover  # type: ignore[method-assign]
            raise IoError(5, "injected")

        if alone:
            model.manager.recover = fail  # type: ignore[method-assign]
        with pytest.raises(IoError if alone else CheckpointError, match="injected"):
            load(directory, model, optimizer)
        load(directory, model, optimizer)
        assert_same(model.state_dict(), want)


def test_a_rank_that_cannot_give_gradients_up_ends_a_load_on_all(tmp_path: Path) -> None:
    run_on_ranks(_give_up_fails_on_one, 2, str(tmp_path), timeout=30.0)


def _update_fails_on_one() -> None:
    model, optimizer = wrap(mlp, RECIPE)
    with model:
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        states = optimizer.state_dict()
        train_step(model, optimizer, RECIPE, 0)
        _backward(model, optimizer)
        sharding = model.manager.sharding
        assert sharding is not None
        close_all = sharding.close_all

        def fail() -> None:
            sharding.close_all = close_all  # type: ignore[method-assign]
            raise IoError(28, "made up", "disk", 0)

        if dist.get_rank() == 1:
            sharding.close_all = fail  # type: ignore[method-assign]
            with pytest.raises(IoError):
                optimizer.step()
        else:
            optimizer.step()
        with pytest.raises(StateError, match=r"different steps, \[2, 1\] by rank.*load_state_dict of both"):
            _backward(model, optimizer)
        model.zero_grad()
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        for step in range(RECIPE.steps):
            train_step(model, optimizer, RECIPE, step)
        _, want = train_plain(mlp, RECIPE)
        assert_near(model.state_dict(), want)


def test_states_of_model_and_optimizer_end_a_failed_update_of_one() -> None:
    run_on_ranks(_update_fails_on_one, 2)


def _clip_after_a_refusal() -> None:
    assert_same(_clipped_weights(refused=True), _clipped_weights(refused=False))


def _clipped_weights(*, refused: bool) -> dict[str, Tensor]:
    model, optimizer = wrap(mlp, RECIPE)
    optimizer.max_norm = 1e-3
    with model:
        _backward(model, optimizer)
        if refused:
            with pytest.raises(ConfigError, match="norm_type"):
                optimizer.clip_grad_by_norm(1e-3, -1.0)
        optimizer.step()
        return {key: value.clone() for key, value in model.state_dict().items()}


def test_a_refused_norm_leaves_the_step_clipped() -> None:
    run_on_ranks(_clip_after_a_refusal, 2)


def _say_what_is_long() -> None:
    peers = make_peers(None)
    assert isinstance(peers, ProcessGroupPeers)
    rank = dist.get_rank()
    long = "x" * (700 * rank) + "\u00e9"
    assert peers.say(long) == ["x" * (700 * other) + "\u00e9" for other in range(3)]
    numbers = [-(2**63), 2**63 - 1, *range(rank * 100)]
    assert peers.exchange(Topic.SETTINGS, numbers)[2] == [-(2**63), 2**63 - 1, *range(200)]
    with pytest.raises(StateError, match=r"rank 0 saves or loads \(failed: it\), rank 1 wraps a model"):
        peers.say("failed: it") if rank == 0 else peers.exchange(Topic.SETTINGS, numbers)
    assert peers.say("still") == ["still"] * 3


def test_messages_of_any_length_arrive_and_different_ones_are_refused() -> None:
    run_on_ranks(_say_what_is_long, 3)
