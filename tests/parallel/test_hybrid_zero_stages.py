"""HybridParallelPlugin with zero_stage 0 to 2: the numbers of one process, one exchange, any files."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, MAX_NORM, batch_of, language, loss_of, train_whole
from processes import run_on_ranks
from tensor_harness import LANGUAGE_PLAN
from test_pipeline_optimizer_files import assert_same_files, files_at, load, save, train
from torch import distributed as dist
from torch import nn

from gemini import ConfigError, CPUAdam, StateError
from gemini.parallel import Booster, HybridParallelPlugin

STEPS = 3
OPTIONS: dict[str, Any] = {"tp_plan": LANGUAGE_PLAN, "num_microbatches": 4, "max_norm": MAX_NORM}
OPTIONS["log_num_zeros_in_grad"] = True


def boosted(stage: int, optimizer: Any = CPUAdam, **options: Any) -> tuple[Booster, Any, Any, Any]:
    """A booster, a model with a tied weight, its optimizer and a scheduler."""
    booster = Booster(plugin=HybridParallelPlugin(zero_stage=stage, **{**OPTIONS, **options}))
    model = language()
    optimizer = optimizer(model.parameters(), **ADAM)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    return booster, model, optimizer, scheduler


def whole_weights(booster: Booster, model: Any) -> dict[str, torch.Tensor]:
    partition = booster.plugin.parts[model].partition
    return {
        name: value.clone()
        for name, value in partition.gather_state(model.state_dict(keep_vars=True)).items()
    }


def _train(stage: int, batches: int, waits: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Train ``STEPS`` steps of ``batches`` batches; all but the last under ``no_sync`` if it ``waits``."""
    booster, model, optimizer, _ = boosted(stage, **options)
    ranks, losses, norms, zeros = booster.plugin.data_ranks, [], [], []
    for step in range(STEPS):
        for index, part in enumerate(batch_of(step).chunk(ranks.size)[ranks.number].chunk(batches)):
            with booster.no_sync(model) if waits and index < batches - 1 else nullcontext():
                loss = booster.execute_pipeline(iter([part]), model, loss_of, optimizer)["loss"]
        optimizer.step()
        losses.append(float(loss))
        norms.append(optimizer.get_grad_norm())
        zeros.append(optimizer.get_num_zeros_in_grad())
    held = sum(v.numel() for state in optimizer.optim.state.values() for v in state.values() if v.dim())
    found = {"losses": losses, "norms": norms, "zeros": zeros, "weights": whole_weights(booster, model)}
    found |= {"exchanges": optimizer.traffic.num_reduces, "states": held}
    booster.plugin.mesh.leave("ended the test")
    optimizer.close()
    return found


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {}),
    "tp": (2, {"tp_size": 2}),
    "pp": (2, {"pp_size": 2, "pp_style": "zbv"}),
    "pp, several stages": (2, {"pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 2}),
    "dp and pp": (4, {"pp_size": 2}),
    "sent early": (4, {"pp_size": 2, "overlap_communication": True, "reduce_bucket_size_in_m": 1}),
}


def _train_each(options: dict[str, Any]) -> list[dict[str, Any]]:
    return [_train(stage, 1, False, options) for stage in (0, 1, 2)]


def zeros_of_first_step() -> int:
    """Return how many elements of the first gradient are 0 on one process."""
    model = language()
    loss_of(model(batch_of(0)), batch_of(0)).backward()
    return sum(int((p.grad == 0).sum()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_are_equal_to_the_bit_and_near_one_process(layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    wanted = train_whole(STEPS)
    zeros = zeros_of_first_step()
    for whole, cut, cut_more in run_on_ranks(_train_each, ranks, options):
        assert whole["losses"] == pytest.approx(wanted.losses, rel=1e-5)
        assert whole["norms"] == pytest.approx(wanted.norms, rel=1e-6)
        assert whole["zeros"][0] == zeros
        assert whole["zeros"] == cut["zeros"] == cut_more["zeros"]
        for name, value in whole["weights"].items():
            assert torch.allclose(value, wanted.weights[name], atol=1e-5)
        for other in (cut, cut_more):
            assert (other["losses"], other["norms"]) == (whole["losses"], whole["norms"])
            assert all(torch.equal(value, whole["weights"][name]) for name, value in other["weights"].items())
        copies = ranks // options.get("pp_size", 1) // options.get("tp_size", 1)
        assert whole["exchanges"] == cut["exchanges"] == (STEPS if copies > 1 else 0)
        assert cut["states"] <= whole["states"] // copies + 64
        assert whole["states"] > 0


def _zeros_of_chunks() -> int | None:
    booster, model, optimizer, _ = boosted(3, tp_size=2)
    ranks = booster.plugin.data_ranks
    part = batch_of(0).chunk(ranks.size)[ranks.number]
    booster.execute_pipeline(iter([part]), model, loss_of, optimizer)
    optimizer.step()
    found: int | None = optimizer.get_num_zeros_in_grad()
    booster.plugin.mesh.leave("ended the test")
    return found


def test_zeros_in_chunks_are_those_of_the_whole_model_without_what_fills_its_parts_up() -> None:
    assert run_on_ranks(_zeros_of_chunks, 4) == [zeros_of_first_step()] * 4  # 37 rows are cut in two


def _accumulate() -> list[dict[str, Any]]:
    return [_train(stage, 2, True, {"pp_size": 2, "num_microbatches": 2}) for stage in (0, 1, 2)]


def test_gradients_that_accumulate_are_exchanged_once_a_step() -> None:
    ranks = run_on_ranks(_accumulate, 4)
    for each in ranks:
        for found in each:
            assert found["exchanges"] == STEPS
            assert found["norms"] == each[0]["norms"] == ranks[0][0]["norms"]
    model = language()
    loss = loss_of(model(batch_of(0)), batch_of(0)) * 2  # of two batches: gradients are added
    loss.backward()
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert ranks[0][0]["norms"][0] == pytest.approx(norm, rel=1e-6)


# -- files -------------------------------------------------------------------------------------------

Place = tuple[int, dict[str, Any]]
SAVED: list[Place] = [
    (0, {}),
    (1, {"pp_size": 2, "pp_style": "zbv"}),
    (2, {"tp_size": 2}),
    (2, {}),
    (3, {"pp_size": 2}),
]


def _save_each(directory: Path) -> list[list[float]]:
    losses = []
    for index, (stage, options) in enumerate(SAVED):
        boost = boosted(stage, **options)
        train(boost, range(2))
        save(boost, files_at(directory / str(index)))
        losses.append(train(boost, range(2, 4)))
    return losses


def _load_each(directory: Path) -> list[list[list[float]]]:
    losses: list[list[list[float]]] = []
    for place, (stage, options) in enumerate(SAVED):
        boost = boosted(stage, **options)
        train(boost, range(1))
        losses.append([])
        for index in range(len(SAVED)):
            load(boost, files_at(directory / str(index)))
            save(boost, files_at(directory / f"{index} again at {place}"))
            losses[-1].append(train(boost, range(2, 4)))
    return losses


@pytest.mark.dear("every layout saves, and every other loads")
def test_what_any_stage_and_layout_saves_any_other_goes_on_from(tmp_path: Path) -> None:
    wanted = run_on_ranks(_save_each, 2, tmp_path)[0]
    for losses in run_on_ranks(_load_each, 2, tmp_path, timeout=120):
        for place, found in enumerate(losses):
            for index, of_saved in enumerate(wanted):
                assert found[index] == pytest.approx(of_saved, rel=1e-6)
                again = files_at(tmp_path / f"{index} again at {place}")
                assert_same_files(files_at(tmp_path / str(index)), again)


def _masters(directory: Path) -> bool:
    """Save 16-bit weights, whose masters are cut, from stages, and load them over others."""
    files, again = files_at(directory / "one"), files_at(directory / "again")
    boost = boosted(1, pp_size=2, mixed_precision="bf16")
    train(boost, range(2))
    save(boost, files)
    other = boosted(2, mixed_precision="bf16")
    load(other, files)
    save(other, again)
    assert_same_files(files, again)
    return True


def test_masters_of_16_bit_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    assert run_on_ranks(_masters, 2, tmp_path) == [True, True]


# -- 16 bits, other optimizers, other settings ---------------------------------------------------------


def _overflow() -> tuple[list[float], float]:
    booster, model, optimizer, _ = boosted(
        1, pp_size=2, mixed_precision="fp16", initial_scale=2.0**24, max_scale=2.0**24, hysteresis=1
    )
    losses = []
    for _ in range(2):
        losses.append(float(booster.execute_pipeline(iter([batch_of(0)]), model, loss_of, optimizer)["loss"]))
        optimizer.step()
    return losses, optimizer.loss_scale.scale


def test_an_overflow_in_one_stage_skips_the_step_on_all() -> None:
    first, last = run_on_ranks(_overflow, 2)
    assert first == last
    assert first[0][0] == first[0][1]  # nothing was updated
    assert first[1] < 2.0**24


def _others() -> tuple[float, str]:
    """torch's own Adam; then a learning rate that only one stage has."""
    booster, model, optimizer, _ = boosted(1, torch.optim.Adam, pp_size=2)
    train((booster, model, optimizer, _), range(1))
    loss = float(booster.execute_pipeline(iter([batch_of(1)]), model, loss_of, optimizer)["loss"])
    optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    with pytest.raises(StateError) as caught:
        optimizer.step()
    return loss, str(caught.value)


def test_any_elementwise_optimizer_and_settings_that_differ_between_stages() -> None:
    wanted = train_whole(2)
    for loss, message in run_on_ranks(_others, 2):
        assert loss == pytest.approx(wanted.losses[1], rel=1e-5)
        assert "lr=" in message


def _train_with_states_made_before(stage: int) -> list[float]:
    booster, model, optimizer, _ = boosted(stage, torch.optim.Adagrad, tp_size=2)
    losses = []
    for step in range(STEPS):
        out = booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)
        optimizer.step()
        losses.append(float(out["loss"]))
    return losses


@pytest.mark.parametrize("stage", [0, 2])
def test_states_that_an_optimizer_has_before_the_cut_are_cut_too(stage: int) -> None:
    model, wanted = language(), []
    optimizer = torch.optim.Adagrad(model.parameters(), **ADAM)
    for step in range(STEPS):
        loss = loss_of(model(batch_of(step)), batch_of(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    for losses in run_on_ranks(_train_with_states_made_before, 2, stage):
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_what_a_stage_does_not_have_is_refused_by_name() -> None:
    for options in ({"device_bytes": "1GiB"}, {"placement_policy": "cpu"}, {"gather_bytes": 1}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} with zero_stage=1.*zero_stage=3"):
            HybridParallelPlugin(zero_stage=1, **options)
    with pytest.raises(ConfigError, match="cpu_offload with zero_stage=3"):
        HybridParallelPlugin(cpu_offload=True)
    with pytest.raises(ConfigError, match="zero_stage is 4"):
        HybridParallelPlugin(zero_stage=4)
    with pytest.raises(TypeError, match="no_such"):
        HybridParallelPlugin(zero_stage=1, no_such=1)
    with torch.device("meta"):
        model = language()
    with pytest.raises(ConfigError, match="zero_stage=3"):
        Booster(plugin=HybridParallelPlugin(zero_stage=2, **OPTIONS)).boost(model)
    booster, model, optimizer, _ = boosted(2)  # one process, with no launch
    out = booster.execute_pipeline(iter([batch_of(0)]), model, loss_of, optimizer)
    optimizer.step()
    assert float(out["loss"]) == pytest.approx(train_whole(1).losses[0], rel=1e-6)
