"""Models of transformers, unmodified, compute the same on parts of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from tensor_harness import TOLERANCE, make_mesh, relative
from torch import Tensor, nn
from torch import distributed as dist

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer
from gemini.parallel import Booster, HybridParallelPlugin, parallelize, parallelize_sequence

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY, LENGTH = 67, 9  # which two does not divide
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA = {**SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "use_cache": False}
BERT = {
    **SIZES,
    "vocab_size": VOCABULARY,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VIT = {**SIZES, "image_size": 16, "patch_size": 8, "num_labels": 5}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama, one key head": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": 3}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 16,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
            "resid_pdrop": 0,
            "use_cache": False,
        },
    ),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**BERT, "pad_token_id": 1}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "dropout": 0.0,
            "word_embed_proj_dim": 32,
            "use_cache": False,
        },
    ),
    # Scores reach a cap this low, and a sink counts as much as a key.
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **LLAMA,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 0.2,
            "sliding_window": 3,
            "attn_implementation": "eager",  # the others of transformers leave the cap out
        },
    ),
    "gpt-oss": (  # with fewer heads than ranks, if they are three
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **LLAMA,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "sliding_window": 3,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attn_implementation": "eager",
        },
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT),
    "bert, classes": ("BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 5}),
    "llama, classes": (
        "LlamaForSequenceClassification",
        "LlamaConfig",
        {**LLAMA, "num_labels": 5, "pad_token_id": 0},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 1, "n_head": 4}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"d_model": 32, "num_layers": 1, "num_heads": 4}),
}
TOKENS = [
    "llama",
    "llama, one key head",
    "qwen3",
    "mistral",
    "gpt2",
    "bert",
    "roberta",
    "opt",
    "gemma2",
    "gpt-oss",
]
WHOLE_BATCHES = ["vit", "bert, classes", "llama, classes"]


def on_ranks(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Call it there; the first call imports transformers, which takes its time on a busy machine."""
    return run_on_ranks(function, size, *args, timeout=180.0)


def build(name: str) -> nn.Module:
    model, config, options = MODELS[name]
    torch.manual_seed(13)
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    with torch.no_grad():  # biases and norms begin as zeros and ones, which hides mistakes
        for index, param in enumerate(built.parameters()):
            param.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(index)))
    return built


def batch_of(name: str, padding: str | None) -> dict[str, Tensor]:
    """Return a batch; ``padding``: where what does not count is in its second sequence."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    if name == "vit":
        return {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
            "labels": torch.tensor([1, 4]),
        }
    batch = {"input_ids": ids, "labels": ids.clone()}
    if "classes" in name:
        batch["labels"] = torch.tensor([1, 4])
    else:
        batch["labels"][0, :3] = -100
    if padding is not None:
        mask = torch.ones_like(ids)
        places = slice(6, None) if padding == "behind" else slice(None, 3)
        mask[1, places] = 0
        batch["attention_mask"] = mask
        if "classes" not in name:
            batch["labels"][1, places] = -100
        if name == "gemma2" and padding == "before":
            # Padding predicts this one. It sees nothing: eager functions take the mean of all values.
            batch["labels"][1, places.stop] = -100
    if name == "roberta":
        batch["position_ids"] = (torch.arange(LENGTH) + 2).unsqueeze(0)
    return batch


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def errors_of(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative errors of what ranks have the mean of."""
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    errors = {}
    assert got.keys() == wanted.keys()
    for name, grad in got.items():
        dist.all_reduce(grad)
        difference = float((grad / dist.get_world_size() - wanted[name]).abs().max())
        # Softmax does not see the biases of keys: their gradients are noise.
        errors[name] = difference / max(float(wanted[name].abs().max()), 1e-3 * largest)
    return errors


def compare(name: str, method: str, padding: str | None, recomputes: bool = False) -> dict[str, float]:
    whole, model = build(name), build(name)
    batch = batch_of(name, padding)
    wanted = whole(**batch).loss
    wanted.backward()
    cut = "blocks" if name in WHOLE_BATCHES else "batch"
    sequence = parallelize_sequence(model, make_mesh(sp=dist.get_world_size()), method, cut=cut)
    if recomputes:
        model.gradient_checkpointing_enable()
    part = batch if cut == "blocks" else sequence.cut(batch)
    got = model(**part).loss
    if cut == "batch" and not sequence.shifts_labels:  # a loss of its own
        got = sequence.mean_loss(got, part["labels"])
    got.backward()
    return {"loss": relative(got.detach(), wanted.detach())} | errors_of(gradients(model), gradients(whole))


def compare_all(method: str, padding: str | None) -> dict[str, dict[str, float]]:
    return {name: compare(name, method, padding) for name in TOKENS + WHOLE_BATCHES}


@pytest.mark.parametrize("padding", [None, "behind", "before"])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_models_on_parts_compute_what_whole_ones_do(method: str, padding: str | None) -> None:
    for found in on_ranks(compare_all, 2, method, padding):
        for name, errors in found.items():
            assert max(errors.values()) <= TOLERANCE, (name, errors)


def compare_recomputed(method: str) -> dict[str, dict[str, float]]:
    names = ["llama, one key head", "bert", "vit", "gemma2", "gpt-oss"]
    return {name: compare(name, method, "behind", recomputes=True) for name in names}


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_recomputed_blocks_attend_as_in_forward(method: str) -> None:
    for found in on_ranks(compare_recomputed, 3, method):  # of which one has a head less
        for name, errors in found.items():
            assert max(errors.values()) <= TOLERANCE, (name, errors)


def compare_documents(method: str) -> dict[str, float]:
    """Compare with three documents side by side in each sequence, told apart by their positions."""
    whole, model = build("llama"), build("llama")
    batch = batch_of("llama", None)
    batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 0, 1, 2, 3]])
    wanted = whole(**batch).loss
    wanted.backward()
    sequence = parallelize_sequence(model, make_mesh(sp=2), method)
    got = model(**sequence.cut(batch)).loss
    got.backward()
    return {"loss": relative(got.detach(), wanted.detach())} | errors_of(gradients(model), gradients(whole))


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_documents_in_one_sequence_do_not_see_each_other(method: str) -> None:
    for errors in on_ranks(compare_documents, 2, method):
        assert max(errors.values()) <= TOLERANCE, errors


def compare_cut(name: str, method: str) -> dict[str, float]:
    """Compare a model whose layers are cut too, and its loss taken by parts, over 2 x 2 ranks."""
    whole, model = build(name), build(name)
    batch = batch_of(name, "behind")
    wanted = whole(**batch).loss
    wanted.backward()
    mesh = make_mesh(sp=2, tp=2)
    partition = parallelize(model, mesh, gather_logits=False)
    sequence = parallelize_sequence(model, mesh, method)
    got = model(**sequence.cut(batch)).loss
    got.backward()
    # Ranks of tp have the same of the whole, those of sp its two parts.
    grads = partition.gather_state(gradients(model))
    return {"loss": relative(got.detach(), wanted.detach())} | errors_of(grads, gradients(whole))


def compare_all_cut(names: list[str], method: str) -> dict[str, dict[str, float]]:
    return {name: compare_cut(name, method) for name in names}


@pytest.mark.parametrize(
    ("names", "method"), [(["llama, one key head", "gemma2"], "ulysses"), (["gpt2"], "ring")]
)
def test_parts_of_layers_and_of_sequences_go_together(names: list[str], method: str) -> None:
    for found in on_ranks(compare_all_cut, 4, names, method):
        for name, errors in found.items():
            assert max(errors.values()) <= TOLERANCE, (name, errors)


def train(method: str, device_bytes: str) -> tuple[list[float], list[float], int]:
    """Train a model whose layers and sequences are cut, in chunks."""
    mesh = make_mesh(sp=2, tp=2)
    model = build("llama")
    ranks = parallelize(model, mesh).model_ranks
    sequence = parallelize_sequence(model, mesh, method)
    losses, norms = [], []
    with GeminiDDP(
        model,
        process_group=mesh.group("dp", "sp"),
        model_ranks=ranks,
        device_bytes=device_bytes,
        host_bytes="8MiB",
        non_model_bytes=0,
        min_chunk_size_mb=0.008,
        search_range_mb=0.004,
    ) as managed:
        optimizer = GeminiOptimizer(CPUAdam(managed.parameters(), lr=1e-2, eps=1e-6), managed)
        for _ in range(3):
            loss = managed(**sequence.cut(batch_of("llama", "behind"))).loss
            optimizer.backward(loss)
            norms.append(float(optimizer.clip_grad_by_norm(0.5)))
            optimizer.step()
            losses.append(loss.item())
        return losses, norms, managed.stats()["d2h"]["bytes"]


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_managed_parts_train_as_the_whole_model_within_any_budget(method: str) -> None:
    model = build("llama")
    adam = CPUAdam(model.parameters(), lr=1e-2, eps=1e-6)
    wanted_losses, wanted_norms = [], []
    for _ in range(3):
        loss = model(**batch_of("llama", "behind")).loss
        loss.backward()
        wanted_norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        adam.step()
        adam.zero_grad()
        wanted_losses.append(loss.item())
    roomy = on_ranks(train, 4, method, "64MiB")
    tight = on_ranks(train, 4, method, "160KiB")
    for (losses, norms, _), (same_losses, same_norms, moved) in zip(roomy, tight, strict=True):
        assert losses == pytest.approx(wanted_losses, rel=TOLERANCE)
        assert norms == pytest.approx(wanted_norms, rel=TOLERANCE)
        assert (same_losses, same_norms) == (losses, norms)
        assert moved > 0


def refuse() -> list[str]:
    mesh = make_mesh(sp=2)
    said = []
    for name in ("bloom", "t5", "vit"):
        with pytest.raises(ConfigError) as caught:
            parallelize_sequence(build(name), mesh)
        said.append(str(caught.value))
    model = build("llama")
    before = model.config._attn_implementation
    copy = build("llama")
    copy.config = model.config
    sequence = parallelize_sequence(model, mesh)
    assert copy.config._attn_implementation == before  # a model that shares the configuration is left alone
    batch = batch_of("llama", None)
    part = sequence.cut(batch)
    del part["shift_labels"]
    with pytest.raises(ConfigError) as caught:
        model(**part)
    said.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        sequence.cut({"labels": batch["labels"]})
    said.append(str(caught.value))
    return said


def test_what_parts_would_compute_wrongly_is_refused() -> None:
    for bloom, t5, vit, unshifted, empty in on_ranks(refuse, 2):
        assert bloom.startswith("BloomForCausalLM ")
        assert t5.startswith("T5ForConditionalGeneration has two sequences")
        assert vit.startswith("ViTForImageClassification computes positions")
        assert unshifted.startswith("the labels belong to a part of a sequence")
        assert empty.startswith("a batch has input_ids")


def _losses_of_plugin(name: str, sizes: dict[str, Any]) -> list[float]:
    booster, model = Booster(plugin=HybridParallelPlugin(**sizes)), build(name)
    model, optimizer, *_ = booster.boost(model, CPUAdam(model.parameters(), lr=1e-2, eps=1e-6))
    losses = []
    for _ in range(3):
        out = booster.execute_pipeline(iter([batch_of(name, "behind")]), model, own_loss, optimizer)
        optimizer.step()
        losses.append(float(out["loss"]))
    return losses


def own_loss(output: Any, batch: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize(("ranks", "sizes"), [(2, {"sp_size": 2}), (4, {"sp_size": 2, "tp_size": 2})])
def test_a_plugin_trains_them_with_the_loss_that_they_return(
    name: str, ranks: int, sizes: dict[str, Any]
) -> None:
    model = build(name)
    optimizer = CPUAdam(model.parameters(), lr=1e-2, eps=1e-6)
    wanted = []
    for _ in range(3):
        loss = model(**batch_of(name, "behind")).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    for losses in on_ranks(_losses_of_plugin, ranks, name, sizes):
        assert losses == pytest.approx(wanted, rel=1e-5)
