"""``gemini merge``: PEFT's numbers, a tensor at a time, or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import assert_same
from safetensors.torch import load_file, save_file
from tiny_trained import SIZES, HeldTensors, entries, llama, save

from gemini.cli.main import main
from gemini.errors import ConfigError
from gemini.jobs.after_training import adapter_merge, array_merge
from gemini.jobs.after_training.adapter_merge import merge
from gemini.jobs.after_training.array_merge import ArrayMerging

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed")

LINEAR = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def gpt2(directory: Path) -> Path:
    """Save a model with transposed weights, under names without the prefix of the model."""
    config = transformers.GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    save(directory, transformers.GPT2LMHeadModel(config))
    file = directory / "model.safetensors"
    bare = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    save_file(bare, file, metadata={"format": "pt"})
    return directory


def qwen2(directory: Path) -> Path:
    return save(directory, transformers.Qwen2ForCausalLM(transformers.Qwen2Config(vocab_size=320, **SIZES)))


def mixtral(directory: Path) -> Path:
    """Save a mixture with a tensor in the files for each matrix of each of its three experts."""
    sizes = {**SIZES, "vocab_size": 320, "num_local_experts": 3}
    torch.manual_seed(0)
    return save(directory, transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).bfloat16())


def gpt_oss(directory: Path) -> Path:
    """Save a mixture with whole arrays of experts, turned, in the files."""
    sizes = {**SIZES, "vocab_size": 320, "num_local_experts": 5, "head_dim": 16}
    torch.manual_seed(0)
    return save(directory, transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes)).bfloat16())


def adapt(base: Path, directory: Path, config: Any = None, **options: Any) -> Path:
    """Save adapters for ``base`` with values that are not those at the start of training."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.get_peft_model(model, config or peft.LoraConfig(**{**LINEAR, **options}))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                param += 0.05 * torch.randn_like(param)
    adapted.save_pretrained(directory)
    return directory


CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "bf16": (llama, {}),
    "rslora": (
        lambda path: llama(path, dtype=torch.float32),
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}},
    ),
    "dora": (llama, {"use_dora": True}),
    "whole modules and embeddings": (
        llama,
        {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head", "norm"]},
    ),
    "transposed": (gpt2, {"fan_in_fan_out": True}),
    "arrays of experts that files have one by one": (
        mixtral,
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            "use_rslora": True,
        },
    ),
    "arrays of experts": (
        gpt_oss,
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 1},
    ),
    "a matrix": (llama, {"target_modules": [], "target_parameters": ["up_proj.weight"]}),
    "biases": (qwen2, {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_peft(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, options = CASES[case]
    base = make(tmp_path / "base")
    adapter = adapt(base, tmp_path / "adapter", **options)
    capsys.readouterr()
    assert main(["merge", str(base), str(adapter), str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "adapters merged into" in said.out
    assert said.err == ""
    auto = transformers.AutoModelForCausalLM
    plain = auto.from_pretrained(base)
    want = peft.PeftModel.from_pretrained(auto.from_pretrained(base), adapter).merge_and_unload()
    got = auto.from_pretrained(tmp_path / "out")
    assert_same(got, want.requires_grad_())
    before = plain.state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in got.state_dict().items())
    assert entries(tmp_path / "out") == sorted({*entries(base), "README.md"})


def test_one_tensor_of_the_base_is_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = llama(tmp_path / "base")
    adapter = adapt(base, tmp_path / "adapter")
    held = HeldTensors(monkeypatch, base)
    merged = merge(base, adapter, tmp_path / "out")
    assert held.most_bytes == merged.copied.largest_bytes
    assert merged.num_merged == 14


def test_few_experts_of_an_array_are_merged_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = gpt_oss(tmp_path / "base")
    arrays = ["experts.gate_up_proj", "experts.down_proj"]
    adapter = adapt(base, tmp_path / "adapter", target_modules=[], target_parameters=arrays)
    merge(base, adapter, tmp_path / "whole")
    held, most, merged = HeldTensors(monkeypatch, base), [0], ArrayMerging._merge

    def noted(merging: ArrayMerging, layer: Any, rows: torch.Tensor, used: range) -> None:
        most.append(len(used))
        merged(merging, layer, rows, used)

    monkeypatch.setattr(ArrayMerging, "_merge", noted)
    monkeypatch.setattr(array_merge, "_RUN_BYTES", 1)
    found = merge(base, adapter, tmp_path / "out")
    assert (max(most), found.num_merged) == (2, 4)
    assert held.most_bytes == found.copied.largest_bytes
    whole, out = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(value, out[name]) for name, value in whole.items())


def test_a_tokenizer_of_the_adapters_replaces_that_of_the_base(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    adapter = adapt(base, tmp_path / "adapter")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(adapter)
    merge(base, adapter, tmp_path / "out")
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    )


def _edit(adapter: Path, **fields: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _cut(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def _not_finite(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    values = load_file(path)
    next(iter(values.values())).fill_(float("inf"))
    save_file(values, path)


def _without_one(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    values = load_file(path)
    del values[min(values)]
    save_file(values, path)


@pytest.mark.parametrize(
    ("spoil", "base_options", "message"),
    [
        (
            lambda _: None,
            {"intermediate_size": 32},
            r"do not fit this base: .* has shape \[.*\], but the base",
        ),
        (lambda _: None, {"num_hidden_layers": 1}, r"the base has no layer for its '.*layers\.1\."),
        (lambda _: None, {"num_hidden_layers": 3}, "needs 4 tensors that its file lacks, such as"),
        (_without_one, {}, "needs 1 tensors that its file lacks"),
        (_cut, {}, "cannot read .*adapter_model.safetensors"),
        (_not_finite, {}, "gives values that are not finite"),
        (lambda path: _edit(path, peft_type="IA3"), {}, "adapters of type 'IA3'; gemini merges only LORA"),
        (lambda path: _edit(path, init_lora_weights="pissa"), {}, "changes the weights of the base as well"),
        (lambda path: _edit(path, loftq_config={"x": 1}), {}, "has loftq_config, which gemini cannot merge"),
        (lambda path: (path / "adapter_config.json").unlink(), {}, "has no adapter_config.json"),
        (
            lambda path: (path / "adapter_config.json").write_text("{"),
            {},
            "adapter_config.json is not valid JSON",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_in_one_line_and_nothing_is_written(
    spoil: Callable[[Path], object], base_options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    adapter = adapt(llama(tmp_path / "first"), tmp_path / "adapter", target_modules=["q_proj", "up_proj"])
    base = llama(tmp_path / "base", **base_options) if base_options else tmp_path / "first"
    spoil(adapter)
    before = entries(tmp_path)
    with pytest.raises(ConfigError, match=message) as refused:
        merge(base, adapter, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert entries(tmp_path) == before


def test_an_adapter_that_would_untie_the_base_is_refused(tmp_path: Path) -> None:
    base = llama(tmp_path / "base", tie_word_embeddings=True)
    adapter = adapt(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match=r"changes 'lm_head\.weight', which is tied in the base"):
        merge(base, adapter, tmp_path / "out")


def test_what_is_there_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = llama(tmp_path / "base")
    adapter = adapt(base, tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"adapter exists; remove it, or name another place"):
        merge(base, adapter, adapter)

    def fails(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(adapter_merge, "copy_weights", fails)
    with pytest.raises(KeyboardInterrupt):
        merge(base, adapter, tmp_path / "out")
    assert entries(tmp_path) == ["adapter", "base"]
