"""What a layout is planned to take is what its ranks take; sizes that cannot be are refused."""

from __future__ import annotations

import json
import weakref
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, batch_of, language, loss_of
from processes import run_on_ranks
from tensor_harness import LANGUAGE_PLAN, Language
from torch import Tensor, nn

from gemini import ConfigError, CPUAdam
from gemini.cli.main import main
from gemini.parallel import Booster, HybridParallelPlugin
from gemini.parallel.layout_plan import DataCut, LayoutPlan, model_bytes

OPTIONS: dict[str, Any] = {"tp_plan": LANGUAGE_PLAN, "num_microbatches": 4}


def planned(data_ranks: int = 1, **options: Any) -> LayoutPlan:
    ids = torch.empty(16 // data_ranks // 4, 6, dtype=torch.int64, device="meta")
    plugin = HybridParallelPlugin(**{**OPTIONS, **options})
    return plugin.plan(language(), lambda model: loss_of(model(ids), ids), data_ranks=data_ranks)


class Kept:
    """The storages that autograd keeps, as long as it does; not those of ``before``."""

    def __init__(self, before: list[Tensor]) -> None:
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in before}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return tensor

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def _measured(options: dict[str, Any]) -> dict[str, int]:
    """Train a step; return what this rank has of everything."""
    booster = Booster(plugin=HybridParallelPlugin(**{**OPTIONS, **options}))
    model = language()
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    ranks = booster.plugin.data_ranks
    part = batch_of(0).chunk(ranks.size)[ranks.number].clone()
    kept = Kept([*model.parameters(), part])
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        booster.execute_pipeline(iter([part]), model, loss_of, optimizer)
    gradients = sum(optimizer.gradient_bytes())
    optimizer.step()
    states = [v for state in optimizer.optim.state.values() for v in state.values() if v.dim()]
    return {
        "parameter_bytes": sum(param.nbytes for param in model.parameters()),
        "gradient_bytes": gradients,
        "state_bytes": sum(state.nbytes for state in states),
        "activation_bytes": kept.peak,
    }


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp": (1, {"pp_size": 2}),
    "gpipe": (1, {"pp_size": 2, "pp_style": "gpipe"}),
    "zbv": (1, {"pp_size": 2, "pp_style": "zbv"}),
    "tp": (1, {"tp_size": 2}),
    "dp": (2, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_have_what_was_planned(layout: str, stage: int) -> None:
    copies, options = LAYOUTS[layout]
    plan = planned(copies, zero_stage=stage, **options)
    found = run_on_ranks(_measured, 2, {"zero_stage": stage, **options})
    for place, real in enumerate(found):
        rank = plan.ranks[place if len(plan.ranks) > 1 else 0]
        for name in ("parameter_bytes", "gradient_bytes", "state_bytes"):
            assert getattr(rank, name) == pytest.approx(real[name], abs=64), name  # what is filled up
        if layout == "zbv":
            continue  # halves of backward hold a graph until the other half is over
        # The output that a stage keeps to begin backward with is not kept by autograd.
        kept = real["activation_bytes"]
        assert kept <= rank.activation_bytes <= 1.06 * kept + 64


def test_a_gpipe_holds_all_micro_batches_and_1f1b_no_more_than_ranks() -> None:
    gpipe, ours = (planned(pp_size=2, pp_style=style, num_microbatches=8) for style in ("gpipe", "1f1b"))
    assert gpipe.ranks[0].activation_bytes == 4 * ours.ranks[0].activation_bytes
    assert gpipe.bubble == pytest.approx(ours.bubble)
    assert planned(pp_size=2, num_microbatches=32).bubble < ours.bubble
    assert planned(pp_size=2, pp_style="zbv", num_microbatches=8).bubble < ours.bubble


def test_equal_stages_are_idle_for_as_long_as_the_formula_says() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    x = torch.empty(2, 8, device="meta")
    plugin = HybridParallelPlugin(pp_size=4, num_microbatches=8)
    plan = plugin.plan(Blocks(), lambda model: model(x).sum())
    assert [rank.idle for rank in plan.ranks] == pytest.approx([3 / 11] * 4)  # (p - 1) / (M + p - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp_size": 5}, "choose pp from 1 to 4"),
        ({"tp_size": 3}, "tp may be 1, 2, 4, 8"),
        ({"pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 3}, "choose pp from 1 to 1"),
        ({"pp_size": 2, "pp_style": "interleaved", "num_microbatches": 3}, "multiple of 2"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_those_that_can(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(**options)


def test_planning_leaves_the_model_and_its_numbers_alone() -> None:
    model, ids = language(), torch.empty(4, 6, dtype=torch.int64, device="meta")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    plugin = HybridParallelPlugin(tp_size=2, pp_size=2, **OPTIONS)
    plugin.plan(model, lambda each: loss_of(each(ids), ids))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert type(model) is Language
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model._forward_pre_hooks


# -- the command -------------------------------------------------------------------------------------

MODEL = "gpt:layers=4,hidden=32,heads=4"


def test_the_command_says_it_in_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", MODEL, "--seq", "16", "--tp", "2", "--pp", "2", "--dp", "2", "--accumulation", "4"]
    assert main([*asked, "--zero-stage", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["processes"], said["micro_batches"], said["fits"]) == (8, 4, None)
    first, last = said["ranks"]
    assert first["stages"] == [0]
    assert first["total_bytes"] == sum(
        first[f"{name}_bytes"] for name in ("parameter", "gradient", "state", "activation")
    )
    assert first["state_bytes"] == first["parameter_bytes"]  # two moments over two ranks
    assert 0 < said["bubble"] == pytest.approx((first["idle"] + last["idle"]) / 2)
    assert main([*asked, "--zero-stage", "0", "--device-bytes", "64KiB"]) == 1
    table = capsys.readouterr().out
    assert "It does not fit" in table
    assert "--zero-stage 3" in table
    assert "blocks.2-3" in table


def test_the_command_refuses_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for more, message in (
        (["--tp", "3"], "tp may be 1, 2, 4"),
        (["--pp", "9"], "choose pp from 1 to 4"),
        (["--pp", "2", "--host-bytes", "1GiB"], "--host-bytes does not go with --tp"),
    ):
        assert main(["plan", MODEL, "--seq", "16", *more]) != 0
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [{}, {"pp_size": 2, "num_microbatches": 2}, {"sp_size": 2}], ids=str)
def test_experts_are_planned_in_any_type(sizes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_experts=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        use_cache=False,
    )
    ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    held = []
    for experts in (1, 3):
        config.num_experts_per_tok = experts
        model = transformers.Qwen3MoeForCausalLM(config)
        plugin = HybridParallelPlugin(zero_stage=1, **sizes)
        plan = plugin.plan(model, lambda m, b: m(**b).loss, {"input_ids": ids, "labels": ids})
        assert sum(rank.parameter_bytes for rank in plan.ranks) >= 4 * sum(
            param.numel() for param in model.parameters()
        ) // (2 if sizes.get("sp_size") else 1)
        held.append(sum(rank.activation_bytes for rank in plan.ranks))
    assert held[1] > held[0]


@pytest.mark.parametrize(
    ("stage", "sizes"),
    [
        (0, (14, 2 * 7 + 4 * 7, 12 * 7)),  # a sum is exchanged beside the gradient
        (1, (14, 2 * 7 + 4 * 4, 12 * 4)),
        (2, (14, 4 * 7, 12 * 4)),
        (3, (2 * 4, 4 * 4, 12 * 4)),
    ],
)
def test_of_seven_elements_each_stage_cuts_what_it_says(stage: int, sizes: tuple[int, int, int]) -> None:
    """Two copies of a bf16 parameter: each has a part of four elements, with two moments and a master."""
    cut = DataCut(2, stage, 1)
    assert model_bytes([(7, 2, True)], cut) == sizes
    assert model_bytes([(7, 2, False)], cut) == (sizes[0], 0, 0)
    several = {0: 4 * (7 + 7), 1: 4 * (7 + 4), 3: 4 * 7}  # several micro-batches are summed in fp32
    assert model_bytes([(7, 2, True)], DataCut(2, stage, 2))[1] == several.get(stage, sizes[1])
