"""Published models that low-level ZeRO elsewhere names as ones it may not support."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from torch import Tensor, nn

from gemini.parallel import LowLevelZeroPlugin
from gemini.parallel.zero import LowLevelZeroOptimizer

transformers = pytest.importorskip("transformers", reason="the models come from transformers")

SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SMALL_ALBERT = {**SMALL, "embedding_size": 8, "classifier_dropout_prob": 0.0}
SMALL_GPT2 = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("BertConfig", SMALL),
    "BertForPreTraining": ("BertConfig", SMALL),
    "AlbertModel": ("AlbertConfig", SMALL_ALBERT),
    "AlbertForPreTraining": ("AlbertConfig", SMALL_ALBERT),
    "GPT2DoubleHeadsModel": ("GPT2Config", {**SMALL_GPT2, **NO_DROPOUT}),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    config, options = MODELS[name]
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
    return model


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, 60, (4, 8), generator=torch.Generator().manual_seed(step))


def loss_of(name: str, model: nn.Module, tokens: Tensor) -> Tensor:
    """Return a loss that every output but the last parts of the heads goes into."""
    if name == "GPT2DoubleHeadsModel":
        tokens = tokens.unsqueeze(1)  # one choice
    outputs = model(input_ids=tokens, return_dict=True)
    every = [value for value in outputs.values() if isinstance(value, Tensor) and value.is_floating_point()]
    return torch.stack([value.float().square().mean() for value in every]).sum()


def _train(name: str, stage: int, precision: str) -> tuple[dict[str, Tensor], list[float]]:
    module = build(name)
    inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    plugin = LowLevelZeroPlugin(stage, precision, initial_scale=2.0**8, max_norm=1.0)
    model, optimizer, _ = plugin.configure(module, inner, None, None)
    assert isinstance(optimizer, LowLevelZeroOptimizer)
    losses = []
    for step in range(3):
        loss = loss_of(name, model, own_part(tokens_of(step)))
        optimizer.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return {key: value.detach().float().clone() for key, value in module.named_parameters()}, losses


@pytest.mark.parametrize("name", MODELS)
def test_model_trains_on_two_ranks_as_on_one(name: str) -> None:
    module = build(name)
    plain = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        plain.zero_grad()
        loss_of(name, module, tokens_of(step)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        plain.step()
    for stage, precision, tolerance in ((1, "fp32", 1e-6), (2, "fp32", 1e-6), (2, "bf16", 1e-2)):
        for got, losses in run_on_ranks(_train, 2, name, stage, precision, timeout=100.0):
            assert all(torch.isfinite(torch.tensor(losses)))
            for key, weight in module.named_parameters():
                torch.testing.assert_close(got[key], weight.detach(), rtol=tolerance, atol=tolerance, msg=key)
