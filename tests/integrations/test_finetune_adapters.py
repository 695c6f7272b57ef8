"""Adapters of ``gemini finetune``: their numbers are those of PEFT with the same options."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_runs import LLAMA, plainly_trained, run, small_run
from hf_models import SIZES, saved

from gemini.cli.finetune import forecast_lines
from gemini.cli.main import main
from gemini.errors import ConfigError
from gemini.jobs.after_training.adapter_merge import merge
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.task import FineTuneTask

peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed")
transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")


@pytest.fixture
def config(tmp_path: Path) -> FineTuneConfig:
    return small_run(tmp_path)


@pytest.mark.parametrize(
    ("options", "wanted", "lr"),
    [
        ({"lora": 4}, {"r": 4, "lora_alpha": 8}, 2e-4),
        ({"lora": 4, "rslora": True}, {"r": 4, "lora_alpha": 8, "use_rslora": True}, 2e-4),
        ({"lora": 4, "dora": True, "lora_alpha": 5}, {"r": 4, "lora_alpha": 5, "use_dora": True}, 1e-4),
    ],
    ids=["LoRA", "rsLoRA", "DoRA"],
)
def test_adapters_train_as_peft_trains_them_with_the_same_options(
    options: dict[str, Any], wanted: dict[str, Any], lr: float, config: FineTuneConfig
) -> None:
    config = dataclasses.replace(config, **options, lr=None, precision="fp32", steps=3)
    assert config.learning_rate == lr
    adapter = peft.LoraConfig(**wanted, target_modules="all-linear", task_type="CAUSAL_LM")
    want, losses = plainly_trained(config, adapter)
    result = run(config)
    assert list(result.losses) == losses
    assert result.summary.model is not None
    got = peft.PeftModel.from_pretrained(LLAMA.from_pretrained(config.model), result.summary.model)
    trained = {name: value for name, value in want.state_dict().items() if ".lora_" in name}
    saved = {name: value for name, value in got.state_dict().items() if ".lora_" in name}
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], value) for name, value in trained.items())


ARRAYS = "mlp.experts.gate_up_proj,mlp.experts.down_proj"


def mixture(config: FineTuneConfig) -> FineTuneConfig:
    """Return the run with a mixture of four experts for its model."""
    sizes = {**SIZES, "max_position_embeddings": 64, "num_key_value_heads": 2, "num_local_experts": 4}
    owner = transformers.MixtralForCausalLM
    config_of = transformers.MixtralConfig(**sizes, bos_token_id=None, eos_token_id=0)
    saved(config_of, owner, Path(config.model))
    return dataclasses.replace(config, lora=4, lora_target_parameters=ARRAYS, device_bytes=2**19)


@pytest.mark.parametrize("targets", ["none", "q_proj"])
def test_adapters_on_arrays_of_experts_train_as_peft_trains_them(
    targets: str, config: FineTuneConfig
) -> None:
    config = dataclasses.replace(mixture(config), lora_targets=targets, precision="fp32", steps=3)
    names = [] if targets == "none" else [targets]
    adapter = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=names, target_parameters=ARRAYS.split(","), task_type="CAUSAL_LM"
    )
    want, losses = plainly_trained(config, adapter, transformers.MixtralForCausalLM)
    result = run(config)
    assert list(result.losses) == losses
    assert result.summary.model is not None
    saved_weights = peft.utils.load_peft_weights(result.summary.model, device="cpu")
    trained = want.state_dict()
    assert len(saved_weights) == 8 + 4 * len(names)
    assert all(torch.equal(trained[_of_adapter(name)], value) for name, value in saved_weights.items())


def test_adapters_on_arrays_of_experts_are_exported_merged(config: FineTuneConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(mixture(config), precision="fp32", steps=2)
    with pytest.raises(ConfigError, match=r"--lora-dropout: .*: expert arrays do not support dropout"):
        run(config, lora_target_parameters="", lora_dropout=0.1)
    task = FineTuneTask(config, Path("unused"), resume=False, scratch=None)
    assert "scaled by 2 (alpha 8), on expert arrays, too; learning rate" in task.describe()[0]
    alone = run(config)
    merged = run(config, merge=True, output=str(tmp_path / "merged"))
    assert merged.losses == alone.losses
    merge(Path(config.model), Path(str(alone.summary.model)), tmp_path / "after")
    load = transformers.AutoModelForCausalLM.from_pretrained
    want, got = (load(path).state_dict() for path in (tmp_path / "after", merged.summary.model))
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_what_plans_says_why_there_is_no_plan_of_adapters_on_arrays_of_experts(
    config: FineTuneConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config, said = mixture(config), "there is no plan for adapters on expert arrays"
    Path(str(config.disk_dir)).mkdir()
    (line,) = forecast_lines(config, 24)
    assert line.startswith(f"plan: not available ({said}")
    asked = ["plan", config.model, "--lora", "4", "--seq", "16", "--device-bytes", "64MiB"]
    assert main(asked) == 2
    assert said in capsys.readouterr().err
    assert main([*asked, "--lora-targets", "q_proj,v_proj"]) == 0, "the way out that it names"


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_adapters_on_a_quantized_base_train_as_peft_trains_them(
    kind: str, dora: bool, config: FineTuneConfig
) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra 'quantized' is not installed")
    config = dataclasses.replace(config, lora=4, quantize=kind, dora=dora, precision="fp32", steps=3)
    if kind == "nf4":
        asked = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    else:
        ao = pytest.importorskip("torchao.quantization", reason="the extra 'quantized' is not installed")
        asked = transformers.TorchAoConfig(ao.Int8WeightOnlyConfig(version=2))
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "use_dora": dora}
    adapter = peft.LoraConfig(r=4, lora_alpha=8, **options)
    want, losses = plainly_trained(config, adapter, quantization_config=asked, device_map="cpu")
    result = run(config)
    assert list(result.losses) == losses
    assert result.summary.model is not None
    saved = peft.utils.load_peft_weights(result.summary.model, device="cpu")
    assert len(saved) == 28 + 14 * dora
    trained = want.state_dict()
    assert all(torch.equal(trained[_of_adapter(name)], value) for name, value in saved.items())
    assert json.loads(Path(config.output, "run.json").read_text())["quantize"] == kind
    assert result.summary.parameters == want.num_parameters()


def _of_adapter(name: str) -> str:
    """Return the name that a saved weight has in a model."""
    name = name.replace("lora_magnitude_vector", "lora_magnitude_vector.weight")
    return name.replace(".weight", ".default.weight")


def test_what_is_quantized_already_trains_adapters_alone_and_is_not_quantized_again(
    config: FineTuneConfig,
) -> None:
    fields = json.loads(Path(config.model, "config.json").read_text())
    text = json.dumps({**fields, "quantization_config": {"quant_method": "torchao"}})
    Path(config.model, "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--quantize nf4 .* are quantized; leave --quantize out"):
        run(config, lora=4, quantize="nf4")
    with pytest.raises(ConfigError, match=r"are quantized and cannot be trained; add --lora 16"):
        run(config)
    assert not Path(config.output).exists(), "refused before anything is read"


def test_the_kind_of_adapters_its_scale_and_its_learning_rate_are_said_and_kept(
    config: FineTuneConfig,
) -> None:
    def first_line(**changes: Any) -> str:
        changed = dataclasses.replace(config, **changes)
        return FineTuneTask(changed, Path("unused"), resume=False, scratch=None).describe()[0]

    assert first_line(lr=None) == "training: all weights; learning rate 1e-05, the default for all weights"
    assert first_line(lora=64, rslora=True, lr=3e-3) == (
        "training: rsLoRA adapters of rank 64, scaled by 1 (alpha 8); learning rate 0.003"
    )
    run(config, lora=2, dora=True, lr=None, steps=1)
    kept = json.loads(Path(config.output, "run.json").read_text())
    assert (kept["lr"], kept["dora"], kept["options"]["lora_alpha"]) == (1e-4, True, 4)
    card = Path(config.output, "model", "README.md").read_text()
    assert "DoRA adapters: rank 2, alpha 4" in card
