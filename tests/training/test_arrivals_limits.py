"""Parameters that come later: what cannot be had, and what their chunks, files and names come to."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from arrivals_harness import (
    KIB,
    RULES,
    WIDTH,
    add_a_large_one,
    add_a_layer,
    block,
    inputs,
    put_new_head,
    stack,
    tight,
    train,
    train_step,
)
from disk_space import INDEX_BYTES, disk_space
from gpu_harness import GpuModel
from same_bits import assert_same
from torch import nn

import gemini
from gemini import (
    ConfigError,
    CPUAdam,
    EvictedAccessError,
    GeminiDDP,
    GeminiOptimizer,
    IoError,
    OutOfBudgetError,
    checkpoint,
)
from gemini.chunk import disk_file
from gemini.chunk.cpu_memory import CpuDevice
from gemini.runtime import adopt


def test_the_tiers_must_hold_them(tmp_path: Path) -> None:
    net = stack()
    with GeminiDDP(net, **tight(tmp_path, 160, disk_bytes=512 * KIB)) as model:
        optimizer = GeminiOptimizer(RULES["adam"](net.parameters()), model)
        train_step(model, optimizer, 0)
        torch.manual_seed(0)
        net.append(nn.Linear(WIDTH, 40 * WIDTH))
        with pytest.raises(OutOfBudgetError, match="device_bytes"):
            optimizer.add_param_group({"params": list(net[-1].parameters())})
        assert type(net[-1].weight) is nn.Parameter
        assert len(optimizer.param_groups) == 1
        del net[-1]
        train_step(model, optimizer, 1)
        plain = stack()
        reference = RULES["adam"](plain.parameters())
        for step in range(2):
            train_step(plain, reference, step)
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_what_cannot_be_managed_is_refused(tmp_path: Path) -> None:
    net, other = stack(), stack()
    with GeminiDDP(net, **tight(tmp_path)) as model, GeminiDDP(other, **tight(tmp_path)):
        handle = gemini.handle_of(model)
        for arrival, reason in (
            (nn.Linear(WIDTH, WIDTH, device="meta"), "on 'meta'"),
            (other[0], "is already managed"),
            (nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))]), "only dense floating"),
        ):
            net.append(arrival)
            with pytest.raises(ConfigError, match=reason):
                handle.adopt()
            del net[-1]
        assert handle.adopt() == []


def test_raw_memory_of_them_is_watched(tmp_path: Path) -> None:
    net = stack()
    with GeminiDDP(net, **tight(tmp_path)) as model:
        optimizer = GeminiOptimizer(RULES["adam"](net.parameters()), model)
        optimizer.add_param_group({"params": list(add_a_large_one(net))})
        raw = net[-1][0].weight.detach().numpy()
        for step in range(2):
            train_step(model, optimizer, step)
        raw.sum()
        with pytest.raises(EvictedAccessError):
            train_step(model, optimizer, 2)


def test_without_a_disk(tmp_path: Path) -> None:
    plain = stack()
    want = train(plain, plain, RULES["adam"](plain.parameters()))
    net = stack()
    options = tight(tmp_path, 220, host_bytes="8MiB") | {"disk_dir": None}
    with GeminiDDP(net, **options) as model:
        assert_same(train(net, model, GeminiOptimizer(RULES["adam"](net.parameters()), model)), want)


def test_activations_may_leave_meanwhile(tmp_path: Path) -> None:
    plain = stack()
    want = train(plain, plain, RULES["adam"](plain.parameters()))
    net = stack()
    with GeminiDDP(net, **tight(tmp_path, 300, activation_offload=True)) as model:
        assert_same(train(net, model, GeminiOptimizer(RULES["adam"](net.parameters()), model)), want)


def linears(count: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def test_what_was_away_keeps_its_values_while_its_chunk_gets_masters(tmp_path: Path) -> None:
    net = linears(3)
    net[:2].requires_grad_(False)
    with GeminiDDP(net, **tight(tmp_path, 2**16, mixed_precision="bf16", min_chunk_size_mb=1)) as model:
        handle = gemini.handle_of(model)
        optimizer = GeminiOptimizer(CPUAdam(net[2].parameters(), lr=1e-2), model)
        away = net[1]
        net[1] = nn.Identity()
        handle.adopt()
        net[0].requires_grad_(True)
        net[1] = away
        handle.adopt()
        want = away.weight.detach().float().clone()
        assert torch.equal(model.state_dict()["1.weight"], want)
        away.requires_grad_(True)
        optimizer.add_param_group({"params": list(away.parameters())})
        train_step(model, optimizer, 0)
        assert 0 < (away.weight.detach().float() - want).abs().max() < 0.1


@pytest.mark.parametrize("adopts", [True, False])
def test_another_object_over_the_same_memory_takes_the_place_of_the_old_one(
    adopts: bool, tmp_path: Path
) -> None:
    plain, net = stack(), stack()
    with GeminiDDP(net, **tight(tmp_path, 220)) as model:
        optimizers = [
            torch.optim.AdamW(plain.parameters(), lr=1e-2),
            GeminiOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model),
        ]
        for each, called, optimizer in zip((plain, net), (plain, model), optimizers, strict=True):
            train_step(called, optimizer, 0)
            nn.utils.parametrizations.weight_norm(each[1][0])
            if called is model and adopts:
                gemini.handle_of(model).adopt()
            optimizer.add_param_group({"params": list(each[1][0].parametrizations.parameters())})
            for step in range(1, 4):
                train_step(called, optimizer, step)
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
        checkpoint.save(tmp_path / "saved", model, optimizers[1])
        checkpoint.load(tmp_path / "saved", model, optimizers[1])
        with pytest.raises(ConfigError, match="two parameters over the memory of"):
            optimizers[1].add_param_group({"params": [nn.Parameter(net[0][0].weight)]})


def test_the_disk_file_never_takes_more_than_its_budget(tmp_path: Path) -> None:
    net, budget = stack(), 236 * KIB
    with GeminiDDP(net, **tight(tmp_path, 260, disk_bytes=budget)) as model:
        optimizer = GeminiOptimizer(RULES["adam"](net.parameters()), model)
        train_step(model, optimizer, 0)
        assert disk_space(tmp_path) > 200 * KIB  # reserved
        for seed in range(4):
            net.append(block(80 + seed))
            net[-1].requires_grad_(False)
            gemini.handle_of(model).adopt()
            for step in range(3):
                train_step(model, optimizer, step)
                assert disk_space(tmp_path) <= budget + INDEX_BYTES
        assert model.stats()["disk"]["budget_bytes"] == budget


def test_a_block_that_was_replaced_is_no_obstacle_to_release() -> None:
    net = stack()
    options = {"activation_offload": "auto", "activation_recompute": True, "host_bytes": "64MiB"}
    handle = gemini.manage(net, device_bytes="64MiB", **options)
    optimizer = GeminiOptimizer(RULES["adam"](net.parameters()), net)
    train_step(net, optimizer, 0)
    optimizer.add_param_group({"params": list(put_new_head(net))})
    train_step(net, optimizer, 1)
    handle.release()
    assert not any("forward" in vars(part) for part in net.modules())


def test_keep_fp32_may_name_what_has_left(tmp_path: Path) -> None:
    net = stack()
    with GeminiDDP(net, **tight(tmp_path, mixed_precision="bf16", keep_fp32=["3"])) as model:
        del net[3]
        net.append(block(90))
        assert len(gemini.handle_of(model).adopt()) == 2
        assert net[3][0].weight.dtype is torch.float32  # it has the name


def test_groups_name_the_parameters_that_the_module_has(tmp_path: Path) -> None:
    net = stack()
    with GeminiDDP(net, **tight(tmp_path)) as model:
        optimizer = GeminiOptimizer(torch.optim.AdamW(net.named_parameters(), lr=1e-2), model)
        del net[0]
        gemini.handle_of(model).adopt()
        (group,) = optimizer.param_groups
        assert group["param_names"] == [name for name, _ in net.named_parameters()]
        assert len(group["params"]) == len(group["param_names"])


def test_a_trace_of_before_is_not_that_of_a_model_wrapped_whole(tmp_path: Path) -> None:
    def build(*, grown: bool) -> nn.Sequential:
        net = linears(9)
        net[8:].requires_grad_(False)
        return net if grown else net[:8]

    net, whole = build(grown=False), build(grown=True)
    with GeminiDDP(net, **tight(tmp_path, 160)) as model:
        optimizer = GeminiOptimizer(RULES["adam"](net.parameters()), model)
        train_step(model, optimizer, 0)
        net.append(build(grown=True)[8])
        gemini.handle_of(model).adopt()
        for step in range(4):
            train_step(model, optimizer, step)
        trace = model.memstats()
    with GeminiDDP(whole, **tight(tmp_path, 160), memstats=trace) as model:
        GeminiOptimizer(RULES["adam"](whole[:8].parameters()), model)
        assert model.stats()["warmup"]


@pytest.mark.parametrize("where", ["space", "chunk"])
def test_a_refusal_leaves_everything_as_it_was(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    net = stack()
    with GeminiDDP(net, **tight(tmp_path)) as model:
        optimizer = GeminiOptimizer(RULES["adam"](net.parameters()), model)
        train_step(model, optimizer, 0)
        add_a_layer(net)
        (weight,) = net[-1].parameters()
        model(inputs(0)).square().mean().backward()
        grad, names = weight.grad, list(gemini.handle_of(model).storage.slots)
        before = model.stats()["disk"]["budget_bytes"]

        def fail(*_args: Any, **_options: Any) -> Any:
            raise IoError(errno.ENOSPC, "no space", str(tmp_path))

        with monkeypatch.context() as patch:
            if where == "space":
                patch.setattr(disk_file, "lacking_space", lambda *_args, **_options: "the disk is full")
            else:
                patch.setattr(adopt, "_write_master", fail)
            with pytest.raises(IoError):
                optimizer.add_param_group({"params": [weight]})
        assert type(weight) is nn.Parameter
        assert weight.grad is grad
        assert list(gemini.handle_of(model).storage.slots) == names
        if where == "space":
            assert model.stats()["disk"]["budget_bytes"] == before
        optimizer.zero_grad()
        optimizer.add_param_group({"params": [weight]})
        train_step(model, optimizer, 1)
        assert weight.grad is None


def test_nothing_is_adopted_in_inference_mode(tmp_path: Path) -> None:
    net = stack()
    with GeminiDDP(net, **tight(tmp_path)) as model, torch.inference_mode():
        net.append(block(91))
        with pytest.raises(ConfigError, match="inference_mode"):
            gemini.handle_of(model).adopt()


def test_without_addresses_to_spare_nothing_is_taken_in() -> None:
    class Narrow(CpuDevice):
        def open(self, *args: Any, spare_bytes: int = 0) -> Any:
            if spare_bytes:
                raise gemini.errors.GeminiError("cannot reserve addresses")
            return super().open(*args)

    net = stack()
    with GpuModel(net, device=Narrow(), device_bytes="16MiB") as model:
        optimizer = GeminiOptimizer(RULES["adam"](net.parameters()), model)
        train_step(model, optimizer, 0)
        add_a_layer(net)
        with pytest.raises(ConfigError, match="wrap the model again"):
            gemini.handle_of(model).adopt()


def test_a_model_may_begin_without_parameters(tmp_path: Path) -> None:
    plain, net = stack(), nn.Sequential()
    with GeminiDDP(net, device_bytes="16MiB", disk_dir=str(tmp_path)) as model:
        net.extend(stack())
        optimizers = [
            RULES["adam"](plain.parameters()),
            GeminiOptimizer(RULES["adam"](net.parameters()), model),
        ]
        for called, optimizer in zip((plain, model), optimizers, strict=True):
            for step in range(3):
                train_step(called, optimizer, step)
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
