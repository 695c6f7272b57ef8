"""What a record says that a rank computes, sends and keeps is what ranks compute, send and keep."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from torch import nn

from gemini import CPUAdam
from gemini.parallel import Booster, HybridParallelPlugin
from gemini.planner.records import CutModel, Part, Record

_SAMPLES, _TOKENS = 2, 16


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def _run(model: nn.Module, sequence: Any, samples: int = _SAMPLES) -> torch.Tensor:
    ids = torch.zeros(samples, _TOKENS, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    loss: torch.Tensor = model(**(batch if sequence is None else sequence.cut(batch))).loss
    return loss


def recorded(part: Part) -> Record:
    return CutModel(llama(), part).record(_run)


def _loss_of(output: Any, _batch: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def _sent(options: dict[str, Any]) -> dict[tuple[str, str], tuple[int, int]]:
    """Train a step; return how often a rank called which collective over which axis, and what it sent."""
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model = llama()
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters()))
    mesh = booster.plugin.mesh
    assert mesh is not None
    axes = {name: axis for name in ("tp", "sp") if (axis := mesh.axis(name)) is not None}
    before = {name: axis.totals() for name, axis in axes.items()}
    ids = torch.arange(_SAMPLES * _TOKENS).view(_SAMPLES, _TOKENS) % 64
    booster.execute_pipeline(iter([{"input_ids": ids, "labels": ids}]), model, _loss_of, optimizer)
    found = {}
    for name, axis in axes.items():
        (calls, sent), (calls_before, sent_before) = axis.totals(), before[name]
        for collective in calls - calls_before:
            found[name, collective] = (
                (calls - calls_before)[collective],
                (sent - sent_before)[collective],
            )
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"tp_size": 2},
        {"sp_size": 2, "sp_mode": "ulysses"},
        {"sp_size": 2, "sp_mode": "ring"},
        {"tp_size": 2, "sp_size": 2, "sp_mode": "ulysses"},
    ],
    ids=str,
)
def test_calls_and_bytes_of_every_axis_are_those_of_a_step(options: dict[str, Any]) -> None:
    sizes = Part(options.get("tp_size", 1), options.get("sp_size", 1), options.get("sp_mode", "ulysses"))
    wanted = run_on_ranks(_sent, sizes.tp * sizes.sp, options)[0]
    calls: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for segment in recorded(sizes).segments:
        for way in (segment.forward, segment.backward):
            for each, count in way.messages.items():
                calls[each.axis, each.collective] += count
                nbytes[each.axis, each.collective] += count * each.sent_bytes
    planned = {key: (calls[key], nbytes[key]) for key in calls}
    if "tp_size" in options:  # before a pass ranks compare what they were given
        (count, sent), (more_calls, more) = planned["tp", "all_gather"], wanted["tp", "all_gather"]
        assert more_calls == count + 1
        assert 0 < more - sent < 512
        wanted["tp", "all_gather"] = count, sent
    assert planned == wanted
