"""Bases that transformers loads in 4 and 8 bits, with adapters of PEFT, in chunks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_python

import gemini
from gemini.errors import ConfigError
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.engine import PretrainedEngine

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed")

from hf_models import SIZES, saved  # noqa: E402
from trainer_runs import arguments, figures, ours, tight, unmanaged  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LARGER = {**SIZES, "hidden_size": 64, "intermediate_size": 128}


def quantization(kind: str) -> Any:
    """Return what transformers is asked for."""
    if kind == "8bit":
        ao = pytest.importorskip("torchao.quantization", reason="the extra 'quantized' is not installed")
        return transformers.TorchAoConfig(ao.Int8WeightOnlyConfig(version=2))
    pytest.importorskip("bitsandbytes", reason="the extra 'quantized' is not installed")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )


def adapted(directory: Path, kind: str) -> Any:
    """Return a quantized base with adapters."""
    load = transformers.LlamaForCausalLM.from_pretrained
    base = load(directory, quantization_config=quantization(kind), device_map="cpu")
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, adapters)


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_the_trainer_prints_what_it_prints_of_the_unmanaged_base(kind: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**LARGER)
    directory = saved(config, transformers.LlamaForCausalLM, tmp_path / "base")
    args = arguments(tmp_path / "run", gradient_checkpointing=True, eval_strategy="epoch")
    plain = unmanaged(args, adapted(directory, kind))
    model = adapted(directory, kind)
    gemini.manage(model, **tight(args.output_dir))
    run = ours(args, model)
    assert figures(run) == figures(plain)
    run.save_model(str(tmp_path / "mine"))
    plain.save_model(str(tmp_path / "theirs"))
    mine, theirs = (
        peft.utils.load_peft_weights(str(tmp_path / name), device="cpu") for name in ("mine", "theirs")
    )
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], values) for name, values in theirs.items())
    assert gemini.handle_of(model).stats()["disk_read"]["bytes"] > 0


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_from_pretrained_quantizes_and_puts_adapters_on(kind: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**LARGER)
    directory = saved(config, transformers.LlamaForCausalLM, tmp_path / "base")
    ids = torch.arange(8)[None]
    want = adapted(directory, kind).base_model.model.eval()
    torch.manual_seed(0)
    got = gemini.from_pretrained(
        directory,
        "LlamaForCausalLM",
        quantization_config=quantization(kind),
        adapter=peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
        **tight(str(tmp_path / "disk")),
    ).eval()
    assert torch.equal(got(input_ids=ids).logits, want(input_ids=ids).logits)
    trains = {name.split(".")[-3] for name, param in got.named_parameters() if param.requires_grad}
    assert trains == {"lora_A", "lora_B"}
    held = gemini.handle_of(got).storage.slots
    assert sum(slot.form is not None for slot in held.values()) == 14


def test_a_model_quantized_in_another_way_is_refused_by_name(tmp_path: Path) -> None:
    directory = saved(transformers.LlamaConfig(**LARGER), transformers.LlamaForCausalLM, tmp_path / "base")
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({**fields, "quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(ConfigError, match="quantized by gptq"):
        gemini.from_pretrained(directory)


def test_finetune_refuses_to_merge_into_a_quantized_base(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    config = FineTuneConfig(
        model=str(tmp_path), data=str(tmp_path), output=str(tmp_path / "out"), lora=4, merge=True
    )
    with pytest.raises(ConfigError, match=r"--merge.*quantized"):
        PretrainedEngine(config)


@pytest.mark.dear("an example from start to end, in a process of its own")
def test_the_example_builds_a_base_that_is_larger_than_its_memory(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra 'quantized' is not installed")
    sizes = ["--layers", "3", "--width", "128", "--vocab", "64", "--seq", "8", "--device-bytes", "600KiB"]
    program = str(ROOT / "examples" / "qlora_on_disk.py")
    libraries = ["transformers", "peft", "torchao", "bitsandbytes"]
    done = run_python([program, *sizes, "--disk-dir", str(tmp_path)], cwd=tmp_path, imports=libraries)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^step \d: loss \d", done.stdout, re.M)) == 4
    assert re.search(r"^planned: [\d.]+ tokens/s", done.stdout, re.M)
    assert list(tmp_path.iterdir()) == []
