"""Parameters that come into a module after it was wrapped are managed like the others."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_space import INDEX_BYTES, disk_space
from gpu_harness import GpuModel
from same_bits import assert_same
from torch import Tensor, nn

import gemini
from gemini import (
    ConfigError,
    CPUAdam,
    EvictedAccessError,
    GeminiDDP,
    GeminiOptimizer,
    HybridAdam,
    IoError,
    OutOfBudgetError,
    checkpoint,
)
from gemini.chunk import disk_file
from gemini.chunk.cpu_memory import CpuDevice
from gemini.chunk.gpu_memory import SimulatedDevice
from gemini.runtime import adopt

WIDTH, DEPTH, STEPS = 48, 4, 10
KIB = 2**10


def block(seed: int, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=bias), nn.Tanh())


def stack() -> nn.Sequential:
    return nn.Sequential(*(block(seed) for seed in range(DEPTH)))


def tight(directory: Path, device: int = 160, **options: Any) -> dict[str, Any]:
    return {
        "placement_policy": "const",
        "device_bytes": device * KIB,
        "non_model_bytes": 0,
        "min_chunk_size_mb": 1 / 64,
        "search_range_mb": 1 / 64,
        "disk_dir": str(directory),
        **options,
    }


def inputs(step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss = model(inputs(step)).float().square().mean()
    if isinstance(optimizer, GeminiOptimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def put_new_head(net: nn.Sequential) -> Iterator[nn.Parameter]:
    net[-1] = block(71)
    return net[-1].parameters()


def add_a_layer(net: nn.Sequential) -> Iterator[nn.Parameter]:
    net.append(block(72, bias=False))
    return net[-1].parameters()


def add_a_large_one(net: nn.Sequential) -> Iterator[nn.Parameter]:
    torch.manual_seed(73)
    net.append(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)))
    return net[-1].parameters()


def wrap_a_layer(net: nn.Sequential) -> Iterator[nn.Parameter]:
    """Put an adapter around the first layer, whose parameters get other names by that."""
    net[0] = nn.Sequential(net[0], block(74))
    return net[0][1].parameters()


CHANGES: list[Callable[[nn.Sequential], Iterator[nn.Parameter]]] = [
    put_new_head,
    add_a_layer,
    wrap_a_layer,
    add_a_large_one,
]


def train(
    net: nn.Sequential, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS
) -> dict[str, Tensor]:
    """Train, and change the module after every second step."""
    for step in range(steps):
        if step % 2 == 0 and 0 < step // 2 <= len(CHANGES):
            new = CHANGES[step // 2 - 1](net)
            optimizer.add_param_group({"params": list(new), "lr": 3e-3})
        train_step(model, optimizer, step)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda params: CPUAdam(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "lion": lambda params: gemini.Lion(params, lr=1e-3),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}


@pytest.mark.parametrize("overlap", [True, False, "backward"])
@pytest.mark.parametrize("device", [220, 2**20])
@pytest.mark.parametrize("rule", RULES)
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
            (other[0], "is managed already"),
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
        with pytest.raises(ConfigError, match="wrap the model anew"):
            gemini.handle_of(model).adopt()
