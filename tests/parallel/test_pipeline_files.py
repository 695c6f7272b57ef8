"""Files of a model in stages and parts are those of the whole model, and load at any other layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, CHUNKS, MAX_NORM, batch_of, language, loss_of
from processes import run_on_ranks
from safetensors.torch import load_file, save_file
from tensor_harness import LANGUAGE_PLAN
from torch import Tensor

from gemini import CPUAdam
from gemini.errors import CheckpointError
from gemini.parallel import Booster, HybridParallelPlugin

LAYOUTS: list[dict[str, Any]] = [
    {"pp_size": 2},
    {"pp_size": 2, "pp_style": "zbv"},
    {"tp_size": 2},
    {"pp_size": 2, "tp_size": 2},
    {},
]


def boosted(layout: dict[str, Any], tied: bool) -> tuple[Booster, Any, Any]:
    plugin = HybridParallelPlugin(
        num_microbatches=4, tp_plan=LANGUAGE_PLAN, max_norm=MAX_NORM, **layout, **CHUNKS
    )
    booster, model = Booster(plugin=plugin), language(tied=tied)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    return booster, model, optimizer


def _save(layout: dict[str, Any], tied: bool, path: str, shard: bool) -> float:
    booster, model, optimizer = boosted(layout, tied)
    for step in range(2):
        booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)
        optimizer.step()
    booster.save_model(model, path, shard=shard, size_per_shard=1)
    loss = booster.execute_pipeline(iter([batch_of(9)]), model, loss_of)["loss"]
    return float(loss)


def _load(layout: dict[str, Any], tied: bool, path: str) -> float:
    booster, model, _ = boosted(layout, tied)
    booster.load_model(model, path)
    return float(booster.execute_pipeline(iter([batch_of(9)]), model, loss_of)["loss"])


def _refused(*paths: str) -> list[str]:
    booster, model, _ = boosted({"pp_size": 2}, True)
    before = {name: value.clone() for name, value in model.state_dict(keep_vars=True).items()}
    messages = []
    for path in paths:
        with pytest.raises(CheckpointError) as caught:
            booster.load_model(model, path)
        assert all(
            torch.equal(value, before[name]) for name, value in model.state_dict(keep_vars=True).items()
        )
        messages.append(str(caught.value))
    return messages


def world(layout: dict[str, Any]) -> int:
    return int(layout.get("pp_size", 1) * layout.get("tp_size", 1))


@pytest.mark.parametrize("layout", LAYOUTS[:4])
@pytest.mark.parametrize("tied", [True, False])
def test_what_any_layout_saves_any_other_loads(tmp_path: Path, layout: dict[str, Any], tied: bool) -> None:
    path = str(tmp_path / "model.safetensors")
    wanted = run_on_ranks(_save, 2 * world(layout), layout, tied, path, False)[0]
    whole = language(tied=tied)
    stored = load_file(path)
    lacking = whole.load_state_dict(stored, strict=False).missing_keys
    assert lacking == (["head.weight"] if tied else [])
    with torch.no_grad():
        mean = sum(loss_of(whole(part), part).item() for part in batch_of(9).chunk(4)) / 4
    assert mean == pytest.approx(wanted, rel=1e-5)
    for other in LAYOUTS:
        for loss in run_on_ranks(_load, world(other), other, tied, path):
            assert loss == pytest.approx(wanted, rel=1e-5)


def test_a_directory_has_whole_tensors_and_the_same_bits(tmp_path: Path) -> None:
    layout = {"pp_size": 2}
    one, many = str(tmp_path / "one.safetensors"), str(tmp_path / "many")
    run_on_ranks(_save, 2, layout, False, one, False)
    run_on_ranks(_save, 2, layout, False, many, True)
    stored: dict[str, Tensor] = {}
    for file in Path(many).glob("*.safetensors"):
        stored.update(load_file(file))
    assert stored.keys() == load_file(one).keys()
    assert all(torch.equal(stored[name], value) for name, value in load_file(one).items())


def test_a_file_of_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    """Nor does one load that has two values for a weight that the first and the last stage share."""
    path, differing = str(tmp_path / "model.safetensors"), str(tmp_path / "differing.safetensors")
    run_on_ranks(_save, 2, {"pp_size": 2}, False, path, False)
    stored = load_file(path)
    save_file({name: value for name, value in stored.items() if name != "head.bias"}, differing)
    save_file({**stored, "head.weight": stored["embedding.weight"].clone()}, path)
    for another, difference in run_on_ranks(_refused, 2, path, differing):
        assert "made for another model" in another
        assert "head.bias" in another
        assert "'embedding.weight' and 'head.weight' with different values" in difference
