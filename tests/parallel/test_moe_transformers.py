"""Ranks divide the experts of transformers' mixtures: the numbers and the files of one process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from torch import Tensor

from gemini import HybridAdam, StateError, init_on
from gemini.model.handle import handle_of
from gemini.parallel import Booster, GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin

transformers = pytest.importorskip("transformers")

_SIZES = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_HEADS = {**_SIZES, "num_key_value_heads": 2}
_FINE = {"intermediate_size": 32, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
_FEW = {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_GROUPS = {"n_group": 2, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "Mixtral": {**_HEADS, **_FEW},
    "GptOss": {**_HEADS, **_FEW, "head_dim": 8},
    "Qwen3Moe": {**_HEADS, **_FINE, "num_experts": 4, "head_dim": 8},
    "DeepseekV3": {**_SIZES, **_FINE, **_LATENT, **_GROUPS, "n_routed_experts": 4, "num_key_value_heads": 2},
}
STEPS = 3


def _model(name: str, implementation: str = "grouped_mm") -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    config._experts_implementation = implementation
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def _tokens(step: int) -> Tensor:
    return torch.randint(48, (4, 6), generator=torch.Generator().manual_seed(step))


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def _adam(model: Any) -> torch.optim.Optimizer:
    return HybridAdam(model.parameters(), lr=0.01, eps=1e-3)  # so that rounding is not magnified


def _alone(
    name: str, make: Callable[[Any], Any] = _sgd
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model, norms = _model(name), []
    optimizer, losses = make(model), []
    for step in range(STEPS):
        loss = model(input_ids=_tokens(step), labels=_tokens(step)).loss
        loss.backward()
        norms.append(float(torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, dict(model.state_dict())


def _adagrad(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.01, eps=1e-3)  # has states before experts are divided


def _over_ranks(
    name: str, implementation: str, in_chunks: bool, make: Callable[[Any], Any] = _sgd
) -> tuple[list[float], dict[str, Tensor]]:
    plugin = GeminiPlugin(ep_size=2) if in_chunks else LowLevelZeroPlugin(1, ep_size=2)
    booster, model = Booster(plugin=plugin), _model(name, implementation)
    model, optimizer, *_ = booster.boost(model, make(model))
    losses = []
    for step in range(STEPS):
        tokens = own_part(_tokens(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    params = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    weights = plugin.parts[model].partition.gather_state(params)
    handle_of(model).close() if in_chunks else optimizer.close()
    return losses, weights


def _each_over_ranks(runs: list[tuple[Any, ...]]) -> list[Any]:
    return [_over_ranks(*run) for run in runs]


def test_unmodified_models_train_as_in_one_process() -> None:
    wanted = {name: _alone(name) for name in CONFIGS}
    runs = [(name, "grouped_mm", False) for name in CONFIGS]
    runs += [("Mixtral", "eager", False), ("Mixtral", "batched_mm", False)]
    runs += [("Mixtral", "eager", True), ("GptOss", "grouped_mm", True)]
    found = run_on_ranks(_each_over_ranks, 2, runs)
    for (name, *_), *ranks in zip(runs, *found, strict=True):
        losses, _, weights = wanted[name]
        assert torch.tensor([each[0] for each in ranks]).mean(0).tolist() == pytest.approx(losses, abs=1e-5)
        for each in ranks:
            for key in each[1].keys() & weights.keys():
                value = weights[key]
                assert torch.allclose(each[1][key], value, atol=1e-5), key


def test_states_that_an_optimizer_has_before_are_divided_with_the_experts() -> None:
    wanted, _, _ = _alone("Mixtral", _adagrad)
    runs = [("Mixtral", "grouped_mm", in_chunks, _adagrad) for in_chunks in (False, True)]
    found = run_on_ranks(_each_over_ranks, 2, runs)
    for each in zip(*found, strict=True):
        losses = torch.tensor([rank[0] for rank in each]).mean(0).tolist()
        assert losses == pytest.approx(wanted, abs=1e-5)


# -- files ---------------------------------------------------------------------------------------------


def _boosted(plugin: Any) -> tuple[Booster, Any, Any]:
    booster, model = Booster(plugin=plugin), _model("Mixtral")
    model, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters(), lr=0.01))
    return booster, model, optimizer


def _step(booster: Booster, model: Any, optimizer: Any, step: int) -> float:
    tokens = own_part(_tokens(step))
    loss = model(input_ids=tokens, labels=tokens).loss
    booster.backward(loss, optimizer)
    optimizer.step()
    return float(loss.detach())


def _save(directory: Path) -> float:
    booster, model, optimizer = _boosted(HybridParallelPlugin(zero_stage=2, ep_size=2))
    _step(booster, model, optimizer, 0)
    booster.save_model(model, directory / "model", shard=True)
    booster.save_optimizer(optimizer, directory / "optimizer")
    return _step(booster, model, optimizer, 1)


def _load(directory: Path, ep_size: int) -> float:
    booster, model, optimizer = _boosted(LowLevelZeroPlugin(1, ep_size=ep_size))
    booster.load_model(model, directory / "model")
    booster.load_optimizer(optimizer, directory / "optimizer")
    booster.save_model(model, directory / f"again {ep_size}", shard=True)
    return _step(booster, model, optimizer, 1) + 0 * _step(booster, model, optimizer, 2)


def _load_from_meta(directory: Path) -> float:
    with init_on("meta"):
        model = _model("Mixtral")
    booster = Booster(plugin=GeminiPlugin(ep_size=2))
    model, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters(), lr=0.01))
    with pytest.raises(StateError, match="each rank has some of the experts"):
        model(input_ids=own_part(_tokens(1)))
    booster.load_model(model, directory / "model")
    booster.load_optimizer(optimizer, directory / "optimizer")
    return _step(booster, model, optimizer, 1)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "experts.md"


def _run_page(directory: Path) -> None:
    (program,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    before = Path.cwd()
    os.chdir(directory)
    try:
        exec(compile(program, "experts.md", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)


def test_the_program_of_the_page_runs_as_printed(tmp_path: Path) -> None:
    run_on_ranks(_run_page, 2, tmp_path)
    assert _weights(tmp_path / "divided")["model.layers.1.mlp.experts.down_proj"].shape == (8, 64, 64)


def _weights(directory: Path) -> dict[str, Tensor]:
    return dict(transformers.MixtralForCausalLM.from_pretrained(directory).state_dict())


def test_files_of_two_ranks_load_on_one_and_in_transformers(tmp_path: Path) -> None:
    before = sum(run_on_ranks(_save, 2, tmp_path)) / 2
    alone = run_on_ranks(_load, 1, tmp_path, 1)[0]
    again = sum(run_on_ranks(_load, 2, tmp_path, 2)) / 2
    chunks = sum(run_on_ranks(_load_from_meta, 2, tmp_path)) / 2
    assert [alone, again, chunks] == pytest.approx([before] * 3, abs=1e-5)
    first = _weights(tmp_path / "model")
    assert first["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 32, 16)
    for size in (1, 2):
        found = _weights(tmp_path / f"again {size}")
        assert all(torch.equal(found[name], value) for name, value in first.items())


# -- with other parallelism ------------------------------------------------------------------------------


def _in_grid(options: dict[str, Any], directory: Path) -> tuple[list[float], list[float]]:
    options = {"zero_stage": 1, "ep_size": 2, "num_microbatches": 2, "max_norm": 1e6, **options}
    in_chunks, plugin = options["zero_stage"] == 3, HybridParallelPlugin(**options)
    booster, model = Booster(plugin=plugin), _model("Mixtral")
    model, optimizer, *_ = booster.boost(model, _adam(model) if in_chunks else _sgd(model))
    ranks, losses, norms = plugin.data_ranks, [], []
    for step in range(STEPS):
        tokens = _tokens(step).chunk(ranks.size)[ranks.number]
        batch = {"input_ids": tokens, "labels": tokens}
        done = booster.execute_pipeline(iter([batch]), model, lambda out, _: out.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(done["loss"]))
        norms.append(optimizer.get_grad_norm())
    booster.save_model(model, directory, shard=True)
    plugin.mesh.leave("ended the test")
    handle_of(model).close() if in_chunks else optimizer.close()
    return losses, norms


@pytest.mark.parametrize(
    "options", [{"tp_size": 2}, {"pp_size": 2}, {"sp_size": 2}, {"pp_size": 2, "zero_stage": 3}]
)
def test_experts_are_divided_beside_layers_and_stages(options: dict[str, Any], tmp_path: Path) -> None:
    losses, norms, weights = _alone("Mixtral", _adam if "zero_stage" in options else _sgd)
    for found, measured in run_on_ranks(_in_grid, 4, options, tmp_path):
        assert found == pytest.approx(losses, abs=1e-5)
        assert measured == pytest.approx(norms, rel=1e-6)
    saved = _weights(tmp_path)
    assert all(torch.allclose(saved[name], value, atol=1e-5) for name, value in weights.items())
