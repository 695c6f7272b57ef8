"""``from_pretrained(trains=False)`` of transformers' models: weights stay in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import gemini
from gemini.integrations.safetensors_files import SafetensorsFiles
from gemini.integrations.stored_weights import UnreadTensor

transformers = pytest.importorskip("transformers")

KIB = 1024


def gpt2() -> Any:
    sizes = {"vocab_size": 96, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def mixtral(hidden: int = 32) -> Any:
    sizes = {"vocab_size": 96, "hidden_size": hidden, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))


def saved(build: Any, directory: Path, dtype: torch.dtype) -> Path:
    torch.manual_seed(0)
    build().to(dtype).save_pretrained(directory, max_shard_size=64 * KIB)
    return directory


def tokens(model: Any) -> list[int]:
    prompt = torch.arange(3, 9)[None]
    out = model.eval().generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    return out[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_generates_the_same_tokens_without_a_second_copy(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = saved(gpt2, tmp_path / "model", dtype)
    want = tokens(transformers.GPT2LMHeadModel.from_pretrained(directory))
    model = gemini.from_pretrained(directory, trains=False, device_bytes=128 * KIB, non_model_bytes=0)
    handle = gemini.handle_of(model)
    assert handle.stats()["disk_read"]["bytes"] == 0
    assert tokens(model) == want
    assert handle.stats()["disk_read"]["bytes"] > 0
    assert handle.stats()["disk_write"]["bytes"] == 0
    handle.close()


@pytest.mark.parametrize("hidden", [32, 64])  # rows of an array are whole pages with 64 alone
def test_experts_that_files_have_one_by_one_stay_there(tmp_path: Path, hidden: int) -> None:
    directory = saved(lambda: mixtral(hidden), tmp_path / "model", torch.float32)
    names = transformers.modeling_utils.safe_open(next(directory.glob("*.safetensors")), "pt").keys()
    assert any(".experts.0." in name for name in names)
    want = tokens(transformers.MixtralForCausalLM.from_pretrained(directory))
    model = gemini.from_pretrained(directory, trains=False, device_bytes=256 * KIB, non_model_bytes=0)
    handle = gemini.handle_of(model)
    assert handle.stats()["disk_read"]["bytes"] == 0
    assert tokens(model) == want
    assert handle.stats()["disk_write"]["bytes"] == 0
    handle.close()


def test_a_cast_of_merged_experts_is_copied(tmp_path: Path) -> None:
    directory = saved(mixtral, tmp_path / "model", torch.float32)
    want = tokens(transformers.MixtralForCausalLM.from_pretrained(directory, dtype=torch.bfloat16))
    model = gemini.from_pretrained(
        directory,
        trains=False,
        dtype=torch.bfloat16,
        device_bytes=256 * KIB,
        disk_dir=str(tmp_path),
        non_model_bytes=0,
    )
    assert tokens(model) == want
    gemini.handle_of(model).close()


def deepseek() -> Any:
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    fine = {"moe_intermediate_size": 32, "intermediate_size": 64, "first_k_dense_replace": 1}
    latent = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
    config = transformers.DeepseekV3Config(
        **sizes, **experts, **fine, **latent, v_head_dim=16, num_key_value_heads=4
    )
    return transformers.DeepseekV3ForCausalLM(config)


def test_buffers_are_read_while_the_files_are_open(tmp_path: Path) -> None:
    directory = saved(deepseek, tmp_path / "model", torch.float32)
    want = tokens(transformers.DeepseekV3ForCausalLM.from_pretrained(directory))
    model = gemini.from_pretrained(directory, trains=False, device_bytes=256 * KIB, non_model_bytes=0)
    assert {type(buffer) for buffer in model.buffers()} == {torch.Tensor}
    assert tokens(model) == want
    gemini.handle_of(model).close()


def test_hundreds_of_experts_that_are_put_together_stay_unread(tmp_path: Path) -> None:
    """A layer of DeepSeek-V3 has 256; their two matrices are stacked, then put behind each other."""
    experts = 256
    values = {f"{kind}.{n}": torch.full((2, 3), float(n)) for kind in "gu" for n in range(experts)}
    save_file(values, tmp_path / "model.safetensors")
    with SafetensorsFiles([tmp_path / "model.safetensors"]) as files:
        parts = [[UnreadTensor(files[f"{kind}.{n}"]) for n in range(experts)] for kind in "gu"]
        array = torch.cat([torch.stack(part) for part in parts], dim=1)
        assert isinstance(array, UnreadTensor)
        assert len(array.pieces) == 2 * experts
        want = torch.cat([torch.stack([values[f"{k}.{n}"] for n in range(experts)]) for k in "gu"], dim=1)
        assert torch.equal(array.read(), want)
