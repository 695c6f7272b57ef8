"""Models of transformers, unmodified, compute the same when they are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import LLAMA, ROWS, build, inputs_of
from processes import run_on_ranks
from tensor_harness import TOLERANCE, make_mesh, relative
from torch import distributed as dist
from torch import nn

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer, init_on
from gemini.parallel import parallelize
from gemini.parallel.mesh import counted
from gemini.parallel.tensor.plan import STYLES

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LANGUAGE = ["gpt2", "llama, tied", "bloom", "opt"]


def on_two_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call it there; the first call imports transformers, which takes its time on a busy machine."""
    return run_on_ranks(function, 2, *args, timeout=180.0)


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


@pytest.mark.parametrize("name", ROWS)
def test_cut_model_computes_what_the_whole_one_does(name: str) -> None:
    for errors in on_two_ranks(compare, name, True):
        assert max(errors.values()) <= TOLERANCE, errors


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_group": 2, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {**LLAMA, **EXPERTS, "num_experts": 4, "head_dim": 8},
    "DeepseekV3": {**LLAMA, **EXPERTS, **LATENT, **GROUPS, "n_routed_experts": 4, "num_key_value_heads": 4},
}


def compare_mixtures(names: list[str]) -> list[tuple[dict[str, float], bool]]:
    found = []
    for name in names:
        ROWS[name] = (f"{name}ForCausalLM", f"{name}Config", MIXTURES[name])
        errors = compare(name, True)
        mesh, model = make_mesh(tp=2), build(name)
        cuts = parallelize(model, mesh, whole_experts=True).cuts
        found.append((errors, any(".experts.down_proj" in key for key in cuts)))
    return found


def test_experts_are_cut_inside() -> None:
    for found in on_two_ranks(compare_mixtures, list(MIXTURES)):
        for (errors, is_cut), name in zip(found, MIXTURES, strict=True):
            assert max(errors.values()) <= TOLERANCE, (name, errors)
            assert any(".experts.gate_up_proj" in key for key in errors), name
            assert not is_cut, "whole_experts=True leaves them"


@pytest.mark.parametrize("name", LANGUAGE)
def test_loss_by_parts_is_that_of_whole_logits(name: str) -> None:
    for errors in on_two_ranks(compare, name, False):
        assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_norms_on_parts_of_the_sequence_compute_what_whole_ones_do(name: str) -> None:
    for errors in on_two_ranks(compare, name, False, True):
        assert max(errors.values()) <= TOLERANCE, errors


def count(name: str, layers: int, gather_logits: bool) -> tuple[dict[str, int], int]:
    ROWS["counted"] = (*ROWS[name][:2], {**ROWS[name][2], "num_hidden_layers": layers})
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
        assert said.endswith("possible sizes: 1, 3")


def test_key_heads_fewer_than_ranks_are_on_several() -> None:
    for errors in run_on_ranks(compare, 4, "llama", True, timeout=180.0):  # two of them
        assert max(errors.values()) <= TOLERANCE, errors


def refuse_slices() -> str:
    _, _, options = ROWS["bloom"]
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
        assert said.startswith("gather_logits=False: BertForMaskedLM is not a causal language model")


def on_meta(name: str) -> nn.Module:
    """Return the model without values, and torch's generator at the beginning."""
    kind, config, options = ROWS[name]
    torch.manual_seed(3)
    with init_on("meta"):
        model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**options))
    return model


def weights_from_meta(name: str) -> bool:
    mesh = make_mesh(tp=2)
    with GeminiDDP(on_meta(name), process_group=mesh["dp"], device_bytes="64MiB") as managed:
        whole = {key: value.clone() for key, value in managed.state_dict().items()}
    model = on_meta(name)
    partition = parallelize(model, mesh)
    got = partition.gather_state(model.state_dict())
    return got.keys() == whole.keys() and all(torch.equal(got[key], value) for key, value in whole.items())


@pytest.mark.parametrize("name", ["gpt2", "falcon", "mamba"])
def test_model_of_transformers_on_meta_begins_with_the_bits_of_one_process(name: str) -> None:
    assert all(on_two_ranks(weights_from_meta, name))


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
    [
        ("gpt2", True),
        ("bloom", True),
        ("qwen3", False),
        ("qwen3, one key head", False),
        ("falcon, one key head", True),
    ],
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
