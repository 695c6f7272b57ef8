"""The laws of ZeRO 1 and 2: how states are cut, sent and kept never changes what is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import pairs
from processes import own_part, run_on_ranks
from torch import Tensor
from zero_models import (
    EVERY_WAY,
    adamw,
    assert_same,
    loss_of,
    odd_net,
    row_major_net,
    tokens_of,
    train,
    train_plain,
    weights,
)

from gemini import ConfigError, CPUAdam
from gemini.parallel.zero import LowLevelZeroOptimizer

# A few units in the last place of fp32, on weights near 1 after four AdamW steps: ranks sum gradients of
# parts of the batch, one process sums the whole batch.
TOLERANCE = 2e-6


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.01)


def rmsprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=1e-3, centered=True)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=1e-2)


def cpu_adam(params: Any) -> torch.optim.Optimizer:
    return CPUAdam(params, lr=1e-2, weight_decay=0.1)


OPTIMIZERS = [adamw, sgd, rmsprop, adagrad, cpu_adam]


def _train(options: dict[str, Any]) -> dict[str, Tensor]:
    return weights(train(**options)[0])


def _each(options: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [_train(each) for each in options]


# -- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2])
def test_one_process_trains_as_the_plain_optimizer_does(
    make: Callable[[Any], torch.optim.Optimizer], stage: int
) -> None:
    want, plain = train_plain(make=make)
    got, optimizer = train(make=make, stage=stage)
    assert_same(weights(got), weights(want))
    for key, entry in plain.state_dict()["state"].items():
        for name, value in entry.items():
            assert torch.equal(optimizer.state_dict()["state"][key][name], value), (key, name)


@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_one_process_clips_as_torch_does(max_norm: float) -> None:
    want, _ = train_plain(max_norm=max_norm, model=row_major_net())
    got, _ = train(clip_grad_norm=max_norm, model=row_major_net())
    assert_same(weights(got), weights(want))


def test_one_process_sends_nothing() -> None:
    traffic = train(stage=2, overlap_communication=True)[1].traffic
    assert traffic.reduce_bytes == traffic.gather_bytes == traffic.other_bytes == 0


def test_parameters_keep_their_memory_and_need_no_masters_in_fp32() -> None:
    model = odd_net()
    before = {name: param.data_ptr() for name, param in model.named_parameters()}
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()))
    assert before == {name: param.data_ptr() for name, param in model.named_parameters()}
    masters = [param.data_ptr() for group in optimizer.param_groups for param in group["params"]]
    in_order = [param.data_ptr() for param in model.parameters() if param.is_contiguous()]
    assert set(in_order) < set(masters)


# -- several ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_train_as_one_process_does_on_the_whole_batch(world_size: int) -> None:
    cases = [{"make": make, "clip_grad_norm": 0.05} for make in OPTIMIZERS]
    cases += [{"micro_batches": 3}, {"stage": 2, "micro_batches": 3, "overlap_communication": True}]
    every = run_on_ranks(_each, world_size, cases)
    for index, case in enumerate(cases):
        norm = case.get("clip_grad_norm", 0.0)
        want = weights(train_plain(make=case.get("make", adamw), max_norm=norm)[0])
        for results in every:
            assert_same(results[index], every[0][index])
            for name, weight in want.items():
                torch.testing.assert_close(results[index][name], weight, rtol=0, atol=TOLERANCE)


@pairs(world_size=[2, 3], precision=["fp32", "bf16", "fp16"], micro_batches=[1, 2])
def test_stage_buckets_overlap_and_offload_never_change_a_bit(
    world_size: int, precision: str, micro_batches: int
) -> None:
    common = {"precision": precision, "micro_batches": micro_batches, "clip_grad_norm": 0.05}
    every = run_on_ranks(_each, world_size, [{**common, **way} for way in EVERY_WAY])
    for results in every:
        for got in results:
            assert_same(got, every[0][0])


def _rounds(micro_batches: int, synced: bool, precision: str) -> tuple[int, int]:
    """Return how often and how much a rank sends for the gradients of one step."""
    model = odd_net()
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), stage=2, precision=precision)
    for index, part in enumerate(own_part(tokens_of(0)).chunk(micro_batches)):
        if synced or index + 1 == micro_batches:
            optimizer.backward(loss_of(model, part))
        else:
            with optimizer.no_sync():
                optimizer.backward(loss_of(model, part))
    return optimizer.traffic.num_reduces, optimizer.traffic.reduce_bytes


def test_local_accumulation_in_stage_2_really_saves_communication() -> None:
    once = run_on_ranks(_rounds, 2, 1, False, "fp32")
    assert run_on_ranks(_rounds, 2, 3, False, "fp32") == once
    assert run_on_ranks(_rounds, 2, 3, True, "fp32") == [(3 * num, 3 * size) for num, size in once]


def test_16_bit_gradients_are_sent_in_16_bits_and_their_local_sums_in_fp32() -> None:
    wide = run_on_ranks(_rounds, 2, 1, False, "fp32")[0][1]
    assert run_on_ranks(_rounds, 2, 1, False, "bf16")[0][1] * 2 == wide
    assert run_on_ranks(_rounds, 2, 3, False, "bf16")[0][1] == wide


def _accumulate_in_three_ways() -> list[dict[str, Tensor]]:
    results = []
    for way in ("no_sync", "autograd", "synced"):
        model = odd_net()
        optimizer = LowLevelZeroOptimizer(adamw(model.parameters()))
        first, second = own_part(tokens_of(0)).chunk(2)
        if way == "no_sync":
            with optimizer.no_sync():
                optimizer.backward(loss_of(model, first))
            optimizer.backward(loss_of(model, second))
        elif way == "autograd":
            loss_of(model, first).backward()
            loss_of(model, second).backward()
        else:
            optimizer.backward(loss_of(model, first))
            optimizer.backward(loss_of(model, second))
        optimizer.step()
        results.append(weights(model))
    return results


def test_plain_backward_and_every_kind_of_accumulation_give_the_same_step() -> None:
    for local, plain, synced in run_on_ranks(_accumulate_in_three_ways, 2):
        assert_same(plain, local)
        for name, weight in local.items():
            torch.testing.assert_close(synced[name], weight, rtol=0, atol=TOLERANCE)


def _start_differently() -> dict[str, Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    model = torch.nn.Linear(5, 3)
    LowLevelZeroOptimizer(adamw(model.parameters()), precision="bf16")
    return weights(model)


def test_ranks_start_from_the_weights_of_the_first() -> None:
    first, second = run_on_ranks(_start_differently, 2)
    assert_same(second, first)


def _differ_in_shape() -> str:
    width = 3 + torch.distributed.get_rank()
    with pytest.raises(ConfigError, match=r"ranks \[1\] have different parameters") as caught:
        LowLevelZeroOptimizer(adamw(torch.nn.Linear(width, 3).parameters()))
    return str(caught.value)


def test_ranks_with_other_parameters_are_refused_on_all_ranks() -> None:
    assert len(set(run_on_ranks(_differ_in_shape, 2))) == 1


def _half_group() -> list[dict[str, Tensor]]:
    """Train in two groups of two ranks each, on other batches."""
    dist = torch.distributed
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    model = odd_net()
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()), dp_process_group=groups[mine])
    optimizer.backward(loss_of(model, tokens_of(mine).chunk(2)[dist.get_rank() % 2]))
    optimizer.step()
    return [weights(model)]


def test_group_of_some_ranks_trains_on_its_own() -> None:
    every = [result[0] for result in run_on_ranks(_half_group, 4)]
    assert_same(every[1], every[0])
    assert_same(every[3], every[2])
    assert not torch.equal(every[0]["bias"], every[2]["bias"])


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 3}, "stage 1 or 2"),
        ({"stage": 1, "partition_grad": True}, "contradict"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size"),
        ({"clip_grad_norm": -1.0}, "max_norm"),
        ({"precision": "fp8"}, "choose from"),
        ({"communication_dtype": torch.int8}, "communication_dtype"),
        ({"communication_dtype": torch.float16}, "loss scale of fp16"),
        ({"communication_dtype": torch.float16, "precision": "bf16"}, "loss scale of fp16"),
        ({"initial_scale": 0.5}, "min_scale"),
    ],
)
def test_option_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    model = odd_net()
    optimizer = adamw(model.parameters())
    with pytest.raises(ConfigError, match=message):
        LowLevelZeroOptimizer(optimizer, **options)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_unknown_keyword_is_refused_and_so_is_a_late_group() -> None:
    model = odd_net()
    with pytest.raises(TypeError, match="max_norm"):
        LowLevelZeroOptimizer(adamw(model.parameters()), max_norm=1.0)  # type: ignore[call-arg]
    optimizer = LowLevelZeroOptimizer(adamw(model.parameters()))
    with pytest.raises(ConfigError, match="after wrapping"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "SparseAdam"])
def test_optimizer_that_is_not_elementwise_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="element"):
        LowLevelZeroOptimizer(getattr(torch.optim, name)(odd_net().parameters()))


class OfMatrices(torch.optim.Optimizer):
    """Of a class that nobody knows: decays matrices alone, or everything; counts in its group."""

    def __init__(self, params: Any, alone: bool) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})
        self.alone = alone

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.dim() > 1 or not self.alone:
                    param.mul_(1 - 1e-3)
                param.sub_(param.grad, alpha=group["lr"] / group["count"])


def test_a_class_that_is_not_known_is_tried_before_its_parameters_are_cut() -> None:
    with pytest.raises(ConfigError, match=r"OfMatrices is to update parts of parameters.*Use stage=0"):
        LowLevelZeroOptimizer(OfMatrices(odd_net().parameters(), alone=True))
    LowLevelZeroOptimizer(OfMatrices(odd_net().parameters(), alone=True), stage=0)
    optimizer = OfMatrices(odd_net().parameters(), alone=False)
    LowLevelZeroOptimizer(optimizer)
    assert optimizer.param_groups[0]["count"] == 0
