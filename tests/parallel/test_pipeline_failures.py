"""A rank of a pipeline that fails is named on every other one, with what it was doing, and none is left."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, CHUNKS, batch_of, language, loss_of
from processes import RanksFailed, run_on_ranks
from tensor_harness import LANGUAGE_PLAN
from torch import Tensor, nn
from torch import distributed as dist

from gemini import CPUAdam
from gemini.comm.heartbeats import PATIENCE_VARIABLE
from gemini.parallel import Booster, HybridParallelPlugin

SOON = 30.0


def _set_patience(seconds: float) -> None:
    os.environ[PATIENCE_VARIABLE] = str(seconds)


class _Trap(torch.autograd.Function):
    """Fails where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Any) -> Tensor:
        ctx.trap = trap
        trap("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.trap("backward")
        return grad, None


class Trapped(nn.Module):
    """A block that fails in its third pass of a kind, on one rank."""

    def __init__(self, inner: nn.Module, kind: str, how: str, odd: int) -> None:
        super().__init__()
        self.inner = inner
        self.told = (kind, how, odd)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # a stage looks at what it hands on before it trains
            return self.inner(x)
        out: Tensor = _Trap.apply(self.inner(x), self.spring)
        return out

    def spring(self, kind: str) -> None:
        wanted, how, odd = self.told
        if kind != wanted or dist.get_rank() != odd:
            return
        self.passes += 1
        if self.passes == 3 and how == "raise":
            raise ValueError("a bad sample")
        if self.passes == 3 and how == "die":
            os.kill(os.getpid(), signal.SIGKILL)


def _train(kind: str, how: str, odd: int, style: str, sizes: dict[str, int]) -> tuple[str, float]:
    _set_patience(4.0)
    torch.manual_seed(3)
    model = language()
    model.blocks[3] = Trapped(model.blocks[3], kind, how, odd)
    plugin = HybridParallelPlugin(pp_style=style, num_microbatches=4, tp_plan=PLAN, **sizes, **CHUNKS)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    begin, message = time.monotonic(), ""
    try:
        for step in range(3):
            booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)
            optimizer.step()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    model.close()
    return message, seconds


PLAN = {name: style for name, style in LANGUAGE_PLAN.items() if "blocks" not in name}


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("style", ["1f1b", "zero_bubble"])
def test_what_a_stage_raises_is_said_on_all_ranks(kind: str, style: str) -> None:
    sizes = {"pp_size": 2, **({"num_model_chunks": 2} if style == "zero_bubble" else {})}
    first, last = run_on_ranks(_train, 2, kind, "raise", 1, style, sizes)
    assert last[0] == "ValueError: a bad sample"
    stage = 1 if style == "1f1b" else 3
    assert first[0].startswith(f"StateError: stage {stage}, micro-batch 2, {kind}")
    assert "(rank 1): ValueError: a bad sample" in first[0]
    assert max(first[1], last[1]) < SOON


@pytest.mark.parametrize("sizes", [{"pp_size": 2, "tp_size": 2}, {"pp_size": 2}])
def test_ranks_beside_a_failed_stage_hear_of_it_too(sizes: dict[str, int]) -> None:
    every = run_on_ranks(_train, 4, "forward", "raise", 3, "1f1b", sizes)
    for rank, (message, seconds) in enumerate(every):
        assert "ValueError: a bad sample" in message
        assert rank == 3 or "stage 1, micro-batch 2, forward (rank 3)" in message
        assert seconds < SOON


class Skipping(nn.Module):
    """Adds what comes in front of the blocks behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 37)

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x + first)
        return logits


def _skip(style: str, sizes: dict[str, int]) -> str:
    booster = Booster(plugin=HybridParallelPlugin(pp_style=style, num_microbatches=4, **sizes, **CHUNKS))
    model: nn.Module = Skipping()
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    try:
        booster.execute_pipeline(iter([batch_of(0)]), model, loss_of, optimizer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("style", ["1f1b", "zbv"])
def test_a_loss_of_what_another_stage_has_is_refused_on_all_ranks(style: str) -> None:
    first, last = run_on_ranks(_skip, 2, style, {"pp_size": 2})
    told, said = (last, first) if style == "zbv" else (first, last)
    assert said.startswith("ConfigError: the loss depends on a value that only another stage has")
    # Both ends of the model are on one rank in zbv: the last stage is refused nonetheless.
    assert "used after a block" in told


def _raise_between() -> tuple[str, float]:
    _set_patience(4.0)
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=4, tp_plan=PLAN, max_norm=1.0, **CHUNKS)
    booster, model = Booster(plugin=plugin), language()
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    begin, message = time.monotonic(), ""
    try:
        with plugin.mesh:
            booster.execute_pipeline(iter([batch_of(0)]), model, loss_of, optimizer)
            if dist.get_rank() == 1:
                raise ValueError("in the program itself")
            optimizer.step()
    except Exception as error:
        message = str(error)
    seconds = time.monotonic() - begin
    model.close()
    return message, seconds


def test_a_rank_that_raises_between_pass_and_step_is_named() -> None:
    for message, seconds in run_on_ranks(_raise_between, 2):
        assert "in the program itself" in message
        assert seconds < SOON


def test_a_stage_that_dies_is_noticed() -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1:\ndied") as caught:
        run_on_ranks(_train, 2, "forward", "die", 1, "1f1b", {"pp_size": 2})
    assert time.monotonic() - begin < 2 * SOON
    assert "rank 0:" not in str(caught.value)
