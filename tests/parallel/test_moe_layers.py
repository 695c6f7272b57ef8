"""Layers of experts, their losses and seeds, in one process; managed ones have the bits of others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemini
from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer
from gemini.parallel.engine import gradient_handler as handlers
from gemini.parallel.engine import initialize, launch, shutdown
from gemini.parallel.launch import GRADIENT_HANDLER
from gemini.parallel.moe import (
    BiasBalance,
    Capacity,
    Experts,
    MoeLayer,
    MoeLoss,
    Moeloss,
    NormalNoiseGenerator,
    Top2Router,
    TopKRouter,
    VanillaFFN,
    Widenet,
    attach,
    moe_env,
    moe_mlp_args,
    moe_set_seed,
)
from gemini.parallel.moe import experts as experts_file
from gemini.parallel.moe.losses import RouterRecord
from gemini.runtime.activation.recomputed_blocks import recompute_blocks
from gemini.runtime.storage.experts import expert_sets

WIDTH, EXPERTS = 8, 4


@pytest.fixture(autouse=True)
def _no_run_and_no_seed() -> Iterator[None]:
    yield
    shutdown()
    moe_env._seed = None


def layer_of(k: int = 2, expert: Any = VanillaFFN, seed: int = 0, **options: Any) -> MoeLayer:
    moe_set_seed(seed)
    torch.manual_seed(seed)
    router_options = {key: options.pop(key) for key in ("capacity", "noisy_func") if key in options}
    experts = Experts(expert, EXPERTS, **moe_mlp_args(WIDTH, 16))
    return MoeLayer(WIDTH, EXPERTS, TopKRouter(k, **router_options), experts, **options)


class Recomputing(nn.Module):
    """Two layers and a head; ``recomputes``: who has the layers run again in backward."""

    def __init__(self, *, recomputes: str = "nobody", **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer_of(seed=seed, **options) for seed in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.recomputes = recomputes
        if recomputes == "the runtime":
            recompute_blocks(self, ["layers.0", "layers.1"])

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recomputes == "torch" else layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def tokens(count: int = 12, seed: int = 1) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Listed(VanillaFFN):
    """Another class with the same computation: its experts are a list."""


# -- what a layer computes -------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [None, Capacity(0.5)])
@pytest.mark.parametrize("k", [1, 2])
def test_a_layer_adds_what_each_kept_expert_makes_of_a_token(k: int, capacity: Capacity | None) -> None:
    layer = layer_of(k, capacity=capacity)
    array = layer.experts.array
    assert array is not None
    x = tokens()
    routing = layer.router(nn.functional.linear(x, layer.gate))
    wanted = torch.zeros_like(x)
    for token in range(len(x)):
        for place in range(k):
            expert = int(routing.experts[token, place])
            hidden = nn.functional.gelu(array.up[expert] @ x[token] + array.up_bias[expert])
            made = array.down[expert] @ hidden + array.down_bias[expert]
            wanted[token] += routing.weights[token, place] * made
    torch.testing.assert_close(layer(x), wanted)
    assert torch.equal(layer(x.view(3, 4, WIDTH)).view(12, WIDTH), layer(x))


def test_dropped_tokens_are_zero() -> None:
    layer = layer_of(1, capacity=Capacity(0.1))
    x = tokens()
    kept = layer.router(nn.functional.linear(x, layer.gate)).kept.any(-1)
    assert 0 < kept.sum() < len(x)
    assert not layer(x)[~kept].any()
    assert layer(x)[kept].any(-1).all()


def test_padding_is_zero_and_changes_no_token() -> None:
    layer = layer_of(2, capacity=Capacity(0.7))
    x = tokens().view(3, 4, WIDTH)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]])
    padded = layer(x, mask)
    assert not padded[mask == 0].any()
    torch.testing.assert_close(padded[mask == 1], layer(x[mask == 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_groups_loops_and_lists_compute_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    grouped, looped, listed = layer_of(), layer_of(), layer_of(expert=Listed)
    array, made = grouped.experts.array, listed.experts.experts
    assert array is not None
    assert made is not None
    for number, expert in enumerate(made):
        for name, linear in (("up", expert.up), ("down", expert.down)):
            linear.weight.data = getattr(array, name).data[number].clone()  # type: ignore[union-attr]
            linear.bias.data = getattr(array, f"{name}_bias").data[number].clone()  # type: ignore[union-attr]
    outs, grads = [], []
    for layer in (grouped.to(dtype), looped.to(dtype), listed.to(dtype)):
        if layer is looped:
            monkeypatch.setattr(experts_file, "_grouped_mm", None)
        x = tokens().to(dtype).requires_grad_()
        out = layer(x)
        out.square().sum().backward()
        outs.append(out)
        grads.append((x.grad, layer.gate.grad))
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for out, grad in zip(outs[1:], grads[1:], strict=True):
        assert out.dtype == dtype
        torch.testing.assert_close(out, outs[0], **tolerance)
        torch.testing.assert_close(grad, grads[0], **tolerance)


@pytest.mark.parametrize("expert", [VanillaFFN, Listed])
@pytest.mark.parametrize("count", [0, 1])
def test_experts_without_tokens_get_gradients_of_zero(expert: type, count: int) -> None:
    layer = layer_of(1, expert=expert)
    layer(tokens(count)).sum().backward()
    assert all(param.grad is not None for param in layer.parameters())
    if count == 0:
        assert not any(param.grad.any() for param in layer.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize("k", [1, 2])
def test_the_gate_gets_a_gradient_without_a_loss_of_its_own(k: int) -> None:
    layer = layer_of(k)
    layer(tokens()).square().sum().backward()
    assert layer.gate.grad is not None
    assert layer.gate.grad.any()


def test_autocast_computes_experts_in_its_type_and_the_gate_in_fp32() -> None:
    layer = layer_of()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(tokens())
    assert not torch.equal(found, layer(tokens()))
    torch.testing.assert_close(found, layer(tokens()), rtol=0.05, atol=0.02)


def test_a_layer_without_data_has_the_shapes_of_one_with_data() -> None:
    layer = layer_of(2, capacity=Capacity(0.5)).to("meta")
    x = torch.empty(3, 4, WIDTH, device="meta", requires_grad=True)
    out = layer(x, torch.ones(3, 4, device="meta"))
    out.sum().backward()
    assert out.shape == x.shape
    assert all(param.grad is not None for param in layer.parameters())


# -- losses ----------------------------------------------------------------------------------------


def test_moe_loss_adds_both_losses_and_their_gradients() -> None:
    model = Recomputing()
    x, label = tokens(), torch.arange(12) % 3
    criterion = MoeLoss(0.5, nn.CrossEntropyLoss, z_weight=0.25, label_smoothing=0.1).bind(model)
    whole = criterion(model(x), label)
    whole.backward()
    found = gradients(model)
    model.zero_grad()
    record = RouterRecord.of(model)
    plain = nn.CrossEntropyLoss(label_smoothing=0.1)(model(x), label)
    assert len(record.balance) == len(record.z) == 2
    wanted = plain + 0.5 * sum(record.balance) + 0.25 * sum(record.z)
    wanted.backward()
    torch.testing.assert_close(whole, wanted)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(found[name], grad)
    assert torch.equal(
        criterion(model.eval()(x), label), nn.CrossEntropyLoss(label_smoothing=0.1)(model(x), label)
    )
    assert Moeloss is MoeLoss


def test_attached_losses_have_the_gradients_of_a_moe_loss() -> None:
    attached, collected = Recomputing(aux_weight=0.5), Recomputing()
    attached.load_state_dict(collected.state_dict())
    x, label = tokens(), torch.arange(12) % 3
    nn.CrossEntropyLoss()(attached(x), label).backward()
    MoeLoss(0.5, nn.CrossEntropyLoss).bind(collected)(collected(x), label).backward()
    for name, grad in gradients(collected).items():
        torch.testing.assert_close(gradients(attached)[name], grad)
    loss = torch.ones((), requires_grad=True)
    attach(torch.zeros(2, requires_grad=True), 3 * loss, scale=lambda: 4.0).sum().backward()
    assert loss.grad == 12


def test_losses_of_a_pass_are_its_own() -> None:
    first, second = Recomputing(), Recomputing()
    record = RouterRecord.of(first)
    first(tokens())
    kept = list(record.balance)
    second(tokens())
    assert record.balance == kept
    first(tokens(seed=2))
    assert len(record.balance) == 2
    assert record.balance[0] is not kept[0]
    with pytest.raises(RuntimeError):
        first(torch.zeros(2, WIDTH + 1))
    first.layers[0](tokens())
    assert len(record.balance) <= 2
    assert RouterRecord.of(nn.Sequential(first)) is record
    other = copy.deepcopy(first)
    other(tokens())
    assert RouterRecord.of(other) is not record
    assert len(RouterRecord.of(other).balance) == 2


@pytest.mark.parametrize("by", ["torch", "the runtime"])
def test_recomputation_counts_no_batch_twice_and_changes_no_gradient(by: str) -> None:
    results = []
    for recomputes in ("nobody", by):
        model = Recomputing(recomputes=recomputes, has_bias=True, noisy_func=NormalNoiseGenerator(EXPERTS))
        criterion = MoeLoss(0.1, nn.CrossEntropyLoss).bind(model)
        torch.manual_seed(3)
        for micro in range(2):
            criterion(model(tokens(seed=micro)), torch.arange(12) % 3).backward()
        record = RouterRecord.of(model)
        assert len(record.balance) == 2
        counts = list(record.take_counts().values())
        assert [int(each.sum()) for each in counts] == [2 * 12 * 2] * 2
        results.append((gradients(model), counts))
    (grads, counts), (again, counted) = results
    assert all(torch.equal(grads[name], again[name]) for name in grads)
    assert all(map(torch.equal, counts, counted))


def test_biases_move_once_a_step_towards_balance() -> None:
    model = nn.Sequential(layer_of(1, has_bias=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    BiasBalance(model, optimizer, rate=0.01)
    bias: Tensor = model[0].expert_bias  # type: ignore[assignment]
    x = tokens(40) + 2 * nn.functional.normalize(model[0].gate[0].detach(), dim=0)
    counts = model[0].router(nn.functional.linear(x, model[0].gate), bias=bias).counts
    for _ in range(3):
        model(x).sum().backward()
    optimizer.step()
    assert torch.equal(bias, 0.01 * torch.sign(10.0 - counts))
    optimizer.step()
    assert torch.equal(bias, 0.01 * torch.sign(10.0 - counts))
    for _ in range(150):
        model(x)
        optimizer.step()
    after = model[0].router(nn.functional.linear(x, model[0].gate), bias=bias).counts
    assert after.max() - after.min() < counts.max() - counts.min()
    assert "0.expert_bias" in model.state_dict()


# -- seeds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("expert", [VanillaFFN, Listed])
def test_weights_depend_on_seed_layer_and_number_alone(expert: type) -> None:
    def weights(*, built: int = 0, before: int = 0, seed: int = 42, num: int = EXPERTS) -> list[Tensor]:
        for _ in range(built):
            Experts(VanillaFFN, 2, **moe_mlp_args(WIDTH, 16))
        moe_set_seed(seed)
        nn.Linear(2, 2)  # torch's generator is another one
        made = [Experts(expert, num, **moe_mlp_args(WIDTH, 16)) for _ in range(before + 1)]
        found = made[-1]
        if found.array is not None:
            return [row.detach() for row in found.array.up]
        assert found.experts is not None
        return [each.up.weight.detach() for each in found.experts]  # type: ignore[union-attr]

    wanted = weights()
    assert len({row.sum().item() for row in wanted}) == EXPERTS
    assert all(map(torch.equal, wanted, weights(built=3)))
    assert all(map(torch.equal, wanted[:2], weights(num=2)))
    assert not any(map(torch.equal, wanted, weights(before=1)))
    assert not any(map(torch.equal, wanted, weights(seed=43)))
    state = torch.get_rng_state()
    moe_set_seed(1)
    Experts(expert, 2, **moe_mlp_args(WIDTH, 16))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_built_on_meta_gets_the_weights_of_its_seed(tmp_path: Path) -> None:
    def build() -> Widenet:
        moe_set_seed(7)
        return small_widenet()

    with gemini.init_on("meta"):
        late = build()
    ddp = GeminiDDP(late, device_bytes="1MiB", host_bytes=0, disk_dir=tmp_path, non_model_bytes=0)
    wanted = {key: value for key, value in build().state_dict().items() if "experts" in key}
    assert wanted
    assert all(torch.equal(ddp.state_dict()[key], value) for key, value in wanted.items())


# -- the whole -------------------------------------------------------------------------------------


def small_widenet() -> Widenet:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 32, "depth": 2, "num_heads": 2}
    return Widenet(4, 1.2, num_classes=10, img_size=8, patch_size=4, **sizes)


def train(model: Any, step: Callable[[Tensor], None]) -> list[float]:
    criterion = MoeLoss(0.01, nn.CrossEntropyLoss).bind(model)
    generator = torch.Generator().manual_seed(2)
    pictures, labels = torch.randn(6, 3, 8, 8, generator=generator), torch.arange(6)
    torch.manual_seed(4)  # of the noise
    losses = []
    for _ in range(4):
        loss = criterion(model(pictures), labels)
        step(loss)
        losses.append(loss.item())
    return losses


def test_a_managed_model_trains_with_the_bits_of_others(tmp_path: Path) -> None:
    moe_set_seed(1)
    plain = small_widenet()
    model = copy.deepcopy(plain)
    arrays = expert_sets(model)[0].arrays
    assert [name.rpartition(".")[2] for name in arrays] == ["up", "down"]
    optimizer = CPUAdam(plain.parameters(), lr=1e-2)

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    wanted = train(plain, step)
    room = {"device_bytes": "72KiB", "host_bytes": 0, "disk_dir": tmp_path, "non_model_bytes": 0}
    ddp = GeminiDDP(model, min_chunk_size_mb=4096 / 2**20, **room)
    managed = GeminiOptimizer(CPUAdam(ddp.parameters(), lr=1e-2), ddp)

    def managed_step(loss: Tensor) -> None:
        managed.zero_grad()
        managed.backward(loss)
        managed.step()

    assert train(ddp, managed_step) == wanted
    assert wanted[-1] < wanted[0]
    state = ddp.state_dict()
    assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())


def test_frozen_layers_read_the_experts_that_they_use_alone(tmp_path: Path) -> None:
    moe_set_seed(0)
    torch.manual_seed(0)
    experts = Experts(VanillaFFN, 8, **moe_mlp_args(64, 64))  # rows of 16 KiB
    plain = nn.Sequential(MoeLayer(64, 8, TopKRouter(1), experts)).requires_grad_(False).eval()
    room = {"device_bytes": "88KiB", "host_bytes": 0, "disk_dir": tmp_path, "non_model_bytes": 0}
    ddp = GeminiDDP(copy.deepcopy(plain), **room)
    chunks = gemini.handle_of(ddp).storage.chunks
    assert chunks.has_choices
    for seed in range(4):
        x = torch.randn(1, 64, generator=torch.Generator().manual_seed(seed))
        before = chunks.link_stats()["disk_read"]["bytes"]
        assert torch.equal(ddp(x), plain(x))
        assert chunks.link_stats()["disk_read"]["bytes"] - before <= 2 * 16384 + 8 * 4096
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(9))
    assert torch.equal(ddp(x), plain(x))


def test_initialize_tells_the_criterion_the_model_and_a_handler_averages_experts() -> None:
    launch({"parallel": {"moe": {"size": 1}}, "gradient_handler": [{"type": "MoeGradientHandler"}]})
    assert (moe_env.model_parallel_size, moe_env.data_parallel_size, moe_env.seed) == (1, 1, None)
    model = Recomputing()
    criterion = MoeLoss(0.5, nn.CrossEntropyLoss)
    engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), criterion)[0]
    assert type(engine.gradient_handlers[0]) is handlers.MoeGradientHandler
    assert GRADIENT_HANDLER.has("MoeGradientHandler")
    out = engine(tokens())
    label = torch.arange(12) % 3
    loss = engine.criterion(out, label)
    assert loss > nn.functional.cross_entropy(out, label) + 0.4
    engine.backward(loss)
    engine.step()


def test_what_does_not_go_together_is_refused_with_a_way_out() -> None:
    layer = layer_of()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for make, said in (
        (lambda: MoeLoss(0.1, nn.MSELoss)(tokens(), tokens()), r"call criterion\.bind\(model\)"),
        (lambda: MoeLoss(0.1, nn.MSELoss()), "must be a class"),  # type: ignore[arg-type]
        (lambda: MoeLoss(0.1, nn.MSELoss).bind(nn.Linear(2, 2)), "Linear has no MoeLayer"),
        (lambda: BiasBalance(layer, optimizer), "has_bias=True"),
        (lambda: Experts(num_experts=2), "expert=VanillaFFN"),
        (lambda: Experts(VanillaFFN, 0), "num_experts is 0"),
        (lambda: MoeLayer(WIDTH, 3, Top2Router(), layer.experts), "num_experts is 3, but experts has 4"),
        (lambda: launch({"parallel": {"moe": {"size": 2}}}), "among 2 of 1 processes"),
    ):
        with pytest.raises(ConfigError, match=said):
            make()
