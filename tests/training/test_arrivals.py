"""Parameters that come into a module after it was wrapped are managed like the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arrivals_harness import (
    CHANGES,
    DEPTH,
    KIB,
    RULES,
    add_a_layer,
    block,
    inputs,
    put_new_head,
    stack,
    tight,
    train,
    train_step,
)
from gpu_harness import GpuModel
from pairs import pairs
from same_bits import assert_same
from torch import Tensor, nn

import gemini
from gemini import CPUAdam, GeminiDDP, GeminiOptimizer, HybridAdam, checkpoint
from gemini.chunk.gpu_memory import SimulatedDevice


@pairs(rule=RULES, device=[220, 2**20], overlap=[True, False, "backward"])
def test_they_train_as_without_management(rule: str, device: int, overlap: Any, tmp_path: Path) -> None:
    plain = stack()
    want = train(plain, plain, RULES[rule](plain.parameters()))
    net = stack()
    with GeminiDDP(net, **tight(tmp_path, device)) as model:
        optimizer = GeminiOptimizer(RULES[rule](net.parameters()), model, overlap=overlap)
        assert_same(train(net, model, optimizer), want)
        stats = model.stats()
        assert stats["device"]["peak_bytes"] <= device * KIB
        assert not stats["warmup"]
        if device < 2**20:
            assert stats["disk_read"]["bytes"] > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_budgets_never_change_them_in_16_bits(precision: str, tmp_path: Path) -> None:
    def run(**options: Any) -> dict[str, Tensor]:
        net = stack()
        options = tight(tmp_path, mixed_precision=precision) | options
        with GeminiDDP(net, **options) as model:
            return train(net, model, GeminiOptimizer(RULES["adam"](net.parameters()), model))

    assert_same(run(), run(device_bytes="1GiB"))


def test_a_master_begins_with_all_bits_of_what_arrived(tmp_path: Path) -> None:
    net = stack()
    with GeminiDDP(net, **tight(tmp_path, mixed_precision="bf16")) as model:
        net.append(block(75))
        want = net[-1][0].weight.detach().clone()
        assert gemini.handle_of(model).adopt() == [f"{DEPTH}.0.weight", f"{DEPTH}.0.bias"]
        assert net[-1][0].weight.dtype is torch.bfloat16
        assert torch.equal(model.state_dict()[f"{DEPTH}.0.weight"], want)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_their_states_may_lie_in_a_file(fraction: float, tmp_path: Path) -> None:
    plain = stack()
    want = train(plain, plain, RULES["adam"](plain.parameters()))
    net = stack()
    adam = HybridAdam(
        net.parameters(),
        lr=1e-2,
        weight_decay=0.1,
        nvme_offload_fraction=fraction,
        nvme_offload_dir=str(tmp_path),
    )
    with GeminiDDP(net, **tight(tmp_path, 2**12)) as model:
        assert_same(train(net, model, GeminiOptimizer(adam, model)), want)


def test_they_train_on_a_gpu(tmp_path: Path) -> None:
    plain = stack()
    want = train(plain, plain, RULES["adam"](plain.parameters()))
    net, gpu = stack(), SimulatedDevice(2**24, block_bytes=2**14, max_delay_us=50, seed=2)
    options = tight(tmp_path, 320, host_bytes=2**20)
    with GpuModel(net, device=gpu, **options) as model:
        assert_same(train(net, model, GeminiOptimizer(RULES["adam"](net.parameters()), model)), want)


def test_a_module_managed_in_place(tmp_path: Path) -> None:
    plain = stack()
    want = train(plain, plain, RULES["adam"](plain.parameters()))
    net = stack()
    handle = gemini.manage(net, **tight(tmp_path))
    train(net, net, GeminiOptimizer(RULES["adam"](net.parameters()), net))
    handle.release()
    assert_same({name: value.detach() for name, value in net.state_dict().items()}, want)
    assert all(type(param) is nn.Parameter for param in net.parameters())


def test_an_optimizer_made_of_them_needs_no_call(tmp_path: Path) -> None:
    plain, net = stack(), stack()
    put_new_head(plain)
    optimizer = RULES["adam"](plain.parameters())
    for step in range(3):
        train_step(plain, optimizer, step)
    with GeminiDDP(net, **tight(tmp_path)) as model:
        put_new_head(net)
        managed = GeminiOptimizer(RULES["adam"](net.parameters()), model)
        for step in range(3):
            train_step(model, managed, step)
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_gradients_that_are_there_stay(tmp_path: Path) -> None:
    plain, net = stack(), stack()
    with GeminiDDP(net, **tight(tmp_path)) as model:
        for each, called in ((plain, plain), (net, model)):
            add_a_layer(each)
            called(inputs(0)).square().mean().backward()
        gemini.handle_of(model).adopt()
        optimizers = [
            RULES["adam"](plain.parameters()),
            GeminiOptimizer(RULES["adam"](net.parameters()), model),
        ]
        for each, called, optimizer in zip((plain, net), (plain, model), optimizers, strict=True):
            called(inputs(1)).square().mean().backward()
            optimizer.step()
            assert each[-1][0].weight.grad is not None or called is model
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_what_is_frozen_is_evaluated_and_unfrozen_later(tmp_path: Path) -> None:
    plain, net = stack(), stack()
    with GeminiDDP(net, **tight(tmp_path)) as model:
        for each in (plain, net):
            add_a_layer(each)
            each[-1].requires_grad_(False)
        assert gemini.handle_of(model).adopt() == [f"{DEPTH}.0.weight"]
        assert gemini.handle_of(model).adopt() == []
        with torch.no_grad():
            assert torch.equal(model(inputs(0)), plain(inputs(0)))
        optimizers = [
            RULES["adam"](plain.parameters()),
            GeminiOptimizer(RULES["adam"](net.parameters()), model),
        ]
        for each, called, optimizer in zip((plain, net), (plain, model), optimizers, strict=True):
            for step in range(4):
                if step == 2:
                    each[-1].requires_grad_(True)
                train_step(called, optimizer, step)
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_what_has_left_leaves_the_optimizer_and_may_come_back(tmp_path: Path) -> None:
    plain, net = stack(), stack()
    with GeminiDDP(net, **tight(tmp_path)) as model:
        optimizers = [
            torch.optim.AdamW(plain.parameters(), lr=1e-2),
            GeminiOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model),
        ]
        for each, called, optimizer in zip((plain, net), (plain, model), optimizers, strict=True):
            for step in range(6):
                if step == 2:
                    old = each[-1]
                    optimizer.add_param_group({"params": list(put_new_head(each))})
                if step == 4:
                    each[-1] = old
                    if called is plain:
                        for param in old.parameters():
                            optimizer.state.pop(param)
                    else:
                        optimizer.add_param_group({"params": list(old.parameters())})
                train_step(called, optimizer, step)
        held = {param for group in optimizers[1].param_groups for param in group["params"]}
        assert held == set(net.parameters())
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_hold_what_the_model_computes_with(asynchronous: bool, tmp_path: Path) -> None:
    net = stack()
    with GeminiDDP(net, **tight(tmp_path)) as model:
        optimizer = GeminiOptimizer(RULES["adam"](net.parameters()), model)
        train_step(model, optimizer, 0)
        early = checkpoint.save_async(tmp_path / "early", model, optimizer) if asynchronous else None
        for change in CHANGES:
            optimizer.add_param_group({"params": list(change(net)), "lr": 1e-2})
        for step in range(1, 4):
            train_step(model, optimizer, step)
        checkpoint.save(tmp_path / "saved", model, optimizer)
        train_step(model, optimizer, 4)
        want = dict(model.state_dict())
    if early is not None:
        first = stack()
        with GeminiDDP(first, **tight(tmp_path)) as model:
            checkpoint.load(
                tmp_path / "early", model, GeminiOptimizer(RULES["adam"](first.parameters()), model)
            )
            plain = stack()
            train_step(plain, RULES["adam"](plain.parameters()), 0)
            assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    again = stack()
    groups = [list(again[:-1].parameters())]
    groups += [list(change(again)) for change in CHANGES]
    for device in (200, 2**20):
        with GeminiDDP(copy.deepcopy(again), **tight(tmp_path, device)) as model:
            params = dict(zip(again.parameters(), model.parameters(), strict=True))
            adam = CPUAdam([params[param] for param in groups[0]], lr=1e-2, weight_decay=0.1)
            for group in groups[1:]:
                adam.add_param_group({"params": [params[param] for param in group], "lr": 1e-2})
            optimizer = GeminiOptimizer(adam, model)
            checkpoint.load(tmp_path / "saved", model, optimizer)
            train_step(model, optimizer, 4)
            assert_same(dict(model.state_dict()), want)


def exchange(net: nn.Sequential) -> None:
    net[0], net[2] = net[2], net[0]


def tie(net: nn.Sequential) -> None:
    net[0][0].weight = net[2][0].weight


@pytest.mark.parametrize("change", [exchange, tie])
def test_names_are_those_that_the_module_has_now(
    change: Callable[[nn.Sequential], None], tmp_path: Path
) -> None:
    plain, net, again = stack(), stack(), stack()
    with GeminiDDP(net, **tight(tmp_path)) as model:
        optimizers = [
            torch.optim.AdamW(plain.parameters(), lr=1e-2),
            GeminiOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model),
        ]
        for each, called, optimizer in zip((plain, net), (plain, model), optimizers, strict=True):
            train_step(called, optimizer, 0)
            change(each)
            if called is model:
                assert gemini.handle_of(model).adopt() == []
            train_step(called, optimizer, 1)
        checkpoint.save(tmp_path / "saved", model, optimizers[1])
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    change(again)
    with GeminiDDP(again, **tight(tmp_path)) as model:
        # In the order of the groups, which is that of before.
        names = [name for name, _ in stack().named_parameters()]
        if change is exchange:
            names = [*names[4:6], *names[2:4], *names[:2], *names[6:]]
        else:
            names.remove("0.0.weight")
            names[names.index("2.0.weight")] = "0.0.weight"
        params = [again.get_parameter(name) for name in names]
        optimizer = GeminiOptimizer(torch.optim.AdamW(params, lr=1e-2), model)
        checkpoint.load(tmp_path / "saved", model, optimizer)
        train_step(model, optimizer, 2)
        train_step(plain, optimizers[0], 2)
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
