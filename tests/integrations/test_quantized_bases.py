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
from gemini.jobs.finetune.engine import refuse_quantized

safetensors = pytest.importorskip("safetensors.torch", reason="the extra 'hf' is not installed")
transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed")

from hf_models import SIZES, saved  # noqa: E402
from trainer_runs import arguments, figures, ours, tight, unmanaged  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LARGER = {**SIZES, "hidden_size": 64, "intermediate_size": 128}


def quantization(kind: str) -> Any:
    """Return what transformers is asked for."""
    if kind == "bitsandbytes-8bit":
        pytest.importorskip("bitsandbytes", reason="the extra 'quantized' is not installed")
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    if kind == "8bit":
        ao = pytest.importorskip("torchao.quantization", reason="the extra 'quantized' is not installed")
        return transformers.TorchAoConfig(ao.Int8WeightOnlyConfig(version=2))
    pytest.importorskip("bitsandbytes", reason="the extra 'quantized' is not installed")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )


def plain_base(directory: Path, kind: str | None, **options: Any) -> Any:
    """Return what transformers loads; ``kind`` None: as the directory has it."""
    asked = {} if kind is None else {"quantization_config": quantization(kind)}
    base = transformers.LlamaForCausalLM.from_pretrained(directory, device_map="cpu", **asked, **options)
    for layer in base.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # else its kernel for inference, where there is one
    return base


def loaded(directory: Path, kind: str | None, **options: Any) -> Any:
    """Return what gemini loads."""
    asked = {} if kind is None else {"quantization_config": quantization(kind)}
    return gemini.from_pretrained(directory, "LlamaForCausalLM", **asked, **options)


def adapted(directory: Path, kind: str, **options: Any) -> Any:
    """Return a quantized base with adapters."""
    base = plain_base(directory, kind)
    torch.manual_seed(0)
    return peft.get_peft_model(base, lora(**options))


def lora(**options: Any) -> Any:
    """Return a config of adapters that change what the model computes."""
    options = {"init_lora_weights": False, **options}
    return peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options)


def raw(tensor: Any) -> torch.Tensor:
    """Return the bytes of a tensor, or of its values."""
    plain = tensor.dequantize() if hasattr(tensor, "__tensor_flatten__") else tensor
    return plain.detach().contiguous().view(-1).view(torch.uint8)


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


@pytest.mark.parametrize("kind", ["4bit", "8bit", "bitsandbytes-8bit"])
@pytest.mark.parametrize("stored", [False, True])
def test_weights_quantized_while_they_are_loaded_have_the_bits_of_transformers(
    kind: str, stored: bool, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(**LARGER, attention_bias=True)
    directory: Path = saved(config, transformers.LlamaForCausalLM, tmp_path / "base")
    asked: str | None = kind
    if stored:
        plain_base(directory, kind).save_pretrained(tmp_path / "quantized")
        directory, asked = tmp_path / "quantized", None
    want = plain_base(directory, asked)
    got = loaded(directory, asked, **tight(str(tmp_path / "disk")))
    one, other = got.state_dict(), want.state_dict()
    assert list(one) == list(other)
    assert all(torch.equal(raw(one[name]), raw(value)) for name, value in other.items())
    assert all(one[name].dtype == value.dtype for name, value in other.items())
    kinds = [[type(module).__name__ for module in model.modules()] for model in (got, want)]
    assert kinds[0] == kinds[1]
    assert all(map(torch.equal, got.buffers(), want.buffers()))
    assert got.config.to_dict() == want.config.to_dict()
    trains = [{n for n, p in model.named_parameters() if p.requires_grad} for model in (got, want)]
    held = gemini.handle_of(got).storage.slots
    assert trains[0] == {name for name in trains[1] if held[name].form is None}
    assert sum(slot.form is not None for slot in held.values()) == 14
    ids = torch.arange(8)[None]
    assert torch.equal(got(input_ids=ids).logits, want(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("4bit", {}), ("8bit", {}), ("4bit", {"use_dora": True, "init_lora_weights": True})],
)
def test_adapters_are_put_on_what_is_quantized_while_it_is_loaded(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    directory = saved(transformers.LlamaConfig(**LARGER), transformers.LlamaForCausalLM, tmp_path / "base")
    ids = torch.arange(8)[None]
    want = adapted(directory, kind, **options).eval()
    torch.manual_seed(0)
    got = loaded(directory, kind, adapter=lora(**options), **tight(str(tmp_path / "disk"))).eval()
    assert torch.equal(got(input_ids=ids).logits, want(input_ids=ids).logits)
    kinds = [[type(module).__name__ for module in model.modules()] for model in (got, want)]
    assert kinds[0] == kinds[1]
    flags = [[(n, p.requires_grad) for n, p in model.named_parameters()] for model in (got, want)]
    assert flags[0] == flags[1]
    held = gemini.handle_of(got).storage.slots
    assert sum(slot.form is not None for slot in held.values()) == 14


@pytest.mark.parametrize("kind", ["4bit", "bitsandbytes-8bit"])
def test_save_pretrained_writes_what_it_writes_of_the_unmanaged_model(kind: str, tmp_path: Path) -> None:
    directory = saved(transformers.LlamaConfig(**LARGER), transformers.LlamaForCausalLM, tmp_path / "base")
    plain_base(directory, kind).save_pretrained(tmp_path / "theirs")
    loaded(directory, kind, **tight(str(tmp_path / "disk"))).save_pretrained(tmp_path / "mine")
    files = [{f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("mine", "theirs")]
    assert files[0] == files[1]


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_save_pretrained_takes_weights_of_torchao_apart_as_of_the_unmanaged_model(
    tier: str, tmp_path: Path
) -> None:
    directory = saved(transformers.LlamaConfig(**LARGER), transformers.LlamaForCausalLM, tmp_path / "base")
    plain_base(directory, "8bit").save_pretrained(tmp_path / "theirs")
    budgets = tight(str(tmp_path / "disk"))
    if tier == "host":
        budgets = {**budgets, "host_bytes": "8MiB", "disk_dir": None}
    model = loaded(directory, "8bit", **budgets)
    model.save_pretrained(tmp_path / "mine")
    files = [tmp_path / name / "model.safetensors" for name in ("mine", "theirs")]
    mine, theirs = map(safetensors.load_file, files)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    opened = [safetensors.safe_open(file, framework="pt") for file in files]
    assert opened[0].metadata() == opened[1].metadata()
    again = plain_base(tmp_path / "mine", None)
    ids = torch.arange(8)[None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    gemini.handle_of(model).release()
    model.save_pretrained(tmp_path / "released")
    assert safetensors.load_file(tmp_path / "released" / "model.safetensors").keys() == theirs.keys()


PEAK = """
import transformers, torchao.quantization as ao, gemini

def resident(which):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(which))

asked = transformers.TorchAoConfig(ao.Int8WeightOnlyConfig(version=2))
options = {"device_bytes": "16MiB", "host_bytes": 0, "disk_dir": "disk", "non_model_bytes": 0}
options |= {"auto_class": "LlamaForCausalLM", "quantization_config": asked}
first = gemini.from_pretrained("small", **options)  # imports what loading needs
open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
model = gemini.from_pretrained("base", **options)
print(resident("VmHWM") - before)
"""


@pytest.mark.dear("a model that is larger than what else a process takes, in a process of its own")
def test_quantizing_while_loading_never_holds_the_model_in_16_bits(tmp_path: Path) -> None:
    pytest.importorskip("torchao.quantization", reason="the extra 'quantized' is not installed")
    sizes = {"vocab_size": 96, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 12}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=8))
    nbytes = 2 * sum(param.numel() for param in model.parameters())
    model = model.bfloat16().to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "disk").mkdir()
    libraries = ["transformers", "peft", "torchao", "bitsandbytes"]
    saved(transformers.LlamaConfig(**SIZES), transformers.LlamaForCausalLM, tmp_path / "small")
    done = run_python(["-c", PEAK], cwd=tmp_path, imports=libraries)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 0.6 * nbytes


def test_a_weight_that_the_files_lack_is_refused_by_name(tmp_path: Path) -> None:
    directory = saved(transformers.LlamaConfig(**LARGER), transformers.LlamaForCausalLM, tmp_path / "base")
    file, name = directory / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    values = safetensors.load_file(file)
    del values[name]
    safetensors.save_file(values, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lack values of '{name}'"):
        loaded(directory, "4bit", **tight(str(tmp_path / "disk")))


def test_embeddings_that_torchao_unties_are_quantized_as_the_whole_model_is(tmp_path: Path) -> None:
    ao = pytest.importorskip("torchao.quantization", reason="the extra 'quantized' is not installed")
    config = transformers.LlamaConfig(**LARGER, tie_word_embeddings=True)
    directory = saved(config, transformers.LlamaForCausalLM, tmp_path / "base")
    unties = {"include_input_output_embeddings": True, "untie_embedding_weights": True}
    asked = transformers.TorchAoConfig(ao.Int8WeightOnlyConfig(version=2), **unties)
    want = plain_base(directory, None, quantization_config=asked)
    got = loaded(directory, None, quantization_config=asked, **tight(str(tmp_path / "disk")))
    ids = torch.arange(8)[None]
    assert torch.equal(got(input_ids=ids).logits, want(input_ids=ids).logits)


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
        refuse_quantized(config)


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
