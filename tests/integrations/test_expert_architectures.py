"""Mixtures of experts of transformers generate with the logits of the resident model, by the expert."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini import _C

transformers = pytest.importorskip("transformers")

_SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_HEADS = {**_SIZES, "num_key_value_heads": 2}
_FINE = {"intermediate_size": 128, "moe_intermediate_size": 32, "num_experts_per_tok": 4}
_FEW = {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_GROUPS = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "Mixtral": {**_HEADS, **_FEW},
    "GptOss": {**_HEADS, **_FEW, "head_dim": 16},
    "Qwen3Moe": {**_HEADS, **_FINE, "num_experts": 16, "head_dim": 16},
    "Olmoe": {**_HEADS, "intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4},
    "DeepseekV3": {**_SIZES, **_FINE, **_LATENT, **_GROUPS, "n_routed_experts": 16, "num_key_value_heads": 4},
    "GraniteMoe": {**_HEADS, **_FEW},
}


def _model(name: str, implementation: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    config._experts_implementation = implementation
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)


def _logits(model: Any) -> torch.Tensor:
    prompt = torch.arange(5, 15).view(2, 5)
    out = model.generate(
        prompt,
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(out.logits)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_mixture_generates_the_same_logits_at_three_budgets(
    name: str, implementation: str, tmp_path: Path
) -> None:
    plain = _model(name, implementation)
    want = _logits(plain)
    total = sum(param.nbytes for param in plain.parameters())
    for share in (0.3, 0.5, 0.9):
        room = int(share * total)
        module = copy.deepcopy(plain)
        handle = gemini.manage(
            module,
            device_bytes=room,
            host_bytes=0,
            disk_dir=tmp_path,
            non_model_bytes=0,
            optimizer_rule="none",
        )
        assert handle.storage.chunks.has_choices
        for _ in range(2):
            assert torch.equal(_logits(module), want)
        assert not handle.storage.chunks.table.diverged()
        assert handle.storage.chunks.table.peak(_C.Tier.DEVICE) <= room
        handle.close()


def _trained(model: Any, optimizer: Any, backward: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    for step in range(4):
        ids = torch.randint(0, 96, (1, 6), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_mixture_trains_by_the_expert_with_the_bits_of_torch(
    name: str, implementation: str, tmp_path: Path
) -> None:
    plain = _model(name, implementation).train().requires_grad_(True)
    module = copy.deepcopy(plain)
    room = int(1.3 * sum(param.nbytes for param in plain.parameters()))  # of 4, with gradients and states
    optimizer = gemini.HybridAdam(plain.parameters(), lr=1e-3)
    losses, weights = _trained(plain, optimizer, lambda loss: loss.backward())
    budgets: dict[str, Any] = {"device_bytes": room, "host_bytes": 0, "disk_dir": tmp_path}
    with gemini.GeminiDDP(module, non_model_bytes=0, **budgets) as ddp:
        managed = gemini.GeminiOptimizer(gemini.HybridAdam(ddp.parameters(), lr=1e-3), ddp)
        found = _trained(ddp, managed, managed.backward)
        assert any(slot.group.parts for slot in ddp.storage.slots.values())
        assert ddp.stats()["device"]["peak_bytes"] <= room
    assert found[0] == losses
    assert all(torch.equal(found[1][key], value) for key, value in weights.items())
