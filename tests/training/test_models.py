"""Any model of plain torch can be managed: every kind of parameter, on any device, in any group."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from training_harness import (
    KIB,
    Recipe,
    assert_same_state,
    assert_trains_alike,
    managed_optimizer,
    managed_step,
    seeded,
    tight,
    train_managed,
    train_plain,
)
from training_models import Around, TinyGPT, gpt_loss, square_loss

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer, HybridAdam, init_on

BOTH = pytest.mark.parametrize("precision", [None, "bf16"])
BUDGETS = pytest.mark.parametrize("device_bytes", [None, 40 * KIB])


class Kinds(nn.Module):
    """Parameters that are frozen, unused, transposed, empty, scalar, shared, and large or small."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.unused = nn.Linear(32, 8)
        self.transposed = nn.Parameter(torch.randn(32, 32).t() / 6)
        self.permuted = nn.Parameter(torch.randn(4, 8, 32).permute(2, 0, 1) / 6)
        self.empty = nn.Parameter(torch.empty(0, 32))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.randn(32))
        self.register_buffer("seen", torch.tensor(0), persistent=False)
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        """Use everything but what is called unused."""
        self.seen += 1
        x = torch.tanh(self.frozen(x)) @ self.transposed + self.shift.to(x.dtype)
        x = x + x @ self.permuted.reshape(32, 32)
        x = torch.cat([x, self.empty.to(x.dtype)]) * self.scalar
        return self.second(torch.tanh(self.first(x)))


@BOTH
@BUDGETS
def test_every_kind_of_parameter_trains_alike(
    device_bytes: int | None, precision: str | None, tmp_path: Path
) -> None:
    assert_trains_alike(
        lambda: Around(Kinds()),
        square_loss,
        tight(tmp_path, device_bytes),
        Recipe(precision=precision, clip=("norm", 0.1)),
    )


def test_parameters_keep_identity_shape_stride_and_tying(tmp_path: Path) -> None:
    module = seeded(Kinds)
    before = {name: (id(p), p.shape, p.stride(), p.requires_grad) for name, p in module.named_parameters()}
    with GeminiDDP(module, **tight(tmp_path)):
        after = {name: (id(p), p.shape, p.stride(), p.requires_grad) for name, p in module.named_parameters()}
        assert after == before
        assert module.second.weight is module.first.weight
        assert module.frozen.weight.grad is None
        assert isinstance(module.scalar, nn.Parameter)


def test_freezing_later_stops_updates_and_what_was_frozen_may_be_unfrozen(tmp_path: Path) -> None:
    with GeminiDDP(seeded(lambda: Around(Kinds())), **tight(tmp_path)) as model:
        model.module.core.first.requires_grad_(False)
        before = model.module.core.first.weight.clone()
        managed_step(model, managed_optimizer(model), square_loss, Recipe(), 0)
        assert torch.equal(model.module.core.first.weight, before)
        model.module.core.first.requires_grad_(True)
        frozen = model.module.core.frozen
        with pytest.raises(
            ConfigError, match=r"core.frozen.weight.* is frozen and has no memory for a gradient"
        ):
            frozen.weight.grad = torch.zeros(frozen.weight.shape)
        frozen.weight.requires_grad_(True)
        frozen.bias.requires_grad = True
        assert all(p.requires_grad for p in frozen.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_built_in_16_bits_keeps_its_dtype_and_trains_alike(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    got = assert_trains_alike(
        lambda: Around(nn.Linear(32, 32)).to(dtype), square_loss, tight(tmp_path, 32 * KIB)
    )
    assert {value.dtype for value in got.state.values()} == {torch.float32}


def test_a_model_of_mixed_dtypes_trains_alike(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Linear(32, 32).to(torch.bfloat16)
            self.full = nn.LayerNorm(32)

        def forward(self, x: Tensor) -> Tensor:
            return self.full(self.small(x.to(torch.bfloat16)).float())

    assert_trains_alike(lambda: Around(Mixed()), square_loss, tight(tmp_path, 40 * KIB))


def test_fp64_parameters_are_computed_and_saved_in_fp64(tmp_path: Path) -> None:
    plain = seeded(lambda: Around(nn.Linear(32, 32)).double())
    with GeminiDDP(seeded(lambda: Around(nn.Linear(32, 32)).double()), **tight(tmp_path, 128 * KIB)) as model:
        assert square_loss(model, 0).item() == square_loss(plain, 0).item()
        assert_same_state(model.state_dict(), plain.state_dict())


def test_a_sparse_gradient_is_refused_with_the_way_out(tmp_path: Path) -> None:
    core = seeded(lambda: nn.Sequential(nn.Embedding(64, 32, sparse=True), nn.Linear(32, 32)))
    with GeminiDDP(core, **tight(tmp_path, 64 * KIB)) as model:
        before = model.state_dict()
        with pytest.raises(
            ConfigError, match=r"'0.weight' has a sparse gradient; build its module with sparse=False"
        ):
            model(torch.tensor([1, 2])).sum().backward()
        managed_optimizer(model).zero_grad()
        assert_same_state(model.state_dict(), before)
        model.manager.chunks.table.check_invariants()


@pytest.mark.parametrize("param", [torch.zeros(4, dtype=torch.int8), torch.zeros(4, 4).to_sparse()])
def test_a_parameter_that_cannot_be_managed_is_refused_by_name(param: Tensor) -> None:
    module = nn.Linear(4, 4)
    module.extra = nn.Parameter(param, requires_grad=False)
    with pytest.raises(ConfigError, match="'extra'"):
        GeminiDDP(module)
    assert type(module.weight) is nn.Parameter


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_submodule_is_refused_by_name_if_it_has_parameters() -> None:
    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match="'1' is scripted"):
        GeminiDDP(scripted)
    assert type(scripted[0].weight) is nn.Parameter
    with GeminiDDP(nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.ReLU()))) as model:
        assert model(torch.ones(4)).min() >= 0


def test_a_model_without_parameters_can_be_wrapped() -> None:
    with GeminiDDP(nn.Sequential(nn.ReLU())) as model:
        assert model(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
        assert model.state_dict() == {}


@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_parameter_groups_and_schedulers_apply(wrapped_first: bool, tmp_path: Path) -> None:
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        decay = [p for p in module.parameters() if p.dim() > 1]
        return [
            {"params": decay, "weight_decay": 0.1},
            {"params": [p for p in module.parameters() if p.dim() <= 1], "lr": 3e-2, "betas": (0.8, 0.9)},
        ]

    def run(module: nn.Module, optimizer: Any, scheduler: Any) -> list[float]:
        losses = []
        for index in range(5):
            loss = square_loss(module, index)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return losses

    def halved(optimizer: Any) -> Any:
        return LambdaLR(optimizer, lambda epoch: 0.5**epoch)

    plain = seeded(lambda: Around(nn.Linear(32, 32)))
    reference = CPUAdam(groups(plain), lr=1e-2)
    want = run(plain, reference, halved(reference))
    module = seeded(lambda: Around(nn.Linear(32, 32)))
    inner = None if wrapped_first else HybridAdam(groups(module), lr=1e-2)
    with GeminiDDP(module, **tight(tmp_path, 40 * KIB)) as model:
        inner = inner or HybridAdam(groups(module), lr=1e-2)
        optimizer = GeminiOptimizer(inner, model)
        assert run(model, optimizer, halved(inner if wrapped_first else optimizer)) == want
        assert_same_state(model.state_dict(), plain.state_dict())
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]


def test_a_closure_and_zero_grad_to_zeros_work_as_in_torch(tmp_path: Path) -> None:
    def run(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []

        def closure() -> Tensor:
            loss = square_loss(module, len(losses))
            loss.backward()
            return loss

        for index in range(4):
            losses.append(optimizer.step(closure).item())
            optimizer.zero_grad(set_to_none=index % 2 == 0)
        optimizer.step()
        return losses

    plain = seeded(lambda: Around(Kinds()))
    want = run(plain, CPUAdam(plain.parameters(), lr=1e-2))
    with GeminiDDP(seeded(lambda: Around(Kinds())), **tight(tmp_path, 40 * KIB)) as model:
        assert run(model, GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model)) == want


def test_a_plain_torch_optimizer_can_update_managed_fp32_parameters(tmp_path: Path) -> None:
    def run(module: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for index in range(4):
            loss = square_loss(module, index)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    plain = seeded(lambda: Around(nn.Linear(32, 32)))
    want = run(plain)
    with GeminiDDP(seeded(lambda: Around(nn.Linear(32, 32))), **tight(tmp_path, 40 * KIB)) as model:
        assert run(model) == want
        assert_same_state(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("device_bytes", [None, 72 * KIB])
def test_a_model_on_meta_becomes_the_one_built_on_the_cpu(device_bytes: int | None, tmp_path: Path) -> None:
    want = train_plain(seeded(TinyGPT), gpt_loss, Recipe(steps=3))
    with init_on("meta"):
        module = TinyGPT()
    assert all(param.is_meta for param in module.parameters())
    torch.manual_seed(0)
    got = train_managed(GeminiDDP(module, **tight(tmp_path, device_bytes)), gpt_loss, Recipe(steps=3))
    assert got.losses == want.losses
    assert_same_state(got.state, want.state)


class Staged(nn.Module):
    """Frozen and trainable layers alternate, registered in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.norm = nn.BatchNorm1d(32)
        self.first = nn.LSTM(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Run from first to last."""
        out: Tensor = self.last(self.norm(self.frozen(self.first(x)[0])))
        return out


def test_initialization_on_meta_follows_the_order_of_registration(tmp_path: Path) -> None:
    options = tight(tmp_path, 192 * KIB)
    with GeminiDDP(seeded(Staged), **options) as model:
        want = {key: value.clone() for key, value in model.state_dict().items()}
        managed_step(model, managed_optimizer(model), square_loss, Recipe(), 0)
        trace = model.memstats()
    for memstats in (None, trace):
        with init_on("meta"):
            module = Staged()
        torch.manual_seed(0)
        with GeminiDDP(module, memstats=memstats, **options) as model:
            assert_same_state(model.state_dict(), want)


def test_autocast_trains_alike(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, index: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square_loss(model, index)

    assert_trains_alike(lambda: Around(nn.Linear(32, 32)), loss_fn, tight(tmp_path, 40 * KIB))


def test_a_copy_of_the_module_is_plain_and_independent(tmp_path: Path) -> None:
    with GeminiDDP(seeded(lambda: Around(Kinds())), **tight(tmp_path, 40 * KIB)) as model:
        copied = copy.deepcopy(model.module)
        assert all(type(param) is nn.Parameter for param in copied.parameters())
        assert copied.core.second.weight is copied.core.first.weight
        assert_same_state(copied.state_dict(), model.state_dict())
        before = {key: value.clone() for key, value in copied.state_dict().items()}
        managed_step(model, managed_optimizer(model), square_loss, Recipe(), 0)
        assert_same_state(copied.state_dict(), before)
        train_plain(copied, square_loss, Recipe(steps=1))


def test_a_managed_module_is_wrapped_again_as_the_refusal_says(tmp_path: Path) -> None:
    with GeminiDDP(seeded(lambda: Around(Kinds())), **tight(tmp_path, 40 * KIB)) as model:
        with pytest.raises(ConfigError, match=r"already managed.*copy\.deepcopy\(module\).*before .* closed"):
            GeminiDDP(model.module)
        copied, want = copy.deepcopy(model.module), square_loss(model, 0).item()
    with GeminiDDP(copied, **tight(tmp_path, 40 * KIB)) as model:
        assert square_loss(model, 0).item() == want
