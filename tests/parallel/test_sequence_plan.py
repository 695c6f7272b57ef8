"""What parts of sequences are planned to take is what ranks take; what the plugin refuses a plan refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from pipeline_harness import ADAM
from processes import run_on_ranks
from test_layout_plan import Kept
from test_sequence_plugin import Named, batch_of, loss_of_part
from torch import Tensor, nn

from gemini import ConfigError, CPUAdam
from gemini.cli.main import main
from gemini.parallel import Booster, HybridParallelPlugin
from gemini.parallel.layout_plan import LayoutPlan
from gemini.parallel.mesh import Arrival, Axis

Case = tuple[str, dict[str, Any]]
MICRO_BATCHES = 2


def build(kind: str) -> nn.Module:
    if kind in ("llama", "gpt2", "bert"):
        from test_sequence_stages import build as build_of_transformers

        return build_of_transformers(kind)
    return Named(kind)


def micro_batch(kind: str, size: int = 4) -> dict[str, Tensor]:
    """Return some of four sequences, of a length that nothing divides."""
    batch = {name: value[:size] for name, value in batch_of(0).items()}
    if kind in ("llama", "gpt2", "bert"):  # their masks are made of what is padded, their positions by them
        del batch["position_ids"]
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = loss_of_part(output, batch) if isinstance(output, Tensor) else output.loss
    return loss


def planned(kind: str, options: dict[str, Any], *, data_ranks: int = 1) -> LayoutPlan:
    plugin = HybridParallelPlugin(num_microbatches=MICRO_BATCHES, **options)
    batch = micro_batch(kind, 4 // MICRO_BATCHES)
    return plugin.plan(
        build(kind), lambda model, part: loss_of(model(**part), part), batch, data_ranks=data_ranks
    )


@contextmanager
def messages() -> Iterator[list[int]]:
    """Yield the bytes of messages of attention that are under way, at their most and now."""
    most_and_now = [0, 0]
    swap, pass_on, wait = Axis.all_to_all, Axis.pass_on, Arrival.wait

    def note(nbytes: int) -> None:
        most_and_now[1] += nbytes
        most_and_now[0] = max(most_and_now)

    def swapped(axis: Axis, parts: Any, shapes: Any) -> list[Tensor]:
        got = swap(axis, parts, shapes)
        nbytes = sum(each.nbytes for each in (*parts, *got))
        note(nbytes)
        note(-nbytes)
        return got

    def passed(axis: Axis, tensor: Tensor) -> Arrival:
        note(2 * tensor.nbytes)
        return pass_on(axis, tensor)

    def waited(arrival: Arrival) -> Tensor:
        got = wait(arrival)
        note(-2 * got.nbytes)
        return got

    with (
        mock.patch.object(Axis, "all_to_all", swapped),
        mock.patch.object(Axis, "pass_on", passed),
        mock.patch.object(Arrival, "wait", waited),
    ):
        yield most_and_now


def _measured(cases: list[Case]) -> list[dict[str, int]]:
    """Train a step of each case; return what this rank has of everything."""
    found = []
    for kind, options in cases:
        booster = Booster(plugin=HybridParallelPlugin(num_microbatches=MICRO_BATCHES, **options))
        model: Any = build(kind)
        model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
        batch = micro_batch(kind)
        kept = Kept([*model.parameters(), *model.buffers(), *batch.values()])
        with messages() as sent, torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            booster.execute_pipeline(iter([batch]), model, loss_of, optimizer)
        gradients = sum(optimizer.gradient_bytes())
        optimizer.step()
        states = [v for state in optimizer.optim.state.values() for v in state.values() if v.dim()]
        found.append(
            {
                "parameter_bytes": sum(param.nbytes for param in model.parameters()),
                "gradient_bytes": gradients,
                "state_bytes": sum(state.nbytes for state in states),
                "activation_bytes": kept.peak,
                "message_bytes": sent[0],
            }
        )
    return found


def check(case: Case, found: list[dict[str, int]], ranks_of_stage: int) -> None:
    """Compare what was planned with what ranks have, of which those of the first stage come first."""
    plan = planned(*case)
    for place, real in enumerate(found):
        stage = place // ranks_of_stage
        rank = plan.ranks[stage]
        for name in ("parameter_bytes", "gradient_bytes", "state_bytes"):
            assert getattr(rank, name) == pytest.approx(real[name], abs=64), (case, name)  # what is filled up
        assert rank.message_bytes == real["message_bytes"], case
        sent = 0
        if stage + 1 < len(plan.ranks):  # the output that begins backward is not kept by autograd
            part = 8 if case[1].get("sp_mode") == "ring" else 7  # of 13 tokens, filled up
            sent = 4 * part * 32 * 4  # four sequences of 32 features
        assert rank.activation_bytes == pytest.approx(real["activation_bytes"] + sent, abs=512), case


ULYSSES: dict[str, Any] = {"sp_size": 2, "zero_stage": 1}
RING: dict[str, Any] = {**ULYSSES, "sp_mode": "ring"}


def test_ranks_have_what_was_planned() -> None:
    cases: list[Case] = [("torch", ULYSSES), ("ours", ULYSSES), ("ours", RING)]
    for case, *found in zip(cases, *run_on_ranks(_measured, 2, cases), strict=True):
        check(case, found, 2)


def test_ranks_have_what_was_planned_of_models_of_transformers() -> None:
    pytest.importorskip("transformers", reason="models of transformers")
    cases: list[Case] = [(kind, options) for kind in ("llama", "bert") for options in (ULYSSES, RING)]
    measured = run_on_ranks(_measured, 2, cases, timeout=120)  # they import transformers
    for case, *found in zip(cases, *measured, strict=True):
        check(case, found, 2)


def test_stages_have_what_was_planned() -> None:
    cases: list[Case] = [("ours", {**options, "pp_size": 2}) for options in (ULYSSES, RING)]
    for case, *found in zip(cases, *run_on_ranks(_measured, 4, cases), strict=True):
        check(case, found, 2)


def test_heads_that_do_not_divide_are_planned_for_the_rank_with_the_most() -> None:
    options = {**ULYSSES, "sp_size": 3}
    (first,), *others = run_on_ranks(_measured, 3, [("ours", options)])
    (rank,) = planned("ours", options).ranks
    assert rank.activation_bytes == pytest.approx(first["activation_bytes"], abs=512)
    assert rank.message_bytes == first["message_bytes"]
    for name in ("activation_bytes", "message_bytes"):
        assert all(other[name] < first[name] for (other,) in others)


def test_a_part_takes_its_part() -> None:
    whole, half, rank_of_six = (
        planned("ours", options, data_ranks=ranks).ranks[0]
        for options, ranks in (({"zero_stage": 1}, 1), (ULYSSES, 1), (ULYSSES, 3))
    )
    assert whole.message_bytes == 0
    assert half.activation_bytes < 0.65 * whole.activation_bytes  # attention keeps what was exchanged, too
    assert half.state_bytes == pytest.approx(whole.state_bytes / 2, rel=0.01)
    assert rank_of_six.state_bytes == pytest.approx(whole.state_bytes / 6, rel=0.02)
    assert rank_of_six.activation_bytes == half.activation_bytes


# -- what cannot be ----------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Attention of ``heads``, with a ``dropout``, over tokens as they are."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout, batch_first=True, **options)

    def forward(self, input_ids: Tensor, **others: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        out: Tensor = self.attention(x, x, x, attn_mask=others.get("attention_mask"), need_weights=False)[0]
        return out


IDS = torch.zeros(2, 5, dtype=torch.int64)
MASK = torch.zeros(2, 1, 5, 5)


@pytest.mark.parametrize(
    ("options", "model", "batch", "message"),
    [
        ({}, Attending(), None, "plan.. needs a micro-batch of whole sequences"),
        ({}, Attending(), IDS, "is a Tensor"),
        ({}, Attending(), {"ids": IDS}, "has input_ids"),
        ({}, Attending(), {"input_ids": IDS, "attention_mask": MASK}, "pad the batch to 6 tokens"),
        ({}, Attending(bias=True, add_bias_kv=True), {"input_ids": IDS}, "add_bias_kv"),
        (
            {"sp_mode": "ring"},
            Attending(dropout=0.1),
            {"input_ids": IDS},
            "ring attention does not support dropout",
        ),
        ({"tp_size": 3}, Attending(), {"input_ids": IDS}, "tp 3: "),
    ],
)
def test_what_the_plugin_refuses_is_not_planned(
    options: dict[str, Any], model: nn.Module, batch: Any, message: str
) -> None:
    plugin = HybridParallelPlugin(**{"sp_size": 2, **options})
    with pytest.raises(ConfigError, match=message):
        plugin.plan(model, lambda model, part: model(**part).mean(), batch)
    good = HybridParallelPlugin(sp_size=2).plan(
        Attending(), lambda model, part: model(**part).mean(), {"input_ids": IDS}
    )
    assert good.ranks[0].message_bytes > 0


# -- the command -------------------------------------------------------------------------------------

MODEL = "gpt:layers=4,hidden=32,heads=4"


def test_the_command_names_the_layout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    asked = ["plan", MODEL, "--seq", "15", "--sp", "2"]  # is filled up
    assert main([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["processes"], said["sp"], said["sp_mode"]) == (2, 2, "ulysses")
    (rank,) = said["ranks"]
    assert rank["message_bytes"] == 2 * 3 * 8 * 32 * 4  # sent and arriving; three tensors of 8 tokens
    assert rank["total_bytes"] == sum(
        rank[f"{name}_bytes"] for name in ("parameter", "gradient", "state", "activation", "message")
    )
    more = ["--sp-mode", "ring", "--tp", "2", "--pp", "2", "--dp", "3", "--device-bytes", "16KiB"]
    assert main([*asked, *more]) == 1
    table = " ".join(capsys.readouterr().out.split())
    for text in (
        "over 24 processes: tp 2 x pp 2 x sp 2 (ring) x dp 3",
        "messages",
        "6 data ranks",
        "raise tp, pp or sp",
    ):
        assert text in table


def test_the_command_refuses_what_the_plugin_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for more, message in (
        (["--sp", "2", "--host-bytes", "1GiB"], "--host-bytes does not go with --tp, --pp, --sp and --dp"),
        (["--sp", "2", "--tp", "3"], "tp may be 1, 2, 4"),
    ):
        assert main(["plan", MODEL, "--seq", "16", *more]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
