"""HybridParallelPlugin and execute_pipeline: batches, losses, precision, data, and what is refused."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, CHUNKS, batch_of, language, loss_of
from processes import run_on_ranks
from tensor_harness import LANGUAGE_PLAN
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gemini import ConfigError, CPUAdam, HybridAdam
from gemini.parallel import Booster, GeminiPlugin, HybridParallelPlugin
from gemini.parallel.pipeline.batches import cut_batch

Batch = tuple[Tensor, Tensor]


def boosted(**options: Any) -> tuple[Booster, Any, Any]:
    plugin = HybridParallelPlugin(**{"num_microbatches": 4, "tp_plan": LANGUAGE_PLAN, **CHUNKS, **options})
    booster, model = Booster(plugin=plugin), language()
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    return booster, model, optimizer


# -- how much a loss counts ------------------------------------------------------------------------


def uneven(step: int) -> Batch:
    """Tokens, and how many of each sequence count: other numbers in each micro-batch."""
    return batch_of(step), torch.arange(16) % 5 + 1


def loss_of_some(output: Tensor, batch: Batch) -> Tensor:
    """The mean over the tokens that count."""
    ids, lengths = batch
    counted = torch.arange(5) < lengths[:, None]
    each = nn.functional.cross_entropy(output[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (each * counted).sum() / counted.sum()


def number_of_tokens(batch: Batch) -> float:
    return float(batch[1].sum())


def _count(sizes: dict[str, int]) -> tuple[list[float], list[float]]:
    booster, model, optimizer = boosted(max_norm=1.0, **sizes)
    ranks, losses, norms = booster.plugin.data_ranks, [], []
    for step in range(3):
        part = tuple(value.chunk(ranks.size)[ranks.number] for value in uneven(step))
        out = booster.execute_pipeline(iter([part]), model, loss_of_some, optimizer, count=number_of_tokens)
        optimizer.step()
        losses.append(float(out["loss"]))
        norms.append(optimizer.get_grad_norm())
    return losses, norms


@pytest.mark.parametrize(("ranks", "sizes"), [(2, {"pp_size": 2}), (4, {"pp_size": 2}), (2, {})])
def test_a_mean_over_tokens_is_that_of_the_whole_batch(ranks: int, sizes: dict[str, int]) -> None:
    model = language()
    optimizer = CPUAdam(model.parameters(), **ADAM)
    wanted: tuple[list[float], list[float]] = ([], [])
    for step in range(3):
        loss = loss_of_some(model(uneven(step)[0]), uneven(step))
        loss.backward()
        wanted[0].append(loss.item())
        wanted[1].append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    for losses, norms in run_on_ranks(_count, ranks, sizes):
        assert losses == pytest.approx(wanted[0], rel=1e-5)
        assert norms == pytest.approx(wanted[1], rel=1e-5)


# -- precision ---------------------------------------------------------------------------------------


def _in_16_bits(precision: str, device_bytes: str, scale: float) -> tuple[list[float], float | None, int]:
    options = {"mixed_precision": precision, "device_bytes": device_bytes, "host_bytes": "16MiB"}
    booster, model, optimizer = boosted(
        pp_size=2, pp_style="zbv", initial_scale=scale, hysteresis=1, **options
    )
    losses = []
    for step in range(5):
        losses.append(
            float(booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)["loss"])
        )
        optimizer.step()
    now = optimizer.loss_scale.scale if optimizer.loss_scale is not None else None
    return losses, now, model.stats()["d2h"]["bytes"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_are_near_and_budgets_change_no_bit_of_them(precision: str) -> None:
    roomy = run_on_ranks(_in_16_bits, 2, precision, "64MiB", 16.0)
    tight = run_on_ranks(_in_16_bits, 2, precision, "250KiB", 16.0)
    assert [each[0] for each in tight] == [each[0] for each in roomy]
    assert all(each[2] > 0 for each in tight)
    model = language()
    assert roomy[0][0][0] == pytest.approx(loss_of(model(batch_of(0)), batch_of(0)).item(), rel=0.05)


def test_an_overflow_in_one_stage_skips_the_step_on_all() -> None:
    first, last = run_on_ranks(_in_16_bits, 2, "fp16", "64MiB", 2.0**24)
    assert first[1] == last[1]
    assert first[1] is not None
    assert first[1] < 2.0**24
    assert first[0] == last[0]


def _in_fp16(pp_size: int, num_microbatches: int) -> tuple[list[float], list[float], list[float]]:
    """Train an untied model from a scale that overflows; return losses, norms and scales by step."""
    plugin = HybridParallelPlugin(
        pp_size=pp_size, num_microbatches=num_microbatches, tp_plan=LANGUAGE_PLAN, mixed_precision="fp16",
        initial_scale=2.0**18, hysteresis=1, max_norm=1e6, **CHUNKS,
    )  # fmt: skip
    booster, model = Booster(plugin=plugin), language(tied=False)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    for step in range(8):
        out = booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)
        optimizer.step()
        values = (float(out["loss"]), optimizer.get_grad_norm(), optimizer.loss_scale.scale)
        for series, value in zip(found, values, strict=True):
            series.append(value)
    return found


def test_stages_change_no_bit_of_fp16_but_micro_batches_change_where_the_scale_settles() -> None:
    ((losses, norms, scales),) = run_on_ranks(_in_fp16, 1, 1, 4)
    for in_stages in run_on_ranks(_in_fp16, 2, 2, 4):
        assert in_stages[0] == losses
        assert in_stages[1] == pytest.approx(norms, rel=1e-6, nan_ok=True)  # sums of other squares
        assert in_stages[2] == scales
    ((whole_losses, _, whole),) = run_on_ranks(_in_fp16, 1, 1, 1)
    assert whole[-1] == 2.0**15  # above it the gradient of the loss itself, which is the scale, overflows
    assert scales[-1] > whole[-1]  # here that is a fourth of the scale: fewer steps are left out
    assert whole_losses != pytest.approx(losses, rel=1e-3)


# -- data --------------------------------------------------------------------------------------------


def _data(sizes: dict[str, int]) -> list[list[int]]:
    plugin = HybridParallelPlugin(**sizes)
    loader = plugin.prepare_dataloader(TensorDataset(torch.arange(16)), 4, shuffle=True)
    return [batch[0].tolist() for batch in loader]


def test_the_data_is_divided_over_dp_alone() -> None:
    every = run_on_ranks(_data, 4, {"pp_size": 2})
    assert every[0] == every[2]  # the stages of one pipeline
    assert every[1] == every[3]
    assert sorted(i for batch in every[0] + every[1] for i in batch) == list(range(16))


BAD = {
    "other shapes": "take the same batches",
    "other contents": r"ranks \[0\] and \[1\] .* different contents",
    "other labels": r"ranks \[0\] and \[1\] .* different contents",
    "one ended": r"iterators of ranks \[1\] .* ended before",
    "another number": "cannot be cut",
    "one bad": "refused their batches|cannot be cut",
    "no criterion": "needs a criterion",
}


def _bad_batch(bad: str) -> tuple[str, float]:
    booster, model, optimizer = boosted(pp_size=2)
    rank, criterion, ids = dist.get_rank(), loss_of, batch_of(0)
    if bad == "other shapes":
        ids = ids[:, : 6 - rank]
    elif bad == "other contents":
        ids = ids.flip(0) if rank else ids
    elif bad == "other labels":
        ids = (ids, torch.full((len(ids), 5), 1.0 + rank / 2**20))
    elif bad == "another number":
        ids = ids[:7]
    elif bad == "one bad":
        ids = ids[: 7 + rank]
    else:
        criterion = None
    batches = [] if bad == "one ended" and rank else [ids]
    with pytest.raises(ConfigError) as caught:
        booster.execute_pipeline(iter(batches), model, criterion, optimizer)
    out = booster.execute_pipeline(iter([batch_of(0)]), model, loss_of, optimizer)  # it goes on
    optimizer.step()
    return str(caught.value), float(out["loss"])


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_batch_is_refused_on_all_ranks_which_go_on(bad: str) -> None:
    wanted = loss_of(language()(batch_of(0)), batch_of(0)).item()
    for message, loss in run_on_ranks(_bad_batch, 2, bad):
        assert re.search(BAD[bad], message)
        assert loss == pytest.approx(wanted, rel=1e-5)


def _call_otherwise(contents: str) -> str:
    plugin = HybridParallelPlugin(tp_size=2, tp_plan=LANGUAGE_PLAN, **CHUNKS)
    model = Booster(plugin=plugin).boost(language(), None)[0]
    ids = batch_of(0)
    try:
        model(ids.flip(0) if dist.get_rank() and contents == "other" else ids)
    except ConfigError as error:
        return str(error)
    return "called"


def test_ranks_along_tp_that_call_a_model_with_other_batches_are_told() -> None:
    assert run_on_ranks(_call_otherwise, 2, "the same") == ["called"] * 2
    assert all("different contents" in said for said in run_on_ranks(_call_otherwise, 2, "other"))


def _boost_with(number: str) -> list[str]:
    plugin = HybridParallelPlugin(pp_size=2, **CHUNKS)
    data, said = TensorDataset(torch.arange(16)), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    ranks = dist if number == "of the world" else None
    count, rank = (ranks.get_world_size(), ranks.get_rank()) if ranks else (1, 0)
    sampler: Any = DistributedSampler(data, num_replicas=count, rank=rank)
    logger = logging.getLogger("gemini.parallel.booster.booster")
    logger.addHandler(handler)
    try:
        Booster(plugin=plugin).boost(language(), None, dataloader=DataLoader(data, sampler=sampler))
        Booster(plugin=plugin).boost(language(), None, dataloader=DataLoader(data))
    finally:
        logger.removeHandler(handler)
    return said


def test_samplers_are_judged_by_dp() -> None:
    assert run_on_ranks(_boost_with, 2, "of dp") == [[], []]
    for rank, said in enumerate(run_on_ranks(_boost_with, 2, "of the world")):
        assert len(said) == 1
        assert f"gives this rank part {rank} of 2, but it needs part 0 of 1" in said[0]


# -- calls -------------------------------------------------------------------------------------------


def test_one_process_needs_no_launch() -> None:
    booster, model, optimizer = boosted()
    wanted = language()
    loss = loss_of(wanted(batch_of(0)), batch_of(0))
    out = booster.execute_pipeline(iter([batch_of(0)]), model, loss_of, optimizer, return_outputs=True)
    optimizer.step()
    assert float(out["loss"]) == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(torch.cat(out["outputs"]), wanted(batch_of(0)), atol=1e-6)
    assert model(batch_of(0)).shape == (16, 6, 37)


def _outputs() -> tuple[Any, float]:
    booster, model, optimizer = boosted(pp_size=2)
    training = booster.execute_pipeline(iter([batch_of(0)]), model, loss_of, optimizer, return_outputs=True)
    optimizer.zero_grad()
    found = booster.execute_pipeline(iter([batch_of(0)]), model, None, return_outputs=True)
    assert found["loss"] is None
    if found["outputs"] is not None:
        assert all(torch.equal(a, b) for a, b in zip(found["outputs"], training["outputs"], strict=True))
        assert not found["outputs"][0].requires_grad
    return found["outputs"], float(training["loss"])


def test_outputs_are_where_the_last_stage_is() -> None:
    first, last = run_on_ranks(_outputs, 2)
    assert first[0] is None
    assert torch.allclose(torch.cat(last[0]), language()(batch_of(0)), atol=1e-6)
    assert first[1] == last[1]


def test_a_batch_is_cut_in_any_of_its_forms() -> None:
    ids = torch.arange(8)
    assert [piece["ids"].tolist() for piece in cut_batch({"ids": ids, "flag": True}, 2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert len(cut_batch((ids, ids), size=2)) == 4
    assert len(cut_batch([ids])) == 1
    for count, size in ((3, None), (None, 3), (0, None), (2, 2)):
        with pytest.raises(ConfigError, match=r"\[1, 2, 4, 8\]"):
            cut_batch(ids, count, size)
    with pytest.raises(ConfigError, match="number of samples"):
        cut_batch((ids, ids[:3]), 2)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="zero_stage"):
        HybridParallelPlugin(zero_stage=7)
    with pytest.raises(ConfigError, match="do not divide 1"):
        Booster(plugin=HybridParallelPlugin(pp_size=2)).boost(language())
    with pytest.raises(TypeError, match="no_such"):
        HybridParallelPlugin(no_such=1)
    with pytest.raises(ConfigError, match="gpipe"):
        HybridParallelPlugin(pp_size=2, pp_style="pipedream")
    booster = Booster(plugin=GeminiPlugin())
    model, optimizer, *_ = booster.boost(model := language(), HybridAdam(model.parameters()))
    with pytest.raises(ConfigError, match="HybridParallelPlugin"):
        booster.execute_pipeline(iter([batch_of(0)]), model, loss_of, optimizer)


def test_a_schedule_that_is_none_is_refused_where_there_is_one_stage_too() -> None:
    with pytest.raises(ConfigError, match="there is no schedule '1f2b'; there are gpipe, 1f1b"):
        HybridParallelPlugin(pp_style="1f2b")
