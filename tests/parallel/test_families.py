"""One record holds what the strategies know about a family of models."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from families import READ, ROWS, SAYS, build, inputs_of, transformers
from processes import run_on_ranks
from tensor_harness import TOLERANCE, gathered, make_mesh, relative
from torch import Tensor
from torch import distributed as dist

from gemini import ConfigError
from gemini.parallel import Mesh, parallelize
from gemini.parallel.families import FAMILIES, Family, Rule, family_of
from gemini.parallel.tensor.plan import style_of

_RULES = {"name", "model_types", "modules", "partial", "sublayers", "plan"}


@pytest.mark.parametrize("name", ROWS | READ)
def test_a_record_says_what_its_row_expects(name: str) -> None:
    family = family_of(build(name))
    told = {each.name: getattr(family, each.name) for each in fields(Family) if each.name not in _RULES}
    unknown = {each: getattr(Family(), each) for each in told}
    assert told == unknown | SAYS[family.name]


def test_every_family_has_a_row() -> None:
    of_library = {family.name for family in FAMILIES if family.model_types}
    assert of_library | {Family().name} == SAYS.keys()
    assert {name for family in FAMILIES for name in family.model_types} >= of_library


def test_no_two_families_claim_one_class_or_one_configuration() -> None:
    for claimed in ("model_types", "modules", "partial", "sublayers"):
        names = [name for family in FAMILIES for name in getattr(family, claimed)]
        assert len(names) == len(set(names)), claimed


def test_every_style_that_a_record_names_is_known() -> None:
    rules = [rule for family in FAMILIES for rule in family.modules.values() if isinstance(rule, Rule)]
    assert all(style_of(name) for rule in rules for name in (*rule.children.values(), rule.own) if name)


def train(name: str, mesh: Mesh | None) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of four steps, and the whole weights behind them."""
    model = build(name)
    partition = None if mesh is None else parallelize(model, mesh, check=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(4):
        loss = model(**inputs_of(name)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if partition is None:
        return losses, {key: value.detach() for key, value in model.state_dict().items()}
    return losses, gathered(model, partition)


def compare(name: str) -> tuple[list[float], list[float], float, float]:
    """Return the losses, whole and cut, how far apart weights are at most, and how far they went."""
    wanted, weights = train(name, None)
    got, parts = train(name, make_mesh(tp=dist.get_world_size()))
    first = build(name).state_dict()
    assert parts.keys() == weights.keys()
    apart = max(relative(parts[key], weights[key]) for key in weights)
    return wanted, got, apart, max(relative(weights[key], first[key]) for key in weights)


@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith(("falcon", "mamba", "bart"))])
def test_a_cut_model_trains_to_the_weights_of_one_process(name: str) -> None:
    for wanted, got, apart, went in run_on_ranks(compare, 2, name, timeout=180.0):
        assert got == pytest.approx(wanted, rel=TOLERANCE)
        assert wanted[-1] < wanted[0]
        assert apart <= 10 * TOLERANCE < 0.01 < went


def adapt(name: str) -> tuple[list[float], list[float]]:
    """Return the losses of three steps of LoRA beside the fused projection, whole and cut."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def losses(mesh: Mesh | None) -> list[float]:
        config = peft.LoraConfig(r=2, target_modules=["query_key_value"], init_lora_weights=False)
        torch.manual_seed(7)
        model = peft.get_peft_model(build(name), config)
        if mesh is not None:
            parallelize(model, mesh, check=True)
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
        found = []
        for _ in range(3):
            loss = model(**inputs_of(name)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    return losses(None), losses(make_mesh(tp=2))


def test_adapters_beside_shared_key_heads_train_as_in_one_process() -> None:
    for wanted, got in run_on_ranks(adapt, 2, "falcon, one key head", timeout=180.0):
        assert got == pytest.approx(wanted, rel=TOLERANCE)
        assert wanted[-1] < wanted[0]


def refuse(name: str, options: dict[str, Any]) -> str:
    model, config, usual = ROWS[name]
    built = getattr(transformers, model)(getattr(transformers, config)(**{**usual, **options}))
    with pytest.raises(ConfigError) as caught:
        parallelize(built, make_mesh(tp=2))
    return str(caught.value)


def test_sizes_that_do_not_divide_a_family_are_refused_by_name() -> None:
    odd = {"hidden_size": 24, "num_attention_heads": 3}
    for said in run_on_ranks(refuse, 2, "falcon, one key head", odd, timeout=180.0):
        assert said.startswith("transformer.h.0.self_attention.query_key_value: 3 query heads")
    for said in run_on_ranks(refuse, 2, "falcon, groups", {"num_kv_heads": 1}, timeout=180.0):
        assert said.endswith("num_kv_heads is 1, which is not divisible by 2 ranks")
    for said in run_on_ranks(refuse, 2, "mamba", {"hidden_size": 5, "expand": 1}, timeout=180.0):
        assert said.startswith("backbone.layers.0.mixer: 5 channels of A_log")
