"""Models of transformers, unmodified, compute the same when they are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from tensor_harness import TOLERANCE, make_mesh, relative
from torch import Tensor, nn
from torch import distributed as dist

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer, init_on
from gemini.parallel import parallelize
from gemini.parallel.mesh import counted
from gemini.parallel.tensor.plan import STYLES

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY = 67  # which nothing divides
TEXT = {"vocab_size": VOCABULARY, "use_cache": False}
LLAMA = {
    **TEXT,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
BART = {
    **TEXT,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **TEXT,
            "n_embd": 32,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 16,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
            "resid_pdrop": 0,
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "llama, one key head": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "num_key_value_heads": 1}),
    "qwen3, one key head": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**LLAMA, "head_dim": 8, "num_key_value_heads": 1, "attention_bias": True},
    ),
    **{
        f"cohere, norms by head, {heads} key heads": (
            "CohereForCausalLM",
            "CohereConfig",
            {
                **LLAMA,
                "use_qk_norm": True,
                "num_key_value_heads": heads,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        )
        for heads in (1, 2)
    },
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 8}),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**BERT, "pad_token_id": 1}),
    "albert": (
        "AlbertForMaskedLM",
        "AlbertConfig",
        {**BERT, "embedding_size": 16, "num_hidden_layers": 3, "num_hidden_groups": 2, "inner_group_num": 2},
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {**TEXT, "hidden_size": 32, "n_head": 4, "n_layer": 2, "hidden_dropout": 0.0},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            **TEXT,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "dropout": 0.0,
            "word_embed_proj_dim": 32,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **TEXT,
            "d_model": 32,
            "d_ff": 48,
            "d_kv": 8,
            "num_heads": 4,
            "num_layers": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    **{
        name.lower(): (f"{name}ForConditionalGeneration", f"{name}Config", BART)
        for name in ("Bart", "MBart", "Pegasus", "Blenderbot", "M2M100", "PLBart")
    },
    "marian": ("MarianMTModel", "MarianConfig", {**BART, "decoder_start_token_id": 0}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 5,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 12,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "dropout": 0.0,
        },
    ),
}
LANGUAGE = ["gpt2", "llama, tied", "bloom", "opt"]


def on_two_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call it there; the first call imports transformers, which takes its time on a busy machine."""
    return run_on_ranks(function, 2, *args, timeout=180.0)


def build(name: str) -> nn.Module:
    model, config, options = MODELS[name]
    torch.manual_seed(13)
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    with torch.no_grad():  # biases and norms begin as zeros and ones, which hides mistakes
        for index, param in enumerate(built.parameters()):
            param.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(index)))
    return built


def inputs_of(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=generator)
    if name == "vit":
        images = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([1, 4])}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 24, generator=generator), "labels": ids}
    labels = ids.clone()
    labels[0, :3] = -100
    if name == "bloom":  # whose bias depends on the mask
        seen = torch.ones_like(ids)
        seen[1, :2] = 0
        return {"input_ids": ids, "labels": labels, "attention_mask": seen}
    return {"input_ids": ids, "labels": labels}


def compare(name: str, gather_logits: bool, sequence_norms: bool = False) -> dict[str, float]:
    whole, model = build(name), build(name)
    inputs = {key: value[:, :8] if sequence_norms else value for key, value in inputs_of(name).items()}
    wanted = whole(**inputs)
    wanted.loss.backward()
    partition = parallelize(
        model,
        make_mesh(tp=dist.get_world_size()),
        gather_logits=gather_logits,
        sequence_norms=sequence_norms,
    )
    got = model(**inputs)
    got.loss.backward()
    grads = partition.gather_state({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    errors = {"loss": relative(got.loss.detach(), wanted.loss.detach())}
    if gather_logits:
        errors["logits"] = relative(got.logits.detach(), wanted.logits.detach())
    for key, param in whole.named_parameters():
        if param.grad is not None:
            difference = float((grads.pop(key) - param.grad).abs().max())
            # Softmax does not see the biases of keys: their gradients are noise.
            errors[key] = difference / max(float(param.grad.abs().max()), 1e-3 * largest)
    assert not grads
    assert len(partition.cuts) > 8
    return errors


@pytest.mark.parametrize("name", MODELS)
def test_cut_model_computes_what_the_whole_one_does(name: str) -> None:
    for errors in on_two_ranks(compare, name, True):
        assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("name", LANGUAGE)
def test_loss_by_parts_is_that_of_whole_logits(name: str) -> None:
    for errors in on_two_ranks(compare, name, False):
        assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_norms_on_parts_of_the_sequence_compute_what_whole_ones_do(name: str) -> None:
    for errors in on_two_ranks(compare, name, False, True):
        assert max(errors.values()) <= TOLERANCE, errors


def count(name: str, layers: int, gather_logits: bool) -> tuple[dict[str, int], int]:
    MODELS["counted"] = (*MODELS[name][:2], {**MODELS[name][2], "num_hidden_layers": layers})
    mesh = make_mesh(tp=2)
    model = build("counted")
    parallelize(model, mesh, gather_logits=gather_logits)
    axis = mesh.axis("tp")
    assert axis is not None
    model(**inputs_of(name)).loss.backward()  # the first pass also compares what must be equal
    with counted(axis) as (calls, sent):
        model(**inputs_of(name)).loss.backward()
    return dict(calls), sum(sent.values())


def test_llama_has_four_all_reduces_in_each_layer() -> None:
    (one, one_bytes), _ = on_two_ranks(count, "llama", 1, False)
    (three, three_bytes), _ = on_two_ranks(count, "llama", 3, False)
    assert three["all_reduce"] - one["all_reduce"] == 2 * 4
    assert three_bytes - one_bytes == 2 * 4 * (2 * 9 * 32 * 4)  # b s h in fp32, and 2 (P - 1) / P is 1
    # The embedding, the head's input, and of the loss the largest, then sum and own logit.
    assert one == {"all_reduce": 4 + 1 + 1 + 2}
    (whole, _), _ = on_two_ranks(count, "llama", 1, True)
    assert whole == {"all_reduce": 4 + 1 + 1, "all_gather": 1}


def refuse(options: dict[str, Any]) -> str:
    config = transformers.LlamaConfig(**{**LLAMA, **options})
    with pytest.raises(ConfigError) as caught:
        parallelize(transformers.LlamaForCausalLM(config), make_mesh(tp=2))
    return str(caught.value)


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    for said in on_two_ranks(refuse, {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}):
        assert said.startswith("model.layers.0.self_attn.q_proj: 24 outputs in 1 x 3 units of 8")
        assert said.endswith("sizes that do: 1, 3")


def test_key_heads_fewer_than_ranks_are_on_several() -> None:
    for errors in run_on_ranks(compare, 4, "llama", True, timeout=180.0):  # two of them
        assert max(errors.values()) <= TOLERANCE, errors


def refuse_slices() -> str:
    _, _, options = MODELS["bloom"]
    config = transformers.BloomConfig(**options, pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(ConfigError) as caught:
        parallelize(transformers.BloomForCausalLM(config), make_mesh(tp=2))
    return str(caught.value)


def test_slices_of_whole_weights_are_refused() -> None:
    for said in on_two_ranks(refuse_slices):
        assert said.startswith("transformer.h.0.self_attention: slow_but_exact")


def refuse_loss() -> str:
    with pytest.raises(ConfigError) as caught:
        parallelize(build("bert"), make_mesh(tp=2), gather_logits=False)
    return str(caught.value)


def test_loss_that_cannot_be_replaced_is_refused() -> None:
    for said in on_two_ranks(refuse_loss):
        assert said.startswith("gather_logits=False: BertForMaskedLM is no causal language model")


def on_meta(name: str) -> nn.Module:
    """Return the model without values, and torch's generator at the beginning."""
    kind, config, options = MODELS[name]
    torch.manual_seed(3)
    with init_on("meta"):
        model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**options))
    return model


def weights_from_meta() -> bool:
    mesh = make_mesh(tp=2)
    with GeminiDDP(on_meta("gpt2"), process_group=mesh["dp"], device_bytes="64MiB") as managed:
        whole = {key: value.clone() for key, value in managed.state_dict().items()}
    model = on_meta("gpt2")
    partition = parallelize(model, mesh)
    got = partition.gather_state(model.state_dict())
    return got.keys() == whole.keys() and all(torch.equal(got[key], value) for key, value in whole.items())


def test_model_of_transformers_on_meta_begins_with_the_bits_of_one_process() -> None:
    assert all(on_two_ranks(weights_from_meta))


def train(name: str, device_bytes: str, gather_logits: bool) -> tuple[list[float], list[float], int]:
    mesh = make_mesh(tp=2)
    model = build(name)
    ranks = parallelize(model, mesh, gather_logits=gather_logits).model_ranks
    losses, norms = [], []
    with GeminiDDP(
        model,
        process_group=mesh["dp"],
        model_ranks=ranks,
        device_bytes=device_bytes,
        host_bytes="8MiB",
        non_model_bytes=0,
        min_chunk_size_mb=0.008,
        search_range_mb=0.004,
    ) as managed:
        adam = CPUAdam(managed.parameters(), lr=1e-2, eps=1e-6)
        optimizer = GeminiOptimizer(adam, managed)
        for _ in range(4):
            loss = managed(**inputs_of(name)).loss
            optimizer.backward(loss)
            norms.append(float(optimizer.clip_grad_by_norm(0.5)))
            optimizer.step()
            losses.append(loss.item())
        return losses, norms, managed.stats()["d2h"]["bytes"]


def train_whole(name: str) -> tuple[list[float], list[float]]:
    model = build(name)
    adam = CPUAdam(model.parameters(), lr=1e-2, eps=1e-6)
    losses, norms = [], []
    for _ in range(4):
        loss = model(**inputs_of(name)).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize(
    ("name", "gather_logits"),
    [("gpt2", True), ("bloom", True), ("qwen3", False), ("qwen3, one key head", False)],
)
def test_managed_parts_train_as_the_whole_model_within_any_budget(name: str, gather_logits: bool) -> None:
    wanted_losses, wanted_norms = train_whole(name)
    roomy = on_two_ranks(train, name, "64MiB", gather_logits)
    tight = on_two_ranks(train, name, "160KiB", gather_logits)
    for (losses, norms, _), (same_losses, same_norms, moved) in zip(roomy, tight, strict=True):
        assert losses == pytest.approx(wanted_losses, rel=TOLERANCE)
        assert norms == pytest.approx(wanted_norms, rel=1e-5)
        assert (same_losses, same_norms) == (losses, norms)
        assert moved > 0


def test_names_of_styles_are_those_of_transformers() -> None:
    known = pytest.importorskip("transformers.integrations.tensor_parallel", reason="another transformers")
    kept = {"colwise_rep", "rowwise_rep"}  # of earlier versions
    assert set(STYLES) - kept <= set(known.ALL_PARALLEL_STYLES.keys())
