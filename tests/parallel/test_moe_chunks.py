"""Experts in chunks that ranks divide (ZeRO 3): the numbers and the files of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import EXPERTS, STEPS, TOP, WIDTH, CalledLayer, batch_of, loss_of, mixture
from processes import own_part, run_on_ranks
from torch import Tensor, nn

from gemini import ConfigError, HybridAdam, Lamb, checkpoint, init_on
from gemini.model.handle import handle_of
from gemini.parallel import Booster, GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin
from gemini.parallel.moe import Experts, MoeLayer, TopKRouter, VanillaFFN, moe_mlp_args, moe_set_seed


def _wide() -> nn.Sequential:
    """A mixture that fills several chunks on each of four ranks."""
    moe_set_seed(3)
    torch.manual_seed(3)
    layers = [
        MoeLayer(64, EXPERTS, TopKRouter(TOP), Experts(VanillaFFN, EXPERTS, **moe_mlp_args(64, 128)))
        for _ in range(2)
    ]
    return nn.Sequential(nn.Linear(WIDTH, 64), *layers, nn.Linear(64, 3))


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "own": mixture,
    "called": partial(mixture, CalledLayer),
    "wide": _wide,
}
KIB = 2**10
PARTS = 2  # backward passes of a step


def _adam(model: nn.Module) -> HybridAdam:
    return HybridAdam(model.parameters(), lr=0.01, eps=1e-3)  # so that rounding is not magnified


def _alone(name: str, max_norm: float) -> dict[str, Any]:
    model = MODELS[name]()
    optimizer, losses, norms = _adam(model), [], []
    for step in range(STEPS):
        tokens, target = batch_of(step)
        loss = loss_of(model(tokens), target)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": dict(model.state_dict())}


def _train(name: str, max_norm: float, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train over ranks; each step has several backward passes, and the last one exchanges gradients."""
    own: dict[str, Any] = {"zero_stage": 3} if kind == "hybrid" else {}
    plugin = (HybridParallelPlugin if own else GeminiPlugin)(max_norm=max_norm, **own, **options)
    booster, model = Booster(plugin=plugin), MODELS[name]()
    model, optimizer, *_ = booster.boost(model, _adam(model))
    losses, norms = [], []
    for step in range(STEPS):
        pairs = zip(*(own_part(each).chunk(PARTS) for each in batch_of(step)), strict=True)
        found = 0.0
        for number, (tokens, target) in enumerate(pairs):
            with nullcontext() if number == PARTS - 1 else booster.no_sync(model, optimizer):
                loss = loss_of(model(tokens), target) / PARTS
                booster.backward(loss, optimizer)
            found += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found)
        norms.append(optimizer.get_grad_norm())
    values = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    stats, groups = model.stats(), model.storage.groups
    dense_bytes = sum(group.grad.spec.nbytes for group in groups if not group.plan.is_own)
    ranks = model.peers.share.size
    assert model.peers.traffic.reduced == STEPS * dense_bytes // ranks * (ranks - 1)  # and no expert's
    weights = plugin.parts[model].partition.gather_state(values)
    if isinstance(plugin, HybridParallelPlugin):
        plugin.mesh.leave("ended the test")
    handle_of(model).close()
    on_disk = stats["disk"]["peak_bytes"]
    return {"losses": losses, "norms": norms, "weights": weights, "on_disk": on_disk}


def _train_each(name: str, max_norm: float, runs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [_train(name, max_norm, *run) for run in runs]


def _assert_as_alone(ranks: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    losses = torch.tensor([each["losses"] for each in ranks]).mean(0)
    assert losses.tolist() == pytest.approx(wanted["losses"], abs=1e-5)
    for each in ranks:
        assert each["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
        for name, value in wanted["weights"].items():
            assert torch.allclose(each["weights"][name], value, atol=1e-5), name


@pytest.mark.parametrize("name", ["own", "called"])
def test_two_ranks_with_different_experts_train_as_one_process(name: str) -> None:
    wanted = _alone(name, 0.5)
    assert max(wanted["norms"]) > 0.5  # clipping matters
    runs: list[tuple[str, dict[str, Any]]] = [("hybrid", {"ep_size": 2}), ("gemini", {"ep_size": 2})]
    for found in zip(*run_on_ranks(_train_each, 2, name, 0.5, runs), strict=True):
        _assert_as_alone(list(found), wanted)


@pytest.mark.dear("four ranks train three times, twice through DISK")
def test_four_ranks_train_in_twos_and_all_together_and_budgets_change_no_bit(tmp_path: Path) -> None:
    wanted = _alone("wide", 0.5)
    tiers = {"device_bytes": 450 * KIB, "host_bytes": 0, "disk_dir": str(tmp_path), "non_model_bytes": 0}
    runs: list[tuple[str, dict[str, Any]]] = [
        ("gemini", {"ep_size": 2}),
        ("gemini", {"ep_size": 2, **tiers}),
        ("hybrid", {"ep_size": 4, **tiers}),
    ]
    free, budgeted, apart = zip(*run_on_ranks(_train_each, 4, "wide", 0.5, runs), strict=True)
    for found in (free, budgeted, apart):
        _assert_as_alone(list(found), wanted)
    for one, other in zip(free, budgeted, strict=True):
        assert other["on_disk"] > 0
        assert one["norms"] == other["norms"]
        assert all(torch.equal(other["weights"][name], value) for name, value in one["weights"].items())


# -- what ranks do differently -----------------------------------------------------------------------


def _one_sided() -> tuple[list[float], dict[str, Tensor]]:
    """Have tokens of each rank choose experts in another order, and one expert of each rank have none."""
    plugin = GeminiPlugin(ep_size=2)
    booster, model = Booster(plugin=plugin), mixture(CalledLayer)
    with torch.no_grad():
        for layer in (model[1], model[2]):
            layer.router.bias.copy_(torch.tensor([100.0, -100.0, -100.0, 99.0]))
    model, optimizer, *_ = booster.boost(model, _adam(model))
    tokens, target = map(own_part, batch_of(0))
    losses = []
    for _ in range(2):
        loss = loss_of(model(tokens), target)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    values = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    weights = plugin.parts[model].partition.gather_state(values)
    handle_of(model).close()
    return losses, weights


def test_an_expert_without_tokens_has_a_gradient_of_zeros_and_nobody_waits() -> None:
    before = mixture(CalledLayer).state_dict()
    for losses, weights in run_on_ranks(_one_sided, 2):
        assert losses[1] < losses[0]
        after = weights["1.experts.up"]
        changed = [not torch.equal(now, old) for now, old in zip(after, before["1.experts.up"], strict=True)]
        assert changed == [True, False, False, True]


# -- files -------------------------------------------------------------------------------------------


def _step(booster: Booster, model: Any, optimizer: Any, step: int) -> float:
    tokens, target = map(own_part, batch_of(step))
    loss = loss_of(model(tokens), target)
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _save(directory: Path) -> float:
    booster, model = Booster(plugin=HybridParallelPlugin(zero_stage=3, ep_size=2)), mixture()
    model, optimizer, *_ = booster.boost(model, _adam(model))
    _step(booster, model, optimizer, 0)
    booster.save_model(model, directory / "model")
    booster.save_optimizer(optimizer, directory / "optimizer")
    return _step(booster, model, optimizer, 1)


def _load(directory: Path, kind: str, ep_size: int) -> float:
    torch.manual_seed(5)
    plugin = GeminiPlugin(ep_size=ep_size) if kind == "chunks" else LowLevelZeroPlugin(1, ep_size=ep_size)
    booster, model = Booster(plugin=plugin), mixture()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model, optimizer, *_ = booster.boost(model, _adam(model) if kind == "chunks" else _torch_adam(model))
    booster.load_model(model, directory / "model")
    booster.load_optimizer(optimizer, directory / "optimizer")
    return _step(booster, model, optimizer, 1)


def _torch_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.0)


def test_files_load_at_any_other_size_with_and_without_chunks(tmp_path: Path) -> None:
    before = sum(run_on_ranks(_save, 2, tmp_path)) / 2
    for ranks, kind, ep_size in ((1, "chunks", 1), (2, "chunks", 1), (2, "chunks", 2), (2, "plain", 2)):
        again = sum(run_on_ranks(_load, ranks, tmp_path, kind, ep_size)) / ranks
        assert again == pytest.approx(before, abs=1e-5), (ranks, kind, ep_size)


def _from_meta() -> dict[str, Tensor]:
    with init_on("meta"):
        model = mixture()
    plugin = GeminiPlugin(ep_size=2)
    model, *_ = Booster(plugin=plugin).boost(model)
    values = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    weights = plugin.parts[model].partition.gather_state(values)
    handle_of(model).close()
    return {name: value for name, value in weights.items() if "array" in name}


def test_experts_from_meta_have_the_values_of_one_process() -> None:
    wanted = mixture().state_dict()
    for found in run_on_ranks(_from_meta, 2):
        assert len(found) == 8
        assert all(torch.equal(value, wanted[name]) for name, value in found.items())


# -- what is refused ---------------------------------------------------------------------------------


def _refused(directory: Path) -> list[str]:
    plugin = GeminiPlugin(ep_size=2)
    booster, model = Booster(plugin=plugin), mixture()
    model, optimizer, *_ = booster.boost(model, _adam(model))
    said = []
    for call in (
        lambda: model.join().__enter__(),
        lambda: checkpoint.save(directory, model, optimizer),
        lambda: handle_of(model).module.state_dict(),
        lambda: Booster(plugin=plugin).boost(*_with_lamb()),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(str(caught.value))
    return said


def _with_lamb() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mixture()
    return model, Lamb(model.parameters(), lr=0.01)


def test_what_needs_the_whole_model_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for said in run_on_ranks(_refused, 2, tmp_path):
        for text, way_out in zip(
            said,
            ("smallest number", "booster.save_model", "booster.save_model", "HybridAdam"),
            strict=True,
        ):
            assert way_out in text
