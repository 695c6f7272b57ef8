"""Experts divided among ranks have the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import (
    EXPERTS,
    STEPS,
    WIDTH,
    CalledLayer,
    OwnLayer,
    batch_of,
    loss_of,
    mixture,
    train_alone,
)
from processes import own_part, run_on_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from gemini import ConfigError
from gemini.parallel import (
    Booster,
    HybridParallelPlugin,
    Layout,
    LowLevelZeroPlugin,
    Mesh,
    TorchDDPPlugin,
)
from gemini.parallel.engine import MoeGradientHandler, initialize
from gemini.parallel.expert_ranks import ExpertRanks, fitting_size
from gemini.parallel.launch import launch_from_torch, shutdown
from gemini.parallel.mesh import counted
from gemini.parallel.moe import (
    BiasBalance,
    Capacity,
    Experts,
    MoeLayer,
    MoeLoss,
    TopKRouter,
    VanillaFFN,
    moe_env,
    moe_mlp_args,
    moe_set_seed,
)
from gemini.parallel.moe.divide import divide_experts

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "own": OwnLayer,
    "capacity that drops nothing": partial(OwnLayer, capacity=Capacity(EXPERTS)),
    "balanced over the group": partial(OwnLayer, aux_weight=0.5, balance_over="group"),
    "called": CalledLayer,
}


def _train(layer: str, plugin: Any) -> dict[str, Any]:
    booster, model = Booster(plugin=plugin), mixture(LAYERS[layer])
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
    losses, norms = [], []
    for step in range(STEPS):
        tokens, target = map(own_part, batch_of(step))
        loss = loss_of(model(tokens), target)
        booster.backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
        norms.append(optimizer.get_grad_norm())
    weights = plugin.parts[model].partition.gather_state(model.state_dict(keep_vars=True))
    if isinstance(plugin, HybridParallelPlugin):
        plugin.mesh.leave("ended the test")
    optimizer.close()
    numels = [param.numel() for name, param in model.named_parameters() if "expert" in name]
    return {"losses": losses, "norms": norms, "weights": weights, "numel": sum(numels)}


def _train_each(layer: str, runs: list[tuple[int, int]]) -> list[dict[str, Any]]:
    plugins = [
        HybridParallelPlugin(zero_stage=stage, ep_size=size, max_norm=1e6)
        for stage, size in runs
        if stage != 2
    ]
    plugins += [LowLevelZeroPlugin(2, ep_size=size, max_norm=1e6) for stage, size in runs if stage == 2]
    return [_train(layer, plugin) for plugin in plugins]


def assert_as_alone(ranks: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Compare losses, norms and weights with those of one process."""
    losses = torch.tensor([each["losses"] for each in ranks]).mean(0)
    assert losses.tolist() == pytest.approx(wanted["losses"], abs=1e-5)
    for each in ranks:
        assert each["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
        for name, value in wanted["weights"].items():
            assert torch.allclose(each["weights"][name], value, atol=1e-5), name


@pytest.mark.parametrize("layer", LAYERS)
def test_ranks_train_as_one_process(layer: str) -> None:
    wanted = train_alone(mixture(LAYERS["own" if "capacity" in layer else layer]))
    whole = sum(value.numel() for name, value in wanted["weights"].items() if "expert" in name)
    runs = [(0, 1), (0, 2), (1, 2), (2, 2)] if layer in ("own", "called") else [(1, 2)]
    by_rank = run_on_ranks(_train_each, 2, layer, runs)
    for (_, size), found in zip(runs, zip(*by_rank, strict=True), strict=True):
        assert_as_alone(list(found), wanted)
        assert all(each["norms"] == found[0]["norms"] for each in found)
        assert all(each["numel"] == whole // size for each in found)


def test_four_ranks_train_as_one_process_in_twos_and_all_together() -> None:
    wanted = train_alone(mixture(OwnLayer))
    for found in zip(*run_on_ranks(_train_each, 4, "own", [(1, 2), (0, 2), (1, 4)]), strict=True):
        assert_as_alone(list(found), wanted)


class Recomputed(nn.Module):
    """A layer that runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = CalledLayer()

    def forward(self, x: Tensor) -> Tensor:
        """Run it, and keep its input alone."""
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def _accumulated(stage: int) -> dict[str, Tensor]:
    plugin = HybridParallelPlugin(zero_stage=stage, ep_size=2, overlap_communication=True)
    booster, model = Booster(plugin=plugin), mixture(Recomputed)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.3))
    for step in range(STEPS):
        tokens, target = map(own_part, batch_of(step))
        halves = list(zip(tokens.chunk(2), target.chunk(2), strict=True))
        with booster.no_sync(model, optimizer):
            booster.backward(loss_of(model(halves[0][0]), halves[0][1]) / 2, optimizer)
        booster.backward(loss_of(model(halves[1][0]), halves[1][1]) / 2, optimizer)
        optimizer.step()
    weights = plugin.parts[model].partition.gather_state(model.state_dict(keep_vars=True))
    plugin.mesh.leave("ended the test")
    optimizer.close()
    return weights


@pytest.mark.parametrize("stage", [0, 2])
def test_accumulation_and_recomputation_change_no_weight(stage: int) -> None:
    wanted = train_alone(mixture(Recomputed))["weights"]
    for found in run_on_ranks(_accumulated, 2, stage):
        assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in wanted.items())


def _norm_of_given(stage: int, size: int) -> float:
    plugin = HybridParallelPlugin(zero_stage=stage, ep_size=size)
    model = mixture()
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    partition = plugin.parts[model].partition
    generator = torch.Generator().manual_seed(1)
    for name, param in model.module.named_parameters():
        shape = partition.cuts[name].shape if name in partition.cuts else param.shape
        grad = torch.randn(shape, generator=generator)
        mine = partition.cut_state({name: grad})[name]
        param.grad = mine * 2 if name in partition.cuts else mine  # of the tokens of both ranks
    norm = float(optimizer.clip_grad_by_norm(1.0))
    plugin.mesh.leave("ended the test")
    optimizer.close()
    return norm


def _norms() -> list[float]:
    return [_norm_of_given(stage, size) for stage in (0, 1) for size in (1, 2)]


def test_norms_have_the_same_bits_however_experts_are_divided() -> None:
    first, second = run_on_ranks(_norms, 2)
    assert first == second
    assert len(set(first)) == 1


# -- groups ------------------------------------------------------------------------------------------


def _groups() -> tuple[Any, ...]:
    with Mesh(Layout(dp=4, ep=2)) as mesh:
        ranks = ExpertRanks.of(mesh.axis("dp"), 2, [EXPERTS])
        assert ranks is not None
        assert ranks.copies is not None
        lists = [mesh[name].mesh.tolist() for name in ("ep", "moe_dp")]
        return lists, list(ranks.own(EXPERTS)), ranks.sharing.rank, ranks.copies.rank


def test_neighbours_divide_experts_and_the_others_have_the_same() -> None:
    found = run_on_ranks(_groups, 4)
    assert [each[0] for each in found] == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]
    assert [each[1:] for each in found] == [([0, 1], 0, 0), ([2, 3], 1, 0), ([0, 1], 0, 1), ([2, 3], 1, 1)]


def test_fewer_experts_than_ranks_lower_the_number_of_ranks() -> None:
    assert fitting_size(8, [4], 8) == 4
    assert fitting_size(8, [4, 16], 8) == 4
    assert fitting_size(2, [4, 6], 8) == 2


@pytest.mark.parametrize(
    ("size", "counts", "ranks", "said"),
    [
        (4, [6], 8, "among 4 of 8 .* 6 experts of a layer; choose 1 or 2"),
        (4, [3], 4, "choose 1$"),
        (2, [4], 3, "among 2 of 3 ranks .*choose 1"),
        (4, [2, 3], 4, "2, 3 experts of a layer; choose 1$"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_those_that_can(
    size: int, counts: list[int], ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        fitting_size(size, counts, ranks)


REFUSED: list[tuple[dict[str, Any], Callable[[], nn.Module], str]] = [
    ({"ep_size": 2}, mixture, "choose 1$"),
    ({"ep_size": 2, "zero_stage": 1, "tp_size": 1}, lambda: nn.Linear(2, 2), "Linear has no experts"),
    ({"ep_size": 0}, mixture, "ep_size is 0"),
    ({"ep_size": 2, "zero_stage": 3}, mixture, "choose 1$"),
]


@pytest.mark.parametrize(("options", "model", "said"), REFUSED)
def test_what_cannot_be_divided_is_refused(
    options: dict[str, Any], model: Callable[[], nn.Module], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Booster(plugin=HybridParallelPlugin(**{"zero_stage": 1, **options})).boost(model())


# -- tokens ------------------------------------------------------------------------------------------


def _exchanges() -> tuple[dict[str, int], dict[str, int], list[float]]:
    with Mesh(Layout(dp=2, ep=2)) as mesh:
        axis = mesh.axis("dp")
        ranks = ExpertRanks.of(axis, 2, [EXPERTS])
        assert axis is not None
        assert ranks is not None
        model = mixture(CalledLayer)[1]
        experts = divide_experts(model, ranks)
        assert experts is not None
        with torch.no_grad():
            model.router.bias.copy_(torch.tensor([0.0, 100.0, 100.0, 0.0]))
        tokens = own_part(batch_of(0)[0])[: 0 if axis.rank else None]  # the second rank has none
        tokens.requires_grad_()
        with counted(axis) as (forward, _):
            output = model(tokens)
        with counted(axis) as (backward, _):
            output.sum().backward()
        norms = [float(row.norm()) for param in experts.params for row in param.grad]
        return dict(forward), dict(backward), norms


def test_one_exchange_each_way_and_experts_without_tokens_have_zeros() -> None:
    for rank, (forward, backward, norms) in enumerate(run_on_ranks(_exchanges, 2)):
        assert (forward, backward) == ({"all_to_all": 3}, {"all_to_all": 2})  # the first one of counts
        used = [False, True] if rank == 0 else [True, False]
        assert [norm > 0 for norm in norms] == used * 2


def _without_tokens() -> list[float]:
    with Mesh(Layout(dp=2, ep=2)) as mesh:
        found = []
        for layer in (OwnLayer, CalledLayer):
            model = mixture(layer)[1]
            ranks = ExpertRanks.of(mesh.axis("dp"), 2, [EXPERTS])
            assert ranks is not None
            experts = divide_experts(model, ranks)
            assert experts is not None
            model(torch.zeros(0, WIDTH)).sum().backward()
            found += [float(param.grad.abs().sum()) for param in experts.params]
        return found


def test_a_batch_without_tokens_on_any_rank_has_zeros() -> None:
    for found in run_on_ranks(_without_tokens, 2):
        assert found == [0.0] * 6


# -- the launch ----------------------------------------------------------------------------------------


def _seeded() -> tuple[Any, ...]:
    launch_from_torch({"parallel": {"moe": {"size": 2}}})
    moe_set_seed(7)
    made = [Experts(expert, EXPERTS, **moe_mlp_args(WIDTH, WIDTH, 0.5)) for expert in (VanillaFFN, _OfOurs)]
    torch.manual_seed(1)
    rows, counts = torch.ones(4, WIDTH), torch.tensor([1, 1, 1, 1])
    dropped = made[0](rows, counts)
    sizes = moe_env.model_parallel_size, moe_env.data_parallel_size
    states = [dict(experts.state_dict()) for experts in made]
    shutdown()
    return sizes, states, dropped


class _OfOurs(VanillaFFN):
    """A class that becomes a list of modules."""


def test_weights_depend_on_seed_layer_and_expert_and_dropout_on_the_rank() -> None:
    moe_set_seed(7)
    array, listed = (
        Experts(expert, EXPERTS, **moe_mlp_args(WIDTH, WIDTH)).state_dict()
        for expert in (VanillaFFN, _OfOurs)
    )
    found = run_on_ranks(_seeded, 2)
    masks = []
    for rank, (sizes, (rows, named), dropped) in enumerate(found):
        assert sizes == (2, 1)
        own = slice(2 * rank, 2 * rank + 2)
        assert all(torch.equal(value, array[name][own]) for name, value in rows.items())
        assert all(torch.equal(value, listed[name]) for name, value in named.items())
        assert {name.split(".")[1] for name in named} == {str(2 * rank), str(2 * rank + 1)}
        masks.append(dropped == 0)
    assert not torch.equal(masks[0], masks[1])


class Classifier(nn.Module):
    """A mixture with a class for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mixture(partial(OwnLayer, balance_over="group"))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.body(x)  # type: ignore[no-any-return]


def _with_engine(config: dict[str, Any]) -> tuple[list[float], float]:
    launch_from_torch(config)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    engine, *_ = initialize(model, optimizer, MoeLoss(0.1, nn.CrossEntropyLoss))
    losses = []
    for step in range(STEPS):
        tokens, target = map(own_part, batch_of(step))
        engine.zero_grad()
        loss = engine.criterion(engine(tokens), target.argmax(1))
        engine.backward(loss)
        norm = engine.optimizer.clip_grad_by_norm(1e6)
        engine.step()
        losses.append(loss.item())
    shutdown()
    return losses, float(norm)


_IN_CHUNKS = {"stage": 3, "mixed_precision": None}


@pytest.mark.parametrize("more", [{}, {"zero": {"stage": 2, "precision": "fp32"}}, {"zero": _IN_CHUNKS}])
def test_an_engine_trains_as_one_process(more: dict[str, Any]) -> None:
    ((wanted, norm),) = run_on_ranks(_with_engine, 1, {})
    handlers = {} if more else {"gradient_handler": [{"type": "MoeGradientHandler"}]}
    found = run_on_ranks(_with_engine, 2, {"parallel": {"moe": {"size": 2}}, **more, **handlers})
    assert torch.tensor([each[0] for each in found]).mean(0).tolist() == pytest.approx(wanted, abs=1e-5)
    assert [each[1] for each in found] == pytest.approx([norm] * 2, rel=1e-6)


def _engine_files(config: dict[str, Any], directory: Path, loads: bool) -> float:
    launch_from_torch(config)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 if loads else 0.01)
    engine, *_ = initialize(model, optimizer, nn.CrossEntropyLoss())
    if loads:
        engine.booster.load_model(engine.model, directory / "model")
        engine.booster.load_optimizer(engine.optimizer, directory / "optimizer")
    for step in range(3):
        if step == 1 and not loads:
            engine.booster.save_model(engine.model, directory / "model")
            engine.booster.save_optimizer(engine.optimizer, directory / "optimizer")
        if step == 0 and loads:
            continue
        tokens, target = map(own_part, batch_of(step))
        engine.zero_grad()
        loss = engine.criterion(engine(tokens), target.argmax(1))
        engine.backward(loss)
        engine.step()
    shutdown()
    return float(loss.detach())


@pytest.mark.parametrize("more", [{}, {"zero": {"stage": 1, "precision": "fp32"}}])
def test_files_of_an_engine_load_in_one_process(more: dict[str, Any], tmp_path: Path) -> None:
    divided = {"parallel": {"moe": {"size": 2}}, **more}
    wanted = run_on_ranks(_engine_files, 2, divided, tmp_path, False)
    again = run_on_ranks(_engine_files, 2, divided, tmp_path, True)
    alone = run_on_ranks(_engine_files, 1, more, tmp_path, True)
    assert again == wanted
    assert alone == pytest.approx([sum(wanted) / 2], abs=1e-5)


def _refused_plugins() -> list[str]:
    launch_from_torch({"parallel": {"moe": {"size": 2}}})
    said = []
    for plugin in (TorchDDPPlugin(), HybridParallelPlugin(zero_stage=1), LowLevelZeroPlugin(1)):
        with pytest.raises(ConfigError) as caught:
            Booster(plugin=plugin).boost(mixture())
        said.append(str(caught.value))
    shutdown()
    return said


def test_plugins_that_would_average_different_experts_are_refused() -> None:
    for said in run_on_ranks(_refused_plugins, 2):
        assert all(text.endswith("LowLevelZeroPlugin(ep_size=2), or launch without moe") for text in said)


def _handled() -> dict[str, Tensor]:
    launch_from_torch({"parallel": {"moe": {"size": 2}}})
    model = mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    handler = MoeGradientHandler(model, optimizer)
    for step in range(STEPS):
        tokens, target = map(own_part, batch_of(step))
        loss_of(model(tokens), target).backward()
        handler.handle_gradient()
        optimizer.step()
        optimizer.zero_grad()
    shutdown()
    return dict(model.state_dict())


def test_a_loop_with_the_gradient_handler_trains_as_one_process() -> None:
    wanted = train_alone(mixture())["weights"]
    for rank, found in enumerate(run_on_ranks(_handled, 4)):
        for name, value in found.items():
            own = slice(rank % 2 * 2, rank % 2 * 2 + 2) if "array" in name else slice(None)
            assert torch.allclose(value, wanted[name][own], atol=1e-5), name


def _moved() -> list[float]:
    launch_from_torch({"parallel": {"moe": {"size": 2}}} if dist.get_world_size() > 1 else {})
    model = mixture(partial(OwnLayer, has_bias=True)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    balance = BiasBalance(model, optimizer, rate=0.1)
    for step in range(STEPS):
        model(own_part(batch_of(step)[0]))
        balance.step()
    shutdown()
    return [float(each) for layer in (model[1], model[2]) for each in layer.layer.expert_bias]


def test_biases_move_by_the_choices_of_all_ranks() -> None:
    (wanted,) = run_on_ranks(_moved, 1)
    assert len(set(wanted)) > 1
    assert run_on_ranks(_moved, 2) == [wanted] * 2


def test_there_is_no_other_group_to_balance_over() -> None:
    with pytest.raises(ConfigError, match="balance_over is 'all'"):
        MoeLayer(
            WIDTH,
            EXPERTS,
            TopKRouter(2),
            Experts(VanillaFFN, EXPERTS, **moe_mlp_args(WIDTH, WIDTH)),
            balance_over="all",  # type: ignore[arg-type]
        )
