"""A pipeline holds no message that was taken, and computes no block more often than was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from pipeline_harness import ADAM, batch_of, language, loss_of
from processes import run_on_ranks
from tensor_harness import LANGUAGE_PLAN
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini import CPUAdam
from gemini.parallel import Booster, HybridParallelPlugin
from gemini.parallel.pipeline.stage_messages import StageMessages

BLOCKS = tuple(f"blocks.{index}" for index in range(4))


class Recomputed(nn.Module):
    """A block that recomputes its activations by itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def _step(
    style: str, micro_batches: int, options: dict[str, Any], by_model: bool = False
) -> tuple[int, list[int]]:
    """Train two steps, of which the first finds what goes from stage to stage; return how many messages were
    under way at the end of the second, and how often each block ran in it."""
    plugin = HybridParallelPlugin(
        pp_size=2,
        pp_style=style,
        num_microbatches=micro_batches,
        zero_stage=0,
        tp_plan=LANGUAGE_PLAN,
        **options,
    )
    model, runs, left = language(), [0] * len(BLOCKS), []
    for index, block in enumerate(model.blocks):
        block.up.register_forward_hook(lambda *_, index=index: runs.__setitem__(index, runs[index] + 1))
    if by_model:
        model.blocks = nn.ModuleList(map(Recomputed, model.blocks))
    finish = StageMessages.finish
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    StageMessages.finish = lambda self: (left.append(len(self._sent)), finish(self))[1]  # type: ignore[method-assign]
    try:
        for step in range(2):
            runs[:] = [0] * len(BLOCKS)
            booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)
            optimizer.zero_grad()
    finally:
        StageMessages.finish = finish  # type: ignore[method-assign]
    return left[-1], runs


def test_a_rank_keeps_no_message_that_the_other_has_taken() -> None:
    few, many = (run_on_ranks(_step, 2, "1f1b", count, {}) for count in (4, 16))
    assert all(under_way <= 4 for under_way, _ in many)
    assert [under_way for under_way, _ in many] == [under_way for under_way, _ in few]


@pytest.mark.parametrize("style", ["1f1b", "zbv"])
def test_a_block_runs_twice_for_a_micro_batch_where_it_recomputes(style: str) -> None:
    chunks = {"num_model_chunks": 2} if style == "zbv" else {}
    found = run_on_ranks(_step, 2, style, 4, {"recompute": BLOCKS, **chunks})
    assert [sum(each) for each in zip(*(runs for _, runs in found), strict=True)] == [8] * len(BLOCKS)


@pytest.mark.parametrize("style", ["zero_bubble", "zbv"])
def test_a_block_that_recomputes_by_itself_runs_twice_where_backward_is_split(style: str) -> None:
    found = run_on_ranks(_step, 2, style, 4, {"num_model_chunks": 2}, True)
    assert [sum(each) for each in zip(*(runs for _, runs in found), strict=True)] == [8] * len(BLOCKS)
