"""``gemini.from_pretrained`` gives a transformers model what its own ``from_pretrained`` gives."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import SIZES, assert_same, saved
from safetensors.torch import load_file, save_file

import gemini
from gemini.errors import CheckpointError, ConfigError
from gemini.integrations.safetensors_files import StoredTensor
from gemini.runtime.config import GeminiConfig

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

LLAMA = transformers.LlamaForCausalLM


def llama(**more: Any) -> Any:
    return transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **more)


KINDS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llama": lambda: (llama(), LLAMA),
    "tied": lambda: (llama(tie_word_embeddings=True), LLAMA),
    "fused weights": lambda: (
        transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32),
        transformers.GPT2LMHeadModel,
    ),
    "tied bias": lambda: (transformers.BertConfig(**SIZES), transformers.BertForMaskedLM),
    "experts that are merged": lambda: (
        transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
        transformers.MixtralForCausalLM,
    ),
}


def tight(directory: Path) -> dict[str, Any]:
    return {"device_bytes": "600KiB", "disk_dir": str(directory), "non_model_bytes": 0}


def load_both(directory: Path, kind: Any, **options: Any) -> tuple[Any, Any]:
    """Return what transformers and we load, each with its report, from the same random numbers."""
    torch.manual_seed(5)
    want = kind.from_pretrained(directory, output_loading_info=True, **options)
    torch.manual_seed(5)
    got = gemini.from_pretrained(
        directory, kind, output_loading_info=True, optimizer_rule="none", **options, **tight(directory)
    )
    return got, want


@pytest.mark.parametrize("name", KINDS)
def test_values_ties_and_outputs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config, kind = KINDS[name]()
    (got, report), (want, wanted) = load_both(saved(config, kind, tmp_path, shard="60KB"), kind)
    assert report == wanted
    assert_same(got, want)
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(got(input_ids=tokens).logits, want(input_ids=tokens).logits)
    assert type(got).__name__ == kind.__name__


def test_an_auto_class_its_name_and_the_config_find_the_class(tmp_path: Path) -> None:
    saved(llama(), LLAMA, tmp_path)
    for chosen in (transformers.AutoModelForCausalLM, "AutoModelForCausalLM", None):
        assert isinstance(gemini.from_pretrained(tmp_path, chosen, **tight(tmp_path)), LLAMA)


def test_missing_weights_are_initialized_as_transformers_does(tmp_path: Path) -> None:
    saved(llama(), LLAMA, tmp_path)
    (got, report), (want, wanted) = load_both(tmp_path, transformers.LlamaForSequenceClassification)
    assert report == wanted
    assert report["missing_keys"] == {"score.weight"}
    assert report["unexpected_keys"] == {"lm_head.weight"}
    assert_same(got, want)


def test_another_shape_is_refused_or_initialized_as_asked(tmp_path: Path) -> None:
    file = saved(llama(), LLAMA, tmp_path) / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.ones(5, 32)}, file, {"format": "pt"})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        gemini.from_pretrained(tmp_path, LLAMA, **tight(tmp_path))
    (got, report), (want, wanted) = load_both(tmp_path, LLAMA, ignore_mismatched_sizes=True)
    assert report == wanted
    assert_same(got, want)


@pytest.mark.parametrize("budgets", ["keywords", "config"])
def test_the_config_of_a_model_and_that_of_budgets_go_where_they_belong(budgets: str, tmp_path: Path) -> None:
    saved(llama(), LLAMA, tmp_path)
    config = llama(attention_dropout=0.1)
    config.num_hidden_layers = 1
    want = LLAMA.from_pretrained(tmp_path, config=config)
    if budgets == "keywords":
        got = gemini.from_pretrained(tmp_path, LLAMA, config=config, **tight(tmp_path))
    else:
        want = LLAMA.from_pretrained(tmp_path)
        got = gemini.from_pretrained(tmp_path, LLAMA, config=GeminiConfig.from_options(**tight(tmp_path)))
    assert_same(got, want)
    assert got.config.attention_dropout == want.config.attention_dropout


@pytest.mark.parametrize("held", ["both, alike", "both, different", "the other alone"])
def test_ties_follow_what_the_files_hold(held: str, tmp_path: Path) -> None:
    file = saved(llama(tie_word_embeddings=True), LLAMA, tmp_path) / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + (held == "both, different")
    if held == "the other alone":
        del state["model.embed_tokens.weight"]
    save_file(state, file, {"format": "pt"})
    (got, report), (want, wanted) = load_both(tmp_path, LLAMA)
    assert report == wanted
    assert_same(got, want)


def test_16_bits_in_files_train_with_masters(tmp_path: Path) -> None:
    saved(llama(dtype="bfloat16"), LLAMA, tmp_path)
    model = gemini.from_pretrained(tmp_path, LLAMA, mixed_precision="bf16", **tight(tmp_path))
    optimizer = gemini.GeminiAdamOptimizer(model, lr=1e-2)
    tokens = torch.arange(12).reshape(2, 6)
    first = model(input_ids=tokens, labels=tokens).loss
    first.backward()
    optimizer.step()
    assert model(input_ids=tokens, labels=tokens).loss < first
    assert gemini.handle_of(model).state_dict()["lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_a_model_keeps_in_fp32_has_that_type(dtype: torch.dtype, tmp_path: Path) -> None:
    kind, sizes = transformers.T5ForConditionalGeneration, {"d_model": 32, "d_kv": 8, "d_ff": 64}
    saved(transformers.T5Config(vocab_size=64, num_layers=1, num_heads=4, **sizes), kind, tmp_path)
    got, want = load_both(tmp_path, kind, dtype=dtype)
    assert_same(got[0], want[0])
    types = {param.dtype for param in got[0].parameters()}
    assert types == ({dtype, torch.float32} if dtype == torch.float16 else {dtype})


def test_no_memory_is_held_by_a_load_that_failed(tmp_path: Path) -> None:
    file = saved(llama(), LLAMA, tmp_path) / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    before = set(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        gemini.from_pretrained(tmp_path, LLAMA, **tight(tmp_path))
    assert set(tmp_path.iterdir()) == before
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
    saved(llama(), LLAMA, tmp_path)
    assert_same(LLAMA.from_pretrained(tmp_path), gemini.from_pretrained(tmp_path, LLAMA, **tight(tmp_path)))


@pytest.mark.parametrize("path", ["./tooy", "/nowhere/tooy", "~/tooy", "some/where/tooy"])
def test_a_path_that_is_no_directory_is_refused_at_once(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"no directory '{path}'.*save_pretrained\(\).*hf download"):
        gemini.from_pretrained(path, LLAMA)


def test_a_name_that_nobody_knows_is_said_to_be_no_directory_either() -> None:
    with pytest.raises(OSError, match=r"^there is no directory 'tooy' here, and transformers"):
        gemini.from_pretrained("tooy", LLAMA)


def test_an_option_that_was_misspelled_is_refused_with_a_guess(tmp_path: Path) -> None:
    saved(llama(), LLAMA, tmp_path)
    with pytest.raises(TypeError, match=r"'dsk_dir' \(did you mean disk_dir\?\)"):
        gemini.from_pretrained(tmp_path, LLAMA, dsk_dir=str(tmp_path))
    with pytest.raises(TypeError, match="'nonsense'"):
        gemini.from_pretrained(tmp_path, LLAMA, nonsense=1)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model-00001-of-"])
def test_files_that_are_damaged_are_named_with_the_way_out(name: str, tmp_path: Path) -> None:
    LLAMA(llama()).save_pretrained(tmp_path, max_shard_size="20KB")
    file = next(each for each in sorted(tmp_path.iterdir()) if each.name.startswith(name))
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=rf"{file.name}.*; copy or download the file again"):
        gemini.from_pretrained(tmp_path, LLAMA, **tight(tmp_path))


def test_a_config_alone_is_initialized_by_the_models_own_rules(tmp_path: Path) -> None:
    model = gemini.from_pretrained(llama(), LLAMA, **tight(tmp_path))
    spread = float(model.model.embed_tokens.weight.std())
    assert 0.015 < spread < 0.025
    assert torch.equal(model.model.norm.weight, torch.ones(32))


def test_a_class_that_transformers_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="AutoModelForNothing"):
        gemini.from_pretrained(saved(llama(), LLAMA, tmp_path), "AutoModelForNothing")


def test_no_more_than_the_largest_tensor_is_held_beside_the_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(llama(), LLAMA, tmp_path)
    largest = max(param.nbytes for param in LLAMA.from_pretrained(tmp_path).parameters())
    read, held, most = StoredTensor.read, [], []

    def watched(tensor: StoredTensor, memory: torch.UntypedStorage | None = None) -> torch.Tensor:
        values = read(tensor, memory)
        held.append(weakref.ref(values.untyped_storage()))
        alive = [storage() for storage in held]  # some several times: memory is used again
        most.append(sum({each.data_ptr(): each.nbytes() for each in alive if each is not None}.values()))
        return values

    monkeypatch.setattr(StoredTensor, "read", watched)
    gemini.from_pretrained(tmp_path, LLAMA, **tight(tmp_path))
    assert len(most) == 21
    assert max(most) <= largest
