"""Unmodified models of transformers in stages, and in stages and parts, train as in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_harness import ADAM, CHUNKS, MAX_NORM
from processes import run_on_ranks
from torch import Tensor, nn

from gemini import CPUAdam
from gemini.parallel import Booster, HybridParallelPlugin

pytest.importorskip("transformers", reason="models of transformers")

TIGHT = {"device_bytes": "600KiB", "host_bytes": "16MiB"}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def build(name: str) -> nn.Module:
    """A small model, in fp32, without dropout unless its name says so."""
    import transformers as t

    t.logging.set_verbosity_error()
    torch.manual_seed(8)
    if name == "llama":
        config = t.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
        return t.LlamaForCausalLM(config)
    if name == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8))
    if name.startswith("gpt2"):
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1 if "dropout" in name else 0.0)
        config = t.GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=32, **drops)
        return t.GPT2LMHeadModel(config)
    if name == "llama4":
        experts = {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64}
        config = t.Llama4TextConfig(**SIZES, **experts, num_key_value_heads=2, pad_token_id=0)
        return t.Llama4ForCausalLM(config)
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "deberta":
        relative = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
        return t.DebertaV2ForMaskedLM(
            t.DebertaV2Config(**SIZES, **off, **relative, max_position_embeddings=32)
        )
    return t.BertForMaskedLM(t.BertConfig(**SIZES, max_position_embeddings=32, **off))


def batch_of(step: int) -> dict[str, Tensor]:
    """Tokens, the last of which are padding in some sequences of each micro-batch."""
    ids = torch.randint(64, (8, 6), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[::2, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_of(output: Any, _batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = output.loss
    return loss


@cache
def whole(name: str) -> tuple[list[float], list[float]]:
    model = build(name)
    optimizer = CPUAdam(model.parameters(), **ADAM)
    losses, norms = [], []
    for step in range(4):
        loss = model(**batch_of(step)).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def _train(name: str, style: str, sizes: dict[str, Any], path: str) -> tuple[list[float], list[float], int]:
    plugin = HybridParallelPlugin(
        pp_style=style, num_microbatches=4, max_norm=MAX_NORM, **sizes, **CHUNKS, **TIGHT
    )
    booster, model = Booster(plugin=plugin), build(name)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    losses, norms = [], []
    for step in range(4):
        out = booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)
        optimizer.step()
        losses.append(float(out["loss"]))
        norms.append(optimizer.get_grad_norm())
    booster.save_model(model, path, shard=True)
    return losses, norms, model.stats()["device"]["peak_bytes"]


@pytest.mark.parametrize(
    ("name", "style", "sizes"),
    [
        ("llama", "1f1b", {"pp_size": 2, "tp_size": 2}),
        ("llama", "zbv", {"pp_size": 2}),
        ("qwen3", "1f1b", {"pp_size": 2, "tiled_loss": True}),
        ("gpt2", "zero_bubble", {"pp_size": 2, "tp_size": 2}),
        ("bert", "dualpipev", {"pp_size": 2}),
        ("llama4", "1f1b", {"pp_size": 2}),  # asks weights of another stage for their device
        (
            "deberta",
            "1f1b",
            {"pp_size": 2, "before": ["deberta.encoder.rel_embeddings"]},
        ),  # hands blocks a weight
    ],
)
def test_models_of_transformers_train_in_stages(
    tmp_path: Path, name: str, style: str, sizes: dict[str, Any]
) -> None:
    path = str(tmp_path / "saved")
    wanted = whole(name)
    for losses, norms, peak in run_on_ranks(_train, 2 * sizes.get("tp_size", 1), name, style, sizes, path):
        assert losses == pytest.approx(wanted[0], rel=1e-5)
        assert norms == pytest.approx(wanted[1], rel=1e-5)
        assert peak <= 600 * 1024
    read = type(build(name)).from_pretrained(path)
    assert getattr(read.config, "use_cache", None) == getattr(build(name).config, "use_cache", None)


def _train_with_dropout(tp_size: int, device_bytes: str) -> tuple[list[float], int]:
    plugin = HybridParallelPlugin(
        pp_size=2,
        tp_size=tp_size,
        num_microbatches=4,
        device_bytes=device_bytes,
        host_bytes="16MiB",
        **CHUNKS,
    )
    booster, model = Booster(plugin=plugin), build("gpt2 with dropout")
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), **ADAM))
    losses = []
    for step in range(4):
        out = booster.execute_pipeline(iter([batch_of(step)]), model, loss_of, optimizer)
        optimizer.step()
        losses.append(float(out["loss"]))
    return losses, model.stats()["d2h"]["bytes"]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_budgets_change_no_bit_of_stages_that_drop_out(tp_size: int) -> None:
    roomy = run_on_ranks(_train_with_dropout, 2 * tp_size, tp_size, "64MiB")
    tight = run_on_ranks(_train_with_dropout, 2 * tp_size, tp_size, "300KiB")
    assert [losses for losses, _ in tight] == [losses for losses, _ in roomy] == [roomy[0][0]] * 2 * tp_size
    assert all(moved > 0 for _, moved in tight)
    assert roomy[0][0] != whole("gpt2")[0]
    assert roomy[0][0] == pytest.approx(whole("gpt2")[0], rel=0.1)
