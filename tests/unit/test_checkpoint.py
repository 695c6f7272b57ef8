"""Resuming from a checkpoint is going on: bit for bit, whatever the budgets were and are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_models import KIB, Model, Run, assert_equal, assert_same, start
from pairs import pairs
from torch import nn

from gemini import GeminiDDP, GeminiOptimizer, HybridAdam, checkpoint, handle_of
from gemini.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")


def resident(_directory: Path) -> dict[str, Any]:
    return {}


def tight(directory: Path) -> dict[str, Any]:
    return {"device_bytes": 128 * KIB, "disk_dir": str(directory)}


def three_tiers(directory: Path) -> dict[str, Any]:
    return {
        "device_bytes": 160 * KIB,
        "host_bytes": 64 * KIB,
        "disk_dir": str(directory),
        "placement_policy": "cpu",
    }


def large_chunks(directory: Path) -> dict[str, Any]:
    return {"min_chunk_size_mb": 0.1, "placement_policy": "cuda"}


PLACES = [resident, tight, three_tiers, large_chunks]


@pairs(before=PLACES, after=PLACES, precision=[None, "bf16"])
def test_resuming_equals_going_on_in_any_place(
    tmp_path: Path, before: Any, after: Any, precision: str | None
) -> None:
    first = start(mixed_precision=precision, **before(tmp_path)).train(3)
    first.save(tmp_path / "run")
    first.train(3)
    second = start(seed=7, mixed_precision=precision, **after(tmp_path))
    second.load(tmp_path / "run")
    second.train(3)
    assert second.losses == first.losses[3:]
    assert_same(second, first)
    assert second.model.stats()["step"] == 6
    assert (first.model.stats()["disk_write"]["bytes"] > 0) == (before in (tight, three_tiers))


@pytest.mark.parametrize("options", [{"accumulate": 3}, {"max_norm": 0.1}, {"mixed_precision": "fp16"}])
def test_resuming_equals_going_on_with(tmp_path: Path, options: dict[str, Any]) -> None:
    first = start(**options, **tight(tmp_path)).train(2)
    first.save(tmp_path / "run")
    first.train(3)
    second = start(seed=7, **options)
    second.load(tmp_path / "run")
    second.train(3)
    assert second.losses == first.losses[-len(second.losses) :]
    assert_same(second, first)
    if second.optimizer.loss_scale is not None and first.optimizer.loss_scale is not None:
        assert second.optimizer.loss_scale.state_dict() == first.optimizer.loss_scale.state_dict()


def test_saving_changes_nothing(tmp_path: Path) -> None:
    saving, other = start(**tight(tmp_path)), start(**tight(tmp_path))
    saving.train(2).save(tmp_path / "run")
    saving.train(2)
    random_after = torch.get_rng_state()
    torch.manual_seed(0)
    other = start(**tight(tmp_path)).train(4)
    assert torch.equal(random_after, torch.get_rng_state())
    assert saving.losses == other.losses
    assert_same(saving, other)


def test_every_generator_is_restored(tmp_path: Path) -> None:
    import random

    run = start().train(1)
    random.gauss(0, 1)
    np.random.standard_normal()
    run.save(tmp_path / "run")
    want = (random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.rand(3).tolist())
    run.load(tmp_path / "run")
    assert (random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.rand(3).tolist()) == want


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("place", [resident, tight])
def test_hooks_of_loading_see_every_name_and_change_no_weight(
    tmp_path: Path, place: Any, precision: str | None
) -> None:
    first = start(mixed_precision=precision).train(2)
    first.save(tmp_path / "run")
    second = start(seed=7, mixed_precision=precision, **place(tmp_path))
    seen: list[Any] = []

    def hook(module: Any, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        weight = state[prefix + "weight"] * 1  # as a hook that converts a format
        seen.append((list(state), metadata["version"], weight.requires_grad, weight.float()))
        state[prefix + "weight"] = weight * 2

    second.model.module.norm.register_load_state_dict_pre_hook(hook)
    second.load(tmp_path / "run")
    want = first.model.state_dict()
    ((names, version, needs_grad, weight),) = seen
    assert (names, version, needs_grad) == ([name for name in want if name.startswith("norm.")], 2, False)
    assert torch.equal(weight, first.model.module.norm.weight.detach().float())
    assert_same(second, first)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("place", [resident, tight])
def test_what_hooks_of_loading_write_into_weights_does_not_stay(
    tmp_path: Path, place: Any, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(mixed_precision=precision).train(2)
    first.save(tmp_path / "run")
    second = start(seed=7, mixed_precision=precision, **place(tmp_path))
    norm, calls = second.model.module.norm, []
    load_plain = norm._load_from_state_dict

    def in_place(_module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        calls.append("before")
        state[prefix + "weight"].mul_(2)

    def own_way(state: dict[str, Any], prefix: str, *more: Any) -> None:
        load_plain(state, prefix, *more)
        with torch.no_grad():
            norm.bias.copy_(state[prefix + "bias"] * 2 + 1)

    norm.register_load_state_dict_pre_hook(in_place)
    monkeypatch.setattr(norm, "_load_from_state_dict", own_way)
    second.load(tmp_path / "run")
    assert calls == ["before"]
    assert_same(second, first)
    second.train(2)
    assert_same(second, start(mixed_precision=precision).train(4))


def test_hooks_of_loading_run_without_buffers_too(tmp_path: Path) -> None:
    seen: list[Any] = []
    module = torch.nn.Linear(4, 4)
    module.register_load_state_dict_pre_hook(lambda _module, state, *_: seen.append(list(state)))
    with GeminiDDP(module) as model:
        optimizer = GeminiOptimizer(HybridAdam(model.parameters()), model)
        checkpoint.save(tmp_path, model, optimizer)
        checkpoint.load(tmp_path, model, optimizer)
    assert seen == [["weight", "bias"]]


def test_loading_an_early_checkpoint_forgets_later_moments(tmp_path: Path) -> None:
    run = start(**tight(tmp_path))
    run.save(tmp_path / "run")
    want = start().train(3)
    run.train(2)
    run.load(tmp_path / "run")
    assert run.optimizer.state_dict()["state"] == {}
    torch.manual_seed(1)
    run.losses.clear()
    run.train(3)
    torch.manual_seed(0)
    again = start(**tight(tmp_path))
    torch.manual_seed(1)
    again.train(3)
    assert run.losses == again.losses != want.losses
    assert_same(run, again)


def test_load_gives_pending_gradients_up(tmp_path: Path) -> None:
    run = start(**tight(tmp_path)).train(2)
    run.save(tmp_path / "run")
    run.train(2)
    want = run.losses[2:]
    run.model(torch.zeros(6, 5, dtype=torch.long)).sum().backward()
    run.load(tmp_path / "run")
    run.losses.clear()
    run.train(2)
    assert run.losses == want


def test_saving_refuses_pending_gradients(tmp_path: Path) -> None:
    run = start().train(1)
    run.save(tmp_path / "run")
    run.model(torch.zeros(6, 5, dtype=torch.long)).sum().backward()
    with pytest.raises(CheckpointError, match="zero_grad"):
        run.save(tmp_path / "run")
    run.optimizer.zero_grad()
    run.save(tmp_path / "run")


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_users_write_to_a_weight_is_saved(tmp_path: Path, precision: str | None) -> None:
    run = start(mixed_precision=precision, **tight(tmp_path)).train(2)
    with torch.no_grad():
        run.model.module.up.weight.add_(0.5)
    want = run.model.module.up.weight.detach().clone()
    run.save(tmp_path / "run")
    assert torch.equal(run.model.state_dict()["up.weight"].to(want.dtype), want)
    run.train(2)
    second = start(seed=7, mixed_precision=precision)
    second.load(tmp_path / "run")
    assert torch.equal(second.model.module.up.weight.detach().clone(), want)
    assert_same(second.train(2), run)


def test_a_loaded_master_is_not_cut_to_16_bits_by_an_earlier_write(tmp_path: Path) -> None:
    run = start(mixed_precision="bf16").train(2)
    run.save(tmp_path / "run")
    run.train(2)
    other = start(seed=7, mixed_precision="bf16")
    with torch.no_grad():
        other.model.module.up.weight.add_(0.5)
    other.load(tmp_path / "run")
    assert_same(other.train(2), run)


def test_a_checkpoint_of_fp32_resumes_in_bf16_with_the_same_masters(tmp_path: Path) -> None:
    run = start().train(2)
    run.save(tmp_path / "run")
    other = start(seed=7, mixed_precision="bf16")
    other.load(tmp_path / "run")
    want, got = run.model.state_dict(), other.model.state_dict()
    trained = {name for name, param in run.model.module.named_parameters() if param.requires_grad}
    assert all(torch.equal(got[name], want[name]) for name in trained)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_keep_the_bits_that_16_do_not_hold(tmp_path: Path, precision: str) -> None:
    """Saved masters cast to 16 bits and back are others: every file and every resume has all 32."""
    run = start(mixed_precision=precision, **tight(tmp_path)).train(2)
    want = run.model.state_dict()
    run.save(tmp_path / "run")
    half = torch.bfloat16 if precision == "bf16" else torch.float16
    assert not torch.equal(want["up.weight"], want["up.weight"].to(half).float())
    with checkpoint.CheckpointReader(checkpoint.latest(tmp_path / "run")) as reader:
        assert torch.equal(reader.weight("up.weight"), want["up.weight"])
    other = start(seed=7, mixed_precision=precision)
    other.load(tmp_path / "run")
    assert torch.equal(other.model.state_dict()["up.weight"], want["up.weight"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_first_checkpoint_has_the_weights_that_were_wrapped(tmp_path: Path, precision: str) -> None:
    """Masters are made of the fp32 weights, not of what is left of them in 16 bits."""
    torch.manual_seed(0)
    want = {name: value.clone() for name, value in Model().named_parameters()}
    run = start(mixed_precision=precision)
    run.save(tmp_path / "run")
    with checkpoint.CheckpointReader(checkpoint.latest(tmp_path / "run")) as reader:
        for name, param in run.model.module.named_parameters():
            if param.requires_grad:
                assert torch.equal(reader.weight(name), want[name]), name


def test_extra_comes_back(tmp_path: Path) -> None:
    run = start()
    extra = {"tokens": 2**60, "history": [0.1, float("inf"), None], "name": "\u00e9", "nested": {"a": [True]}}
    run.save(tmp_path / "run", extra=extra)
    assert run.load(tmp_path / "run") == extra


@pytest.mark.parametrize("extra", [{"a": object()}, {1: "a"}, {"a": [{"b": torch.zeros(1)}]}, {"a": {1, 2}}])
def test_extra_that_json_would_change_is_refused(tmp_path: Path, extra: Any) -> None:
    run = start()
    run.save(tmp_path / "run", extra={"good": 1})
    with pytest.raises(CheckpointError, match="extra"):
        run.save(tmp_path / "run", extra=extra)
    assert run.load(tmp_path / "run") == {"good": 1}


def test_settings_that_json_cannot_hold_come_back(tmp_path: Path) -> None:
    run = start().train(1)
    run.optimizer.param_groups[0]["lr"] = np.float64(0.1)
    run.optimizer.param_groups[1]["lr"] = torch.tensor(0.25)
    run.save(tmp_path / "run")
    other = start(seed=7)
    other.load(tmp_path / "run")
    assert other.optimizer.param_groups[0]["lr"] == 0.1
    assert_equal(other.optimizer.param_groups[1]["lr"], torch.tensor(0.25))
    assert other.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert other.scheduler.state_dict() == run.scheduler.state_dict()  # milestones: numbers as keys


def test_a_scheduler_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    run = start().train(1)

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"call": lambda: 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError

    with pytest.raises(CheckpointError, match="scheduler"):
        checkpoint.save(tmp_path / "run", run.model, run.optimizer, scheduler=Odd())
    assert not checkpoint.is_complete(tmp_path / "run")


def snapshot(run: Run) -> Any:
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    return state, run.optimizer.state_dict(), run.scheduler.state_dict(), torch.get_rng_state()


def refuses(run: Run, directory: Path, match: str) -> None:
    before = snapshot(run)
    with pytest.raises(CheckpointError, match=match):
        run.load(directory)
    assert_equal(snapshot(run), before)


def test_another_models_checkpoint_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    start().save(tmp_path / "run")
    refuses(start(seed=7, width=48).train(1), tmp_path / "run", "another model.*up|another model.*down")


def test_other_buffers_are_refused_and_nothing_changed(tmp_path: Path) -> None:
    start().save(tmp_path / "run")
    run = start(seed=7).train(1)
    run.model.module.norm.register_buffer("more", torch.zeros(2))
    refuses(run, tmp_path / "run", "buffer.*norm.more")


def replace_head(net: Any) -> None:
    net.down = nn.Linear(6 * 32, 32)


def exchange_norms(net: Any) -> None:
    net.norm.weight, net.norm.bias = net.norm.bias, net.norm.weight


def tie_another(net: Any) -> None:
    net.up.bias = net.scale


def name_a_buffer(net: Any) -> None:
    value = net.unused.detach().clone()
    del net.unused
    net.register_buffer("unused", value)


@pytest.mark.parametrize("change", [replace_head, exchange_norms, tie_another, name_a_buffer])
def test_what_took_the_name_of_a_parameter_is_neither_saved_nor_loaded(
    tmp_path: Path, change: Callable[[nn.Module], None]
) -> None:
    start().save(tmp_path / "run")
    run = start(seed=7).train(1)
    change(run.model.module)
    refuses(run, tmp_path / "run", "wrapped")
    for save in (checkpoint.save, checkpoint.save_async):
        with pytest.raises(CheckpointError, match=r"'(down|norm|up|unused).*adopt\(\)"):
            save(tmp_path / "other", run.model, run.optimizer)
    assert not (tmp_path / "other").exists()
    handle_of(run.model).adopt()
    checkpoint.save(tmp_path / "other", run.model, run.optimizer)
    want = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.train(1)
    checkpoint.load(tmp_path / "other", run.model, run.optimizer)
    assert all(torch.equal(value, want[name]) for name, value in run.model.state_dict().items())


def test_a_layer_that_was_taken_out_is_no_obstacle(tmp_path: Path) -> None:
    run, other = start(), start(seed=7)
    for each in (run, other):
        each.model.module.head = nn.Identity()  # tied: the parameter stays
        each.model.module.more = nn.Linear(2, 2)
    run.save(tmp_path / "run")
    other.load(tmp_path / "run")
    assert_same(other, run)


def test_other_parameter_groups_are_refused_and_nothing_changed(tmp_path: Path) -> None:
    start().save(tmp_path / "run")
    run = start(seed=7).train(1)
    for group in run.optimizer.param_groups:
        group["params"].reverse()
    refuses(run, tmp_path / "run", "parameter groups")


def test_a_scheduler_without_a_saved_state_is_refused(tmp_path: Path) -> None:
    run = start().train(1)
    checkpoint.save(tmp_path / "run", run.model, run.optimizer)
    refuses(run, tmp_path / "run", "without a scheduler")
    checkpoint.load(tmp_path / "run", run.model, run.optimizer)
