"""The states of hidden matrices under Muon, and those of the parameters that AdamW updates beside them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from same_bits import assert_same
from test_rules import WIDTH, num_bytes, square, tight
from torch import Tensor, nn
from training_harness import seeded

from gemini import CheckpointError, ConfigError, GeminiDDP, GeminiOptimizer, Muon, checkpoint
from gemini.checkpoint.convert import convert
from gemini.checkpoint.loading import latest
from gemini.chunk.chunk import ChunkKind
from gemini.optim import rule_choice
from gemini.optim.muon import ARRAYS
from gemini.runtime.build import draw_blueprint
from gemini.runtime.config import GeminiConfig, is_hidden_matrix

STEPS = 4
SMALL = {"min_chunk_size_mb": 2**-8, "search_range_mb": 2**-8}


def hidden_matrices() -> nn.Module:
    """Hidden matrices, some smaller than a chunk, with biases and norms between them, and a head."""
    net = nn.Sequential()
    widths = [WIDTH, WIDTH, 20, WIDTH, 20, WIDTH]
    for index, (width, outputs) in enumerate(pairwise(widths)):
        net.add_module(f"linear{index}", nn.Linear(width, outputs))
        net.add_module(f"norm{index}", nn.LayerNorm(outputs))
    net.add_module("lm_head", nn.Linear(WIDTH, 24))
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        square(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrap(**options: Any) -> tuple[GeminiDDP, GeminiOptimizer]:
    model = GeminiDDP(seeded(hidden_matrices), **{**SMALL, **options})
    return model, GeminiOptimizer(Muon(model.module.named_parameters(), weight_decay=0.1), model)


def plain() -> tuple[dict[str, Tensor], dict[str, Any]]:
    net = seeded(hidden_matrices)
    optimizer = Muon(net.named_parameters(), weight_decay=0.1)
    train(net, optimizer, range(STEPS))
    return dict(net.state_dict()), optimizer.state_dict()["state"]


def of_matrices(net: nn.Module, *, use_muon: bool) -> Muon:
    matrices = [each.weight for each in net if isinstance(each, nn.Linear)]  # type: ignore[attr-defined]
    return Muon([{"params": matrices, "use_muon": use_muon}])


def test_a_state_of_other_groups_is_refused_by_name(tmp_path: Path) -> None:
    saved_net = seeded(hidden_matrices)
    with GeminiDDP(saved_net) as model:
        saved = GeminiOptimizer(of_matrices(saved_net, use_muon=False), model)
        train(model, saved, range(1))
        checkpoint.save(tmp_path, model, saved)
        state = saved.state_dict()
    refusal = "group 0 of the state has use_muon=False, and that of the optimizer use_muon=True"
    net = seeded(hidden_matrices)
    with GeminiDDP(net) as model:
        optimizer = GeminiOptimizer(of_matrices(net, use_muon=True), model)
        before = optimizer.state_dict()
        for each in (of_matrices(seeded(hidden_matrices), use_muon=True), optimizer):
            with pytest.raises(ConfigError, match=refusal):
                each.load_state_dict(state)
            groups = [{**group, "use_muon": None} for group in state["param_groups"]]
            with pytest.raises(ConfigError, match="use_muon=None"):
                each.load_state_dict({**state, "param_groups": groups})
        with pytest.raises(CheckpointError, match=f"was saved with another optimizer: {refusal}"):
            checkpoint.load(tmp_path, model, optimizer)
        assert optimizer.state_dict() == before
        optimizer.param_groups[0]["use_muon"] = False
        with pytest.raises(ConfigError, match="the groups' settings ask for exp_avg_sq"):
            optimizer.step()


def test_a_checkpoint_of_other_groups_is_refused_by_these_not_by_its_states(tmp_path: Path) -> None:
    for use_muon in (True, False):
        net = seeded(hidden_matrices)
        with GeminiDDP(net) as model:
            optimizer = GeminiOptimizer(of_matrices(net, use_muon=use_muon), model)
            if use_muon:
                train(model, optimizer, range(1))
                checkpoint.save(tmp_path, model, optimizer)
            else:
                with pytest.raises(CheckpointError, match="has use_muon=True, and that of the optimizer"):
                    checkpoint.load(tmp_path, model, optimizer)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_announced_muon_has_one_state_of_hidden_matrices_and_sizes_are_exact(
    dtype: torch.dtype, precision: str | None
) -> None:
    options: dict[str, Any] = {**SMALL, "optimizer_rule": "muon", "mixed_precision": precision}
    config = GeminiConfig.from_options(**options)
    wanted = draw_blueprint(hidden_matrices().to(dtype), config).context.size.total_bytes
    net = seeded(hidden_matrices).to(dtype)
    with GeminiDDP(net, **options) as model:
        GeminiOptimizer(Muon(net.named_parameters()), model)
        assert model.stats()["model_data_bytes"] == wanted
        for name, slot in model._gemini.storage.slots.items():
            kept = ARRAYS[:1] if is_hidden_matrix(name, slot.param_view.dim()) else ARRAYS
            assert tuple(state.name for state in slot.group.kept.states) == kept
            for piece in slot.pieces:
                states = [each for each in piece.chunks.values() if each.spec.kind is ChunkKind.STATE]
                assert len(states) == len(kept)


@pytest.mark.parametrize("rule", [None, "muon"])
def test_a_third_of_the_memory_changes_no_bit(rule: str | None, tmp_path: Path) -> None:
    weights, state = plain()
    model, optimizer = wrap(**tight(tmp_path, num_bytes(hidden_matrices())), optimizer_rule=rule)
    with model:
        groups = model._gemini.storage.groups
        assert {len(group.kept.states) for group in groups} == {1, 2}
        shares = any(
            len({is_hidden_matrix(s.name, s.param_view.dim()) for s in g.slots}) == 2 for g in groups
        )
        assert shares == (rule is None)
        train(model, optimizer, range(STEPS))
        assert model.stats()["disk_write"]["bytes"] > 0
        assert_same(dict(model.state_dict()), weights)
        assert_same(optimizer.state_dict()["state"], state)
        names = {name for entry in state.values() for name in entry}
        assert names == {"step", *ARRAYS}
        assert "exp_avg_sq" not in optimizer.state[model.module.linear0.weight]


def test_saved_states_with_two_of_each_matrix_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, state = plain()
    with monkeypatch.context() as patch:
        patch.setitem(rule_choice._OF_GROUP, Muon, lambda _group: ARRAYS)
        model, optimizer = wrap()
        with model:
            train(model, optimizer, range(2))
            checkpoint.save(tmp_path / "two", model, optimizer)
            old_state = optimizer.state_dict()
            assert all("exp_avg_sq" in entry for entry in old_state["state"].values())
            old_weights = {name: value.clone() for name, value in model.state_dict().items()}
    for takes_file in (True, False):
        model, optimizer = wrap(optimizer_rule="muon")
        with model:
            if takes_file:
                checkpoint.load(tmp_path / "two", model, optimizer)
            else:
                model.load_state_dict(old_weights)
                optimizer.load_state_dict(old_state)
            train(model, optimizer, range(2, STEPS))
            assert_same(dict(model.state_dict()), weights)
            assert_same(optimizer.state_dict()["state"], state)
            assert model.stats()["small_state_bytes"] == 0
            checkpoint.save(tmp_path / f"one {takes_file}", model, optimizer)
            checkpoint.load(tmp_path / f"one {takes_file}", model, optimizer)
            assert_same(optimizer.state_dict()["state"], state)


@pytest.mark.parametrize(
    "make", [lambda net: Muon(net.named_parameters()), lambda net: torch.optim.NAdam(net.parameters())]
)
def test_the_optimizer_goes_on_from_a_converted_checkpoint(
    make: Callable[[nn.Module], torch.optim.Optimizer], tmp_path: Path
) -> None:
    with GeminiDDP(seeded(hidden_matrices)) as model:
        optimizer = GeminiOptimizer(make(model.module), model)
        train(model, optimizer, range(2))
        checkpoint.save(tmp_path / "saved", model, optimizer)
        train(model, optimizer, range(2, STEPS))
        want = dict(model.state_dict())
    convert(latest(tmp_path / "saved"), tmp_path / "state.pt", "torch")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    net = seeded(hidden_matrices)
    net.load_state_dict(saved["model"])
    plain = make(net)
    plain.load_state_dict(saved["optimizer"])
    train(net, plain, range(2, STEPS))
    assert_same(dict(net.state_dict()), want)
