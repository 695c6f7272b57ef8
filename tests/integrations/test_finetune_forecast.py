"""What ``gemini finetune`` and ``gemini plan`` say beforehand of adapters on a base in 4 or 8 bits."""

from __future__ import annotations

import dataclasses
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from finetune_runs import small_run

import gemini
from gemini.cli.finetune import forecast_source
from gemini.cli.main import main
from gemini.forecast.forecast import Settings, look
from gemini.forecast.machine import MachineSpeeds
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.work import FineTuneWork
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


@pytest.mark.parametrize(
    "changes",
    [{"quantize": "nf4"}, {"quantize": "int8"}, {"quantize": "nf4", "activation_checkpointing": True}],
    ids=["nf4", "int8", "checkpointing"],
)
def test_the_forecast_of_a_quantized_base_is_of_the_step_that_runs(
    changes: dict[str, Any], config: FineTuneConfig
) -> None:
    config = dataclasses.replace(config, lora=4, **changes)
    options = config.managed_options()
    del options["device"]
    settings = Settings(config.batch, GeminiConfig.from_options(**options), MACHINE)
    outlook = look(forecast_source(config, 24), settings, config.batch)

    work = FineTuneWork(config, Path("unused"), resume=False, scratch=None)
    engine = work.engine()
    work.step(engine, 0)
    manager = gemini.handle_of(engine.module).manager
    real, rehearsed = manager.trace, outlook.rehearsal.trace
    engine.close()
    size = outlook.blueprint.context.size
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
    assert main(["plan", config.model, "--lora", "4", "--quantize", "nf4", *budgets, "--json"]) == 0
    assert '"fits": true' in capsys.readouterr().out
    for wrong, said in (
        (["--quantize", "nf4"], "add --lora 16"),
        (["--lora", "4", "--dp", "2"], "leave out --dp"),
    ):
        assert main(["plan", config.model, *wrong, *budgets]) == 2
        assert said in capsys.readouterr().err
    assert main(["plan", "gpt2", "--lora", "4", *budgets]) == 2
    assert "give its directory" in capsys.readouterr().err
