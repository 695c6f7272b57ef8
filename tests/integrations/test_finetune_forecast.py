"""What ``gemini finetune`` and ``gemini plan`` say beforehand of adapters on a base in 4 or 8 bits."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from finetune_runs import LLAMA, small_run

import gemini
from gemini.cli.finetune import forecast_source
from gemini.cli.main import main
from gemini.forecast.forecast import Settings, forecast_batch
from gemini.forecast.machine import MachineSpeeds
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.engine import quantization_of
from gemini.jobs.finetune.task import FineTuneTask
from gemini.memstats import Trace
from gemini.runtime.config import GeminiConfig

pytest.importorskip("bitsandbytes", reason="the extra 'quantized' is not installed")
pytest.importorskip("torchao", reason="the extra 'quantized' is not installed")

MACHINE = MachineSpeeds("described", {"fp32": 1e11, "bf16": 1e11}, 1e10, 1e10, 1e-5)
# What is measured, and names, which begin with that of the module around the model.
APART = {"seconds", "non_model_bytes", "links", "param_order", "chunk_signature"}


@pytest.fixture
def config(tmp_path: Path) -> FineTuneConfig:
    return dataclasses.replace(small_run(tmp_path), documents="joined")


def store_quantized(config: FineTuneConfig, kind: str) -> None:
    """Replace the model of a run by the same with quantized weights."""
    asked = dataclasses.replace(config, lora=4, quantize=kind, precision="fp32")
    model = LLAMA.from_pretrained(config.model, quantization_config=quantization_of(asked))
    model.save_pretrained(config.model)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantize": "nf4"},
        {"quantize": "int8"},
        {"quantize": "nf4", "activation_checkpointing": True},
        {"quantize": "nf4", "dora": True},
        {"quantize": "int8", "dora": True},
        {"stored": "nf4"},
        {"stored": "int8"},
    ],
    ids=["nf4", "int8", "checkpointing", "nf4 dora", "int8 dora", "stored nf4", "stored int8"],
)
def test_the_forecast_of_a_quantized_base_is_of_the_step_that_runs(
    changes: dict[str, Any], config: FineTuneConfig
) -> None:
    if "stored" in changes:
        store_quantized(config, changes["stored"])
        changes = {}
    config = dataclasses.replace(config, lora=4, **changes)
    options = config.managed_options()
    del options["device"]
    settings = Settings(config.batch, GeminiConfig.from_options(**options), MACHINE)
    forecast = forecast_batch(forecast_source(config, 24), settings, config.batch)

    task = FineTuneTask(config, Path("unused"), resume=False, scratch=None)
    engine = task.engine()
    task.step(engine, 0)
    manager = gemini.handle_of(engine.module).manager
    real, rehearsed = manager.trace, forecast.rehearsal.trace
    engine.close()
    size = forecast.blueprint.context.size
    assert dataclasses.replace(size, operator_name=manager.size.operator_name) == manager.size
    assert real is not None
    names = [field.name for field in fields(Trace) if field.name not in APART]
    assert {name: getattr(rehearsed, name) for name in names} == {name: getattr(real, name) for name in names}
    assert [name.removeprefix("model.") for name in rehearsed.param_order] == list(real.param_order)


def test_plan_takes_adapters_on_a_quantized_base(
    config: FineTuneConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MACHINE.save(tmp_path / "machine.json")
    budgets = ["--device-bytes", "64MiB", "--seq", "16", "--machine", str(tmp_path / "machine.json")]
    assert main(["plan", config.model, "--lora", "4", "--quantize", "nf4", "--dora", *budgets, "--json"]) == 0
    assert '"fits": true' in capsys.readouterr().out
    for wrong, said in (
        (["--quantize", "nf4"], "add --lora 16"),
        (["--dora"], "--dora is a variant of LoRA; add --lora 16"),
        (["--lora-targets", "q_proj"], "--lora-targets names the layers that get adapters of LoRA; add"),
        (["--lora", "4", "--lora-targets", "q_porj"], "no layer of this name (did you mean q_proj?)"),
        (["--lora", "4", "--quantize", "nf4", "--tp", "2"], "not supported with --tp: leave it out, or use"),
        (["--lora", "4", "--operators"], "adapters are not supported with --operators"),
    ):
        assert main(["plan", config.model, *wrong, *budgets]) == 2
        assert said in capsys.readouterr().err
    assert main(["plan", "gpt2", "--lora", "4", *budgets]) == 2
    assert "give its directory" in capsys.readouterr().err


def test_plan_divides_adapters_and_quantized_weights_over_ranks(
    config: FineTuneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    def rank(*options: str) -> dict[str, Any]:
        given = ["plan", config.model, "--lora", "4", "--seq", "16", *options, "--json"]
        assert main(given) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)["ranks"][0]
        return found

    one, two = (rank("--quantize", "nf4", "--dp", ranks) for ranks in ("1", "2"))
    plain = rank("--dp", "1")
    assert rank("--dora", "--dp", "1")["state_bytes"] > plain["state_bytes"], "of the norms"
    assert one["parameter_bytes"] < 0.5 * plain["parameter_bytes"]
    assert one["state_bytes"] == plain["state_bytes"], "of the adapters"
    for name in ("parameter_bytes", "state_bytes"):
        assert two[name] == pytest.approx(one[name] / 2, rel=0.01)
    assert two["activation_bytes"] == one["activation_bytes"]
    assert rank("--lora-targets", "all-linear", "--dp", "1") == plain
    assert rank("--lora-targets", "q_proj", "--dp", "1")["state_bytes"] < 0.3 * plain["state_bytes"]
    cut = rank("--tp", "2", "--pp", "2")
    assert cut["parameter_bytes"] < 0.5 * plain["parameter_bytes"]
    assert (
        main(["plan", config.model, "--lora", "4", "--quantize", "nf4", "--dp", "2", "--zero-stage", "1"])
        == 2
    )
    assert "give --zero-stage 3" in capsys.readouterr().err
