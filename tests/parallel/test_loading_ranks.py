"""``gemini.from_pretrained`` over ranks: each keeps its part of what the files hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_on_ranks
from safetensors.torch import save_file
from sharded_harness import SMALL_CHUNKS, WIDTH, mlp

import gemini


def _load(directory: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    model = gemini.from_pretrained(directory, mlp, **SMALL_CHUNKS)
    model(torch.ones(2, WIDTH)).sum().backward()
    handle = gemini.handle_of(model)
    state = {name: value.clone() for name, value in handle.state_dict().items()}
    handle.close()
    return state


def test_each_rank_has_the_values_of_the_files(tmp_path: Path) -> None:
    want = mlp().state_dict()
    save_file(want, tmp_path / "model.safetensors")
    for state in run_on_ranks(_load, 2, str(tmp_path)):
        assert state.keys() == want.keys()
        assert all(torch.equal(state[name], value) for name, value in want.items())


def _load_transformers(directory: str) -> dict[str, torch.Tensor]:
    import transformers

    torch.manual_seed(torch.distributed.get_rank())
    kind = transformers.LlamaForSequenceClassification
    model = gemini.from_pretrained(directory, kind, **SMALL_CHUNKS)
    handle = gemini.handle_of(model)
    state = {name: value.clone() for name, value in handle.state_dict().items()}
    handle.close()
    return state


def test_what_files_lack_is_the_first_ranks(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=64, pad_token_id=0, **sizes)
    want = transformers.LlamaForCausalLM(config)
    want.save_pretrained(tmp_path)
    first, second = run_on_ranks(_load_transformers, 2, str(tmp_path))
    weights = want.state_dict()
    held = first.keys() & weights.keys()
    assert held
    assert all(torch.equal(first[name], weights[name]) for name in held)
    assert all(torch.equal(second[name], value) for name, value in first.items())
    assert first["score.weight"].any()
