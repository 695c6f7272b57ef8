"""Parameters that were frozen when the model was wrapped train from when they are unfrozen."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import same_bits
import torch
from arrivals_harness import tight
from pairs import pairs
from torch import Tensor, nn

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer, HybridAdam, OutOfBudgetError, StateError, checkpoint
from gemini.system.config import parse_bytes

WIDTH, DEPTH = 48, 5
KIB = 2**10


class Adapted(nn.Module):
    """A layer with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.base(inputs) + self.up(self.down(inputs)))


def stack() -> nn.Sequential:
    """Return layers, of which the last trains; 16 bits hold the values."""
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))
    net[:-1].requires_grad_(False)
    return net.to(torch.bfloat16).float()


def adapters() -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(*(Adapted() for _ in range(3)))
    for layer in net:
        layer.base.requires_grad_(False)
    return net


def next_layer(net: nn.Sequential, step: int) -> None:
    """Unfreeze from the top, a layer every second step; freeze the last one in between."""
    if step % 2 == 1:
        net[max(0, DEPTH - 2 - step // 2)].requires_grad_(True)
    net[-1].requires_grad_(step not in (4, 5))


def biases_then_all(net: nn.Sequential, step: int) -> None:
    for name, param in net.named_parameters():
        if step == 2 and name.endswith("bias"):
            param.requires_grad = True
        if step == 4:
            param.requires_grad_()


def train(net: nn.Sequential, unfreeze: Callable[..., None], model: Any, optimizer: Any, steps: int) -> None:
    torch.manual_seed(2)
    for step in range(steps):
        unfreeze(net, step)
        loss = model(torch.randn(3, WIDTH)).float().square().mean()
        if isinstance(optimizer, GeminiOptimizer):
            optimizer.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pairs(
    model=[(stack, next_layer), (stack, biases_then_all), (adapters, biases_then_all)],
    device=[70, 160, 2**20],
    overlap=[True, False, "backward"],
)
def test_budgets_never_change_what_is_unfrozen(
    model: tuple[Any, Any], device: int, overlap: Any, tmp_path: Path
) -> None:
    build, unfreeze = model
    plain = build()
    train(plain, unfreeze, plain, CPUAdam(plain.parameters(), lr=1e-2, weight_decay=0.1), 12)
    net = build()
    with GeminiDDP(net, **tight(tmp_path, device)) as wrapped:
        adam = HybridAdam(net.parameters(), lr=1e-2, weight_decay=0.1)
        optimizer = GeminiOptimizer(adam, wrapped, overlap=overlap)
        train(net, unfreeze, wrapped, optimizer, 12)
        assert wrapped.stats()["device"]["peak_bytes"] <= device * KIB
        assert not wrapped.stats()["warmup"]
        assert_same(weights(wrapped), weights(plain))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_begin_with_what_16_bits_hold(precision: str, tmp_path: Path) -> None:
    def run(*, frozen_later: bool) -> dict[str, Tensor]:
        net = stack()
        net.requires_grad_(frozen_later or False) if frozen_later else None
        with GeminiDDP(net, mixed_precision=precision, **tight(tmp_path, 160)) as model:
            optimizer = GeminiOptimizer(CPUAdam(net.parameters(), lr=1e-2), model, max_norm=1.0)
            net[:-1].requires_grad_(False)
            train(net, next_layer, model, optimizer, 8)
            return weights(model)

    assert_same(run(frozen_later=False), run(frozen_later=True))


@pytest.mark.parametrize("named", [False, True])
def test_groups_may_come_later(named: bool, tmp_path: Path) -> None:
    def run(net: nn.Sequential, model: nn.Module, make: Callable[..., Any]) -> dict[str, Tensor]:
        optimizer = make(CPUAdam(net[-1].parameters(), lr=1e-2))
        for index in range(DEPTH - 2, -1, -1):
            train(net, lambda *_: None, model, optimizer, 2)
            net[index].requires_grad_(True)
            params = net[index].named_parameters() if named else net[index].parameters()
            optimizer.add_param_group(
                {"params": list(params) if not named else [p for _, p in params], "lr": 1e-3}
            )
        train(net, lambda *_: None, model, optimizer, 3)
        return weights(model)

    plain, net = stack(), stack()
    want = run(plain, plain, lambda adam: adam)
    with GeminiDDP(net, **tight(tmp_path, 100)) as model:
        assert_same(run(net, model, lambda adam: GeminiOptimizer(adam, model)), want)


def test_what_the_tiers_cannot_hold_stays_frozen(tmp_path: Path) -> None:
    def wrap(device_bytes: int) -> tuple[nn.Sequential, GeminiDDP, GeminiOptimizer]:
        net = stack()
        options = tight(tmp_path, 0, device_bytes=device_bytes, disk_dir=None)
        model = GeminiDDP(net, **options)
        return net, model, GeminiOptimizer(CPUAdam(net.parameters(), lr=1e-2), model)

    net, model, optimizer = wrap(140 * KIB)
    for param in net[:-1].parameters():
        before = (len(model.manager.chunks.chunks), model.stats(), param.requires_grad)
        try:
            param.requires_grad_(True)
        except OutOfBudgetError as error:
            refused = str(error)
            break
    assert (len(model.manager.chunks.chunks), model.stats(), param.requires_grad) == before
    assert "give disk_dir" in refused
    train(net, lambda *_: None, model, optimizer, 3)
    model.close()
    asked = re.search(r"raise device_bytes to at least ([\d.]+\wiB)", refused)
    assert asked is not None
    net, model, optimizer = wrap(parse_bytes(asked[1]))
    net[-2].requires_grad_(True)
    train(net, lambda *_: None, model, optimizer, 3)
    model.close()


def test_the_next_step_is_recorded_anew(tmp_path: Path) -> None:
    net = stack()
    with GeminiDDP(net, **tight(tmp_path, 100)) as model:
        optimizer = GeminiOptimizer(CPUAdam(net.parameters()), model)
        train(net, lambda *_: None, model, optimizer, 3)
        size = model.stats()["model_data_bytes"]
        assert not model.stats()["warmup"]
        net[0].requires_grad_(True)
        assert model.stats()["warmup"]
        assert model.stats()["model_data_bytes"] > size
        train(net, lambda *_: None, model, optimizer, 1)
        assert not model.stats()["warmup"]
        assert "exp_avg" in optimizer.state[net[0][0].weight]


def test_checkpoints_from_before_and_after(tmp_path: Path) -> None:
    def wrap() -> tuple[nn.Sequential, GeminiDDP, GeminiOptimizer]:
        net = stack()
        model = GeminiDDP(net, **tight(tmp_path, 100))
        return net, model, GeminiOptimizer(CPUAdam(net.parameters(), lr=1e-2), model)

    net, model, optimizer = wrap()
    train(net, lambda *_: None, model, optimizer, 2)
    checkpoint.save(tmp_path / "before", model, optimizer)
    net[1].requires_grad_(True)
    train(net, lambda *_: None, model, optimizer, 2)
    checkpoint.save(tmp_path / "after", model, optimizer)
    want = weights(model)
    checkpoint.load(tmp_path / "before", model, optimizer)
    train(net, lambda *_: None, model, optimizer, 2)
    assert_same(weights(model), want)
    model.close()

    net, model, optimizer = wrap()
    net[1].requires_grad_(True)
    checkpoint.load(tmp_path / "after", model, optimizer)
    assert_same(weights(model), want)
    model.close()


def loaded(
    path: Path, frozen: Callable[[nn.Sequential], Any], how: str, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[int, Any]]:
    """Return the weights of a model that was trained, its masters, and the optimizer's state; ``frozen`` is
    called before the model is wrapped. ``how``: to load into it first."""
    net = stack().requires_grad_(True)
    frozen(net)
    params = [p for p in net.parameters() if p.requires_grad] if "less" in how else net.parameters()
    with GeminiDDP(net, **options) as model:
        optimizer = GeminiOptimizer(CPUAdam(params, lr=1e-2), model)
        if "checkpoint" in how:
            checkpoint.load(path / "saved", model, optimizer)
        elif "states" in how:
            model.load_state_dict(torch.load(path / "model"))
            optimizer.load_state_dict(torch.load(path / "optimizer"))
        else:
            train(net, lambda *_: None, model, optimizer, 3)
            checkpoint.save(path / "saved", model, optimizer)
            torch.save(dict(model.state_dict()), path / "model")
            torch.save(optimizer.state_dict(), path / "optimizer")
        own = {name: param.detach().clone() for name, param in net.named_parameters()}
        return own, dict(model.state_dict()), optimizer.state_dict()["state"]


@pairs(
    precision=["fp32", "bf16"],
    how=["checkpoint", "states", "checkpoint, less in groups"],
    one_bias=[False, True],
)
def test_what_trained_and_is_frozen_now_takes_its_trained_value(
    precision: str, how: str, one_bias: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def freeze(net: nn.Sequential) -> None:
        (net[1][0].bias if one_bias else net[1:3]).requires_grad_(False)

    options = tight(tmp_path, 100, mixed_precision=precision)
    _, masters, states = loaded(tmp_path, lambda net: None, "", **options)
    own, found, kept = loaded(tmp_path, freeze, how, **options)
    frozen = (
        {"1.0.bias"} if one_bias else {f"{layer}.0.{name}" for layer in (1, 2) for name in ("weight", "bias")}
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for name, master in masters.items():
        assert torch.equal(own[name], master.to(own[name].dtype)), name
        assert torch.equal(found[name], master.to(dtype).float() if name in frozen else master), name
    assert own["1.0.bias"].dtype == dtype
    assert "1.0.bias" in caplog.text or not one_bias
    assert "param.requires_grad_(True) before loading" in caplog.text
    trained = [index for index, name in enumerate(masters) if name not in frozen]
    if "less" in how:
        same_bits.assert_same(kept, dict(enumerate(states[index] for index in trained)))
    else:
        same_bits.assert_same(kept, {index: states[index] for index in trained})


@pytest.mark.parametrize("how", ["checkpoint", "states"])
def test_what_was_frozen_and_trains_now_begins_with_new_states(how: str, tmp_path: Path) -> None:
    def freeze(net: nn.Sequential) -> None:
        net[1:3].requires_grad_(False)

    options = tight(tmp_path, 100, mixed_precision="bf16")
    _, masters, states = loaded(tmp_path, freeze, "", **options)
    _, found, kept = loaded(tmp_path, lambda net: None, how, **options)
    assert_same(found, masters)
    same_bits.assert_same(kept, states)
    assert set(states) == {0, 1, 6, 7, 8, 9}


def test_a_save_under_way_keeps_what_was(tmp_path: Path) -> None:
    net = stack()
    with GeminiDDP(net, **tight(tmp_path, 100)) as model:
        optimizer = GeminiOptimizer(CPUAdam(net.parameters(), lr=1e-2), model)
        train(net, lambda *_: None, model, optimizer, 3)
        want = weights(model)
        saving = checkpoint.save_async(tmp_path / "saved", model, optimizer)
        net.requires_grad_(True)
        train(net, lambda *_: None, model, optimizer, 3)
        saving.wait()
        checkpoint.load(tmp_path / "saved", model, optimizer)
        assert_same(weights(model), want)


def test_not_within_a_backward_pass_nor_of_a_closed_model(tmp_path: Path) -> None:
    net = stack()
    with GeminiDDP(net, **tight(tmp_path, 100)) as model:
        optimizer = GeminiOptimizer(CPUAdam(net.parameters()), model)
        net[-1][0].weight.register_hook(lambda _: net[0].requires_grad_(True))
        with pytest.raises(StateError, match="during a backward pass"):
            optimizer.backward(model(torch.ones(1, WIDTH)).sum())
    with pytest.raises(StateError):
        net[0].requires_grad_(True)
