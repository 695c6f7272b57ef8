"""Experts train by the expert: what moves are the rows that tokens use, their gradients and their states, and
the numbers are those of plain torch."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import EXPERTS, PRODUCTS, ROW_BYTES, managed, model, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemini
from gemini import GeminiDDP, GeminiOptimizer, HybridAdam
from gemini.checkpoint import load, save
from gemini.chunk.chunk import CutChunk
from gemini.optim.chunk_update import ChunkUpdate

ARRAYS = ("grouped", "one_by_one", "gathered")
STEPS = 6  # the first two are recorded and planned; updates wait from the third on

Rule = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return HybridAdam(params, lr=1e-2, weight_decay=0.1)


def plainly(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)  # type: ignore[no-any-return]


def by_checkpoints(module: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    inner: Any = module.module if isinstance(module, GeminiDDP) else module
    x.requires_grad_()
    for layer in inner:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


def twice(module: nn.Module, x: Tensor) -> Tensor:
    return torch.cat((module(x), module(x * 0.5)))


def train(
    module: nn.Module,
    optimizer: Any,
    backward: Callable[[Tensor], object],
    *,
    run: Callable[[nn.Module, Tensor], Tensor] = plainly,
    batches: int = 1,
    to_none: bool = True,
    clip: Callable[[], object] | None = None,
    steps: Sequence[int] = range(STEPS),
) -> list[float]:
    losses = []
    for step in steps:
        for batch in range(batches):
            loss = run(module, tokens(2, seed=10 * step + batch)).square().mean()
            backward(loss)
            losses.append(loss.item())
        if clip is not None:
            clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    return losses


def plain_run(product: str, rule: Rule = adam, max_norm: float = 0.0, **how: Any) -> tuple[Any, ...]:
    plain = model(product).requires_grad_(True)
    optimizer = rule(plain.parameters())
    if max_norm:
        how["clip"] = lambda: nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    losses = train(plain, optimizer, lambda loss: loss.backward(), **how)
    return losses, plain.state_dict(), optimizer.state_dict()["state"]


def managed_run(
    product: str, rows: float, disk: Path, rule: Rule = adam, max_norm: float = 0.0, **how: Any
) -> tuple[Any, ...]:
    own = {name: how.pop(name) for name in ("overlap",) if name in how}
    with managed(model(product).requires_grad_(True), rows, disk) as ddp:
        optimizer = GeminiOptimizer(rule(ddp.parameters()), ddp, max_norm=max_norm, **own)
        losses = train(ddp, optimizer, optimizer.backward, **how)
        peak = ddp.stats()["device"]["peak_bytes"]
        assert peak <= rows * ROW_BYTES
        return losses, ddp.state_dict(), optimizer.state_dict()["state"]


def assert_same(found: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    losses, weights, states = found
    assert losses == want[0]
    assert all(torch.equal(weights[name], value) for name, value in want[1].items())
    for number, state in want[2].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(states[number][name]), torch.as_tensor(value)), (number, name)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("rows", [5.6, 12, 40, 1000])
def test_experts_train_with_the_bits_of_torch_at_any_budget(
    product: str, rows: float, tmp_path: Path
) -> None:
    assert_same(managed_run(product, rows, tmp_path), plain_run(product))


def _reentrant(module: nn.Module, x: Tensor) -> Tensor:
    return by_checkpoints(module, x, reentrant=True)


def _recorded(module: nn.Module, x: Tensor) -> Tensor:
    return by_checkpoints(module, x, reentrant=False)


@pytest.mark.parametrize("product", ["grouped", "one_by_one"])
@pytest.mark.parametrize(
    "how",
    [
        {"max_norm": 0.01},
        {"batches": 3},
        {"run": _reentrant},
        {"run": _recorded},
        {"run": twice},
        {"run": twice, "batches": 2},
        {"to_none": False},
        {"rule": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)},
    ],
    ids=["clipped", "accumulated", "reentrant", "recomputed", "twice", "twice accumulated", "zeros", "sgd"],
)
def test_however_a_step_is_made_its_bits_are_those_of_torch(
    product: str, how: dict[str, Any], tmp_path: Path
) -> None:
    assert_same(managed_run(product, 14, tmp_path, **how), plain_run(product, **how))


@pytest.mark.parametrize("overlap", [False, "backward"])
def test_updates_have_the_same_bits_whenever_they_run(overlap: Any, tmp_path: Path) -> None:
    found = managed_run("grouped", 12, tmp_path, overlap=overlap)
    assert_same(found, plain_run("grouped"))


def test_an_update_that_needs_whole_parameters_gets_them(tmp_path: Path) -> None:
    def lamb(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return gemini.optim.Lamb(params, lr=1e-2)

    assert_same(managed_run("grouped", 60, tmp_path, lamb), plain_run("grouped", lamb))


def trained(disk: Path, rows: float = 14, steps: int = STEPS, product: str = "grouped") -> tuple[Any, Any]:
    """A model that has trained for some steps, so that updates wait, and its optimizer."""
    ddp = managed(model(product).requires_grad_(True), rows, disk)
    optimizer = GeminiOptimizer(adam(ddp.parameters()), ddp)
    train(ddp, optimizer, optimizer.backward, steps=range(steps))
    return ddp, optimizer


def moved_bytes(ddp: GeminiDDP) -> int:
    stats = gemini.handle_of(ddp).storage.chunks.link_stats()
    return sum(int(stats[link]["bytes"]) for link in ("disk_read", "disk_write"))


def test_a_step_moves_the_experts_that_it_uses_and_no_others(tmp_path: Path) -> None:
    ddp, optimizer = trained(tmp_path)
    moved = []
    for count in (1, 100):
        before = moved_bytes(ddp)
        optimizer.backward(ddp(tokens(count)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        moved.append(moved_bytes(ddp) - before)
        assert ddp.stats()["pending_updates"] >= 3 * 2 * EXPERTS  # of rows, be they used or not
    assert 0 < moved[0] <= 0.4 * moved[1]  # two of eight experts


def test_routing_is_no_divergence_of_a_step(tmp_path: Path) -> None:
    ddp, optimizer = trained(tmp_path, steps=3)
    table = gemini.handle_of(ddp).storage.chunks.table
    for step in range(3, 9):
        train(ddp, optimizer, optimizer.backward, steps=[step])
        assert not table.diverged()


def array(ddp: GeminiDDP) -> Any:
    return ddp.module[0].experts.up  # type: ignore[index, union-attr]


def test_rows_that_no_token_uses_get_no_gradient(tmp_path: Path) -> None:
    ddp, optimizer = trained(tmp_path)
    optimizer.backward(ddp(tokens(1)).square().sum())
    (slot,) = [slot for slot in ddp.storage.slots.values() if slot.name == "0.experts.up"]
    assert isinstance(slot.group.grad, CutChunk)
    assert len(list(slot.grad.held())) == 2  # a token uses two experts
    assert sum(bool(row.any()) for row in array(ddp).grad.clone()) == 2


def test_the_gradient_can_be_read_replaced_and_given_up(tmp_path: Path) -> None:
    plain = model("grouped").requires_grad_(True)
    ddp = managed(model("grouped").requires_grad_(True), 14, tmp_path)
    plain(tokens(3)).square().sum().backward()
    gemini.handle_of(ddp).backward(ddp(tokens(3)).square().sum())
    want = plain[0].experts.up.grad  # type: ignore[index, union-attr]
    assert torch.equal(array(ddp).grad.clone(), want)  # type: ignore[arg-type]
    array(ddp).grad = want + 1  # type: ignore[operator]
    assert torch.equal(array(ddp).grad[3].clone(), want[3] + 1)  # type: ignore[index]
    array(ddp).grad.mul_(2)
    assert torch.equal(array(ddp).grad.clone(), (want + 1) * 2)  # type: ignore[operator]
    array(ddp).grad = None
    assert array(ddp).grad is None


def test_whoever_is_to_see_the_gradient_sees_all_of_it(tmp_path: Path) -> None:
    plain = model("grouped").requires_grad_(True)
    ddp = managed(model("grouped").requires_grad_(True), 60, tmp_path)
    plain(tokens(3)).square().sum().backward()
    want = plain[0].experts.up.grad  # type: ignore[index, union-attr]
    (found,) = torch.autograd.grad(ddp(tokens(3)).square().sum(), [array(ddp)])
    assert torch.equal(found, want)  # type: ignore[arg-type]
    seen: list[Tensor] = []
    hook = array(ddp).register_hook(seen.append)
    gemini.handle_of(ddp).backward(ddp(tokens(3)).square().sum())
    hook.remove()
    assert torch.equal(seen[0], want)  # type: ignore[arg-type]
    assert torch.equal(array(ddp).grad.clone(), want)  # type: ignore[arg-type]


def test_a_pass_for_other_inputs_adds_nothing(tmp_path: Path) -> None:
    ddp = managed(model("grouped").requires_grad_(True), 14, tmp_path)
    x = tokens(3).requires_grad_()
    ddp(x).square().sum().backward(inputs=[x])
    assert x.grad is not None
    assert array(ddp).grad is None


def test_updates_that_wait_are_made_before_weights_and_states_are_read(tmp_path: Path) -> None:
    want = plain_run("grouped")
    ddp, optimizer = trained(tmp_path)
    assert ddp.stats()["pending_updates"] > 0
    assert torch.equal(array(ddp)[5].clone(), want[1]["0.experts.up"][5])
    states = optimizer.state[array(ddp)]
    assert torch.equal(states["exp_avg"].clone(), want[2][2]["exp_avg"])


def assert_same_weights(
    run: Callable[[nn.Module, Any, Callable[[Tensor], object]], object], disk: Path
) -> None:
    """``run`` trains a plain and a managed model to the same weights."""
    plain = model("grouped").requires_grad_(True)
    run(plain, adam(plain.parameters()), lambda loss: loss.backward())
    with managed(model("grouped").requires_grad_(True), 14, disk) as ddp:
        optimizer = GeminiOptimizer(adam(ddp.parameters()), ddp)
        run(ddp, optimizer, optimizer.backward)
        found = ddp.state_dict()
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())


def test_each_update_that_waits_has_the_settings_of_its_step(tmp_path: Path) -> None:
    def run(module: nn.Module, optimizer: Any, backward: Callable[[Tensor], object]) -> None:
        for step in range(8):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            train(module, optimizer, backward, steps=[step])

    assert_same_weights(run, tmp_path)


def test_a_checkpoint_of_updates_that_wait_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    ddp, optimizer = trained(tmp_path, steps=4)
    save(tmp_path / "saved", ddp, optimizer)
    ddp.close()
    other = managed(model("grouped").requires_grad_(True), 9, tmp_path)
    its = GeminiOptimizer(adam(other.parameters()), other)
    load(tmp_path / "saved", other, its)
    train(other, its, its.backward, steps=range(4, STEPS))
    want = plain_run("grouped")[1]
    assert all(torch.equal(value, want[name]) for name, value in other.state_dict().items())


def test_rows_that_the_user_writes_to_keep_what_was_written(tmp_path: Path) -> None:
    def run(module: nn.Module, optimizer: Any, backward: Callable[[Tensor], object]) -> None:
        for step in range(6):
            train(module, optimizer, backward, steps=[step])
            with torch.no_grad():
                inner: Any = module.module if isinstance(module, GeminiDDP) else module
                inner[1].experts.down[step] += 1.0

    assert_same_weights(run, tmp_path)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_of_experts_have_the_same_bits_at_any_budget(precision: str, tmp_path: Path) -> None:
    found = []
    for rows in (8, 500):
        module = model("grouped").requires_grad_(True)
        room, disk = int(rows * ROW_BYTES), tmp_path
        how: dict[str, Any] = {"device_bytes": room, "host_bytes": 0, "disk_dir": disk, "non_model_bytes": 0}
        with GeminiDDP(module, mixed_precision=precision, **how) as ddp:
            optimizer = GeminiOptimizer(adam(ddp.parameters()), ddp)
            losses = train(ddp, optimizer, optimizer.backward)
            found.append((losses, ddp.state_dict(), optimizer.state_dict()["state"]))
    assert_same(found[0], found[1])


def test_the_least_budget_is_that_of_one_expert(tmp_path: Path) -> None:
    # A row, its gradient and its two states, beside what a layer has besides its experts.
    floor = 4 * ROW_BYTES
    with managed(model("grouped").requires_grad_(True), 1.2 * floor / ROW_BYTES, tmp_path) as ddp:
        optimizer = GeminiOptimizer(adam(ddp.parameters()), ddp)
        train(ddp, optimizer, optimizer.backward, steps=range(3))
        assert ddp.stats()["device"]["peak_bytes"] <= 1.2 * floor


def test_experts_are_ordinary_parameters_with_what_they_learned_once_the_model_is_released(
    tmp_path: Path,
) -> None:
    want = plain_run("grouped")[1]
    ddp, _ = trained(tmp_path)
    module = ddp.module
    gemini.handle_of(ddp).release()
    assert all(torch.equal(value, want[name]) for name, value in module.state_dict().items())


def _penalized(module: nn.Module, x: Tensor) -> Tensor:
    inner: Any = module.module if isinstance(module, GeminiDDP) else module
    up = inner[0].experts.up
    return module(x) + up.square().sum() * 1e-3 + (up[1] * 0.1).sum() + up.sin().sum() * 1e-3  # type: ignore[no-any-return]


def test_uses_of_all_rows_beside_some_are_added_up_in_torchs_order(tmp_path: Path) -> None:
    how: dict[str, Any] = {"run": _penalized, "batches": 3}
    assert_same(managed_run("grouped", 40, tmp_path, **how), plain_run("grouped", **how))


def test_one_optimizer_leaves_the_gradients_of_another(tmp_path: Path) -> None:
    def run(module: nn.Module, first: Any, second: Any) -> list[float]:
        losses = []
        for step in range(STEPS):
            loss = module(tokens(2, seed=step)).square().mean()
            loss.backward()
            losses.append(loss.item())
            for optimizer in (first, second):
                optimizer.step()
            for optimizer in (first, second):
                optimizer.zero_grad()
        return losses

    plain = model("grouped").requires_grad_(True)
    params = list(plain.parameters())
    want = run(plain, adam(params[:9]), adam(params[9:]))
    ddp = managed(model("grouped").requires_grad_(True), 40, tmp_path)
    params = list(ddp.parameters())
    found = run(ddp, *(GeminiOptimizer(adam(some), ddp) for some in (params[:9], params[9:])))
    assert found == want
    assert all(torch.equal(ddp.state_dict()[name], value) for name, value in plain.state_dict().items())


def test_a_view_of_all_rows_gets_its_gradient(tmp_path: Path) -> None:
    ddp = managed(model("grouped").requires_grad_(True), 40, tmp_path)
    turned = array(ddp).mT
    (found,) = torch.autograd.grad(turned[1].square().sum(), turned)
    assert torch.equal(found[1], 2 * array(ddp).detach()[1].mT.clone())
    turned = array(ddp).mT
    turned.retain_grad()
    turned.mT[1].square().sum().backward()
    assert torch.equal(turned.grad[1], found[1])


def test_rows_that_train_are_not_written_to_where_torch_refuses_it(tmp_path: Path) -> None:
    ddp = managed(model("grouped").requires_grad_(True), 40, tmp_path)
    for write in (lambda up: up[1].mul_(2), lambda up: up[1:3].add_(1), lambda up: up.unbind(0)[1].mul_(2)):
        with pytest.raises(RuntimeError):
            write(array(ddp))


def test_masters_follow_the_rows_that_were_written_at_any_budget(tmp_path: Path) -> None:
    found = []
    for rows in (14, 500):
        how: dict[str, Any] = {"device_bytes": int(rows * ROW_BYTES), "host_bytes": 0, "disk_dir": tmp_path}
        module = model("grouped").requires_grad_(True)
        with GeminiDDP(module, mixed_precision="bf16", non_model_bytes=0, **how) as ddp:
            optimizer = GeminiOptimizer(adam(ddp.parameters()), ddp)
            for step in range(STEPS):
                train(ddp, optimizer, optimizer.backward, steps=[step])
                with torch.no_grad():
                    array(ddp)[step].add_(0.01)
            found.append(ddp.state_dict())
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def test_updates_that_wait_for_long_take_no_objects(tmp_path: Path) -> None:
    ddp, optimizer = trained(tmp_path)

    def count() -> int:
        gc.collect()
        return sum(type(each) is ChunkUpdate for each in gc.get_objects())

    before = count()
    for _ in range(8):
        optimizer.backward(ddp(tokens(1)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    assert count() <= before


@pytest.mark.dear("a plain and a managed model train for each of eight examples")
@given(
    product=st.sampled_from(PRODUCTS),
    rows=st.floats(6, 60),
    steps=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=2), min_size=4, max_size=7),
    evaluates=st.booleans(),
)
@settings(max_examples=num_examples(8), deadline=None)
def test_any_batches_at_any_budget_train_with_the_bits_of_torch(
    product: str, rows: float, steps: list[list[int]], evaluates: bool
) -> None:
    """``steps``: of each the tokens of its batches."""

    def run(module: nn.Module, optimizer: Any, backward: Callable[[Tensor], object]) -> list[float]:
        losses = []
        for step, batches in enumerate(steps):
            for batch, count in enumerate(batches):
                loss = module(tokens(count, seed=10 * step + batch)).square().mean()
                backward(loss)
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if evaluates and step % 2:
                with torch.no_grad():
                    losses.append(module(tokens(3, seed=step)).sum().item())
        return losses

    plain = model(product, layers=2).requires_grad_(True)
    want = run(plain, adam(plain.parameters()), lambda loss: loss.backward())
    with (
        tempfile.TemporaryDirectory() as disk,
        managed(model(product, layers=2).requires_grad_(True), rows, Path(disk)) as ddp,
    ):
        optimizer = GeminiOptimizer(adam(ddp.parameters()), ddp)
        assert run(ddp, optimizer, optimizer.backward) == want
        assert ddp.stats()["device"]["peak_bytes"] <= rows * ROW_BYTES
        found = ddp.state_dict()
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
