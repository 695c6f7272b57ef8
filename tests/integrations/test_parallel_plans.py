"""GeminiTrainer and ``gemini finetune`` run a plan for one rank, and refuse what they cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_samples import plan_for
from torch import nn

from gemini.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("accelerate", reason="the extra 'hf' is not installed")

from hf_models import SIZES, assert_same, saved  # noqa: E402
from test_finetune import save_tokenizer  # noqa: E402
from trainer_runs import Tokens, arguments, build, figures, unmanaged  # noqa: E402

from gemini.cli.main import main  # noqa: E402
from gemini.forecast.machine import MachineSpeeds  # noqa: E402
from gemini.integrations.transformers import GeminiTrainer  # noqa: E402
from gemini.jobs.finetune.config import FineTuneConfig, with_plan  # noqa: E402
from gemini.memstats.trace import LINKS, LinkSpeed  # noqa: E402
from gemini.parallel import Layout, ParallelPlan  # noqa: E402
from gemini.parallel.plan import PlanBudgets  # noqa: E402

BLOCKS = tuple(f"model.layers.{index}" for index in range(SIZES["num_hidden_layers"]))
BUDGETS = PlanBudgets(200 * 1024, 2**20, 0)


def settings(model: nn.Module, /, **changed: Any) -> ParallelPlan:
    return plan_for(model, **{"num_microbatches": 3, "budgets": BUDGETS, "recompute": BLOCKS[:1], **changed})


# -- the Trainer ---------------------------------------------------------------------------------------


def trainer_of(directory: Path, plan: ParallelPlan | Path, *, given: Any = None, **more: Any) -> Any:
    more = {"gradient_accumulation_steps": 3, **more}
    return GeminiTrainer(
        model=build(),
        args=arguments(directory, **more),
        train_dataset=Tokens(12),
        eval_dataset=Tokens(4),
        gemini={"plan": plan, "non_model_bytes": 0, **(given or {})},
    )


def test_a_trainer_runs_a_plan_with_the_numbers_of_an_unmanaged_one(tmp_path: Path) -> None:
    want = unmanaged(arguments(tmp_path / "want", gradient_accumulation_steps=3))
    settings(build()).save(tmp_path / "plan.json")
    got = trainer_of(tmp_path / "got", tmp_path / "plan.json")
    got.train()
    assert figures(got) == figures(want)
    assert_same(got.model, want.model)
    stats = got.handle.stats()
    assert stats["device"]["budget_bytes"] == BUDGETS.device_bytes
    assert stats["predicted"]["step_seconds"] == 1.5
    assert stats["measured"]["step_seconds"] > 0
    assert "gemini/predicted_step_seconds" in got.state.log_history[0]
    assert ["forward" in vars(got.model.get_submodule(name)) for name in BLOCKS[:2]] == [True, False]


@pytest.mark.parametrize(
    ("changed", "more", "given", "said"),
    [
        ({}, {"gradient_accumulation_steps": 2}, {}, r"gradient_accumulation_steps=2 \(the plan says 3\)"),
        ({}, {"per_device_train_batch_size": 3}, {}, "per_device_train_batch_size=3"),
        ({}, {"gradient_checkpointing": True}, {}, "gradient_checkpointing=True"),
        ({}, {"bf16": True}, {}, "bf16=True"),
        ({}, {}, {"host_bytes": "2MiB"}, "host_bytes='2MiB'"),
        ({"layout": Layout(tp=2)}, {}, {}, r"the plan says tp 2; run it with HybridParallelPlugin"),
        ({"layout": Layout(dp=2), "zero_stage": 2}, {}, {}, "the plan says ZeRO 2"),
        ({"layout": Layout(dp=2)}, {}, {}, "for 2 ranks"),
        ({"model": "0"}, {}, {}, "fingerprint"),
        ({"recompute": ("lm_head.x",)}, {}, {}, "it recomputes 'lm_head.x'"),
    ],
    ids=range(10),
)
def test_a_trainer_refuses_what_contradicts_the_plan_and_what_it_cannot_run(
    changed: dict[str, Any], more: dict[str, Any], given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer_of(tmp_path, settings(build(), **changed), given=given, **more)


# -- gemini finetune -----------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint with its tokenizer, and rows to learn from beside it."""
    pytest.importorskip("tokenizers", reason="comes with transformers")
    sizes = {**SIZES, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 0}
    saved(transformers.LlamaConfig(**sizes), transformers.LlamaForCausalLM, tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "all work and no play " * 20}))
    return tmp_path / "base"


def tune(base: Path, output: str, *more: str) -> int:
    there = base.parent
    asked = ["--model", str(base), "--data", str(there / "data.jsonl"), "--output", str(there / output)]
    rows = ["--seq", "24", "--steps", "3", "--lr", "1e-2", "--non-model-bytes", "0", "--quiet", "--json"]
    return main(["finetune", *asked, *rows, *more])


def plan_of(base: Path, **changed: Any) -> str:
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    settings(model, **{"dtype": "bf16", "num_microbatches": 2, **changed}).save(base.parent / "plan.json")
    return str(base.parent / "plan.json")


def test_a_run_by_a_plan_is_the_run_with_its_options(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(base, "planned", "--plan", plan_of(base)) == 0
    planned = json.loads(capsys.readouterr().out)
    options = ["--batch", "2", "--accumulate", "2", "--device-bytes", "200KiB", "--host-bytes", "1MiB"]
    assert tune(base, "given", *options) == 0
    given = json.loads(capsys.readouterr().out)
    assert planned["last_loss"] == given["last_loss"]
    assert planned["budget_bytes"] == given["budget_bytes"]
    assert any("the plan predicted 1.5 s per step and 8.0 MiB on DEVICE" in note for note in planned["notes"])
    models = [transformers.LlamaForCausalLM.from_pretrained(each["model"]) for each in (planned, given)]
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_a_run_by_a_plan_is_resumed_with_its_options(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(base)
    assert tune(base, "run", "--plan", plan) == 0
    first = json.loads(capsys.readouterr().out)
    Path(plan).unlink()
    assert tune(base, "run", "--resume", "--steps", "4") == 0
    assert json.loads(capsys.readouterr().out)["budget_bytes"] == first["budget_bytes"]
    options = json.loads((base.parent / "run" / "run.json").read_text())["options"]
    assert (options["recompute"], options["accumulate"]) == (BLOCKS[0], 2)


def test_a_plan_over_ranks_says_how_many_and_the_rows_of_all(base: Path) -> None:
    told = with_plan({"plan": plan_of(base, layout=Layout(dp=2)), "model": "m", "data": "d", "output": "o"})
    config = FineTuneConfig(**told)
    assert (config.nproc, config.batch, config.accumulate) == (2, 2, 4)
    assert config.rows_of_rank(2) == (2, 2), "those of the plan"


def test_a_plan_that_offloads_activations_is_the_option_that_does(base: Path) -> None:
    plan = plan_of(base, activation_offload="auto")
    assert with_plan({"plan": plan, "model": "m", "data": "d", "output": "o"})["activations"] == "offload"


def test_a_plan_that_was_searched_for_is_of_the_model_that_is_trained(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = tuple(LinkSpeed(name, 1e9, 1e-5) for name in LINKS)
    machine = MachineSpeeds("m", {"fp32": 1e11, "bf16": 1e11}, 1e10, 1e10, 1e-5, links)
    machine.save(base.parent / "machine.json")
    kept = str(base.parent / "plan.json")
    asked = ["plan", str(base), "--ranks", "1", "--search", "--machine", str(base.parent / "machine.json")]
    more = ["--seq", "24", "--batch", "4", "--dtype", "bf16", "--device-bytes", "4MiB", "--save-plan", kept]
    assert main([*asked, *more, "--pin", "recompute=all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recompute"] == list(BLOCKS)
    assert tune(base, "run", "--plan", kept) == 0
    assert json.loads(capsys.readouterr().out)["budget_bytes"]["device"] == 2**22


@pytest.mark.parametrize(
    ("changed", "more", "said"),
    [
        ({}, ["--batch", "3"], "batch=3 (the plan says 2)"),
        ({}, ["--activation-checkpointing"], "activation_checkpointing=True"),
        ({}, ["--lora", "4"], "the model and ranks that it was made for"),
        ({"layout": Layout(tp=2)}, ["--pp", "2"], "pp=2 (the plan says 1)"),
        ({"layout": Layout(dp=2)}, ["--nproc", "4"], "nproc=4 (the plan says 2)"),
        (
            {"layout": Layout(dp=2), "zero_stage": 1},
            ["--device-bytes", "1MiB"],
            "--device-bytes needs chunks, but the plan",
        ),
        ({"dtype": "fp16"}, [], "has dtype fp16, but gemini finetune supports only fp32, bf16"),
        ({"model": "0"}, [], "fingerprint"),
    ],
    ids=range(8),
)
def test_finetune_refuses_what_contradicts_the_plan_and_what_it_cannot_run(
    changed: dict[str, Any], more: list[str], said: str, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(base, "run", "--plan", plan_of(base, **changed), *more) == 2
    assert said in capsys.readouterr().err
    assert not (base.parent / "run").exists()


def test_blocks_to_recompute_are_named_without_a_plan(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(base, "run", "--recompute", "model.layers.9") == 2
    assert "recompute names 'model.layers.9', but the model has no such block" in capsys.readouterr().err
    assert tune(base, "run", "--recompute", ",".join(BLOCKS), "--activation-checkpointing") == 2
    assert "give one of them" in capsys.readouterr().err
    assert tune(base, "run", "--recompute", ",".join(BLOCKS)) == 0
