"""Files of an optimizer over stages and parts are those of the whole model, and load at any other layout."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, CHUNKS, MAX_NORM, batch_of, language, loss_of
from processes import run_on_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensor_harness import LANGUAGE_PLAN
from torch import Tensor

from gemini import ConfigError, CPUAdam
from gemini.errors import CheckpointError
from gemini.parallel import Booster, GeminiPlugin, HybridParallelPlugin

# (dp, pp, tp)
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2)]
Sizes = tuple[int, int, int]
Files = tuple[str, str, str]


def world(sizes: Sizes) -> int:
    return sizes[0] * sizes[1] * sizes[2]


def boosted(sizes: Sizes, tied: bool, **options: Any) -> tuple[Booster, Any, Any, Any]:
    """Two groups, whose learning rates a scheduler lowers."""
    options = dict(options)
    adam, dtype = {**ADAM, **options.pop("adam", {})}, options.pop("dtype", torch.float32)
    plugin = HybridParallelPlugin(
        tp_size=sizes[2],
        pp_size=sizes[1],
        num_microbatches=4,
        tp_plan=LANGUAGE_PLAN,
        max_norm=MAX_NORM,
        **{**CHUNKS, **options},
    )
    booster, model = Booster(plugin=plugin), language(tied=tied).to(dtype)
    optimizer: Any = CPUAdam(groups_of(model), **adam)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    return booster, model, optimizer, scheduler


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the parameters in an order that is not the model's."""
    named = list(model.named_parameters())
    return [
        {"params": [param for name, param in reversed(named) if "down" in name], "weight_decay": 0.1},
        {"params": [param for name, param in named if "down" not in name]},
    ]


def train(boost: tuple[Booster, Any, Any, Any], steps: range) -> list[float]:
    booster, model, optimizer, scheduler = boost
    ranks, losses = booster.plugin.data_ranks, []
    for step in steps:
        part = batch_of(step).chunk(ranks.size)[ranks.number]
        losses.append(float(booster.execute_pipeline(iter([part]), model, loss_of, optimizer)["loss"]))
        optimizer.step()
        scheduler.step()
    return losses


def files_at(directory: Path) -> Files:
    directory.mkdir(exist_ok=True)
    return str(directory / "model"), str(directory / "optimizer"), str(directory / "scheduler")


def save(boost: tuple[Booster, Any, Any, Any], files: Files, shard: bool = False) -> None:
    booster, model, optimizer, scheduler = boost
    booster.save_model(model, files[0], shard=shard)
    booster.save_optimizer(optimizer, files[1], shard=shard)
    booster.save_lr_scheduler(scheduler, files[2])


def load(boost: tuple[Booster, Any, Any, Any], files: Files) -> None:
    booster, model, optimizer, scheduler = boost
    booster.load_optimizer(optimizer, files[1])
    booster.load_model(model, files[0])
    booster.load_lr_scheduler(scheduler, files[2])


def content(path: str) -> dict[str, Tensor]:
    found = Path(path)
    each = sorted(found.glob("*.safetensors")) if found.is_dir() else [found]
    return {name: value for file in each for name, value in load_file(file).items()}


def document(path: str) -> Any:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["gemini.optimizer"])


def assert_same_files(one: Files, other: Files) -> None:
    for a, b in zip(one[:2], other[:2], strict=True):
        there, here = content(a), content(b)
        assert there.keys() == here.keys()
        assert all(torch.equal(value, here[name]) for name, value in there.items())
    assert document(one[1]) == document(other[1])
    assert Path(one[2]).read_text() == Path(other[2]).read_text()


def _train_and_save(sizes: Sizes, tied: bool, files: Files, options: dict[str, Any]) -> list[float]:
    boost = boosted(sizes, tied, **options)
    train(boost, range(3))
    save(boost, files)
    return train(boost, range(3, 5))


def _load_and_train(
    sizes: Sizes, tied: bool, each: list[tuple[Files, Files]], options: dict[str, Any]
) -> list[list[float]]:
    """Load each of some files over what was there before, save it again elsewhere, and train on."""
    boost, losses = boosted(sizes, tied, **options), []
    train(boost, range(1))
    for files, again in each:
        load(boost, files)
        save(boost, again)
        losses.append(train(boost, range(3, 5)))
    return losses


@pytest.mark.dear("every layout loads what every other one saved")
def test_what_any_layout_saves_any_other_goes_on_from(tmp_path: Path) -> None:
    saved = [files_at(tmp_path / f"from-{index}") for index in range(len(LAYOUTS))]
    wanted = [
        run_on_ranks(_train_and_save, world(sizes), sizes, True, files, {})[0]
        for sizes, files in zip(LAYOUTS, saved, strict=True)
    ]
    for sizes in LAYOUTS:
        again = [files_at(tmp_path / f"again-{index}") for index in range(len(LAYOUTS))]
        pairs = list(zip(saved, again, strict=True))
        for losses in run_on_ranks(_load_and_train, world(sizes), sizes, True, pairs, {}):
            for found, of_saved in zip(losses, wanted, strict=True):
                assert found == pytest.approx(of_saved, rel=1e-6)
        for one, other in pairs:
            assert_same_files(one, other)


# -- what files hold -------------------------------------------------------------------------------


def _as_gemini_plugin_does(files: Files, again: Files) -> dict[str, Tensor]:
    booster, model = Booster(plugin=GeminiPlugin(max_norm=MAX_NORM, **CHUNKS)), language(tied=False)
    optimizer: Any = CPUAdam(groups_of(model), **ADAM)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    load((booster, model, optimizer, scheduler), files)
    save((booster, model, optimizer, scheduler), again)
    return {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_gemini_plugin_goes_on_from_what_parts_save_and_the_other_way_round(
    tmp_path: Path, ranks: int
) -> None:
    saved, of_gemini, again = (files_at(tmp_path / name) for name in ("saved", "gemini", "again"))
    sizes = LAYOUTS[-1]
    run_on_ranks(_train_and_save, world(sizes), sizes, False, saved, {})
    run_on_ranks(_as_gemini_plugin_does, ranks, saved, of_gemini)
    run_on_ranks(_load_and_train, world(sizes), sizes, False, [(of_gemini, again)], {})
    assert_same_files(saved, of_gemini)
    assert_same_files(saved, again)


def _states_beside_those_of_one_process(sizes: Sizes, files: Files) -> None:
    booster, model, optimizer, _ = boosted(sizes, True)
    for step in range(3):
        booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)
        optimizer.step()
    booster.save_optimizer(optimizer, files[1], shard=True, size_per_shard=1)


def test_states_are_those_of_the_whole_model(tmp_path: Path) -> None:
    files, sizes = files_at(tmp_path / "saved"), LAYOUTS[-1]
    run_on_ranks(_states_beside_those_of_one_process, world(sizes), sizes, files)
    model = language()
    optimizer = CPUAdam(groups_of(model), **ADAM)
    for step in range(3):
        loss_of(model(batch_of(step)), batch_of(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    stored = content(files[1])
    wanted = {
        f"{name}/{moment}": optimizer.state[param][moment]
        for name, param in model.named_parameters()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    assert stored.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(stored[name], value, rtol=1e-4, atol=1e-6 * float(value.abs().max())), name


# -- how states are kept ---------------------------------------------------------------------------

TIGHT = {"device_bytes": "250KiB", "host_bytes": "16MiB"}
KEPT: dict[str, dict[str, Any]] = {
    "bf16 with masters": {"mixed_precision": "bf16", **TIGHT},
    "fp16 with masters": {"mixed_precision": "fp16", "initial_scale": 16.0},
    "bf16 moments": {"adam": {"state_dtype": "bf16"}},
    "remainders": {"dtype": torch.bfloat16, "adam": {"master_remainders": True}},
}


@pytest.mark.parametrize("kept", KEPT)
def test_no_bit_of_what_is_kept_is_lost(tmp_path: Path, kept: str) -> None:
    saved, then, again = (files_at(tmp_path / name) for name in ("saved", "then", "again"))
    options = KEPT[kept]
    run_on_ranks(_train_and_save, 4, (1, 2, 2), True, saved, options)
    run_on_ranks(_load_and_train, 2, (2, 1, 1), True, [(saved, then)], options)
    run_on_ranks(_load_and_train, 2, (1, 1, 2), True, [(then, again)], options)
    assert_same_files(saved, then)
    assert_same_files(saved, again)


def test_int8_moments_keep_their_bits_where_no_tensor_is_cut(tmp_path: Path) -> None:
    saved, then, cut = (files_at(tmp_path / name) for name in ("saved", "then", "cut"))
    options = {"adam": {"state_dtype": "int8"}}
    wanted = run_on_ranks(_train_and_save, 2, (1, 2, 1), True, saved, options)[0]
    run_on_ranks(_load_and_train, 2, (2, 1, 1), True, [(saved, then)], options)
    assert_same_files(saved, then)
    for losses in run_on_ranks(_load_and_train, 2, (1, 1, 2), True, [(saved, cut)], options):
        assert losses[0] == pytest.approx(wanted, rel=1e-3)


# -- memory ----------------------------------------------------------------------------------------


class _Alive:
    """Counts the tensors that a function has returned and that somebody still has."""

    def __init__(self, call: Any) -> None:
        self._call, self._now, self.most = call, 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._call(*args, **kwargs)
        for tensor in found.values() if isinstance(found, dict) else [found]:
            if not tensor.is_meta:
                self._now += 1
                self.most = max(self.most, self._now)
                weakref.finalize(tensor, self._gone)
        return found

    def _gone(self) -> None:
        self._now -= 1


def _most_tensors(files: Files) -> tuple[int, int]:
    boost = boosted((1, 1, 2), True)
    train(boost, range(1))
    booster, model, optimizer, _ = boost
    partition = booster.plugin.parts[model].partition
    saving, loading = _Alive(partition.gather_state), _Alive(partition.cut_state)
    partition.gather_state, partition.cut_state = saving, loading
    booster.save_optimizer(optimizer, files[1])
    booster.load_optimizer(optimizer, files[1])
    return saving.most, loading.most


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    for most in run_on_ranks(_most_tensors, 2, files_at(tmp_path)):
        assert most[0] == 1
        assert most[1] <= 2  # halves


# -- refusals --------------------------------------------------------------------------------------


def _refused(sizes: Sizes, tied: bool, path: str) -> str:
    booster, model, optimizer, _ = boosted(sizes, tied)
    train((booster, model, optimizer, _), range(1))
    before = optimizer.state_dict()
    with pytest.raises(CheckpointError) as caught:
        booster.load_optimizer(optimizer, path)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for number, entry in before["state"].items():
        assert all(torch.equal(value, after["state"][number][key]) for key, value in entry.items())
    train((booster, model, optimizer, _), range(1))
    return str(caught.value)


def test_a_file_that_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    saved = files_at(tmp_path)
    run_on_ranks(_train_and_save, 2, (1, 2, 1), False, saved, {})
    for message in run_on_ranks(_refused, 4, (1, 2, 2), True, saved[1]):  # another number of parameters
        assert "when it was saved" in message
    for message in run_on_ranks(_refused, 2, (1, 2, 1), False, saved[0]):
        assert "was not written by save_optimizer" in message
    broken = content(saved[1])
    del broken["blocks.3.down.weight/exp_avg"]  # the first stage does not have it
    save_file(broken, saved[1], {"gemini.optimizer": json.dumps(document(saved[1]))})
    for message in run_on_ranks(_refused, 2, (1, 2, 1), False, saved[1]):
        assert "'blocks.3.down.weight' has no exp_avg" in message
    broken["blocks.3.down.weight/exp_avg"] = torch.zeros(3)
    save_file(broken, saved[1], {"gemini.optimizer": json.dumps(document(saved[1]))})
    for message in run_on_ranks(_refused, 2, (1, 2, 1), False, saved[1]):
        assert "has shape (3,) in the checkpoint and (32, 128) in the model" in message


def _groups_changed(path: str) -> None:
    booster, _, optimizer, _ = boosted((1, 2, 1), True)
    optimizer.param_groups[1]["params"].pop()
    with pytest.raises(ConfigError, match=r"make all groups before boost\(\)"):
        booster.save_optimizer(optimizer, path)


def test_groups_that_changed_are_refused(tmp_path: Path) -> None:
    run_on_ranks(_groups_changed, 2, str(tmp_path / "optimizer"))
    assert not list(tmp_path.iterdir())
